// A program that reads all of a model's weights once a step is as fast as the memory. With pages of 4 KiB the processor
// looks up more addresses than it can: it reads at two thirds of the speed that it reaches with large ones. The
// kernel gives those to whole, aligned pieces of 2 MiB only, which most weights are not: here they share regions.
#include "large_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>

namespace tt {
namespace {

constexpr size_t kPage = size_t{2} << 20;
constexpr size_t kRegion = size_t{64} << 20;
constexpr size_t kAlone = size_t{16} << 20;  // arrays from this size on have theirs to themselves
constexpr size_t kLine = 64;

size_t RoundUp(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// An aligned range of addresses that the kernel is asked to fill with large pages, as they are first written.
char* Map(size_t bytes) {
  void* mapped = mmap(nullptr, bytes + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  auto* start = static_cast<char*>(mapped);
  auto* aligned = reinterpret_cast<char*>(RoundUp(reinterpret_cast<uintptr_t>(start), kPage));
  if (aligned > start) munmap(start, aligned - start);
  munmap(aligned + bytes, start + kPage - aligned);
  madvise(aligned, bytes, MADV_HUGEPAGE);
  return aligned;
}

// Gaps and pieces in use, by address; the first gap that is large enough is taken.
class Region {
 public:
  Region(char* start, size_t bytes) : start_(start), bytes_(bytes) { gaps_[start] = bytes; }
  ~Region() { munmap(start_, bytes_); }
  Region(const Region&) = delete;

  char* Take(size_t bytes) {
    auto gap = std::find_if(gaps_.begin(), gaps_.end(), [&](const auto& one) { return one.second >= bytes; });
    if (gap == gaps_.end()) return nullptr;
    auto [start, size] = *gap;
    gaps_.erase(gap);
    if (size > bytes) gaps_[start + bytes] = size - bytes;
    used_[start] = bytes;
    return start;
  }

  void GiveBack(char* start) {
    size_t bytes = used_.extract(start).mapped();
    auto next = gaps_.lower_bound(start);
    if (next != gaps_.end() && start + bytes == next->first) {
      bytes += next->second;
      next = gaps_.erase(next);
    }
    if (next != gaps_.begin() && std::prev(next)->first + std::prev(next)->second == start) {
      std::prev(next)->second += bytes;
    } else {
      gaps_[start] = bytes;
    }
  }

  bool empty() const { return used_.empty(); }

 private:
  char* const start_;
  const size_t bytes_;
  std::map<char*, size_t> gaps_, used_;
};

class Regions {
 public:
  void* Allocate(size_t bytes) {
    std::lock_guard lock(mutex_);
    if (bytes >= kAlone) {
      char* start = Map(RoundUp(bytes, kPage));
      if (start != nullptr) alone_[start] = RoundUp(bytes, kPage);
      return start;
    }
    const size_t wanted = std::max(RoundUp(bytes, kLine), kLine);
    for (auto& [_, region] : shared_) {
      if (char* taken = region->Take(wanted)) return taken;
    }
    char* start = Map(kRegion);
    if (start == nullptr) return nullptr;
    return (shared_[start] = std::make_unique<Region>(start, kRegion))->Take(wanted);
  }

  void Free(void* memory) {
    auto* start = static_cast<char*>(memory);
    std::lock_guard lock(mutex_);
    if (auto whole = alone_.extract(start)) {
      munmap(start, whole.mapped());
      return;
    }
    auto found = std::prev(shared_.upper_bound(start));
    found->second->GiveBack(start);
    // One is kept, lest a program that makes and drops an array by turns has its pages made each time.
    if (found->second->empty() && shared_.size() > 1) shared_.erase(found);
  }

 private:
  std::mutex mutex_;
  std::map<char*, size_t> alone_;
  std::map<char*, std::unique_ptr<Region>> shared_;
};

Regions& TheRegions() {
  static auto* regions = new Regions;
  return *regions;
}

}  // namespace

void* AllocateInLargePages(size_t bytes) { return TheRegions().Allocate(bytes); }
void FreeInLargePages(void* memory) { TheRegions().Free(memory); }

}  // namespace tt
