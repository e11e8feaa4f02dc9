// A group of ranks that take steps together, in memory that they share.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "collectives.h"
#include "collectives_segment.h"

namespace tt {

constexpr int kMaxShownDims = 8;

// A Collective as the other members see it, to be compared byte by byte.
struct Call {
  uint64_t sequence;
  uint64_t detail;
  uint8_t op, reduction, type, rank;
  uint32_t unused;
  int64_t dims[kMaxShownDims];  // of more, the last one stands for all that are left
};

struct alignas(64) Seat {
  std::atomic<uint64_t> steps;     // that this member has come to
  std::atomic<uint64_t> finished;  // collectives of which it reads nothing more
  Call calls[2];                // by turns, so that a fast member does not overwrite what a slow one reads
};

// One group's part of the shared memory; its seats, one a rank of the mesh, lie behind it.
struct alignas(64) GroupMemory {
  std::atomic<uint64_t> ranks;                // the set of members; 0 is free
  alignas(64) std::atomic<uint64_t> arrived;  // steps of all members together
  alignas(64) std::atomic<uint32_t> released; // the last step that all have come to; a futex
  std::atomic<uint32_t> sleepers;

  Seat* seats() { return reinterpret_cast<Seat*>(this + 1); }
  static size_t Bytes(int world) { return sizeof(GroupMemory) + world * sizeof(Seat); }
};

// What concerns the whole mesh, at the start of the shared memory.
struct alignas(64) MeshMemory {
  std::atomic<uint32_t> failed;           // 0, 1 while the first failure is being written, then 2
  int32_t failed_rank;
  char failure[1500];
  alignas(64) std::atomic<uint64_t> at[kMaxRanks];  // the group in whose collective a rank is, or 0
};

// How long, and on what conditions, a rank waits for others.
class Patience {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr auto kLookUp = std::chrono::milliseconds(100);  // how often to look at what could end a wait

  Patience(const Segment& segment, MeshMemory& mesh, int rank, int world, std::chrono::seconds limit);

  // Comes back when `ready()`; sleeps on `word`, which its changer wakes where `sleepers` is not 0 (a null
  // `word` is looked at again and again). Meanwhile it looks for the end of the ranks `missing()`, and of
  // its patience.
  template <class Ready, class Missing>
  MaybeFailure Until(Ready ready, Missing missing, std::atomic<uint32_t>* word, std::atomic<uint32_t>* sleepers) const;

  // What ends a wait that began at `start`: that the mesh has failed, that one of the ranks `missing` has
  // ended, or that it takes too long (a failure without a text, since only the caller knows what for).
  MaybeFailure LookUp(Clock::time_point start, uint64_t missing) const;

  // Makes the mesh useless for all ranks; the first to say so is remembered.
  MaybeFailure Fail(int code, const std::string& message) const;
  MaybeFailure FailedBefore() const;
  const Segment& segment() const { return segment_; }
  MeshMemory& mesh() const { return mesh_; }
  int rank() const { return rank_; }
  int world() const { return world_; }
  std::chrono::seconds limit() const { return limit_; }
  std::string Who(int rank) const;  // "rank 1 (process 1234)"

 private:
  const Segment& segment_;
  MeshMemory& mesh_;
  const int rank_, world_;
  const std::chrono::seconds limit_;
  int spins_, yields_;
};

// That of this process in its mesh, or null where it is alone.
const Patience* MeshPatience();

class Group {
 public:
  Group(GroupMemory& memory, uint64_t ranks, const Patience& patience);

  // Announces what this rank does in the group's next collective; the first Step compares.
  void Begin(const Collective& collective);
  // Comes to the group's next step, and waits until every member has.
  MaybeFailure Step();
  // This rank reads nothing more of this collective.
  void Finish();
  // Waits until every member has finished the collective of this number.
  MaybeFailure AwaitFinished(uint64_t sequence) const;

  uint64_t sequence() const { return sequence_; }
  // Alternates between 0 and 1 on all members alike: which buffer to write next.
  int NextBuffer() { return turns_++ & 1; }
  uint64_t ranks() const { return ranks_; }

 private:
  // Members for which `seat` does not hold; all but this one if it holds for all.
  template <class Holds>
  uint64_t Missing(Holds holds) const;
  MaybeFailure Compare();
  MaybeFailure Explain(Failure failure) const;
  const Call& CallOf(int rank) const { return memory_.seats()[rank].calls[sequence_ & 1]; }

  GroupMemory& memory_;
  const uint64_t ranks_;
  const int size_;
  const Patience& patience_;
  uint64_t steps_ = 0, sequence_ = 0, turns_ = 0;
  bool compared_ = false;
};

// "[0, 2]"
std::string RankList(uint64_t ranks);

}  // namespace tt
