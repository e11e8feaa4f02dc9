// Steps of a group: the last member to come wakes the others. Who waits first looks
// again for a few microseconds, then lets other threads run, then sleeps: a mesh may have more
// ranks than the host has cores. A sleeper looks up ten times a second for members that have ended.
#include "collectives_group.h"

#include <linux/futex.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <thread>
#include <utility>

namespace tt {
namespace {

// Both sides of these are different processes, so the futex is not a private one.
void SleepOn(std::atomic<uint32_t>* word, uint32_t value) {
  timespec timeout{0, std::chrono::nanoseconds(Patience::kLookUp).count()};
  syscall(SYS_futex, word, FUTEX_WAIT, value, &timeout, nullptr, 0);
}

void WakeAll(std::atomic<uint32_t>* word) { syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

int Cores() {
  cpu_set_t cores;
  return sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

const char* OpName(Op op) {
  switch (op) {
    case Op::kAllReduce: return "all_reduce";
    case Op::kAllGather: return "all_gather";
    case Op::kReduceScatter: return "reduce_scatter";
    case Op::kAllToAll: return "all_to_all";
    case Op::kRaggedAllToAll: return "ragged_all_to_all";
    case Op::kPermute: return "collective_permute";
    case Op::kBroadcast: return "broadcast";
    default: return "nothing";
  }
}

// "all_reduce sum f32[4, 8]"
std::string Describe(const Call& call) {
  std::string text = OpName(static_cast<Op>(call.op));
  if (call.reduction != 0) text += std::string(" ") + ReductionName(static_cast<Reduction>(call.reduction));
  text += std::string(" ") + TypeName(call.type) + "[";
  for (int i = 0; i < std::min<int>(call.rank, kMaxShownDims); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(call.dims[i]);
  }
  return text + "]";
}

std::string Place(uint64_t sequence, uint64_t ranks) {
  return "collective " + std::to_string(sequence) + " of group " + RankList(ranks);
}

// Members for which `holds` does not, of their seats.
template <class Holds>
uint64_t MembersWithout(GroupMemory& group, uint64_t ranks, Holds holds) {
  uint64_t missing = 0;
  for (int rank = 0; rank < kMaxRanks && ranks >> rank; ++rank) {
    if ((ranks >> rank & 1) && !holds(group.seats()[rank])) missing |= SetOf(rank);
  }
  return missing;
}

uint64_t RanksHere(const World& world) {
  uint64_t ranks = 0;
  for (int i = 0; i < world.local_size; ++i) ranks |= SetOf(world.first_here() + i);
  return ranks;
}

}  // namespace

std::string RankList(uint64_t ranks) {
  std::string text;
  for (int rank = 0; rank < kMaxRanks; ++rank) {
    if (ranks >> rank & 1) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  }
  return "[" + text + "]";
}

// ---- Patience

Patience::Patience(const Segment& segment, const Hosts* hosts, MeshMemory& mesh, const World& world, std::chrono::seconds limit)
    : segment_(segment), hosts_(hosts), mesh_(mesh), world_(world), here_(RanksHere(world)), limit_(limit) {
  // With a core for each rank the others are about to come; else they may need this one.
  bool crowded = Cores() < world.local_size;
  spins_ = crowded ? 100 : 3000;
  yields_ = crowded ? 30 : 10;
}

template <class Ready, class Missing>
MaybeFailure Patience::Until(Ready ready, Missing missing, std::atomic<uint32_t>* word,
                             std::atomic<uint32_t>* sleepers) const {
  for (int i = 0; i < spins_; ++i) {
    if (ready()) return std::nullopt;
    Pause();
  }
  for (int i = 0; i < yields_; ++i) {
    if (ready()) return std::nullopt;
    sched_yield();
  }
  const auto start = Clock::now();
  auto looked_up = start;
  while (true) {
    if (word != nullptr) {
      sleepers->fetch_add(1);
      uint32_t value = word->load();
      if (!ready()) SleepOn(word, value);
      sleepers->fetch_sub(1);
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    if (ready()) return std::nullopt;
    if (Clock::now() - looked_up < kLookUp / 2) continue;
    looked_up = Clock::now();
    MaybeFailure failure = LookUp(start, missing());
    if (failure && !ready()) return failure;
  }
}

MaybeFailure Patience::LookUp(Clock::time_point start, uint64_t missing) const {
  if (MaybeFailure failure = FailedBefore()) return failure;
  int ended = FirstEnded(missing);
  if (ended >= 0) return Failure{PJRT_Error_Code_UNAVAILABLE, HasEnded(ended)};
  if (Clock::now() - start > limit_) return Failure{PJRT_Error_Code_DEADLINE_EXCEEDED, ""};
  return std::nullopt;
}

int Patience::FirstEnded(uint64_t ranks) const {
  const uint64_t ended_here = segment_.Ended();
  uint64_t ended = ended_here & ranks;
  // Of another host: nobody here who is left hears from it, so that all that it sent has been taken in.
  for (uint64_t others = ranks & ~here_; others != 0; others &= others - 1) {
    const int rank = std::countr_zero(others);
    if ((mesh_.closed[rank].load() | ended_here | ~here_) == ~uint64_t{0}) ended |= SetOf(rank);
  }
  return ended != 0 ? std::countr_zero(ended) : -1;
}

std::string Patience::Who(int rank) const {
  const std::string where = world_.IsHere(rank) ? "process " + std::to_string(segment_.pid(rank)) : hosts_->Where(rank);
  return "rank " + std::to_string(rank) + " (" + where + ")";
}

std::string Patience::HasEnded(int rank) const {
  return Who(rank) + (world_.IsHere(rank) ? " has ended" : " has ended, is stopped, or cannot be reached any more");
}

std::string Patience::LostElsewhere() const {
  if (hosts_ == nullptr) return "";
  const uint64_t all = ~uint64_t{0} >> (kMaxRanks - world_.size);
  const int rank = FirstEnded(all & ~here_);
  return rank < 0 ? "" : HasEnded(rank);
}

MaybeFailure Patience::Fail(int code, const std::string& message) const {
  if (Remember(rank(), message) && tell_) tell_(message);
  return Failure{code, message};
}

bool Patience::Remember(int rank, const std::string& message) const {
  uint32_t none = 0;
  if (!mesh_.failed.compare_exchange_strong(none, 1)) return false;
  mesh_.failed_rank = rank;
  message.copy(mesh_.failure, sizeof mesh_.failure - 1);
  mesh_.failed.store(2);
  return true;
}

MaybeFailure Patience::FailedBefore() const {
  if (mesh_.failed.load() != 2) return std::nullopt;
  return Failure{PJRT_Error_Code_ABORTED, "the mesh has failed; rank " + std::to_string(mesh_.failed_rank) +
                                              " was the first to notice: " + mesh_.failure};
}

// ---- Steps and buffers

void Arrive(GroupMemory& group, int size, int rank, uint64_t step) {
  group.seats()[rank].steps.store(step, std::memory_order_relaxed);
  if (group.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 != step * size) return;
  group.released.store(static_cast<uint32_t>(step));
  if (group.sleepers.load() > 0) WakeAll(&group.released);
}

MaybeFailure AwaitStep(GroupMemory& group, uint64_t ranks, uint64_t step, const Patience& patience) {
  auto released = [&] {
    return static_cast<int32_t>(group.released.load(std::memory_order_acquire) - static_cast<uint32_t>(step)) >= 0;
  };
  auto missing = [&] {
    uint64_t late = MembersWithout(group, ranks, [&](const Seat& seat) { return seat.steps.load() >= step; });
    return late != 0 ? late : ranks & ~SetOf(patience.rank());
  };
  return patience.Until(released, missing, &group.released, &group.sleepers);
}

MaybeFailure AwaitNumber(const std::atomic<uint64_t>& counter, uint64_t number, const Patience& patience) {
  auto reached = [&] { return counter.load(std::memory_order_acquire) == number; };
  return patience.Until(reached, [&] { return patience.here(); }, nullptr, nullptr);
}

GroupMemory* MeshLayout::FindGroup(uint64_t ranks) const {
  for (int i = 0; i < kGroups; ++i) {
    auto* memory = reinterpret_cast<GroupMemory*>(data_ + sizeof(MeshMemory) + i * GroupMemory::Bytes(world_));
    uint64_t owner = memory->ranks.load();
    if (owner == ranks || (owner == 0 && (memory->ranks.compare_exchange_strong(owner, ranks) || owner == ranks))) return memory;
  }
  return nullptr;
}

MaybeFailure Claim(const MeshLayout& layout, int rank, int which, BufferUser user, const Patience& patience) {
  BufferUser& last = layout.mesh().users[rank][which];
  const BufferUser before = std::exchange(last, user);
  if (before.ranks == 0 || before.ranks == user.ranks) return std::nullopt;
  GroupMemory& group = *layout.FindGroup(before.ranks);
  auto readers = [&] {
    return MembersWithout(group, before.ranks & patience.here(), [&](const Seat& seat) {
      return seat.finished.load(std::memory_order_acquire) >= before.sequence;
    });
  };
  MaybeFailure failure = patience.Until([&] { return readers() == 0; }, readers, nullptr, nullptr);
  if (!failure || failure->code == PJRT_Error_Code_ABORTED) return failure;
  const std::string what = Place(before.sequence, before.ranks);
  if (failure->code == PJRT_Error_Code_UNAVAILABLE) {
    return patience.Fail(failure->code, failure->message + " and did not finish " + what);
  }
  return patience.Fail(failure->code, "ranks " + RankList(readers()) + " did not finish " + what + " within " +
                                          std::to_string(patience.limit().count()) + " s (TT_TPU_COLLECTIVE_TIMEOUT)");
}

// ---- Group

Group::Group(GroupMemory& memory, uint64_t ranks, const Patience& patience)
    : memory_(memory), ranks_(ranks), size_(std::popcount(ranks)), patience_(patience) {}

void Group::Begin(const Collective& collective) {
  ++sequence_;
  compared_ = false;
  Call& call = memory_.seats()[patience_.rank()].calls[sequence_ & 1];
  memset(&call, 0, sizeof call);
  call.sequence = sequence_;
  call.detail = collective.detail;
  call.op = static_cast<uint8_t>(collective.op);
  call.reduction = static_cast<uint8_t>(collective.reduction);
  call.type = static_cast<uint8_t>(collective.type);
  call.rank = static_cast<uint8_t>(collective.shape.size());
  for (size_t i = 0; i < collective.shape.size(); ++i) {
    if (i < kMaxShownDims) call.dims[i] = collective.shape[i];
    else call.dims[kMaxShownDims - 1] *= collective.shape[i];
  }
  patience_.mesh().at[patience_.rank()].store(ranks_, std::memory_order_relaxed);
}

MaybeFailure Group::Step(const std::function<MaybeFailure()>& send) {
  if (!compared_) {
    if (MaybeFailure failure = patience_.FailedBefore()) return failure;
  }
  ++steps_;
  MaybeFailure failure;
  if (send) failure = send();
  if (!failure) {
    Arrive(memory_, size_, patience_.rank(), steps_);
    failure = AwaitStep(memory_, ranks_, steps_, patience_);
  }
  if (failure) return Explain(*failure);
  return compared_ ? std::nullopt : Compare();
}

MaybeFailure Group::Compare() {
  compared_ = true;
  const Call& own = CallOf(patience_.rank());
  bool same = true;
  for (int rank = 0; rank < kMaxRanks && ranks_ >> rank; ++rank) {
    if (ranks_ >> rank & 1) same = same && memcmp(&CallOf(rank), &own, sizeof own) == 0;
  }
  if (same) return std::nullopt;
  std::string message = "the ranks disagree on " + Place(own.sequence, ranks_) + ":";
  for (int rank = 0; rank < kMaxRanks && ranks_ >> rank; ++rank) {
    if (ranks_ >> rank & 1) message += " rank " + std::to_string(rank) + " does " + Describe(CallOf(rank)) + ";";
  }
  message.back() = '.';
  return patience_.Fail(PJRT_Error_Code_INVALID_ARGUMENT,
                        message + " All must run the same collectives in the same order (with the same groups and pairs)");
}

// Says which collective it was, and of ranks that did not come where they are.
MaybeFailure Group::Explain(Failure failure) const {
  const Call& own = CallOf(patience_.rank());
  std::string what = Describe(own) + " (" + Place(own.sequence, ranks_) + ")";
  if (failure.code == PJRT_Error_Code_ABORTED) {
    return Failure{failure.code, what + " on rank " + std::to_string(patience_.rank()) + ": " + failure.message};
  }
  if (failure.code == PJRT_Error_Code_UNAVAILABLE) {
    return patience_.Fail(failure.code, failure.message + " and did not finish " + what);
  }
  std::string message = what + " took longer than " + std::to_string(patience_.limit().count()) +
                        " s (TT_TPU_COLLECTIVE_TIMEOUT):";
  for (int rank = 0; rank < kMaxRanks && ranks_ >> rank; ++rank) {
    if (!(ranks_ >> rank & 1) || rank == patience_.rank() || memory_.seats()[rank].steps.load() >= steps_) continue;
    message += " rank " + std::to_string(rank) + " did not come and is " + Whereabouts(rank) + ";";
  }
  message.back() = '.';
  return patience_.Fail(failure.code, message + " A program may run a collective on some ranks only, or one rank is slow");
}

std::string Group::Whereabouts(int rank) const {
  if (!(patience_.here() >> rank & 1)) return "on another host";
  uint64_t at = patience_.mesh().at[rank].load();
  return at == 0 ? "in no collective" : "in a collective of group " + RankList(at);
}

void Group::Finish() {
  memory_.seats()[patience_.rank()].finished.store(sequence_, std::memory_order_release);
  patience_.mesh().at[patience_.rank()].store(0, std::memory_order_relaxed);
}

}  // namespace tt
