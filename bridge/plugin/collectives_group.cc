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

std::string Place(const Call& call, uint64_t ranks) {
  return "collective " + std::to_string(call.sequence) + " of group " + RankList(ranks);
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

Patience::Patience(const Segment& segment, MeshMemory& mesh, int rank, int world, std::chrono::seconds limit)
    : segment_(segment), mesh_(mesh), rank_(rank), world_(world), limit_(limit) {
  // With a core for each rank the others are about to come; else they may need this one.
  bool crowded = Cores() < world;
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
  int ended = segment_.FirstEnded(missing);
  if (ended >= 0) return Failure{PJRT_Error_Code_UNAVAILABLE, Who(ended) + " has ended"};
  if (Clock::now() - start > limit_) return Failure{PJRT_Error_Code_DEADLINE_EXCEEDED, ""};
  return std::nullopt;
}

std::string Patience::Who(int rank) const {
  return "rank " + std::to_string(rank) + " (process " + std::to_string(segment_.pid(rank)) + ")";
}

MaybeFailure Patience::Fail(int code, const std::string& message) const {
  uint32_t none = 0;
  if (mesh_.failed.compare_exchange_strong(none, 1)) {
    mesh_.failed_rank = rank_;
    message.copy(mesh_.failure, sizeof mesh_.failure - 1);
    mesh_.failed.store(2);
  }
  return Failure{code, message};
}

MaybeFailure Patience::FailedBefore() const {
  if (mesh_.failed.load() != 2) return std::nullopt;
  return Failure{PJRT_Error_Code_ABORTED, "the mesh has failed; rank " + std::to_string(mesh_.failed_rank) +
                                              " was the first to notice: " + mesh_.failure};
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

MaybeFailure Group::Step() {
  if (!compared_) {
    if (MaybeFailure failure = patience_.FailedBefore()) return failure;
  }
  ++steps_;
  memory_.seats()[patience_.rank()].steps.store(steps_, std::memory_order_relaxed);
  if (memory_.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == steps_ * size_) {
    memory_.released.store(static_cast<uint32_t>(steps_));
    if (memory_.sleepers.load() > 0) WakeAll(&memory_.released);
  } else {
    auto released = [&] {
      return static_cast<int32_t>(memory_.released.load(std::memory_order_acquire) - static_cast<uint32_t>(steps_)) >= 0;
    };
    auto missing = [&] { return Missing([&](const Seat& seat) { return seat.steps.load() >= steps_; }); };
    if (MaybeFailure failure = patience_.Until(released, missing, &memory_.released, &memory_.sleepers)) {
      return Explain(*failure);
    }
  }
  return compared_ ? std::nullopt : Compare();
}

template <class Holds>
uint64_t Group::Missing(Holds holds) const {
  uint64_t missing = 0;
  for (int rank = 0; rank < kMaxRanks && ranks_ >> rank; ++rank) {
    if ((ranks_ >> rank & 1) && !holds(memory_.seats()[rank])) missing |= uint64_t{1} << rank;
  }
  return missing != 0 ? missing : ranks_ & ~(uint64_t{1} << patience_.rank());
}

MaybeFailure Group::Compare() {
  compared_ = true;
  const Call& own = CallOf(patience_.rank());
  bool same = true;
  for (int rank = 0; rank < kMaxRanks && ranks_ >> rank; ++rank) {
    if (ranks_ >> rank & 1) same = same && memcmp(&CallOf(rank), &own, sizeof own) == 0;
  }
  if (same) return std::nullopt;
  std::string message = "the ranks disagree on " + Place(own, ranks_) + ":";
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
  std::string what = Describe(own) + " (" + Place(own, ranks_) + ")";
  if (failure.code == PJRT_Error_Code_ABORTED) {
    return Failure{failure.code, what + " on rank " + std::to_string(patience_.rank()) + ": " + failure.message};
  }
  if (failure.code == PJRT_Error_Code_UNAVAILABLE) {
    return patience_.Fail(failure.code, failure.message + " and did not finish " + what);
  }
  std::string message = what + " took longer than " + std::to_string(patience_.limit().count()) +
                        " s (TT_TPU_COLLECTIVE_TIMEOUT):";
  for (int rank = 0; rank < kMaxRanks && ranks_ >> rank; ++rank) {
    if (!(ranks_ >> rank & 1) || memory_.seats()[rank].steps.load() >= steps_) continue;
    uint64_t at = patience_.mesh().at[rank].load();
    message += " rank " + std::to_string(rank) + " did not come and is in " +
               (at == 0 ? "no collective;" : "a collective of group " + RankList(at) + ";");
  }
  message.back() = '.';
  return patience_.Fail(failure.code, message + " A program may run a collective on some ranks only, or one rank is slow");
}

void Group::Finish() {
  memory_.seats()[patience_.rank()].finished.store(sequence_, std::memory_order_release);
  patience_.mesh().at[patience_.rank()].store(0, std::memory_order_relaxed);
}

MaybeFailure Group::AwaitFinished(uint64_t sequence) const {
  auto has = [&](const Seat& seat) { return seat.finished.load(std::memory_order_acquire) >= sequence; };
  auto all_have = [&] {
    for (int rank = 0; rank < kMaxRanks && ranks_ >> rank; ++rank) {
      if ((ranks_ >> rank & 1) && !has(memory_.seats()[rank])) return false;
    }
    return true;
  };
  MaybeFailure failure = patience_.Until(all_have, [&] { return Missing(has); }, nullptr, nullptr);
  return failure ? Explain(*failure) : std::nullopt;
}

}  // namespace tt
