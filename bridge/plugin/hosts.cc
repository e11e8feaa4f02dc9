// Rank 0 hears where every rank listens and tells all of them. Between two ranks of different hosts the higher one
// connects to the lower. Afterwards a thread answers whoever wants to bring a message: it hands what comes to the
// socket in this process that waits for it.
#include "hosts.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

namespace tt {
namespace {

constexpr auto kPause = std::chrono::milliseconds(20);

// Hands on what comes at either end, until both have closed.
void Relay(Descriptor one, Descriptor other) {
  std::vector<char> piece(size_t{256} << 10);
  pollfd ends[] = {{one.get(), POLLIN, 0}, {other.get(), POLLIN, 0}};
  while (ends[0].fd >= 0 || ends[1].fd >= 0) {
    if (poll(ends, 2, -1) < 0 && errno != EINTR) return;
    for (int from : {0, 1}) {
      if (ends[from].fd < 0 || ends[from].revents == 0) continue;
      const int to = from == 0 ? other.get() : one.get();
      ssize_t size = recv(ends[from].fd, piece.data(), piece.size(), MSG_DONTWAIT);
      if (size < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      if (size > 0 && SendAll(to, piece.data(), size)) continue;
      shutdown(to, SHUT_WR);
      ends[from].fd = -1;
    }
  }
}

// What a forked child must not keep open: other hosts take a connection's end for its rank's.
std::vector<int>& NotForChildren() {
  static auto* descriptors = new std::vector<int>;
  return *descriptors;
}

void CloseInChild() {
  for (int descriptor : NotForChildren()) close(descriptor);
}

}  // namespace

// Rank 0's answer: what is wrong, or "" and where everyone is.
struct Hosts::Welcome {
  char refusal[1000] = {};
  char job[17] = {};
  Place places[kMaxRanks] = {};
};

// What a process says to another's listener after the meeting: that it is a rank's link, or for whom a message is.
struct Hosts::Knock {
  uint32_t magic = Hello::kMagic + 1;
  int32_t rank = -1;
  char name[108] = {};
};

std::string Hosts::Join(const World& world, const std::string& build, const std::string& problem,
                        std::chrono::seconds patience, std::unique_ptr<Hosts>* hosts) {
  const auto deadline = Clock::now() + patience;
  uint16_t port = world.rank == 0 ? world.meeting_port : 0;
  Descriptor listener = ListenForHosts(&port);
  if (!listener.valid()) {
    return "cannot listen at port " + std::to_string(port) + " for the other hosts (" + strerror(errno) +
           "): end what uses it, or set TORCH_TPU_BASE_PORT to another on all hosts";
  }
  Hello hello = MakeHello(world, build);
  hello.port = port;
  problem.copy(hello.problem, sizeof hello.problem - 1);
  std::unique_ptr<Hosts> joined(new Hosts(world, std::move(listener)));
  std::string refusal = world.rank == 0 ? joined->Receive(hello, problem, deadline) : joined->Visit(hello, deadline);
  if (refusal.empty()) refusal = joined->ConnectAll(deadline);
  if (refusal.empty()) {
    joined->CloseInChildren();
    *hosts = std::move(joined);
  } else if (joined->answering_) {
    joined.release();  // the thread lives as long as the process, and so does what it uses
  }
  return refusal;
}

void Hosts::CloseInChildren() {
  for (const Descriptor& link : links_) {
    if (link.valid()) NotForChildren().push_back(link.get());
  }
  NotForChildren().push_back(listener_.get());
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, CloseInChild); });
}

// Rank 0's side of the meeting.
std::string Hosts::Receive(const Hello& hello, std::string problem, Clock::time_point deadline) {
  Meeting meeting(listener_.get(), hello, 0, world_.size, deadline, [](int) { return true; });
  const std::string refusal = meeting.Gather(std::move(problem));
  Welcome welcome;
  refusal.copy(welcome.refusal, sizeof welcome.refusal - 1);
  world_.job.copy(welcome.job, sizeof welcome.job - 1);
  for (int rank = 0; rank < world_.size; ++rank) {
    const Meeting::Guest& guest = meeting.guests()[rank];
    Place& place = welcome.places[rank];
    place.port = rank == 0 ? hello.port : guest.hello.port;
    place.pid = rank == 0 ? hello.pid : guest.hello.pid;
    // Of rank 0 everyone knows the address that led here.
    if (guest.socket.valid()) PeerAddress(guest.socket.get()).copy(place.address, sizeof place.address - 1);
  }
  for (int socket : meeting.Sockets()) SendAll(socket, &welcome, sizeof welcome);
  job_ = welcome.job;
  places_.assign(welcome.places, welcome.places + world_.size);
  return refusal;
}

