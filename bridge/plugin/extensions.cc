// Extensions: which the plugin has, in one chain, and the FFI registry.
#include "extensions.h"

#include <mutex>
#include <string>
#include <vector>

#include "config.h"
#include "errors.h"
#include "ffi/handlers.h"

namespace tt {
namespace {

// XLA's CPU plugin looks handlers up under this platform, whatever a caller thinks it talks to.
constexpr std::string_view kPlatform = "Host";

PJRT_Error* Register(PJRT_FFI_Register_Handler_Args* args) {
  auto* extension = reinterpret_cast<PJRT_FFI_Extension*>(InnerExtension(PJRT_Extension_Type_FFI));
  if (extension == nullptr) return Unimplemented("the inner plugin has no FFI extension");
  PJRT_FFI_Register_Handler_Args inner = *args;
  if (GetConfig().emulated()) {
    inner.platform_name = const_cast<char*>(kPlatform.data());
    inner.platform_name_size = kPlatform.size();
  }
  return reinterpret_cast<PJRT_Error* (*)(PJRT_FFI_Register_Handler_Args*)>(extension->register_handler)(&inner);
}

// A copy of one of the inner plugin's extensions that can be put into our chain.
template <class Extension>
Extension* Copy(int type) {
  PJRT_Extension_Base* inner = InnerExtension(type);
  if (inner == nullptr) return nullptr;
  auto* copy = new Extension(*reinterpret_cast<Extension*>(inner));
  copy->base.struct_size = std::min(copy->base.struct_size, sizeof(Extension));
  return copy;
}

PJRT_Extension_Base* FfiExtension() {
  auto* extension = Copy<PJRT_FFI_Extension>(PJRT_Extension_Type_FFI);
  if (extension == nullptr) return nullptr;
  extension->register_handler = reinterpret_cast<void*>(Register);
  return &extension->base;
}

PJRT_Extension_Base* ShardingsExtension() {
  auto* extension = Copy<PJRT_Shardings_Extension>(PJRT_Extension_Type_Shardings);
  return extension == nullptr ? nullptr : &extension->base;
}

std::string RegisterFfiHandler(const char* target, void* handler) {
  auto args = MakeArgs<PJRT_FFI_Register_Handler_Args>();
  args.target_name = const_cast<char*>(target);
  args.target_name_size = std::char_traits<char>::length(target);
  args.handler = handler;
  args.platform_name = const_cast<char*>(kPlatform.data());
  args.platform_name_size = kPlatform.size();
  return TakeMessage(Register(&args));
}

}  // namespace

PJRT_Extension_Base* InnerExtension(int type) {
  for (auto* extension = static_cast<PJRT_Extension_Base*>(Inner()->extension_start); extension != nullptr;
       extension = static_cast<PJRT_Extension_Base*>(static_cast<void*>(extension->next))) {
    if (static_cast<int>(extension->type) == type) return extension;
  }
  return nullptr;
}

// Without the inner plugin's layouts: a client then takes each array to be row-major, which it is, and does not
// ask for, print and parse the layout of every result, 4 % of an eager operation's time.
void* BuildExtensions() {
  void* first = nullptr;
  for (PJRT_Extension_Base* extension :
       {MemoryDescriptionsExtension(), ShardingsExtension(), FfiExtension(),
        TpuTopologyExtension(), HostMemoryAllocatorExtension(), TransfersExtension()}) {
    if (extension == nullptr) continue;
    extension->next = static_cast<decltype(extension->next)>(first);
    first = extension;
  }
  return first;
}

void RegisterFfiHandlers() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (!GetConfig().emulated()) return;  // silicon has kernels of its own
    for (const FfiHandler& handler : FfiHandlers()) {
      std::string error = RegisterFfiHandler(handler.target, handler.handler);
      if (!error.empty()) Log(Level::kError, std::string("FFI handler ") + handler.target + ": " + error);
    }
  });
}

}  // namespace tt
