// Buffers: every function that makes or ends one, so that memory is counted.
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "config.h"
#include "errors.h"
#include "large_pages.h"
#include "memory.h"
#include "mesh.h"
#include "pjrt.h"

namespace tt {
namespace {

constexpr int64_t kLargeBytes = 64 << 10;  // what goes into large pages

// The chip whose memory a new buffer takes: of `memory` where it is named, else of `device`. -1: host memory.
int ChipOf(const void* memory, const void* device) {
  return memory != nullptr ? ChipOfMemory(memory) : ChipOfDevice(device);
}

// Reserves, has the buffer made, and hands the bytes to the buffer or back.
template <class Args, class MakeBuffer>
PJRT_Error* Make(Args* args, int chip, int64_t bytes, void* Args::* result, MakeBuffer make) {
  if (chip < 0) return make(args);
  if (PJRT_Error* error = MemoryOf(chip).Reserve(bytes)) return error;
  if (PJRT_Error* error = make(args)) {
    MemoryOf(chip).Release(bytes);
    return error;
  }
  AttachBuffer(args->*result, chip, bytes);
  return nullptr;
}

// By the inner plugin's own function.
template <class Args>
PJRT_Error* Make(Slot slot, Args* args, int chip, int64_t bytes, void* Args::* result) {
  return Make(args, chip, bytes, result, [slot](Args* args) { return CallInner(slot, args); });
}

// Whether the elements of an array of the host lie one after the other, and the caller wants them copied from there.
bool IsPlainCopy(const PJRT_Client_BufferFromHostBuffer_Args& args, int64_t bytes) {
  const int64_t eight = 8;
  const bool packed = SizeInBytes(args.type, &eight, 1) < eight;  // on the chip; the host has a byte for each
  const bool shared = args.host_buffer_semantics > PJRT_HostBufferSemantics_kImmutableUntilTransferCompletes;
  if (args.device_layout != nullptr || packed || shared) return false;
  const auto* dims = static_cast<const int64_t*>(args.dims);
  const auto* strides = static_cast<const int64_t*>(args.byte_strides);
  for (size_t i = 0; i < args.num_byte_strides; ++i) {
    bytes /= dims[i];
    if (dims[i] > 1 && strides[i] != bytes) return false;
  }
  return true;
}

// When a buffer that uses `memory` as it is has gone.
void Gone(PJRT_Error* error, void* memory) {
  TakeMessage(error);
  FreeInLargePages(memory);
}

// Copies the array to `memory`, which the inner plugin takes as the buffer's.
PJRT_Error* FromHostAt(void* memory, int64_t bytes, PJRT_Client_BufferFromHostBuffer_Args* args) {
  memcpy(memory, args->data, bytes);
  auto placed = *args;
  placed.data = memory;
  placed.byte_strides = nullptr;
  placed.num_byte_strides = 0;
  placed.host_buffer_semantics = PJRT_HostBufferSemantics_kMutableZeroCopy;  // so that donated it is written in its place
  if (PJRT_Error* error = CallInner(Slot::Client_BufferFromHostBuffer, &placed)) {
    FreeInLargePages(memory);
    return error;
  }
  args->buffer = placed.buffer;
  auto gone = MakeArgs<PJRT_Event_OnReady_Args>();
  gone.event = placed.done_with_host_buffer;
  gone.callback = reinterpret_cast<void*>(Gone);
  gone.user_arg = memory;
  TakeMessage(CallInner(Slot::Event_OnReady, &gone));
  DestroyEvent(placed.done_with_host_buffer);
  // The host's own array is done with already.
  auto ready = MakeArgs<PJRT_Buffer_ReadyEvent_Args>();
  ready.buffer = args->buffer;
  PJRT_Error* error = CallInner(Slot::Buffer_ReadyEvent, &ready);
  args->done_with_host_buffer = ready.event;
  return error;
}

PJRT_Error* FromHost(PJRT_Client_BufferFromHostBuffer_Args* args) {
  const int chip = ChipOf(args->memory, args->device);
  const int64_t bytes = SizeInBytes(args->type, args->dims, args->num_dims);
  return Make(args, chip, bytes, &PJRT_Client_BufferFromHostBuffer_Args::buffer, [&](auto* args) {
    const bool large = bytes >= kLargeBytes && chip >= 0 && GetConfig().emulated() && IsPlainCopy(*args, bytes);
    void* memory = large ? AllocateInLargePages(bytes) : nullptr;
    return memory != nullptr ? FromHostAt(memory, bytes, args) : CallInner(Slot::Client_BufferFromHostBuffer, args);
  });
}

PJRT_Error* Uninitialized(PJRT_Client_CreateUninitializedBuffer_Args* args) {
  return Make(Slot::Client_CreateUninitializedBuffer, args, ChipOf(args->memory, args->device),
              SizeInBytes(args->shape_element_type, args->shape_dims, args->shape_num_dims),
              &PJRT_Client_CreateUninitializedBuffer_Args::buffer);
}

PJRT_Error* Alias(PJRT_Client_CreateAliasBuffer_Args* args) {
  return Make(Slot::Client_CreateAliasBuffer, args, ChipOfMemory(args->memory),
              SizeInBytes(args->shape_element_type, args->shape_dims, args->shape_num_dims),
              &PJRT_Client_CreateAliasBuffer_Args::alias_buffer);
}

int64_t OnDeviceSize(void* buffer) {
  auto args = MakeArgs<PJRT_Buffer_OnDeviceSizeInBytes_Args>();
  args.buffer = buffer;
  if (PJRT_Error* error = CallInner(Slot::Buffer_OnDeviceSizeInBytes, &args)) {
    TakeMessage(error);
    return 0;
  }
  return args.on_device_size_in_bytes;
}

PJRT_Error* CopyToDevice(PJRT_Buffer_CopyToDevice_Args* args) {
  return Make(Slot::Buffer_CopyToDevice, args, ChipOfDevice(args->dst_device), OnDeviceSize(args->buffer),
              &PJRT_Buffer_CopyToDevice_Args::dst_buffer);
}

PJRT_Error* CopyToMemory(PJRT_Buffer_CopyToMemory_Args* args) {
  return Make(Slot::Buffer_CopyToMemory, args, ChipOfMemory(args->dst_memory), OnDeviceSize(args->buffer),
              &PJRT_Buffer_CopyToMemory_Args::dst_buffer);
}

PJRT_Error* Donate(PJRT_Buffer_DonateWithControlDependency_Args* args) {
  PJRT_Error* error = CallInner(Slot::Buffer_DonateWithControlDependency, args);
  if (error != nullptr) return error;
  // The memory goes over to the new buffer.
  auto device = MakeArgs<PJRT_Buffer_Device_Args>();
  device.buffer = args->out_buffer;
  int64_t bytes = BytesOfBuffer(args->buffer);
  ReleaseBuffer(args->buffer);
  if (PJRT_Error* lost = CallInner(Slot::Buffer_Device, &device)) {
    TakeMessage(lost);
    return nullptr;
  }
  int chip = ChipOfDevice(device.device);
  if (chip < 0 || bytes == 0) return nullptr;
  if (PJRT_Error* full = MemoryOf(chip).Reserve(bytes)) return full;
  AttachBuffer(args->out_buffer, chip, bytes);
  return nullptr;
}

// What a transfer manager has reserved for buffers that nobody has fetched yet.
struct Pending {
  int chip;
  std::vector<int64_t> bytes;
};

struct Transfers {
  std::mutex mutex;
  std::map<const void*, Pending> pending;
};

Transfers& GetTransfers() {
  static auto* transfers = new Transfers;
  return *transfers;
}

PJRT_Error* CreateAsync(PJRT_Client_CreateBuffersForAsyncHostToDevice_Args* args) {
  Pending pending{ChipOfMemory(args->memory), {}};
  const auto* specs = static_cast<const PJRT_ShapeSpec*>(args->shape_specs);
  int64_t total = 0;
  for (size_t i = 0; i < args->num_shape_specs; ++i) {
    pending.bytes.push_back(SizeInBytes(specs[i].element_type, specs[i].dims, specs[i].num_dims));
    total += pending.bytes.back();
  }
  if (pending.chip < 0) return CallInner(Slot::Client_CreateBuffersForAsyncHostToDevice, args);
  if (PJRT_Error* error = MemoryOf(pending.chip).Reserve(total)) return error;
  if (PJRT_Error* error = CallInner(Slot::Client_CreateBuffersForAsyncHostToDevice, args)) {
    MemoryOf(pending.chip).Release(total);
    return error;
  }
  Transfers& transfers = GetTransfers();
  std::lock_guard lock(transfers.mutex);
  transfers.pending[args->transfer_manager] = std::move(pending);
  return nullptr;
}

PJRT_Error* RetrieveAsync(PJRT_AsyncHostToDeviceTransferManager_RetrieveBuffer_Args* args) {
  PJRT_Error* error = CallInner(Slot::AsyncHostToDeviceTransferManager_RetrieveBuffer, args);
  if (error != nullptr) return error;
  Transfers& transfers = GetTransfers();
  std::lock_guard lock(transfers.mutex);
  auto found = transfers.pending.find(args->transfer_manager);
  if (found == transfers.pending.end()) return nullptr;
  AttachBuffer(args->buffer_out, found->second.chip, found->second.bytes.at(args->buffer_index));
  found->second.bytes.at(args->buffer_index) = 0;
  return nullptr;
}

PJRT_Error* DestroyAsync(PJRT_AsyncHostToDeviceTransferManager_Destroy_Args* args) {
  const void* manager = args->transfer_manager;
  PJRT_Error* error = CallInner(Slot::AsyncHostToDeviceTransferManager_Destroy, args);
  Transfers& transfers = GetTransfers();
  std::lock_guard lock(transfers.mutex);
  auto found = transfers.pending.find(manager);
  if (found == transfers.pending.end()) return error;
  for (int64_t bytes : found->second.bytes) MemoryOf(found->second.chip).Release(bytes);
  transfers.pending.erase(found);
  return error;
}

// Released first: once the inner plugin has freed the buffer, another thread may get the same address.
PJRT_Error* Destroy(PJRT_Buffer_Destroy_Args* args) {
  ReleaseBuffer(args->buffer);
  return CallInner(Slot::Buffer_Destroy, args);
}

PJRT_Error* Delete(PJRT_Buffer_Delete_Args* args) {
  ReleaseBuffer(args->buffer);
  return CallInner(Slot::Buffer_Delete, args);
}

}  // namespace

void InstallBuffers(PJRT_Api* api) {
  SetFunction(api, Slot::Client_BufferFromHostBuffer, FromHost);
  SetFunction(api, Slot::Client_CreateUninitializedBuffer, Uninitialized);
  SetFunction(api, Slot::Client_CreateAliasBuffer, Alias);
  SetFunction(api, Slot::Buffer_CopyToDevice, CopyToDevice);
  SetFunction(api, Slot::Buffer_CopyToMemory, CopyToMemory);
  SetFunction(api, Slot::Buffer_DonateWithControlDependency, Donate);
  SetFunction(api, Slot::Client_CreateBuffersForAsyncHostToDevice, CreateAsync);
  SetFunction(api, Slot::AsyncHostToDeviceTransferManager_RetrieveBuffer, RetrieveAsync);
  SetFunction(api, Slot::AsyncHostToDeviceTransferManager_Destroy, DestroyAsync);
  SetFunction(api, Slot::Buffer_Destroy, Destroy);
  SetFunction(api, Slot::Buffer_Delete, Delete);
}

}  // namespace tt
