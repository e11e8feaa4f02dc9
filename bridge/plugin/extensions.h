// The extensions that the plugin presents, and FFI handlers that it brings.
#pragma once

#include "pjrt.h"

namespace tt {

// The chain that PJRT_Api::extension_start points to. Of the inner plugin's
// extensions only those pass that cannot get a program past our compiler.
void* BuildExtensions();

// The first extension of a type in the inner plugin's chain, or null.
PJRT_Extension_Base* InnerExtension(int type);

// Makes the handlers of ffi/handlers.h known to the inner plugin, once.
void RegisterFfiHandlers();

PJRT_Extension_Base* HostMemoryAllocatorExtension();
PJRT_Extension_Base* TpuTopologyExtension();
PJRT_Extension_Base* TransfersExtension();  // null on silicon
PJRT_Extension_Base* MemoryDescriptionsExtension();  // null where the inner plugin has none

}  // namespace tt
