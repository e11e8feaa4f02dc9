// One rank hears what all others say of themselves and compares it with what it would say. A refusal reaches
// everyone who has come, and waits a moment for those who have not.
#include "meeting.h"

#include <poll.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>

namespace tt {
namespace {

std::string Box(const int32_t* bounds) {
  return std::to_string(bounds[0]) + "x" + std::to_string(bounds[1]) + "x" + std::to_string(bounds[2]);
}

std::string Name(int rank) { return "rank " + std::to_string(rank); }

}  // namespace

Hello MakeHello(const World& world, const std::string& build) {
  Hello hello;
  hello.rank = world.rank;
  hello.size = world.size;
  hello.local_size = world.local_size;
  std::copy(world.bounds.begin(), world.bounds.end(), hello.bounds);
  hello.pid = getpid();
  build.copy(hello.build, sizeof hello.build - 1);
  hello.launch = world.launch;
  hello.mesh = world.mesh;
  return hello;
}

Meeting::Meeting(int listener, const Hello& own, int first, int end, Clock::time_point deadline, Known known)
    : listener_(listener), first_(first), end_(end), own_(own), deadline_(deadline), known_(std::move(known)), guests_(end) {}

std::string Meeting::Gather(std::string refusal) {
  while (heard_ < end_ - first_ - 1) {
    if (!refusal.empty()) deadline_ = std::min(deadline_, Clock::now() + kGrace);
    std::string problem = Next();
    if (refusal.empty()) refusal = problem;
    if (Clock::now() >= deadline_) break;
  }
  return refusal;
}

std::vector<int> Meeting::Sockets() const {
  std::vector<int> sockets;
  for (const Guest& guest : guests_) {
    if (guest.socket.valid()) sockets.push_back(guest.socket.get());
  }
  for (const Descriptor& guest : refused_) sockets.push_back(guest.get());
  return sockets;
}

// Waits for one thing to happen: a rank that comes, one that leaves, or the deadline. "" or what is wrong.
std::string Meeting::Next() {
  std::vector<pollfd> watched{{listener_, POLLIN, 0}};
  for (const Guest& guest : guests_) watched.push_back({guest.socket.get(), POLLIN, 0});
  if (poll(watched.data(), watched.size(), MillisecondsTo(deadline_)) == 0) return Missing();
  for (size_t rank = 0; rank < guests_.size(); ++rank) {
    if (watched[rank + 1].revents == 0) continue;
    guests_[rank].socket = Descriptor();
    return Name(rank) + " ended before all had come";
  }
  return watched[0].revents != 0 ? Hear() : "";
}

std::string Meeting::Hear() {
  Guest guest;
  guest.socket = Descriptor(accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC));
  if (!known_(guest.socket.get()) ||
      !ReceiveAll(guest.socket.get(), &guest.hello, sizeof guest.hello, std::min(deadline_, Clock::now() + kGrace)) ||
      guest.hello.magic != Hello::kMagic) {
    return "";  // not one of ours
  }
  guest.hello.build[sizeof guest.hello.build - 1] = guest.hello.problem[sizeof guest.hello.problem - 1] = '\0';
  std::string problem = Compare(guest.hello);
  ++heard_;
  if (problem.empty()) guests_[guest.hello.rank] = std::move(guest);
  else refused_.push_back(std::move(guest.socket));
  return problem;
}

std::string Meeting::Compare(const Hello& hello) const {
  const std::string who = Name(hello.rank), own = Name(own_.rank);
  if (hello.size != own_.size) {
    return who + " has WORLD_SIZE=" + std::to_string(hello.size) + ", " + own + " has " + std::to_string(own_.size);
  }
  if (hello.launch != own_.launch) {
    return who + " belongs to another launch than " + own + ", by its MASTER_PORT or TORCHELASTIC_RUN_ID: only one at a time can "
           "meet at this port (TORCH_TPU_BASE_PORT)";
  }
  if (hello.local_size != own_.local_size) {
    return who + " has LOCAL_WORLD_SIZE=" + std::to_string(hello.local_size) + ", " + own + " has " +
           std::to_string(own_.local_size) + ": start as many processes on each host";
  }
  if (hello.rank == own_.rank || hello.rank < first_ || hello.rank >= end_) return "a process says that it is " + who;
  if (guests_[hello.rank].socket.valid()) return "two processes say that they are " + who + ": each needs a RANK of its own";
  if (memcmp(hello.build, own_.build, sizeof own_.build) != 0) {
    return who + " runs " + hello.build + ", " + own + " runs " + own_.build + ": use one installation";
  }
  if (memcmp(hello.bounds, own_.bounds, sizeof own_.bounds) != 0) {
    return who + " has a mesh of " + Box(hello.bounds) + ", " + own + " of " + Box(own_.bounds);
  }
  if (hello.mesh != own_.mesh) {
    return who + " has another mesh graph descriptor than " + own +
           ": set TT_MESH_GRAPH_DESC_PATH to the same text on all, or on none";
  }
  return hello.problem;
}

std::string Meeting::Missing() const {
  std::string missing;
  for (int rank = first_; rank < end_; ++rank) {
    if (rank == own_.rank || guests_[rank].socket.valid()) continue;
    missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
  }
  return "rank(s) " + missing + " of " + std::to_string(own_.size) + " did not come in time";
}

}  // namespace tt
