// How the processes of a mesh find each other and get their memory. Rank 0 makes unnamed
// memory (a memfd) and listens on a socket in the abstract namespace; the others connect, and get
// the memory and a pidfd of every process over it. Nothing of this has a name in a file
// system, so nothing is left whenever and however a process ends.
#include "collectives_segment.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <functional>
#include <thread>
#include <utility>

#include "config.h"
#include "sockets.h"

namespace tt {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kMagic = 0x4d535454;  // "TTSM"
constexpr auto kGrace = std::chrono::seconds(3);  // for ranks that come late to a refusal

// What a rank says of itself; all but the rank must be the same everywhere.
struct Hello {
  uint32_t magic = kMagic;
  uint32_t rank = 0, size = 0;
  int32_t bounds[3] = {};
  uint64_t bytes = 0;
  char build[96] = {};
};

// Rank 0's answer: why not, or "" with the descriptors beside it.
struct Welcome {
  uint32_t magic = kMagic;
  char refusal[1000] = {};
  int32_t pids[kMaxRanks] = {};
};

std::string Reason(const std::string& what) { return what + ": " + strerror(errno); }

Hello MakeHello(const World& world, const std::string& build, size_t bytes) {
  Hello hello;
  hello.rank = world.rank;
  hello.size = world.size;
  std::copy(world.bounds.begin(), world.bounds.end(), hello.bounds);
  hello.bytes = bytes;
  build.copy(hello.build, sizeof hello.build - 1);
  return hello;
}

std::string SocketName(const World& world) { return "tt-tpu-mesh-" + world.job; }

int PidfdOpen(pid_t pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

bool Readable(int fd, Clock::time_point until) {
  auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
  pollfd one{fd, POLLIN, 0};
  return poll(&one, 1, static_cast<int>(std::max<int64_t>(left, 0))) > 0;
}

bool SendWelcome(int socket, const Welcome& welcome, const std::vector<int>& descriptors) {
  iovec part{const_cast<Welcome*>(&welcome), sizeof welcome};
  std::vector<char> control(CMSG_SPACE(descriptors.size() * sizeof(int)));
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
    memcpy(CMSG_DATA(rights), descriptors.data(), descriptors.size() * sizeof(int));
  }
  return sendmsg(socket, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof welcome);
}

bool ReceiveWelcome(int socket, Welcome* welcome, std::vector<int>* descriptors) {
  iovec part{welcome, sizeof *welcome};
  std::vector<char> control(CMSG_SPACE((kMaxRanks + 1) * sizeof(int)));
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  if (recvmsg(socket, &message, MSG_CMSG_CLOEXEC) != static_cast<ssize_t>(sizeof *welcome)) return false;
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr; part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    descriptors->resize((part->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    memcpy(descriptors->data(), CMSG_DATA(part), descriptors->size() * sizeof(int));
  }
  return welcome->magic == kMagic;
}

std::string MakeMemory(size_t bytes, Descriptor* memory) {
  *memory = Descriptor(memfd_create("tt-tpu-mesh", MFD_CLOEXEC));
  if (!memory->valid()) return Reason("cannot make shared memory");
  // Taken now: what is short later would end a process in the middle of a collective.
  int failed = ftruncate(memory->get(), bytes) != 0 ? errno : posix_fallocate(memory->get(), 0, bytes);
  if (failed == 0) return "";
  return "too little shared memory: the mesh needs " + std::to_string(bytes >> 10) + " KiB (" + strerror(failed) + ")";
}

std::string Box(const int32_t* bounds) {
  return std::to_string(bounds[0]) + "x" + std::to_string(bounds[1]) + "x" + std::to_string(bounds[2]);
}

// Rank 0's side: gathers the others, then tells all of them the same.
class Host {
 public:
  Host(const World& world, const Hello& own, Clock::time_point deadline)
      : world_(world), own_(own), deadline_(deadline), guests_(world.size), pids_(world.size), processes_(world.size) {}

  std::string Gather() {
    pids_[0] = getpid();
    processes_[0] = Descriptor(PidfdOpen(getpid()));
    if (!processes_[0].valid()) return Reason("cannot watch processes (pidfd_open needs Linux 5.3)");
    std::string refusal = Listen();
    if (!refusal.empty()) return refusal;
    Descriptor memory;
    refusal = MakeMemory(own_.bytes, &memory);
    while (heard_ < world_.size - 1) {
      if (!refusal.empty()) deadline_ = std::min(deadline_, Clock::now() + kGrace);
      std::string problem = Next();
      if (refusal.empty()) refusal = problem;
      if (Clock::now() >= deadline_) break;
    }
    Answer(refusal, memory.get());
    memory_ = std::move(memory);
    return refusal;
  }

  std::unique_ptr<Segment> Take() {
    std::vector<int> processes;
    for (auto& process : processes_) processes.push_back(process.release());
    return std::make_unique<Segment>(memory_.release(), own_.bytes, std::move(processes), std::move(pids_));
  }

 private:
  std::string Listen() {
    sockaddr_un address;
    socklen_t size = AbstractAddress(SocketName(world_), &address);
    listener_ = Descriptor(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (!listener_.valid()) return Reason("cannot make a socket");
    if (bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) {
      if (errno == EADDRINUSE) return "another process is rank 0 of this mesh already: end it, or use another MASTER_PORT";
      return Reason("cannot listen for the other ranks");
    }
    return listen(listener_.get(), kMaxRanks) == 0 ? "" : Reason("cannot listen for the other ranks");
  }

  // Waits for one thing to happen: a rank that comes, one that leaves, or the deadline. "" or what is wrong.
  std::string Next() {
    std::vector<pollfd> watched{{listener_.get(), POLLIN, 0}};
    for (auto& guest : guests_) watched.push_back({guest.get(), POLLIN, 0});
    auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline_ - Clock::now()).count();
    if (poll(watched.data(), watched.size(), static_cast<int>(std::max<int64_t>(left, 0))) == 0) return Missing();
    for (size_t rank = 1; rank < guests_.size(); ++rank) {
      if (watched[rank + 1].revents == 0) continue;
      guests_[rank] = Descriptor();
      return "rank " + std::to_string(rank) + " ended before all had come";
    }
    return watched[0].revents != 0 ? Admit() : "";
  }

  std::string Admit() {
    Descriptor guest(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    ucred peer{};
    if (!SameUser(guest.get(), &peer)) return "";  // another user's process is turned away without a word
    Hello hello;
    if (!Readable(guest.get(), std::min(deadline_, Clock::now() + kGrace)) ||
        recv(guest.get(), &hello, sizeof hello, 0) != static_cast<ssize_t>(sizeof hello) || hello.magic != kMagic) {
      return "";
    }
    ++heard_;
    std::string problem = Compare(hello);
    if (!problem.empty()) {
      refused_.push_back(std::move(guest));
      return problem;
    }
    pids_[hello.rank] = peer.pid;
    processes_[hello.rank] = Descriptor(PidfdOpen(peer.pid));
    guests_[hello.rank] = std::move(guest);
    return "";
  }

  std::string Compare(const Hello& hello) const {
    std::string who = "rank " + std::to_string(hello.rank);
    if (hello.size != own_.size) {
      return who + " has WORLD_SIZE=" + std::to_string(hello.size) + ", rank 0 has " + std::to_string(own_.size);
    }
    if (hello.rank == 0 || hello.rank >= own_.size) return "a process says that it is " + who;
    if (guests_[hello.rank].valid()) return "two processes say that they are " + who + ": each needs a RANK of its own";
    if (memcmp(hello.build, own_.build, sizeof own_.build) != 0) {
      return who + " runs " + hello.build + ", rank 0 runs " + own_.build + ": use one installation";
    }
    if (memcmp(hello.bounds, own_.bounds, sizeof own_.bounds) != 0 || hello.bytes != own_.bytes) {
      return who + " has a mesh of " + Box(hello.bounds) + ", rank 0 of " + Box(own_.bounds);
    }
    return "";
  }

  std::string Missing() const {
    std::string missing;
    for (size_t rank = 1; rank < guests_.size(); ++rank) {
      if (!guests_[rank].valid()) missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
    }
    return "rank(s) " + missing + " of " + std::to_string(world_.size) + " did not come in time";
  }

  void Answer(const std::string& refusal, int memory) {
    Welcome welcome;
    refusal.copy(welcome.refusal, sizeof welcome.refusal - 1);
    std::copy(pids_.begin(), pids_.end(), welcome.pids);
    std::vector<int> descriptors{memory};
    for (auto& process : processes_) descriptors.push_back(process.get());
    if (!refusal.empty()) descriptors.clear();
    for (auto* list : {&guests_, &refused_}) {
      for (auto& guest : *list) {
        if (guest.valid()) SendWelcome(guest.get(), welcome, descriptors);
      }
    }
  }

  const World& world_;
  const Hello own_;
  Clock::time_point deadline_;
  Descriptor listener_, memory_;
  std::vector<Descriptor> guests_, refused_;
  std::vector<int32_t> pids_;
  std::vector<Descriptor> processes_;
  int heard_ = 0;
};

// The other ranks' side.
std::string Visit(const World& world, const Hello& hello, Clock::time_point deadline, std::unique_ptr<Segment>* segment) {
  sockaddr_un address;
  socklen_t size = AbstractAddress(SocketName(world), &address);
  Descriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return Reason("cannot make a socket");
  while (connect(socket.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) {
    if (Clock::now() >= deadline) return "rank 0 did not come in time";
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  Welcome welcome;
  std::vector<int> descriptors;
  if (send(socket.get(), &hello, sizeof hello, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof hello)) {
    return "rank 0 ended before all had come";
  }
  if (!Readable(socket.get(), deadline + 2 * kGrace)) return "rank 0 did not answer in time";
  if (!ReceiveWelcome(socket.get(), &welcome, &descriptors)) return "rank 0 ended before all had come";
  if (welcome.refusal[0] != '\0') return welcome.refusal;
  if (static_cast<int>(descriptors.size()) != world.size + 1) return "rank 0 sent too few descriptors: raise `ulimit -n`";
  *segment = std::make_unique<Segment>(descriptors[0], hello.bytes,
                                       std::vector<int>(descriptors.begin() + 1, descriptors.end()),
                                       std::vector<int32_t>(welcome.pids, welcome.pids + world.size));
  return "";
}

}  // namespace

std::string Segment::Join(const World& world, const std::string& build, size_t bytes, std::chrono::seconds patience,
                          std::unique_ptr<Segment>* segment) {
  const Hello hello = MakeHello(world, build, bytes);
  const auto deadline = Clock::now() + patience;
  std::string refusal;
  if (world.size > kMaxRanks) {
    refusal = std::to_string(world.size) + " processes on one host, at most " + std::to_string(kMaxRanks) + " can be joined";
  } else if (world.rank == 0) {
    Host host(world, hello, deadline);
    refusal = host.Gather();
    if (refusal.empty()) *segment = host.Take();
  } else {
    refusal = Visit(world, hello, deadline, segment);
  }
  if (refusal.empty() && !(*segment)->mapped()) refusal = Reason("cannot map the shared memory");
  return refusal;
}

Segment::Segment(int memory, size_t bytes, std::vector<int> processes, std::vector<int32_t> pids)
    : bytes_(bytes), processes_(std::move(processes)), pids_(std::move(pids)) {
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
  if (mapped != MAP_FAILED) {
    data_ = static_cast<char*>(mapped);
    madvise(mapped, bytes, MADV_DONTFORK);  // a forked child is no rank
  }
  close(memory);
}

Segment::~Segment() {
  if (data_ != nullptr) munmap(data_, bytes_);
  for (int process : processes_) close(process);
}

int Segment::FirstEnded(uint64_t ranks) const {
  std::vector<pollfd> watched;
  for (size_t rank = 0; rank < processes_.size(); ++rank) {
    watched.push_back({ranks >> rank & 1 ? processes_[rank] : -1, POLLIN, 0});
  }
  if (poll(watched.data(), watched.size(), 0) <= 0) return -1;
  for (size_t rank = 0; rank < watched.size(); ++rank) {
    if (watched[rank].revents != 0) return static_cast<int>(rank);
  }
  return -1;
}

}  // namespace tt
