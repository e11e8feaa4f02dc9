// Counts what each chip's buffers take. The emulated chip's memory is the
// host's, which would go on until the host dies: here it ends at the limit, as
// on a chip. On silicon the count is kept, and the chip itself sets the end.
#include "memory.h"

#include <array>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "config.h"
#include "errors.h"

namespace tt {
namespace {

struct Owned {
  int chip;
  int64_t bytes;
};

constexpr size_t kMostSpare = 64;

using Owners = std::unordered_map<const void*, Owned>;

// Sharded, since every operation of every thread comes through here.
struct Shard {
  std::mutex mutex;
  Owners buffers;
  std::vector<Owners::node_type> spare;  // of buffers that are gone: an operation's result costs no allocation here
};

Shard& ShardOf(const void* buffer) {
  static auto* shards = new std::array<Shard, 16>;
  return (*shards)[reinterpret_cast<uintptr_t>(buffer) / 64 % shards->size()];
}

void RaiseTo(std::atomic<int64_t>* value, int64_t at_least) {
  int64_t seen = value->load(std::memory_order_relaxed);
  while (seen < at_least && !value->compare_exchange_weak(seen, at_least, std::memory_order_relaxed)) {
  }
}

std::string Readable(int64_t bytes) {
  char text[64];
  snprintf(text, sizeof text, "%lld bytes (%.2f GiB)", static_cast<long long>(bytes), bytes / double(1 << 30));
  return text;
}

int BitsOf(uint32_t type) {
  switch (type) {
    case PJRT_Buffer_Type_S1: case PJRT_Buffer_Type_U1: return 1;
    case PJRT_Buffer_Type_S2: case PJRT_Buffer_Type_U2: return 2;
    case PJRT_Buffer_Type_S4: case PJRT_Buffer_Type_U4: case PJRT_Buffer_Type_F4E2M1FN: return 4;
    case PJRT_Buffer_Type_S16: case PJRT_Buffer_Type_U16: case PJRT_Buffer_Type_F16: case PJRT_Buffer_Type_BF16:
      return 16;
    case PJRT_Buffer_Type_S32: case PJRT_Buffer_Type_U32: case PJRT_Buffer_Type_F32: return 32;
    case PJRT_Buffer_Type_S64: case PJRT_Buffer_Type_U64: case PJRT_Buffer_Type_F64: case PJRT_Buffer_Type_C64:
      return 64;
    case PJRT_Buffer_Type_C128: return 128;
    case PJRT_Buffer_Type_TOKEN: case PJRT_Buffer_Type_INVALID: return 0;
    default: return 8;  // booleans, bytes and the eight-bit floats
  }
}

}  // namespace

PJRT_Error* ChipMemory::Reserve(int64_t bytes, int64_t transient) {
  int64_t total = in_use_.fetch_add(bytes) + bytes;
  if (total + transient > limit_ && GetConfig().emulated()) {
    in_use_ -= bytes;
    // Not "RESOURCE_EXHAUSTED: …": torch_tpu makes the first letter of a message small.
    return ResourceExhausted("out of memory on the emulated chip (RESOURCE_EXHAUSTED): " + Readable(bytes + transient) + " asked, " +
                             Readable(total - bytes) + " in use, limit " + Readable(limit_) +
                             "; free tensors, or set TT_TPU_EMULATED_MEMORY higher where the host has more");
  }
  RaiseTo(&peak_, total + transient);
  RaiseTo(&largest_, bytes);
  allocations_.fetch_add(1, std::memory_order_relaxed);
  return nullptr;
}

Usage ChipMemory::Read() const { return {in_use_, peak_, allocations_, largest_, limit_}; }

ChipMemory& MemoryOf(int chip) {
  static auto* memories = [] {
    auto* all = new std::vector<std::unique_ptr<ChipMemory>>;
    for (int64_t i = 0; i < std::max<int64_t>(GetConfig().chips, 32); ++i) {
      all->push_back(std::make_unique<ChipMemory>(GetConfig().memory_bytes));
    }
    return all;
  }();
  return *memories->at(chip);
}

int64_t SizeInBytes(uint32_t type, const void* dims, size_t num_dims) {
  const auto* sizes = static_cast<const int64_t*>(dims);
  __int128 bits = BitsOf(type);
  for (size_t i = 0; i < num_dims; ++i) bits *= sizes[i];
  __int128 bytes = (bits + 7) / 8;
  return bytes > INT64_MAX / 2 ? INT64_MAX / 2 : static_cast<int64_t>(bytes);
}

void AttachBuffer(const void* buffer, int chip, int64_t bytes) {
  if (bytes == 0) return;
  Shard& shard = ShardOf(buffer);
  std::lock_guard lock(shard.mutex);
  if (shard.spare.empty()) {
    shard.buffers[buffer] = {chip, bytes};
    return;
  }
  Owners::node_type node = std::move(shard.spare.back());
  shard.spare.pop_back();
  node.key() = buffer;
  node.mapped() = {chip, bytes};
  auto inserted = shard.buffers.insert(std::move(node));
  if (!inserted.inserted) inserted.position->second = {chip, bytes};
}

void ReleaseBuffer(const void* buffer) {
  Shard& shard = ShardOf(buffer);
  Owned owned;
  {
    std::lock_guard lock(shard.mutex);
    auto found = shard.buffers.find(buffer);
    if (found == shard.buffers.end()) return;
    owned = found->second;
    Owners::node_type node = shard.buffers.extract(found);
    if (shard.spare.size() < kMostSpare) shard.spare.push_back(std::move(node));
  }
  MemoryOf(owned.chip).Release(owned.bytes);
}

int64_t BytesOfBuffer(const void* buffer) {
  Shard& shard = ShardOf(buffer);
  std::lock_guard lock(shard.mutex);
  auto found = shard.buffers.find(buffer);
  return found == shard.buffers.end() ? 0 : found->second.bytes;
}

}  // namespace tt
