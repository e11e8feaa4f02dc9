// A group of ranks that take steps together, in memory that those of one host share. What ranks of other hosts
// do is done in it for them (collectives_mirror.h).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives.h"
#include "collectives_segment.h"
#include "hosts.h"

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

// The collective for which a buffer was written last.
struct BufferUser {
  uint64_t ranks, sequence;
};

// What concerns the whole mesh, at the start of the shared memory.
struct alignas(64) MeshMemory {
  std::atomic<uint32_t> failed;           // 0, 1 while the first failure is being written, then 2
  int32_t failed_rank;
  char failure[1500];
  alignas(64) std::atomic<uint64_t> at[kMaxRanks];  // the group in whose collective a rank is, or 0
  BufferUser users[kMaxRanks][2];                   // of each rank's two buffers
  std::atomic<uint64_t> mirrored[kMaxRanks];        // frames that have come from a rank of another host
  std::atomic<uint64_t> closed[kMaxRanks];          // the ranks of this host that hear no more from one of another
};

// The whole of what the ranks of a host share.
class MeshLayout {
 public:
  static constexpr size_t kBufferBytes = size_t{1} << 20;
  static constexpr int kGroups = 256;  // different sets of ranks that a mesh can use

  static size_t Bytes(int world) { return BuffersStart(world) + world * 2 * kBufferBytes; }

  MeshLayout(char* data, int world) : data_(data), world_(world) {}
  MeshMemory& mesh() const { return *reinterpret_cast<MeshMemory*>(data_); }
  // The memory of the group of these ranks, null when there are too many groups.
  GroupMemory* FindGroup(uint64_t ranks) const;
  // One of the two that this rank alone writes.
  char* Buffer(int rank, int which) const { return data_ + BuffersStart(world_) + (rank * 2 + which) * kBufferBytes; }

 private:
  static size_t BuffersStart(int world) {
    return (sizeof(MeshMemory) + kGroups * GroupMemory::Bytes(world) + 4095) / 4096 * 4096;
  }

  char* const data_;
  const int world_;
};

// How long, and on what conditions, a rank waits for others.
class Patience {
 public:
  static constexpr auto kLookUp = std::chrono::milliseconds(100);  // how often to look at what could end a wait

  Patience(const Segment& segment, const Hosts* hosts, MeshMemory& mesh, const World& world, std::chrono::seconds limit);

  // Comes back when `ready()`; sleeps on `word`, which its changer wakes where `sleepers` is not 0 (a null
  // `word` is looked at again and again). Meanwhile it looks for the end of the ranks `missing()`, and of
  // its patience.
  template <class Ready, class Missing>
  MaybeFailure Until(Ready ready, Missing missing, std::atomic<uint32_t>* word, std::atomic<uint32_t>* sleepers) const;

  // What ends a wait that began at `start`: that the mesh has failed, that one of the ranks `missing` has
  // ended, or that it takes too long (a failure without a text, since only the caller knows what for).
  MaybeFailure LookUp(Clock::time_point start, uint64_t missing) const;

  // Makes the mesh useless for all ranks; the first to say so is remembered, and told to other hosts.
  MaybeFailure Fail(int code, const std::string& message) const;
  MaybeFailure FailedBefore() const;
  // That rank `rank` was the first to notice; false where another one was.
  bool Remember(int rank, const std::string& message) const;
  void OnFail(std::function<void(const std::string&)> tell) { tell_ = std::move(tell); }

  MeshMemory& mesh() const { return mesh_; }
  const Hosts* hosts() const { return hosts_; }  // null where all ranks are on this one
  int rank() const { return world_.rank; }
  const World& world() const { return world_; }
  uint64_t here() const { return here_; }  // the ranks of this host
  std::chrono::seconds limit() const { return limit_; }
  std::string Who(int rank) const;       // "rank 1 (process 1234)"
  std::string HasEnded(int rank) const;  // "rank 1 (process 1234) has ended"
  std::string LostElsewhere() const;     // the same of a rank of another host that has, or ""

 private:
  int FirstEnded(uint64_t ranks) const;

  const Segment& segment_;
  const Hosts* const hosts_;
  MeshMemory& mesh_;
  const World world_;
  const uint64_t here_;
  const std::chrono::seconds limit_;
  std::function<void(const std::string&)> tell_;
  int spins_, yields_;
};

// That of this process in its mesh, or null where it is alone.
const Patience* MeshPatience();

class Group {
 public:
  Group(GroupMemory& memory, uint64_t ranks, const Patience& patience);

  // Announces what this rank does in the group's next collective; the first Step compares.
  void Begin(const Collective& collective);
  // Comes to the group's next step, and waits until every member has. `send`, if there is one, tells other hosts.
  MaybeFailure Step(const std::function<MaybeFailure()>& send = nullptr);
  // This rank reads nothing more of this collective.
  void Finish();

  uint64_t sequence() const { return sequence_; }
  uint64_t steps() const { return steps_; }
  const Call& call() const { return CallOf(patience_.rank()); }
  // Alternates between 0 and 1 on all members alike: which buffer to write next.
  int NextBuffer() { return turns_++ & 1; }
  uint64_t ranks() const { return ranks_; }

 private:
  MaybeFailure Compare();
  MaybeFailure Explain(Failure failure) const;
  std::string Whereabouts(int rank) const;
  const Call& CallOf(int rank) const { return memory_.seats()[rank].calls[sequence_ & 1]; }

  GroupMemory& memory_;
  const uint64_t ranks_;
  const int size_;
  const Patience& patience_;
  uint64_t steps_ = 0, sequence_ = 0, turns_ = 0;
  bool compared_ = false;
};

// A member has come to this step of the group of `size`.
void Arrive(GroupMemory& group, int size, int rank, uint64_t step);
// Waits until all have come to it.
MaybeFailure AwaitStep(GroupMemory& group, uint64_t ranks, uint64_t step, const Patience& patience);
// Waits until nobody on this host reads a rank's buffer any more, and takes it for a collective of a group. A
// group's own steps see to that unless another group had it last.
MaybeFailure Claim(const MeshLayout& layout, int rank, int which, BufferUser user, const Patience& patience);

// Waits until other processes of this host have counted so far.
MaybeFailure AwaitNumber(const std::atomic<uint64_t>& counter, uint64_t number, const Patience& patience);

inline uint64_t SetOf(int rank) { return uint64_t{1} << rank; }
// "[0, 2]"
std::string RankList(uint64_t ranks);

}  // namespace tt
