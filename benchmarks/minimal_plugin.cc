// The peer of benchmarks/overhead.py: the inner plugin with the fewest
// overrides with which torch_tpu runs on it. It has the platform's name, the
// device's attributes and filtered options; no compile service, no memory
// count, no stamps. Linked with the plugin's own objects, whose entry point is
// renamed GetFullPjrtApi.
#include <cstring>
#include <string>

#include "compile_options.h"
#include "pjrt.h"

namespace {

PJRT_Error* Compile(PJRT_Client_Compile_Args* args) {
  auto inner = *args;
  std::string options = tt::FilterCompileOptions(tt::View(args->compile_options, args->compile_options_size));
  inner.compile_options = options.data();
  inner.compile_options_size = options.size();
  PJRT_Error* error = tt::CallInner(Slot::Client_Compile, &inner);
  args->executable = inner.executable;
  return error;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const PJRT_Api* GetPjrtApi() {
  static PJRT_Api* api = [] {
    auto* copy = new PJRT_Api{};
    copy->struct_size = sizeof(PJRT_Api);
    copy->pjrt_api_version = tt::Inner()->pjrt_api_version;
    copy->pjrt_api_version.minor_version = PJRT_API_MINOR;
    memcpy(tt::Table(copy), tt::Table(const_cast<PJRT_Api*>(tt::Inner())), sizeof(PJRT_Api) - kTableOffset);
    copy->extension_start = nullptr;
    tt::InstallErrors(copy);
    tt::InstallClient(copy);
    tt::InstallDevices(copy);
    tt::SetFunction(copy, Slot::Client_Compile, Compile);
    return copy;
  }();
  return api;
}
