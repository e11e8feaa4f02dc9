// The list of handlers, and how much of the machine they take.
#include "handlers.h"

#include "tasks.h"

namespace tt {

extern "C" __attribute__((visibility("default"))) void TtTpuLeaveACore(bool leave) { Tasks::leave_a_core = leave; }

const std::vector<FfiHandler>& FfiHandlers() {
  static const std::vector<FfiHandler> handlers = [] {
    std::vector<FfiHandler> all = PagedAttentionHandlers();
    for (const FfiHandler& handler : CollectiveHandlers()) all.push_back(handler);
    all.push_back(MatmulHandler());
    all.push_back(LuDecompositionHandler());
    return all;
  }();
  return handlers;
}

}  // namespace tt
