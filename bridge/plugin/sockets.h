// File descriptors that close themselves, and sockets between processes of one host and user.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <string>
#include <utility>

namespace tt {

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

// Who is at the other end of a connection; false where it is no process of this user.
bool SameUser(int socket, ucred* peer);

}  // namespace tt
