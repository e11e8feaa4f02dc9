// File descriptors that close themselves, and sockets between processes: of one host and user, and of several hosts.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

namespace tt {

using Clock = std::chrono::steady_clock;

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }
  bool valid() const { return fd_ >= 0; }

 private:
  int fd_;
};

// In the abstract namespace: a name that ends with its socket, seen by this host (network namespace) alone.
socklen_t AbstractAddress(const std::string& name, sockaddr_un* address);

constexpr const char* kMessageSockets = "tt-tpu-message-";  // those that other hosts may reach too

// A connection to what listens under such a name; not a valid one where nothing does.
Descriptor ConnectHere(const std::string& name);

// Who is at the other end of a connection; false where it is no process of this user.
bool SameUser(int socket, ucred* peer);

// For poll: what is left until then, at least 0.
int MillisecondsTo(Clock::time_point deadline);
// Until one of the events of poll happens at a socket; false, with errno, where none does until then.
bool AwaitSocket(int socket, short events, Clock::time_point deadline);
// Whether all of it could be sent, or came until then, over a socket that blocks.
bool SendAll(int socket, const void* data, size_t size);
bool ReceiveAll(int socket, void* data, size_t size, Clock::time_point deadline);

// Listens to other hosts, on any free port where `port` is 0, which is filled in; errno says why it cannot.
Descriptor ListenForHosts(uint16_t* port);
// Whether the name of a host, or its address, leads anywhere.
bool IsKnownHost(const std::string& address);
// A connection to a port of another host; not a valid one where that is not to be had until then.
Descriptor ConnectToHost(const std::string& address, uint16_t port, Clock::time_point deadline);
// The next one who connects to it, or nobody; blocks.
Descriptor AcceptFromHost(int listener);
// The address at the other end of such a connection, as a text.
std::string PeerAddress(int socket);
bool IsLoopback(const std::string& address);

}  // namespace tt
