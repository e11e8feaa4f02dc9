// What the sockets of the mesh and those of messages have in common.
#include "sockets.h"

#include <unistd.h>

#include <cstddef>

namespace tt {

Descriptor::~Descriptor() {
  if (fd_ >= 0) close(fd_);
}

socklen_t AbstractAddress(const std::string& name, sockaddr_un* address) {
  *address = {};
  address->sun_family = AF_UNIX;
  size_t size = name.copy(address->sun_path + 1, sizeof address->sun_path - 1);
  return offsetof(sockaddr_un, sun_path) + 1 + size;
}

bool SameUser(int socket, ucred* peer) {
  socklen_t size = sizeof *peer;
  return socket >= 0 && getsockopt(socket, SOL_SOCKET, SO_PEERCRED, peer, &size) == 0 && peer->uid == getuid();
}

}  // namespace tt
