// The plugin's entry point: loads the inner plugin, copies its function table
// and lets each file put its own functions in the place of some of the inner
// ones. The API is presented at 0.114 whatever the inner plugin is newer by, so
// that no function which we do not know gets past us.
#include <dlfcn.h>

#include <cstring>
#include <vector>
#include <string>

#include "config.h"
#include "errors.h"
#include "extensions.h"
#include "pjrt.h"

namespace tt {
namespace {

struct InnerPlugin {
  const PJRT_Api* api = nullptr;
  std::string error;
};

InnerPlugin Load() {
  InnerPlugin inner;
  if (!ConfigError().empty()) {
    inner.error = ConfigError();
    return inner;
  }
  const std::string& path = GetConfig().inner_library;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    inner.error = "inner plugin " + path + " cannot be loaded: " + dlerror();
    return inner;
  }
  auto get = reinterpret_cast<const PJRT_Api* (*)()>(dlsym(library, "GetPjrtApi"));
  const PJRT_Api* api = get != nullptr ? get() : nullptr;
  if (api == nullptr) {
    inner.error = "inner plugin " + path + " has no PJRT API (GetPjrtApi)";
    return inner;
  }
  const auto& version = api->pjrt_api_version;
  if (version.major_version != PJRT_API_MAJOR || version.minor_version < PJRT_API_MINOR) {
    inner.error = "inner plugin " + path + " speaks PJRT " + std::to_string(version.major_version) + "." +
                  std::to_string(version.minor_version) + "; at least " + std::to_string(PJRT_API_MAJOR) + "." +
                  std::to_string(PJRT_API_MINOR) + " is needed: install the version that `tt-tpu doctor` names";
    return inner;
  }
  inner.api = api;
  return inner;
}

const InnerPlugin& Once() {
  static const InnerPlugin* inner = new InnerPlugin(Load());
  return *inner;
}

// Stands in every slot when there is no inner plugin, so that the caller gets a message, not a crash.
PJRT_Error* Unavailable(void*) { return MakeError(PJRT_Error_Code_UNAVAILABLE, InnerError()); }

PJRT_Error* PluginAttributes(PJRT_Plugin_Attributes_Args* args) {
  if (PJRT_Error* error = CallInner(Slot::Plugin_Attributes, args)) return error;
  // The compiler's MLIR reads StableHLO up to a version of its own; the smaller one counts.
  static std::vector<PJRT_NamedValue>* attributes = [&] {
    const auto* first = static_cast<const PJRT_NamedValue*>(args->attributes);
    auto* copy = new std::vector<PJRT_NamedValue>(first, first + args->num_attributes);
    for (PJRT_NamedValue& value : *copy) {
      if (View(value.name, value.name_size) != "stablehlo_current_version") continue;
      const auto& ours = GetConfig().stablehlo_version;
      const auto* theirs = static_cast<const int64_t*>(value.int64_array_value);
      if (std::vector<int64_t>(theirs, theirs + value.value_size) > ours) {
        value.int64_array_value = const_cast<int64_t*>(ours.data());
        value.value_size = ours.size();
      }
    }
    return copy;
  }();
  args->attributes = attributes->data();
  args->num_attributes = attributes->size();
  return nullptr;
}

PJRT_Api* Build() {
  auto* api = new PJRT_Api{};
  api->struct_size = sizeof(PJRT_Api);
  api->pjrt_api_version = MakeArgs<PJRT_Api_Version>();
  api->pjrt_api_version.major_version = PJRT_API_MAJOR;
  api->pjrt_api_version.minor_version = PJRT_API_MINOR;
  if (Inner() == nullptr) {
    for (int slot = 0; slot < static_cast<int>(Slot::kCount); ++slot) Table(api)[slot] = Unavailable;
    InstallErrors(api);
    return api;
  }
  memcpy(Table(api), Table(const_cast<PJRT_Api*>(Inner())), sizeof(PJRT_Api) - kTableOffset);
  api->extension_start = BuildExtensions();
  SetFunction(api, Slot::Plugin_Attributes, PluginAttributes);
  InstallErrors(api);
  InstallClient(api);
  InstallDevices(api);
  InstallTopology(api);
  InstallBuffers(api);
  InstallCompile(api);
  InstallExecutables(api);
  return api;
}

}  // namespace

const PJRT_Api* Inner() { return Once().api; }
const std::string& InnerError() { return Once().error; }

}  // namespace tt

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const PJRT_Api* GetPjrtApi() {
  static const PJRT_Api* api = tt::Build();
  return api;
}

// The inner API as it is, with our FFI handlers known to it: what a compile worker drives.
EXPORT const PJRT_Api* GetInnerPjrtApi() {
  if (tt::Inner() != nullptr) tt::RegisterFfiHandlers();
  return tt::Inner();
}
