// The list of handlers.
#include "handlers.h"

namespace tt {

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
