// The list of handlers, one line each.
#include "handlers.h"

namespace tt {

const std::vector<FfiHandler>& FfiHandlers() {
  static const std::vector<FfiHandler> handlers = {MatmulHandler(), LuDecompositionHandler()};
  return handlers;
}

}  // namespace tt
