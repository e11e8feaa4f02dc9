// What the sockets of the mesh and those of messages have in common.
#include "sockets.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <memory>

namespace tt {
namespace {

constexpr std::chrono::seconds kOneTry{10};

using Addresses = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

Addresses Resolve(const std::string& address, uint16_t port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) found = nullptr;
  return Addresses(found, [](addrinfo* list) { if (list != nullptr) freeaddrinfo(list); });
}

void Set(int socket, int level, int name, int value) { setsockopt(socket, level, name, &value, sizeof value); }

// Small pieces leave at once, and a host that has gone without a word is noticed.
void TuneForHosts(int socket) {
  Set(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  Set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  Set(socket, IPPROTO_TCP, TCP_KEEPIDLE, 2);
  Set(socket, IPPROTO_TCP, TCP_KEEPINTVL, 2);
  Set(socket, IPPROTO_TCP, TCP_KEEPCNT, 4);
  Set(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, 10000);
}

// Where nobody listens at a port of this host yet, the kernel may choose that port for this end too, and connect the
// socket to itself.
bool IsOwnPeer(int socket) {
  sockaddr_storage ends[2] = {};
  socklen_t sizes[2] = {sizeof ends[0], sizeof ends[1]};
  return getsockname(socket, reinterpret_cast<sockaddr*>(&ends[0]), &sizes[0]) == 0 &&
         getpeername(socket, reinterpret_cast<sockaddr*>(&ends[1]), &sizes[1]) == 0 && sizes[0] == sizes[1] &&
         memcmp(&ends[0], &ends[1], sizes[0]) == 0;
}

bool Connect(int socket, const addrinfo& to, Clock::time_point deadline) {
  if (connect(socket, to.ai_addr, to.ai_addrlen) != 0) {
    if (errno != EINPROGRESS || !AwaitSocket(socket, POLLOUT, deadline)) return false;
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &size);
    errno = error;
    if (error != 0) return false;
  }
  errno = ECONNREFUSED;  // as it is where nobody listens and this end is not the other one as well
  return !IsOwnPeer(socket);
}

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) close(fd_);
}

socklen_t AbstractAddress(const std::string& name, sockaddr_un* address) {
  *address = {};
  address->sun_family = AF_UNIX;
  size_t size = name.copy(address->sun_path + 1, sizeof address->sun_path - 1);
  return offsetof(sockaddr_un, sun_path) + 1 + size;
}

Descriptor ConnectHere(const std::string& name) {
  sockaddr_un address;
  socklen_t size = AbstractAddress(name, &address);
  Descriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  return connect(socket.get(), reinterpret_cast<sockaddr*>(&address), size) == 0 ? std::move(socket) : Descriptor();
}

bool SameUser(int socket, ucred* peer) {
  socklen_t size = sizeof *peer;
  return socket >= 0 && getsockopt(socket, SOL_SOCKET, SO_PEERCRED, peer, &size) == 0 && peer->uid == getuid();
}

int MillisecondsTo(Clock::time_point deadline) {
  auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, INT32_MAX));
}

bool AwaitSocket(int socket, short events, Clock::time_point deadline) {
  pollfd one{socket, events, 0};
  while (true) {
    const int happened = poll(&one, 1, MillisecondsTo(deadline));
    if (happened > 0) return true;
    if (happened < 0 && errno != EINTR) return false;
    if (happened == 0 && Clock::now() >= deadline) {
      errno = ETIMEDOUT;
      return false;
    }
  }
}

bool SendAll(int socket, const void* data, size_t size) {
  for (size_t at = 0; at < size;) {
    ssize_t sent = send(socket, static_cast<const char*>(data) + at, size - at, MSG_NOSIGNAL);
    if (sent <= 0 && errno != EINTR) return false;
    at += std::max<ssize_t>(sent, 0);
  }
  return true;
}

bool ReceiveAll(int socket, void* data, size_t size, Clock::time_point deadline) {
  for (size_t at = 0; at < size;) {
    if (!AwaitSocket(socket, POLLIN, deadline)) return false;
    ssize_t received = recv(socket, static_cast<char*>(data) + at, size - at, MSG_DONTWAIT);
    if (received == 0 || (received < 0 && errno != EINTR && errno != EAGAIN)) return false;
    at += std::max<ssize_t>(received, 0);
  }
  return true;
}

Descriptor ListenForHosts(uint16_t* port) {
  for (int family : {AF_INET6, AF_INET}) {  // the first hears both, where the host has it
    Descriptor listener(socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    Set(listener.get(), SOL_SOCKET, SO_REUSEADDR, 1);
    if (family == AF_INET6) Set(listener.get(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
    sockaddr_in6 any6{};
    any6.sin6_family = AF_INET6;
    any6.sin6_port = htons(*port);
    sockaddr_in any4{};
    any4.sin_family = AF_INET;
    any4.sin_port = htons(*port);
    auto* any = family == AF_INET6 ? reinterpret_cast<sockaddr*>(&any6) : reinterpret_cast<sockaddr*>(&any4);
    socklen_t size = family == AF_INET6 ? sizeof any6 : sizeof any4;
    if (bind(listener.get(), any, size) != 0 || listen(listener.get(), 128) != 0) {
      if (errno == EADDRINUSE) break;
      continue;
    }
    getsockname(listener.get(), any, &size);
    *port = ntohs(family == AF_INET6 ? any6.sin6_port : any4.sin_port);
    return listener;
  }
  return Descriptor();
}

bool IsKnownHost(const std::string& address) { return Resolve(address, 1) != nullptr; }

Descriptor ConnectToHost(const std::string& address, uint16_t port, Clock::time_point deadline) {
  const Addresses addresses = Resolve(address, port);
  deadline = std::min(deadline, Clock::now() + kOneTry);  // another address may be the right one
  for (const addrinfo* to = addresses.get(); to != nullptr; to = to->ai_next) {
    Descriptor socket(::socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket.valid() || !Connect(socket.get(), *to, deadline)) continue;
    fcntl(socket.get(), F_SETFL, fcntl(socket.get(), F_GETFL) & ~O_NONBLOCK);
    TuneForHosts(socket.get());
    return socket;
  }
  return Descriptor();
}

Descriptor AcceptFromHost(int listener) {
  Descriptor socket(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
  if (socket.valid()) TuneForHosts(socket.get());
  return socket;
}

std::string PeerAddress(int socket) {
  sockaddr_storage peer{};
  socklen_t size = sizeof peer;
  char text[NI_MAXHOST] = {};
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &size) != 0 ||
      getnameinfo(reinterpret_cast<sockaddr*>(&peer), size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) {
    return "";
  }
  std::string address = text;
  return address.rfind("::ffff:", 0) == 0 ? address.substr(7) : address;  // IPv4 as an IPv6 socket sees it
}

bool IsLoopback(const std::string& address) { return address.rfind("127.", 0) == 0 || address == "::1"; }

}  // namespace tt
