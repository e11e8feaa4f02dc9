// At each step a rank sends what others will read of its buffer to one member on each other host. There a
// thread writes it to the same place, and comes to the step, as the rank itself does on its own host: in its order,
// when everyone has come to the step before, and when nobody reads the buffer any more. So the members on
// a host need not know which of the others are there.
#include "collectives_mirror.h"

#include <sys/socket.h>

#include <algorithm>
#include <bit>
#include <thread>

namespace tt {
namespace {

// Adds a piece, to the one before where it is the same or follows it.
void Append(Piece piece, std::vector<Piece>* pieces) {
  if (piece.size == 0) return;
  if (!pieces->empty()) {
    Piece& last = pieces->back();
    if (last.offset == piece.offset && last.size == piece.size) return;
    if (last.offset + last.size == piece.offset) {
      last.size += piece.size;
      return;
    }
  }
  pieces->push_back(piece);
}

// All of it, however long that takes; false when the other end has closed.
bool Await(int socket, void* data, size_t size) { return ReceiveAll(socket, data, size, Clock::time_point::max()); }

}  // namespace

// What a rank says to a member on another host; the pieces follow.
struct Mirror::Frame {
  uint64_t number = 0;        // of this among the frames from this rank to this host
  uint64_t failure_size = 0;  // not 0: the mesh has failed, and a text of this size follows
  uint64_t ranks = 0, step = 0;
  int32_t which = 0, count = 0;
  Call call{};
  Piece pieces[kMaxRanks] = {};
};

Mirror::Mirror(Hosts& hosts, const MeshLayout& layout, Patience& patience)
    : layout_(layout), patience_(patience), links_(patience.world().size), sent_(patience.world().hosts()) {
  patience.OnFail([this](const std::string& message) { TellFailure(message); });
  for (int rank = 0; rank < patience.world().size; ++rank) {
    if (patience.world().IsHere(rank)) continue;
    links_[rank] = std::make_unique<Link>(hosts.TakeLink(rank), patience, rank);
  }
  for (int rank = 0; rank < patience.world().size; ++rank) {
    if (links_[rank] != nullptr) std::thread([this, rank] { Follow(rank); }).detach();
  }
}

std::vector<int> Mirror::MembersOn(int host, uint64_t ranks) const {
  std::vector<int> members;
  const int size = patience_.world().local_size;
  for (int rank = host * size; rank < (host + 1) * size; ++rank) {
    if (ranks >> rank & 1) members.push_back(rank);
  }
  return members;
}

MaybeFailure Mirror::Send(const Group& group, int which, const std::function<Piece(int)>& piece) {
  const World& world = patience_.world();
  const std::vector<int> own = MembersOn(world.HostOf(world.rank), group.ranks());
  const size_t turn = std::find(own.begin(), own.end(), world.rank) - own.begin();
  for (int host = 0; host < world.hosts(); ++host) {
    const std::vector<int> members = MembersOn(host, group.ranks());
    if (host == world.HostOf(world.rank) || members.empty()) continue;
    std::vector<Piece> pieces;
    for (int rank : members) Append(piece(rank), &pieces);
    Frame frame;
    frame.number = sent_[host]++;
    frame.ranks = group.ranks();
    frame.step = group.steps();
    frame.which = which;
    frame.count = static_cast<int32_t>(pieces.size());
    frame.call = group.call();
    std::copy(pieces.begin(), pieces.end(), frame.pieces);
    if (MaybeFailure failure = SendTo(members[turn % members.size()], frame)) return failure;
  }
  return std::nullopt;
}

MaybeFailure Mirror::SendTo(int rank, const Frame& frame) {
  Link& link = *links_[rank];
  std::lock_guard lock(link.mutex);
  const char* buffer = layout_.Buffer(patience_.rank(), frame.which);
  MaybeFailure failure = link.stream.Write(&frame, sizeof frame);
  for (int i = 0; i < frame.count && !failure; ++i) {
    failure = link.stream.Write(buffer + frame.pieces[i].offset, frame.pieces[i].size);
  }
  if (!failure) return std::nullopt;
  link.Break();
  if (failure->message.empty() && failure->code == PJRT_Error_Code_UNAVAILABLE) {
    failure->message = patience_.HasEnded(rank);
  }
  return failure;
}

// To all, as far as they can be told now: who waits for this rank would wait in vain.
void Mirror::TellFailure(const std::string& message) {
  Frame frame;
  frame.failure_size = message.size();
  for (auto& link : links_) {
    if (link == nullptr) continue;
    std::unique_lock lock(link->mutex, std::try_to_lock);
    if (!lock.owns_lock() || link->broken) continue;
    if (!link->stream.Write(&frame, sizeof frame)) link->stream.Write(message.data(), message.size());
    link->Break();
  }
}

// Does what a rank of another host says that it does, as long as it says something.
void Mirror::Follow(int rank) {
  const int socket = links_[rank]->stream.socket();
  Frame frame;
  while (Await(socket, &frame, sizeof frame)) {
    if (frame.failure_size > 0) {
      std::string message(std::min<uint64_t>(frame.failure_size, sizeof MeshMemory::failure), '\0');
      if (Await(socket, message.data(), message.size())) patience_.Remember(rank, message);
      break;
    }
    if (MaybeFailure failure = Take(rank, frame)) {
      if (failure->code == PJRT_Error_Code_DEADLINE_EXCEEDED) {
        failure->message += "the ranks of this host took longer than " + std::to_string(patience_.limit().count()) +
                            " s (TT_TPU_COLLECTIVE_TIMEOUT)";
      }
      patience_.Fail(failure->code, "rank " + std::to_string(patience_.rank()) + " cannot take what " +
                                        patience_.Who(rank) + " sends: " + failure->message);
      break;
    }
  }
  patience_.mesh().closed[rank].fetch_or(SetOf(patience_.rank()));
}

MaybeFailure Mirror::Take(int rank, const Frame& frame) {
  GroupMemory* group = layout_.FindGroup(frame.ranks);
  if (group == nullptr) return Failure{PJRT_Error_Code_RESOURCE_EXHAUSTED, "too many groups of ranks"};
  auto& mirrored = patience_.mesh().mirrored[rank];
  MaybeFailure failure = AwaitNumber(mirrored, frame.number, patience_);
  if (!failure) failure = AwaitStep(*group, frame.ranks, frame.step - 1, patience_);
  if (!failure) failure = Claim(layout_, rank, frame.which, {frame.ranks, frame.call.sequence}, patience_);
  if (failure) return failure;
  mirrored.store(frame.number + 1, std::memory_order_release);
  for (int i = 0; i < frame.count; ++i) {
    const Piece& piece = frame.pieces[i];
    if (!Await(links_[rank]->stream.socket(), layout_.Buffer(rank, frame.which) + piece.offset, piece.size)) return std::nullopt;
  }
  group->seats()[rank].calls[frame.call.sequence & 1] = frame.call;
  Arrive(*group, std::popcount(frame.ranks), rank, frame.step);
  return std::nullopt;
}

}  // namespace tt
