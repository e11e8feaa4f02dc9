// A connection between two ranks that does not wait in vain.
#pragma once

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <utility>

#include "collectives_group.h"
#include "sockets.h"

namespace tt {

// One end of a connection to another rank. Whoever waits at it looks now and then whether rank `peer` is well.
class Stream {
 public:
  // Where `ending` becomes true nothing is waited for any more.
  Stream(Descriptor socket, const Patience& patience, int peer, const std::atomic<bool>* ending = nullptr)
      : socket_(std::move(socket)), patience_(patience), peer_(peer), ending_(ending) {}

  int socket() const { return socket_.get(); }

  MaybeFailure Await(short events) const {
    const auto start = Clock::now();
    while (true) {
      pollfd one{socket_.get(), events, 0};
      if (poll(&one, 1, std::chrono::milliseconds(Patience::kLookUp).count()) > 0) return std::nullopt;
      if (ending_ != nullptr && ending_->load()) return Failure{PJRT_Error_Code_CANCELLED, "the client has ended"};
      if (MaybeFailure failure = patience_.LookUp(start, SetOf(peer_))) return failure;
    }
  }

  // These fail without a text where the other end has closed.
  MaybeFailure Write(const void* data, size_t size) const {
    return Move(POLLOUT, size, [&](size_t at) {
      return send(socket_.get(), static_cast<const char*>(data) + at, size - at, MSG_NOSIGNAL | MSG_DONTWAIT);
    });
  }
  MaybeFailure Read(void* data, size_t size) const {
    return Move(POLLIN, size, [&](size_t at) {
      return recv(socket_.get(), static_cast<char*>(data) + at, size - at, MSG_DONTWAIT);
    });
  }

 private:
  template <class Some>
  MaybeFailure Move(short events, size_t size, Some some) const {
    for (size_t at = 0; at < size;) {
      ssize_t moved = some(at);
      if (moved > 0) {
        at += moved;
      } else if (moved < 0 && errno == EAGAIN) {
        if (MaybeFailure failure = Await(events)) return failure;
      } else if (moved == 0 || errno != EINTR) {
        return Failure{PJRT_Error_Code_UNAVAILABLE, ""};
      }
    }
    return std::nullopt;
  }

  const Descriptor socket_;
  const Patience& patience_;
  const int peer_;
  const std::atomic<bool>* const ending_;
};

}  // namespace tt
