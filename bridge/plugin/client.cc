// The client: what it is created with, and what it says it is.
#include <vector>

#include "compile_client.h"
#include "config.h"
#include "errors.h"
#include "extensions.h"
#include "mesh.h"
#include "pjrt.h"

namespace tt {
namespace {

constexpr std::string_view kPlatformName = "tpu";

PJRT_Error* ListDevices(void* client, std::vector<void*>* devices) {
  auto args = MakeArgs<PJRT_Client_Devices_Args>();
  args.client = client;
  if (PJRT_Error* error = CallInner(Slot::Client_Devices, &args)) return error;
  auto** first = static_cast<void**>(args.devices);
  devices->assign(first, first + args.num_devices);
  return nullptr;
}

PJRT_Error* Create(PJRT_Client_Create_Args* args) {
  // A TPU's options (premapped_buffer_size) mean nothing to the inner plugin, and it runs
  // alone in its process, so that it gets no key-value store either.
  auto inner = MakeArgs<PJRT_Client_Create_Args>();
  auto count = MakeArgs<PJRT_NamedValue>();
  if (GetConfig().emulated()) {
    static const std::string_view name = "cpu_device_count";
    count.name = const_cast<char*>(name.data());
    count.name_size = name.size();
    count.type = PJRT_NamedValue_kInt64;
    count.int64_value = GetConfig().chips;
    count.value_size = 1;
    inner.create_options = &count;
    inner.num_options = 1;
  }
  if (PJRT_Error* error = CallInner(Slot::Client_Create, &inner)) return error;
  RegisterFfiHandlers();
  std::vector<void*> devices;
  if (PJRT_Error* error = ListDevices(inner.client, &devices)) return error;
  RegisterClient(inner.client, devices);
  args->client = inner.client;
  return nullptr;
}

PJRT_Error* Destroy(PJRT_Client_Destroy_Args* args) {
  PJRT_Error* error = CallInner(Slot::Client_Destroy, args);
  if (error == nullptr) ForgetClient(args->client);
  return error;
}

PJRT_Error* PlatformName(PJRT_Client_PlatformName_Args* args) {
  args->platform_name = const_cast<char*>(kPlatformName.data());
  args->platform_name_size = kPlatformName.size();
  return nullptr;
}

PJRT_Error* PlatformVersion(PJRT_Client_PlatformVersion_Args* args) {
  const std::string& version = GetConfig().platform_version;
  args->platform_version = const_cast<char*>(version.data());
  args->platform_version_size = version.size();
  return nullptr;
}

}  // namespace

void InstallClient(PJRT_Api* api) {
  SetFunction(api, Slot::Client_Create, Create);
  SetFunction(api, Slot::Client_Destroy, Destroy);
  SetFunction(api, Slot::Client_PlatformName, PlatformName);
  SetFunction(api, Slot::Client_PlatformVersion, PlatformVersion);
}

}  // namespace tt
