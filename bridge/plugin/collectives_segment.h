// What the processes of one mesh share on a host: a piece of memory, and a sign of each other's end.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mesh.h"

namespace tt {

constexpr int kMaxRanks = 64;  // ranks of one host; a group of them is a bit mask

class Segment {
 public:
  // Meets the other ranks and comes back with memory of `bytes` that all of them have mapped, zeroed.
  // `build` must be the same text in all of them. An error text, or "".
  static std::string Join(const World& world, const std::string& build, size_t bytes, std::chrono::seconds patience,
                          std::unique_ptr<Segment>* segment);

  Segment(int memory, size_t bytes, std::vector<int> processes, std::vector<int32_t> pids);
  ~Segment();
  Segment(const Segment&) = delete;

  char* data() const { return data_; }
  bool mapped() const { return data_ != nullptr; }
  // The first rank of the set `ranks` whose process has ended, or -1.
  int FirstEnded(uint64_t ranks) const;
  int32_t pid(int rank) const { return pids_[rank]; }

 private:
  char* data_ = nullptr;
  size_t bytes_;
  std::vector<int> processes_;  // a pidfd of each rank
  std::vector<int32_t> pids_;
};

}  // namespace tt
