// Collectives over several hosts: what a rank does in its own host's memory is done in that of the others too.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "collectives_group.h"
#include "hosts.h"
#include "stream.h"

namespace tt {

// Part of a buffer.
struct Piece {
  size_t offset, size;
};

class Mirror {
 public:
  // One thread for each rank of another host does here what that rank does.
  Mirror(Hosts& hosts, const MeshLayout& layout, Patience& patience);

  // Whether a set of ranks has some on other hosts.
  bool Spans(uint64_t ranks) const { return (ranks & ~patience_.here()) != 0; }

  // This rank's step in a collective, to the other hosts that take part: with the pieces of its buffer `which` that
  // their members read (`piece(rank)`).
  MaybeFailure Send(const Group& group, int which, const std::function<Piece(int rank)>& piece);

 private:
  struct Frame;
  struct Link {
    Link(Descriptor socket, const Patience& patience, int rank) : stream(std::move(socket), patience, rank) {}

    std::mutex mutex;
    Stream stream;
    bool broken = false;

    // What came next would not be understood: the other end hears that nothing does.
    void Break() {
      broken = true;
      shutdown(stream.socket(), SHUT_WR);
    }
  };

  std::vector<int> MembersOn(int host, uint64_t ranks) const;
  MaybeFailure SendTo(int rank, const Frame& frame);
  void TellFailure(const std::string& message);
  void Follow(int rank);
  MaybeFailure Take(int rank, const Frame& frame);

  const MeshLayout layout_;
  const Patience& patience_;
  std::vector<std::unique_ptr<Link>> links_;  // null for ranks of this host
  std::vector<uint64_t> sent_;                // frames, by host
};

}  // namespace tt
