// Devices: each chip describes itself as one core of a TPU, with its own memory.
#include <cstring>

#include "config.h"
#include "errors.h"
#include "memory.h"
#include "mesh.h"
#include "pjrt.h"

namespace tt {
namespace {

const Description& Of(const void* description) { return *static_cast<const Description*>(description); }

PJRT_Error* GetDescription(PJRT_Device_GetDescription_Args* args) {
  args->device_description = DescriptionOfDevice(args->device);
  return args->device_description != nullptr ? nullptr : InvalidArgument("the device belongs to no live client");
}

PJRT_Error* Id(PJRT_DeviceDescription_Id_Args* args) {
  args->id = Of(args->device_description).id;
  return nullptr;
}

PJRT_Error* ProcessIndex(PJRT_DeviceDescription_ProcessIndex_Args* args) {
  args->process_index = Of(args->device_description).process;
  return nullptr;
}

PJRT_Error* Attributes(PJRT_DeviceDescription_Attributes_Args* args) {
  const auto& attributes = Of(args->device_description).attributes;
  args->attributes = const_cast<PJRT_NamedValue*>(attributes.data());
  args->num_attributes = attributes.size();
  return nullptr;
}

PJRT_Error* Kind(PJRT_DeviceDescription_Kind_Args* args) {
  const std::string& kind = GetConfig().device_kind;
  args->device_kind = const_cast<char*>(kind.data());
  args->device_kind_size = kind.size();
  return nullptr;
}

PJRT_Error* DebugString(PJRT_DeviceDescription_DebugString_Args* args) {
  const std::string& text = Of(args->device_description).debug;
  args->debug_string = const_cast<char*>(text.data());
  args->debug_string_size = text.size();
  return nullptr;
}

PJRT_Error* ToString(PJRT_DeviceDescription_ToString_Args* args) {
  const std::string& text = Of(args->device_description).text;
  args->to_string = const_cast<char*>(text.data());
  args->to_string_size = text.size();
  return nullptr;
}

// The newer way to the same attributes, on the device itself.
PJRT_Error* DeviceAttributes(PJRT_Device_GetAttributes_Args* args) {
  const Description* description = DescriptionOfDevice(args->device);
  if (description == nullptr) return InvalidArgument("the device belongs to no live client");
  args->attributes = const_cast<PJRT_NamedValue*>(description->attributes.data());
  args->num_attributes = description->attributes.size();
  args->device_attributes = nullptr;
  args->attributes_deleter = reinterpret_cast<void*>(+[](void*) {});
  return nullptr;
}

PJRT_Error* IsAddressable(PJRT_Device_IsAddressable_Args* args) {
  args->is_addressable = ChipOfDevice(args->device) >= 0;
  return nullptr;
}

PJRT_Error* NotOurs() { return InvalidArgument("the device belongs to no live client of this process"); }

PJRT_Error* MemoryStats(PJRT_Device_MemoryStats_Args* args) {
  int chip = ChipOfDevice(args->device);
  if (chip < 0) return NotOurs();
  const Usage usage = MemoryOf(chip).Read();
  args->bytes_in_use = usage.in_use;
  auto set = [](int64_t value, int64_t* field, bool* is_set) {
    *field = value;
    *is_set = true;
  };
  set(usage.peak, &args->peak_bytes_in_use, &args->peak_bytes_in_use_is_set);
  set(usage.allocations, &args->num_allocs, &args->num_allocs_is_set);
  set(usage.largest, &args->largest_alloc_size, &args->largest_alloc_size_is_set);
  set(usage.limit, &args->bytes_limit, &args->bytes_limit_is_set);
  set(0, &args->bytes_reserved, &args->bytes_reserved_is_set);
  set(0, &args->peak_bytes_reserved, &args->peak_bytes_reserved_is_set);
  set(usage.limit, &args->bytes_reservable_limit, &args->bytes_reservable_limit_is_set);
  // Nothing fragments: the emulated chip's memory is the host's.
  set(usage.limit - usage.in_use, &args->largest_free_block_bytes, &args->largest_free_block_bytes_is_set);
  set(usage.in_use, &args->pool_bytes, &args->pool_bytes_is_set);
  set(usage.peak, &args->peak_pool_bytes, &args->peak_pool_bytes_is_set);
  if (args->struct_size >= PJRT_Device_MemoryStats_Args_STRUCT_SIZE) {
    set(usage.peak, &args->peak_allocated_bytes, &args->peak_allocated_bytes_is_set);
  }
  // A newer caller's further fields: what is left unset would be read as it lies there.
  if (args->struct_size > sizeof *args) {
    memset(reinterpret_cast<char*>(args) + sizeof *args, 0, args->struct_size - sizeof *args);
  }
  return nullptr;
}

PJRT_Error* ClearMemoryStats(PJRT_Device_ClearMemoryStats_Args* args) {
  int chip = ChipOfDevice(args->device);
  if (chip < 0) return NotOurs();
  MemoryOf(chip).ResetPeak();
  return nullptr;
}

}  // namespace

void InstallDevices(PJRT_Api* api) {
  SetFunction(api, Slot::Device_GetDescription, GetDescription);
  SetFunction(api, Slot::DeviceDescription_Id, Id);
  SetFunction(api, Slot::DeviceDescription_ProcessIndex, ProcessIndex);
  SetFunction(api, Slot::DeviceDescription_Attributes, Attributes);
  SetFunction(api, Slot::DeviceDescription_Kind, Kind);
  SetFunction(api, Slot::DeviceDescription_DebugString, DebugString);
  SetFunction(api, Slot::DeviceDescription_ToString, ToString);
  SetFunction(api, Slot::Device_GetAttributes, DeviceAttributes);
  SetFunction(api, Slot::Device_IsAddressable, IsAddressable);
  SetFunction(api, Slot::Device_MemoryStats, MemoryStats);
  SetFunction(api, Slot::Device_ClearMemoryStats, ClearMemoryStats);
}

}  // namespace tt
