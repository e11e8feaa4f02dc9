// The typed FFI handlers that this plugin brings to the emulated chip.
#pragma once

#include <vector>

namespace tt {

struct FfiHandler {
  const char* target;
  void* handler;  // XLA_FFI_Handler*
};

std::vector<FfiHandler> CollectiveHandlers();  // collectives.cc
FfiHandler LuDecompositionHandler();  // lu.cc
FfiHandler MatmulHandler();           // matmul.cc
std::vector<FfiHandler> PagedAttentionHandlers();  // attention.cc

const std::vector<FfiHandler>& FfiHandlers();

}  // namespace tt
