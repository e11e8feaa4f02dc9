// The client: what it is created with, and what it says it is.
#include <vector>

#include "chip_lock.h"
#include "collectives.h"
#include "compile_client.h"
#include "config.h"
#include "errors.h"
#include "extensions.h"
#include "mesh.h"
#include "pjrt.h"
#include "transfers.h"

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

// One device a chip of this process; in a mesh one for each chip of the mesh, see RegisterClient.
int64_t InnerDeviceCount() { return GetWorld().spread() ? GetWorld().size : GetConfig().chips; }

PJRT_Error* CheckDeviceCount(size_t found) {
  const World& world = GetWorld();
  if (!world.spread() || found == static_cast<size_t>(world.size)) return nullptr;
  return InvalidArgument("the inner plugin has " + std::to_string(found) + " device(s) for WORLD_SIZE=" +
                         std::to_string(world.size) + ": it must see every chip of the mesh; check "
                         "TT_MESH_GRAPH_DESC_PATH and TT_VISIBLE_DEVICES");
}

PJRT_Error* Create(PJRT_Client_Create_Args* args) {
  if (PJRT_Error* error = ReadWorld()) return error;
  if (PJRT_Error* error = ClaimChips()) return error;
  // A TPU's options (premapped_buffer_size) mean nothing to the inner plugin, and it runs
  // alone in its process, so that it gets no key-value store either.
  auto inner = MakeArgs<PJRT_Client_Create_Args>();
  auto count = MakeArgs<PJRT_NamedValue>();
  if (GetConfig().emulated()) {
    static const std::string_view name = "cpu_device_count";
    count.name = const_cast<char*>(name.data());
    count.name_size = name.size();
    count.type = PJRT_NamedValue_kInt64;
    count.int64_value = InnerDeviceCount();
    count.value_size = 1;
    inner.create_options = &count;
    inner.num_options = 1;
  }
  if (PJRT_Error* error = CallInner(Slot::Client_Create, &inner)) return error;
  RegisterFfiHandlers();
  std::vector<void*> devices;
  if (PJRT_Error* error = ListDevices(inner.client, &devices)) return error;
  if (PJRT_Error* error = CheckDeviceCount(devices.size())) return error;
  RegisterClient(inner.client, devices);
  if (PJRT_Error* error = JoinMesh()) return error;
  args->client = inner.client;
  return nullptr;
}

PJRT_Error* Destroy(PJRT_Client_Destroy_Args* args) {
  EndTransfers();
  PJRT_Error* error = CallInner(Slot::Client_Destroy, args);
  if (error == nullptr) ForgetClient(args->client);
  return error;
}

PJRT_Error* NotAlive() { return InvalidArgument("the client is not alive"); }

PJRT_Error* Devices(PJRT_Client_Devices_Args* args) {
  const ClientDevices* devices = DevicesOfClient(args->client);
  if (devices == nullptr) return NotAlive();
  args->devices = const_cast<void**>(devices->all.data());
  args->num_devices = devices->all.size();
  return nullptr;
}

PJRT_Error* AddressableDevices(PJRT_Client_AddressableDevices_Args* args) {
  const ClientDevices* devices = DevicesOfClient(args->client);
  if (devices == nullptr) return NotAlive();
  args->addressable_devices = const_cast<void**>(devices->own.data());
  args->num_addressable_devices = devices->own.size();
  return nullptr;
}

PJRT_Error* AddressableMemories(PJRT_Client_AddressableMemories_Args* args) {
  const ClientDevices* devices = DevicesOfClient(args->client);
  if (devices == nullptr) return NotAlive();
  args->addressable_memories = const_cast<void**>(devices->memories.data());
  args->num_addressable_memories = devices->memories.size();
  return nullptr;
}

PJRT_Error* LookupDevice(PJRT_Client_LookupDevice_Args* args) {
  const ClientDevices* devices = DevicesOfClient(args->client);
  if (devices == nullptr) return NotAlive();
  if (args->id < 0 || args->id >= static_cast<int>(devices->all.size())) {
    return InvalidArgument("there is no device " + std::to_string(args->id) + " among " +
                           std::to_string(devices->all.size()));
  }
  args->device = devices->all[args->id];
  return nullptr;
}

PJRT_Error* LookupAddressableDevice(PJRT_Client_LookupAddressableDevice_Args* args) {
  if (PJRT_Error* error = CallInner(Slot::Client_LookupAddressableDevice, args)) return error;
  if (ChipOfDevice(args->addressable_device) >= 0) return nullptr;
  return InvalidArgument("device " + std::to_string(args->local_hardware_id) + " is driven by another process");
}

PJRT_Error* ProcessIndex(PJRT_Client_ProcessIndex_Args* args) {
  args->process_index = GetWorld().rank;
  return nullptr;
}

// Partitions in the order of the devices' ids: what the passes take for granted.
PJRT_Error* DefaultDeviceAssignment(PJRT_Client_DefaultDeviceAssignment_Args* args) {
  if (!GetWorld().spread()) return CallInner(Slot::Client_DefaultDeviceAssignment, args);
  int64_t wanted = static_cast<int64_t>(args->num_replicas) * args->num_partitions;
  if (wanted > GetWorld().size || static_cast<int64_t>(args->default_assignment_size) < wanted) {
    return InvalidArgument(std::to_string(wanted) + " devices wanted, the mesh has " + std::to_string(GetWorld().size));
  }
  auto* ids = static_cast<int*>(args->default_assignment);
  for (int64_t i = 0; i < wanted; ++i) ids[i] = wanted == 1 ? GetWorld().rank : static_cast<int>(i);
  return nullptr;
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
  SetFunction(api, Slot::Client_Devices, Devices);
  SetFunction(api, Slot::Client_AddressableDevices, AddressableDevices);
  SetFunction(api, Slot::Client_AddressableMemories, AddressableMemories);
  SetFunction(api, Slot::Client_LookupDevice, LookupDevice);
  SetFunction(api, Slot::Client_LookupAddressableDevice, LookupAddressableDevice);
  SetFunction(api, Slot::Client_ProcessIndex, ProcessIndex);
  SetFunction(api, Slot::Client_DefaultDeviceAssignment, DefaultDeviceAssignment);
  SetFunction(api, Slot::Client_PlatformName, PlatformName);
  SetFunction(api, Slot::Client_PlatformVersion, PlatformVersion);
}

}  // namespace tt
