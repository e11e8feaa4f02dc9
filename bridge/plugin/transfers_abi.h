// The structures of PJRT's extension for transfers between processes. pypjrt names its type but not these; sizes
// and order are those of the extension's versions up to 8, of which torch_tpu 0.2.0 calls the first two functions.
#pragma once

#include "pjrt.h"

namespace tt {

using CancelNotifier = void(const char* descriptor, size_t size, int code, const char* message, size_t message_size,
                            void (*canceled)(PJRT_Error*, void*), void* canceled_arg, void* user_arg);

// What the receiver calls, during the call or after it, with one descriptor for each buffer.
struct ReceiveNotifier {
  void* user_arg;
  void (*notify)(PJRT_Error*, const char** descriptors, const size_t* sizes, size_t count, void* user_arg,
                 CancelNotifier* cancel, void* cancel_arg);
};

struct MakeReceiveBuffersArgs {
  size_t struct_size;
  void* extension_start;
  void* client;
  size_t num_shapes;
  const size_t* num_dims;
  const int64_t** dims;
  const uint32_t* element_types;
  void** layouts;
  void* device;
  ReceiveNotifier notifier;
  void** buffers;
  size_t num_buffers;
};

struct CopyToRemoteDeviceArgs {
  size_t struct_size;
  void* extension_start;
  void* buffer;
  void* event;  // set when the descriptor is there, perhaps after this call; the callee's to destroy. Null: it is there
  char** descriptor;
  size_t* descriptor_size;
  void* done_arg;
  void (*done)(PJRT_Error*, bool sent, void* done_arg);  // the error stays the callee's
  void (*destroy_descriptor)(char** descriptor, size_t* size);  // since version 6
};

struct CrossHostTransfersExtension {
  PJRT_Extension_Base base;
  PJRT_Error* (*make_receive_buffers)(MakeReceiveBuffersArgs*);
  void (*copy_to_remote_device)(CopyToRemoteDeviceArgs*);
  PJRT_Error* (*receive_buffers)(void*);  // the second way, by keys in place of descriptors
  PJRT_Error* (*send_buffers)(void*);
};

}  // namespace tt
