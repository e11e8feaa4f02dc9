// The memory of a chip: how much of it is in use, and an end to it.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "pjrt.h"

namespace tt {

struct Usage {
  int64_t in_use, peak, allocations, largest, limit;
};

class ChipMemory {
 public:
  explicit ChipMemory(int64_t limit) : limit_(limit) {}

  // Takes `bytes`; a RESOURCE_EXHAUSTED error that names what was asked, in use and the limit otherwise.
  // `transient` bytes are needed beside them for a while: they count for the limit and the peak only.
  PJRT_Error* Reserve(int64_t bytes, int64_t transient = 0);
  void Release(int64_t bytes) { in_use_ -= bytes; }
  Usage Read() const;
  void ResetPeak() { peak_ = in_use_.load(); }

 private:
  const int64_t limit_;
  std::atomic<int64_t> in_use_{0}, peak_{0}, allocations_{0}, largest_{0};
};

// One for each chip of this process, shared by all of its clients.
ChipMemory& MemoryOf(int chip);

// Bytes of an array with these dimensions (int64 each) of a PJRT_Buffer_Type.
int64_t SizeInBytes(uint32_t type, const void* dims, size_t num_dims);

// From here on `buffer` owns `bytes` that were reserved on `chip`.
void AttachBuffer(const void* buffer, int chip, int64_t bytes);
// Gives back what `buffer` owns; nothing where it owns nothing (any more).
void ReleaseBuffer(const void* buffer);
// What `buffer` owns.
int64_t BytesOfBuffer(const void* buffer);

}  // namespace tt
