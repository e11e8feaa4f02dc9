// Host memory that a framework may pin: without this extension torch_tpu has
// neither pin_memory nor copies that do not block. Emulated chips share the
// host's memory, so an aligned allocation is all that pinning means there.
#include <cstdlib>

#include "errors.h"
#include "extensions.h"

namespace tt {
namespace {

// pypjrt names the extension's type (23) but not its structures; these were read off torch_tpu's calls.
struct AllocateArgs {
  size_t struct_size;
  void* extension_start;
  void* client;
  size_t size;
  int32_t numa_node;
  void* pointer;
  void (*deleter)(void* pointer, void* argument);
  void* deleter_argument;
};

struct HostMemoryAllocator {
  PJRT_Extension_Base base;
  PJRT_Error* (*allocate)(AllocateArgs*);
};

constexpr size_t kAlignment = 64;  // XLA wants buffers aligned to a cache line to use them as they are

PJRT_Error* Allocate(AllocateArgs* args) {
  size_t rounded = (args->size + kAlignment) / kAlignment * kAlignment;
  args->pointer = std::aligned_alloc(kAlignment, rounded);
  if (args->pointer == nullptr) {
    return ResourceExhausted("no host memory for a pinned buffer of " + std::to_string(args->size) + " bytes");
  }
  args->deleter = [](void* pointer, void*) { std::free(pointer); };
  args->deleter_argument = nullptr;
  return nullptr;
}

}  // namespace

PJRT_Extension_Base* HostMemoryAllocatorExtension() {
  static HostMemoryAllocator extension{};
  extension.base.struct_size = sizeof extension;
  extension.base.type = PJRT_Extension_Type_HostMemoryAllocator;
  extension.allocate = Allocate;
  return &extension.base;
}

}  // namespace tt
