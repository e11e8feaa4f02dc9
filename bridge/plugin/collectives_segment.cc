// How the processes of a mesh on one host find each other and get their memory. The first of them makes unnamed
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

#include <bit>
#include <thread>
#include <utility>

#include "meeting.h"
#include "sockets.h"

namespace tt {
namespace {

// The first rank's answer: why not, or "" with the descriptors beside it.
struct Welcome {
  char refusal[1000] = {};
  int32_t pids[kMaxRanks] = {};
};

std::string Reason(const std::string& what) { return what + ": " + strerror(errno); }

std::string SocketName(const World& world) {
  return "tt-tpu-mesh-" + world.job + "-" + std::to_string(world.HostOf(world.rank));
}

int PidfdOpen(pid_t pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

std::vector<int> Release(std::vector<Descriptor>* owned) {
  std::vector<int> released;
  for (Descriptor& one : *owned) released.push_back(one.release());
  return released;
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

bool ReceiveWelcome(int socket, Welcome* welcome, std::vector<Descriptor>* descriptors) {
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
    std::vector<int> received((part->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    memcpy(received.data(), CMSG_DATA(part), received.size() * sizeof(int));
    for (int descriptor : received) descriptors->emplace_back(descriptor);
  }
  return true;
}

std::string MakeMemory(size_t bytes, Descriptor* memory) {
  *memory = Descriptor(memfd_create("tt-tpu-mesh", MFD_CLOEXEC));
  if (!memory->valid()) return Reason("cannot make shared memory");
  // Taken now: what is short later would end a process in the middle of a collective.
  int failed = ftruncate(memory->get(), bytes) != 0 ? errno : posix_fallocate(memory->get(), 0, bytes);
  if (failed == 0) return "";
  return "too little shared memory: the mesh needs " + std::to_string(bytes >> 10) + " KiB (" + strerror(failed) + ")";
}

std::string Listen(const World& world, Descriptor* listener) {
  sockaddr_un address;
  socklen_t size = AbstractAddress(SocketName(world), &address);
  *listener = Descriptor(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!listener->valid()) return Reason("cannot make a socket");
  if (bind(listener->get(), reinterpret_cast<sockaddr*>(&address), size) != 0) {
    if (errno == EADDRINUSE) {
      return "another process is rank " + std::to_string(world.rank) +
             " of this mesh already: end it, or use another MASTER_PORT";
    }
    return Reason("cannot listen for the other ranks");
  }
  return listen(listener->get(), kMaxRanks) == 0 ? "" : Reason("cannot listen for the other ranks");
}

bool IsOwnUser(int socket) {
  ucred peer{};
  return SameUser(socket, &peer);
}

// The side of the host's first rank: hears the others, then tells all of them the same.
std::string Gather(const World& world, const Hello& hello, size_t bytes, Clock::time_point deadline,
                   std::unique_ptr<Segment>* segment) {
  Descriptor listener, memory;
  std::string refusal = Listen(world, &listener);
  if (!refusal.empty()) return refusal;
  refusal = MakeMemory(bytes, &memory);
  Meeting meeting(listener.get(), hello, world.rank, world.rank + world.local_size, deadline, IsOwnUser);
  refusal = meeting.Gather(refusal);
  Welcome welcome;
  std::vector<Descriptor> processes;
  std::vector<int> descriptors{memory.get()};
  for (int rank = world.rank; rank < world.rank + world.local_size; ++rank) {
    ucred peer{.pid = getpid(), .uid = 0, .gid = 0};
    if (rank != world.rank) SameUser(meeting.guests()[rank].socket.get(), &peer);
    welcome.pids[rank] = peer.pid;
    processes.emplace_back(PidfdOpen(peer.pid));
    descriptors.push_back(processes.back().get());
    if (refusal.empty() && !processes.back().valid()) {
      refusal = Reason("cannot watch rank " + std::to_string(rank) + " (pidfd_open)");
    }
  }
  refusal.copy(welcome.refusal, sizeof welcome.refusal - 1);
  if (!refusal.empty()) descriptors.clear();
  for (int socket : meeting.Sockets()) SendWelcome(socket, welcome, descriptors);
  if (refusal.empty()) *segment = std::make_unique<Segment>(memory.release(), bytes, world, Release(&processes), welcome.pids);
  return refusal;
}

// The other ranks' side.
std::string Visit(const World& world, const Hello& hello, size_t bytes, Clock::time_point deadline,
                  std::unique_ptr<Segment>* segment) {
  const std::string first = "rank " + std::to_string(world.first_here());
  sockaddr_un address;
  socklen_t size = AbstractAddress(SocketName(world), &address);
  Descriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return Reason("cannot make a socket");
  while (connect(socket.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) {
    if (Clock::now() >= deadline) return first + " did not come in time";
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  Welcome welcome;
  std::vector<Descriptor> descriptors;
  if (!SendAll(socket.get(), &hello, sizeof hello)) return first + " ended before all had come";
  if (!AwaitSocket(socket.get(), POLLIN, deadline + 2 * kGrace)) return first + " did not answer in time";
  if (!ReceiveWelcome(socket.get(), &welcome, &descriptors)) return first + " ended before all had come";
  if (welcome.refusal[0] != '\0') return welcome.refusal;
  if (static_cast<int>(descriptors.size()) != world.local_size + 1) return first + " sent too few descriptors: raise `ulimit -n`";
  const int memory = descriptors.front().release();
  descriptors.erase(descriptors.begin());
  *segment = std::make_unique<Segment>(memory, bytes, world, Release(&descriptors), welcome.pids);
  return "";
}

}  // namespace

std::string Segment::Join(const World& world, const std::string& build, size_t bytes, std::chrono::seconds patience,
                          std::unique_ptr<Segment>* segment) {
  const Hello hello = MakeHello(world, build);
  const auto deadline = Clock::now() + patience;
  const bool first = world.rank == world.first_here();
  std::string refusal = (first ? Gather : Visit)(world, hello, bytes, deadline, segment);
  if (refusal.empty() && !(*segment)->mapped()) refusal = Reason("cannot map the shared memory");
  return refusal;
}

Segment::Segment(int memory, size_t bytes, const World& world, std::vector<int> processes, const int32_t* pids)
    : bytes_(bytes), first_(world.first_here()), processes_(std::move(processes)), pids_(pids, pids + world.size) {
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

uint64_t Segment::Ended() const {
  std::vector<pollfd> watched;
  for (int process : processes_) watched.push_back({process, POLLIN, 0});
  uint64_t ended = 0;
  if (poll(watched.data(), watched.size(), 0) <= 0) return ended;
  for (size_t i = 0; i < watched.size(); ++i) {
    if (watched[i].revents != 0) ended |= uint64_t{1} << (first_ + i);
  }
  return ended;
}

}  // namespace tt
