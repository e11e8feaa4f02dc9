// What the processes of one mesh share on a host: a piece of memory, and a sign of each other's end.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "meeting.h"
#include "mesh.h"

namespace tt {

class Segment {
 public:
  // Meets the other ranks of this host and comes back with memory of `bytes` that all of them have mapped, zeroed.
  // `build` must be the same text in all of them. An error text, or "".
  static std::string Join(const World& world, const std::string& build, size_t bytes, std::chrono::seconds patience,
                          std::unique_ptr<Segment>* segment);

  // `processes`: a pidfd of each rank of this host, from its first on; `pids`: by rank.
  Segment(int memory, size_t bytes, const World& world, std::vector<int> processes, const int32_t* pids);
  ~Segment();
  Segment(const Segment&) = delete;

  char* data() const { return data_; }
  bool mapped() const { return data_ != nullptr; }
  // The ranks of this host whose processes have ended, as a set.
  uint64_t Ended() const;
  int32_t pid(int rank) const { return pids_[rank]; }

 private:
  char* data_ = nullptr;
  const size_t bytes_;
  const int first_;
  const std::vector<int> processes_;
  const std::vector<int32_t> pids_;
};

}  // namespace tt