// The other ranks' side.
std::string Hosts::Visit(const Hello& hello, Clock::time_point deadline) {
  const std::string place = world_.meeting_address + ":" + std::to_string(world_.meeting_port);
  if (!IsKnownHost(world_.meeting_address)) {
    return "rank 0's host " + world_.meeting_address +
           " (MASTER_ADDR, or the first of TORCH_TPU_SLICEBUILDER_ADDRESSES) is not known here";
  }
  Descriptor socket;
  while (!(socket = ConnectToHost(world_.meeting_address, world_.meeting_port, deadline)).valid()) {
    if (Clock::now() >= deadline) return "rank 0 did not listen at " + place + " in time";
    std::this_thread::sleep_for(kPause);
  }
  Welcome welcome;
  if (!SendAll(socket.get(), &hello, sizeof hello)) return "rank 0 ended before all had come";
  if (!ReceiveAll(socket.get(), &welcome, sizeof welcome, deadline + 2 * kGrace)) {
    return "rank 0 at " + place + " gave no answer in time, or ended before all had come";
  }
  job_ = welcome.job;
  places_.assign(welcome.places, welcome.places + world_.size);
  const std::string leads_to_rank_0 = PeerAddress(socket.get());
  for (Place& known : places_) {
    // A loopback address is one of rank 0's host, as seen there.
    if (known.address[0] == '\0' || IsLoopback(known.address)) {
      known.address[leads_to_rank_0.copy(known.address, sizeof known.address - 1)] = '\0';
    }
  }
  return welcome.refusal;
}

std::string Hosts::ConnectAll(Clock::time_point deadline) {
  answering_ = true;
  std::thread([this] { Answer(); }).detach();
  for (int rank = 0; rank < world_.rank; ++rank) {
    if (world_.IsHere(rank)) continue;
    Knock knock;
    knock.rank = world_.rank;
    Descriptor link = ConnectToHost(places_[rank].address, places_[rank].port, deadline);
    if (!link.valid() || !SendAll(link.get(), &knock, sizeof knock)) {
      return "rank " + std::to_string(rank) + " (" + Where(rank) + ") cannot be reached at port " +
             std::to_string(places_[rank].port) + ": " + strerror(errno);
    }
    std::lock_guard lock(mutex_);
    links_[rank] = std::move(link);
  }
  int missing = 0;
  auto all = [&] {
    for (missing = 0; missing < world_.size; ++missing) {
      if (!world_.IsHere(missing) && !links_[missing].valid()) return false;
    }
    return true;
  };
  std::unique_lock lock(mutex_);
  if (linked_.wait_until(lock, deadline + kGrace, all)) return "";
  return "rank " + std::to_string(missing) + " (" + Where(missing) + ") did not connect in time";
}

std::string Hosts::Where(int rank) const {
  std::string address = places_[rank].address;
  return "process " + std::to_string(places_[rank].pid) + (address.empty() ? "" : " on " + address);
}

Descriptor Hosts::Call(int rank, const std::string& name) const {
  const auto deadline = Clock::now() + 3 * kGrace;
  Descriptor socket = ConnectToHost(places_[rank].address, places_[rank].port, deadline);
  Knock knock;
  name.copy(knock.name, sizeof knock.name - 1);
  char listens = 0;
  bool well = socket.valid() && SendAll(socket.get(), &knock, sizeof knock) && ReceiveAll(socket.get(), &listens, 1, deadline);
  return well ? std::move(socket) : Descriptor();
}

void Hosts::Answer() {
  while (true) {
    Descriptor socket = AcceptFromHost(listener_.get());
    if (socket.valid()) std::thread([this, socket = std::move(socket)]() mutable { AnswerOne(std::move(socket)); }).detach();
    else if (errno == EMFILE || errno == ENFILE) std::this_thread::sleep_for(kPause);
  }
}

void Hosts::AnswerOne(Descriptor socket) {
  Knock knock;
  if (!ReceiveAll(socket.get(), &knock, sizeof knock, Clock::now() + kGrace) || knock.magic != Knock().magic) return;
  knock.name[sizeof knock.name - 1] = '\0';
  if (knock.rank >= 0) {
    std::lock_guard lock(mutex_);
    if (knock.rank >= world_.size || world_.IsHere(knock.rank) || links_[knock.rank].valid()) return;
    links_[knock.rank] = std::move(socket);
    linked_.notify_all();
  } else if (strncmp(knock.name, kMessageSockets, strlen(kMessageSockets)) == 0) {
    // Who asks would ask again at once.
    Descriptor here = ConnectHere(knock.name);
    for (const auto until = Clock::now() + kGrace; !here.valid() && Clock::now() < until; here = ConnectHere(knock.name)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const char listens = 1;
    if (here.valid() && SendAll(socket.get(), &listens, 1)) Relay(std::move(socket), std::move(here));
  }
}

}  // namespace tt
