// How the data of a collective moves: each rank has two buffers in the shared memory that it
// alone writes. What others need goes there in chunks that stay in the caches; everyone takes a step; then
// each reads what it needs, straight to its result. Nothing is copied that a rank has already,
// and the memory needed does not grow with the arrays.
#include "collectives.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "collectives_group.h"
#include "collectives_mirror.h"
#include "collectives_segment.h"
#include "config.h"
#include "errors.h"
#include "hosts.h"

namespace tt {
namespace {

constexpr size_t kBufferBytes = MeshLayout::kBufferBytes;
constexpr size_t kAtOnce = 32 << 10;  // up to here every rank reduces the whole array: one step fewer
constexpr size_t kAlignment = 64;

size_t RoundUp(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// This process's end of the mesh. One collective at a time: programs with collectives run one
// after the other (collectives_order.h), and within a program they form a chain.
class Mesh {
 public:
  Mesh(std::unique_ptr<Segment> segment, std::unique_ptr<Hosts> hosts, const World& world, std::chrono::seconds limit)
      : segment_(std::move(segment)),
        hosts_(std::move(hosts)),
        layout_(segment_->data(), world.size),
        patience_(*segment_, hosts_.get(), layout_.mesh(), world, limit) {
    if (hosts_ != nullptr) mirror_ = std::make_unique<Mirror>(*hosts_, layout_, patience_);
  }

  std::mutex& mutex() { return mutex_; }

  // The group of these ranks, null when there are too many groups.
  Group* FindGroup(const std::vector<int>& ranks) {
    uint64_t set = 0;
    for (int rank : ranks) set |= SetOf(rank);
    std::unique_ptr<Group>& group = groups_[set];
    GroupMemory* memory = group == nullptr ? layout_.FindGroup(set) : nullptr;
    if (memory != nullptr) group = std::make_unique<Group>(*memory, set, patience_);
    return group.get();
  }

  // Null where no other host has members of the group.
  Mirror* MirrorOf(const Group& group) const {
    return mirror_ != nullptr && mirror_->Spans(group.ranks()) ? mirror_.get() : nullptr;
  }

  const MeshLayout& layout() const { return layout_; }
  const Patience& patience() const { return patience_; }

 private:
  const std::unique_ptr<Segment> segment_;
  const std::unique_ptr<Hosts> hosts_;
  const MeshLayout layout_;
  Patience patience_;
  std::unique_ptr<Mirror> mirror_;
  std::mutex mutex_;
  std::map<uint64_t, std::unique_ptr<Group>> groups_;
};

// Null until it has been joined; after that it lives as long as the process.
std::atomic<Mesh*>& TheMesh() {
  static std::atomic<Mesh*> mesh{nullptr};
  return mesh;
}

// One collective of this rank, from its announcement to its end.
class Session {
 public:
  explicit Session(const Collective& call) : call_(call), mesh_(TheMesh()) {}

  MaybeFailure Begin() {
    if (mesh_ == nullptr) return Failure{PJRT_Error_Code_FAILED_PRECONDITION, "this process is not part of a mesh"};
    const int size = mesh_->patience().world().size;
    for (int rank : call_.ranks) {
      if (rank >= 0 && rank < size) continue;
      return Failure{PJRT_Error_Code_INVALID_ARGUMENT,
                     "rank " + std::to_string(rank) + " is not in a mesh of " + std::to_string(size)};
    }
    lock_ = std::unique_lock(mesh_->mutex());
    group_ = mesh_->FindGroup(call_.ranks);
    if (group_ == nullptr) {
      return Failure{PJRT_Error_Code_RESOURCE_EXHAUSTED, "more than " + std::to_string(MeshLayout::kGroups) + " groups of ranks"};
    }
    group_->Begin(call_);
    return std::nullopt;
  }

  // The next buffer to write, or null with `failure` set.
  char* Next(MaybeFailure* failure) {
    buffer_ = group_->NextBuffer();
    const int rank = mesh_->patience().rank();
    *failure = Claim(mesh_->layout(), rank, buffer_, {group_->ranks(), group_->sequence()}, mesh_->patience());
    return *failure ? nullptr : mesh_->layout().Buffer(rank, buffer_);
  }
  // `piece(i)`: the part of this rank's buffer that the member at position i reads before the next step.
  template <class PieceFor>
  MaybeFailure Step(PieceFor piece) {
    Mirror* mirror = mesh_->MirrorOf(*group_);
    if (mirror == nullptr) return group_->Step();
    return group_->Step([&] { return mirror->Send(*group_, buffer_, [&](int rank) { return piece(Position(rank)); }); });
  }
  void End() { group_->Finish(); }

  // What the member at `position` wrote into the buffer of this turn.
  char* From(int position) const { return mesh_->layout().Buffer(call_.ranks[position], buffer_); }
  int members() const { return static_cast<int>(call_.ranks.size()); }
  int own() const { return call_.position; }

 private:
  int Position(int rank) const {
    return static_cast<int>(std::find(call_.ranks.begin(), call_.ranks.end(), rank) - call_.ranks.begin());
  }

  const Collective& call_;
  Mesh* mesh_;
  std::unique_lock<std::mutex> lock_;
  Group* group_ = nullptr;
  int buffer_ = 0;
};

// Rows of `row` bytes that lie `stride` bytes apart, as one run of bytes.
struct Rows {
  char* data;
  size_t row, stride;

  // Calls visit(pointer, position in the run, bytes) for the pieces of the run from `from` to `to`.
  template <class Visit>
  void ForEach(size_t from, size_t to, Visit visit) const {
    while (from < to) {
      size_t in_row = from % row, size = std::min(row - in_row, to - from);
      visit(data + from / row * stride + in_row, from, size);
      from += size;
    }
  }
  void Write(const char* source, size_t from, size_t to) const {
    ForEach(from, to, [&](char* at, size_t position, size_t size) { memcpy(at, source + (position - from), size); });
  }
  void Read(char* target, size_t from, size_t to) const {
    ForEach(from, to, [&](const char* at, size_t position, size_t size) { memcpy(target + (position - from), at, size); });
  }
};

char* Bytes(const void* data) { return static_cast<char*>(const_cast<void*>(data)); }

// Part `position` of [rows, members, row], as a run of rows * row bytes.
Rows PartOf(const void* data, int members, int position, size_t row) {
  return {Bytes(data) + position * row, row, members * row};
}

// How much of each of `parts` fits a buffer beside the others.
size_t ChunkBytes(size_t parts) { return kBufferBytes / parts / kAlignment * kAlignment; }

MaybeFailure ReduceAtOnce(Session& session, Reducer reduce, size_t element, const void* in, void* out, size_t bytes) {
  MaybeFailure failure;
  char* buffer = session.Next(&failure);
  if (failure) return failure;
  memcpy(buffer, in, bytes);
  if ((failure = session.Step([&](int) { return Piece{0, bytes}; }))) return failure;
  const void* sources[kMaxRanks];
  for (int i = 0; i < session.members(); ++i) sources[i] = session.From(i);
  reduce(sources, session.members(), out, bytes / element);
  return std::nullopt;
}

// Each member reduces its part of a chunk, then all collect the parts.
MaybeFailure ReduceInParts(Session& session, Reducer reduce, size_t element, const char* in, char* out, size_t bytes) {
  const int members = session.members(), own = session.own();
  for (size_t start = 0; start < bytes; start += ChunkBytes(members) * members) {
    const size_t left = std::min(bytes - start, ChunkBytes(members) * members);
    const size_t part = RoundUp((left + members - 1) / members, kAlignment);
    auto begin = [&](int i) { return std::min(i * part, left); };
    auto size = [&](int i) { return begin(i + 1) - begin(i); };
    MaybeFailure failure;
    char* buffer = session.Next(&failure);
    if (failure) return failure;
    memcpy(buffer, in + start, begin(own));
    memcpy(buffer + begin(own + 1), in + start + begin(own + 1), left - begin(own + 1));
    if ((failure = session.Step([&](int i) { return Piece{begin(i), size(i)}; }))) return failure;
    const void* sources[kMaxRanks];
    for (int i = 0; i < members; ++i) sources[i] = i == own ? in + start + begin(own) : session.From(i) + begin(own);
    reduce(sources, members, buffer + begin(own), size(own) / element);
    if ((failure = session.Step([&](int) { return Piece{begin(own), size(own)}; }))) return failure;
    for (int i = 0; i < members; ++i) memcpy(out + start + begin(i), session.From(i) + begin(i), size(i));
  }
  return std::nullopt;
}

}  // namespace

PJRT_Error* JoinMesh() {
  const World& world = GetWorld();
  if (!world.spread() || !GetConfig().emulated() || TheMesh() != nullptr) return nullptr;
  std::unique_ptr<Segment> segment;
  std::unique_ptr<Hosts> hosts;
  const std::chrono::seconds limit(GetConfig().collective_timeout);
  const std::string build = GetConfig().platform_version;
  std::string refusal;
  if (world.size > kMaxRanks) {
    refusal = "at most " + std::to_string(kMaxRanks) + " processes can be joined";
  } else {
    refusal = Segment::Join(world, build, MeshLayout::Bytes(world.size), limit, &segment);
    // What is wrong on one host is told to the others too, which have waited as long as it has.
    if (world.hosts() > 1) refusal = Hosts::Join(world, build, refusal, limit + kGrace, &hosts);
  }
  if (!refusal.empty()) {
    return MakeError(PJRT_Error_Code_FAILED_PRECONDITION,
                     "rank " + std::to_string(world.rank) + " cannot join the mesh of " + std::to_string(world.size) +
                         ": " + refusal);
  }
  TheMesh() = new Mesh(std::move(segment), std::move(hosts), world, limit);
  return nullptr;
}

const Patience* MeshPatience() {
  const Mesh* mesh = TheMesh();
  return mesh != nullptr ? &mesh->patience() : nullptr;
}

MaybeFailure AllReduce(const Collective& call, const void* in, void* out, size_t bytes) {
  Reducer reduce = FindReducer(call.type, call.reduction);
  const size_t element = ElementSize(call.type);
  if (reduce == nullptr || element == 0) return Failure{PJRT_Error_Code_UNIMPLEMENTED, "no such reduction of this type"};
  Session session(call);
  MaybeFailure failure = session.Begin();
  if (failure) return failure;
  failure = bytes <= kAtOnce ? ReduceAtOnce(session, reduce, element, in, out, bytes)
                             : ReduceInParts(session, reduce, element, Bytes(in), Bytes(out), bytes);
  if (!failure) session.End();
  return failure;
}

MaybeFailure AllGather(const Collective& call, const void* in, void* out, size_t rows, size_t row) {
  Session session(call);
  MaybeFailure failure = session.Begin();
  if (failure) return failure;
  const size_t bytes = rows * row;
  PartOf(out, session.members(), session.own(), row).Write(Bytes(in), 0, bytes);
  size_t start = 0;
  do {
    const size_t end = std::min(bytes, start + kBufferBytes);
    char* buffer = session.Next(&failure);
    if (failure) return failure;
    memcpy(buffer, Bytes(in) + start, end - start);
    if ((failure = session.Step([&](int) { return Piece{0, end - start}; }))) return failure;
    for (int i = 0; i < session.members(); ++i) {
      if (i != session.own()) PartOf(out, session.members(), i, row).Write(session.From(i), start, end);
    }
    start = end;
  } while (start < bytes);
  session.End();
  return std::nullopt;
}

MaybeFailure ReduceScatter(const Collective& call, const void* in, void* out, size_t rows, size_t row) {
  Reducer reduce = FindReducer(call.type, call.reduction);
  const size_t element = ElementSize(call.type);
  if (reduce == nullptr || element == 0) return Failure{PJRT_Error_Code_UNIMPLEMENTED, "no such reduction of this type"};
  Session session(call);
  MaybeFailure failure = session.Begin();
  if (failure) return failure;
  const int members = session.members(), own = session.own();
  const size_t bytes = rows * row, chunk = ChunkBytes(members);
  size_t start = 0;
  do {
    const size_t end = std::min(bytes, start + chunk);
    char* buffer = session.Next(&failure);
    if (failure) return failure;
    for (int i = 0; i < members; ++i) {
      if (i != own) PartOf(in, members, i, row).Read(buffer + i * chunk, start, end);
    }
    if ((failure = session.Step([&](int i) { return Piece{i * chunk, end - start}; }))) return failure;
    PartOf(in, members, own, row).ForEach(start, end, [&](const char* at, size_t position, size_t size) {
      const void* sources[kMaxRanks];
      for (int i = 0; i < members; ++i) sources[i] = i == own ? at : session.From(i) + own * chunk + (position - start);
      reduce(sources, members, Bytes(out) + position, size / element);
    });
    start = end;
  } while (start < bytes);
  session.End();
  return std::nullopt;
}

MaybeFailure AllToAll(const Collective& call, const void* in, void* out, size_t block) {
  Session session(call);
  MaybeFailure failure = session.Begin();
  if (failure) return failure;
  const int members = session.members(), own = session.own();
  const size_t chunk = ChunkBytes(members);
  memcpy(Bytes(out) + own * block, Bytes(in) + own * block, block);
  size_t start = 0;
  do {
    const size_t size = std::min(block - start, chunk);
    char* buffer = session.Next(&failure);
    if (failure) return failure;
    for (int i = 0; i < members; ++i) {
      if (i != own) memcpy(buffer + i * chunk, Bytes(in) + i * block + start, size);
    }
    if ((failure = session.Step([&](int i) { return Piece{i * chunk, size}; }))) return failure;
    for (int i = 0; i < members; ++i) {
      if (i != own) memcpy(Bytes(out) + i * block + start, session.From(i) + own * chunk, size);
    }
    start += size;
  } while (start < block);
  session.End();
  return std::nullopt;
}

MaybeFailure Permute(const Collective& call, const void* in, void* out, size_t bytes, int from, bool sends) {
  Session session(call);
  MaybeFailure failure = session.Begin();
  if (failure) return failure;
  if (from < 0) memset(out, 0, bytes);
  size_t start = 0;
  do {
    const size_t size = std::min(bytes - start, kBufferBytes);
    char* buffer = session.Next(&failure);
    if (failure) return failure;
    if (sends) memcpy(buffer, Bytes(in) + start, size);
    if ((failure = session.Step([&](int) { return Piece{0, sends ? size : 0}; }))) return failure;
    if (from >= 0) memcpy(Bytes(out) + start, session.From(from), size);
    start += size;
  } while (start < bytes);
  session.End();
  return std::nullopt;
}

MaybeFailure Broadcast(const Collective& call, const void* in, void* out, size_t bytes) {
  return Permute(call, in, out, bytes, 0, call.position == 0);
}

namespace {

// What a member tells the others before a ragged all-to-all, for each receiver.
struct Announced {
  int64_t size, output_offset;
};

std::string CheckParts(const Announced* announced, int members, size_t out_rows, int64_t out_limit) {
  for (int i = 0; i < members; ++i) {
    const Announced& part = announced[i];
    if (part.size < 0 || part.output_offset < 0 || part.output_offset + part.size > out_limit) {
      return "rows " + std::to_string(part.output_offset) + " to " + std::to_string(part.output_offset + part.size) +
             " are outside a result of " + std::to_string(out_rows);
    }
  }
  return "";
}

}  // namespace

MaybeFailure RaggedAllToAll(const Collective& call, const void* in, size_t in_rows, void* out, size_t out_rows,
                            size_t row, const Parts& parts) {
  Session session(call);
  MaybeFailure failure = session.Begin();
  if (failure) return failure;
  const int members = session.members(), own = session.own();
  char* buffer = session.Next(&failure);
  if (failure) return failure;
  auto* announced = reinterpret_cast<Announced*>(buffer);
  for (int i = 0; i < members; ++i) {
    bool inside = parts.send_sizes[i] >= 0 && parts.input_offsets[i] >= 0 &&
                  parts.input_offsets[i] + parts.send_sizes[i] <= static_cast<int64_t>(in_rows);
    announced[i] = {inside ? parts.send_sizes[i] : -1, parts.output_offsets[i]};
  }
  if ((failure = session.Step([&](int) { return Piece{0, members * sizeof(Announced)}; }))) return failure;
  // All members look at all parts, so that all of them stop at a wrong one, and know how long it takes.
  std::vector<std::vector<Announced>> from(members);
  int64_t longest = 0;
  for (int i = 0; i < members; ++i) {
    auto* theirs = reinterpret_cast<const Announced*>(session.From(i));
    from[i].assign(theirs, theirs + members);
    std::string wrong = CheckParts(theirs, members, out_rows, static_cast<int64_t>(out_rows));
    if (!wrong.empty()) {
      return Failure{PJRT_Error_Code_INVALID_ARGUMENT, "ragged_all_to_all: rank " + std::to_string(call.ranks[i]) +
                                                           " sends parts that do not fit: " + wrong};
    }
    for (const Announced& part : from[i]) longest = std::max(longest, part.size);
  }
  const size_t chunk = ChunkBytes(members), total = longest * row;
  auto piece = [&](int64_t rows, size_t start) { return std::min(chunk, std::max(rows * row, start) - start); };
  for (size_t start = 0; start < total; start += chunk) {
    buffer = session.Next(&failure);
    if (failure) return failure;
    for (int i = 0; i < members; ++i) {
      memcpy(buffer + i * chunk, Bytes(in) + parts.input_offsets[i] * row + start, piece(parts.send_sizes[i], start));
    }
    auto read = [&](int i) { return Piece{i * chunk, piece(parts.send_sizes[i], start)}; };
    if ((failure = session.Step(read))) return failure;
    for (int i = 0; i < members; ++i) {
      const Announced& part = from[i][own];
      memcpy(Bytes(out) + part.output_offset * row + start, session.From(i) + own * chunk, piece(part.size, start));
    }
  }
  session.End();
  return std::nullopt;
}

}  // namespace tt

// Comes back when a rank of another host has ended, with what to say of it.
extern "C" __attribute__((visibility("default"))) void TtTpuAwaitLostRank(char* text, size_t size) {
  std::string lost;
  while (lost.empty()) {
    std::this_thread::sleep_for(tt::Patience::kLookUp);
    const tt::Patience* patience = tt::MeshPatience();
    if (patience != nullptr) lost = patience->LostElsewhere();
  }
  text[lost.copy(text, size - 1)] = '\0';
}
