// How the processes of a mesh make sure, before anything else, that all of them are there and fit together.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "mesh.h"
#include "sockets.h"

namespace tt {

constexpr int kMaxRanks = 64;  // of a mesh; a group of them is a bit mask

constexpr std::chrono::seconds kGrace{3};  // for ranks that come late to a refusal, and for words that are due

// What a rank says of itself when it comes; but for its rank, process and port, and what went wrong with it, all
// must say the same.
struct Hello {
  static constexpr uint32_t kMagic = 0x4d535454;  // "TTSM"

  uint32_t magic = kMagic;
  int32_t rank = 0, size = 0, local_size = 0;
  int32_t bounds[3] = {};
  int32_t pid = 0;
  uint16_t port = 0;  // where it listens for other hosts, or 0
  uint64_t launch = 0, mesh = 0;  // as World's
  char build[96] = {};
  char problem[1000] = {};
};

Hello MakeHello(const World& world, const std::string& build);

// One rank's side: it hears the ranks from `first` to `end` but itself, until all have come, one is wrong, or it is too late.
class Meeting {
 public:
  struct Guest {
    Descriptor socket;
    Hello hello;
  };
  // Whether to listen at all to who is at the other end of a connection.
  using Known = std::function<bool(int socket)>;

  Meeting(int listener, const Hello& own, int first, int end, Clock::time_point deadline, Known known);

  // `refusal` is what is wrong with this rank itself, which the others still have to hear. What is wrong, or "".
  std::string Gather(std::string refusal);

  // By rank; those that did not come have no socket.
  const std::vector<Guest>& guests() const { return guests_; }
  // Everyone who has come, and must hear the outcome.
  std::vector<int> Sockets() const;

 private:
  std::string Next();
  std::string Hear();
  std::string Compare(const Hello& hello) const;
  std::string Missing() const;

  const int listener_, first_, end_;
  const Hello own_;
  Clock::time_point deadline_;
  const Known known_;
  std::vector<Guest> guests_;
  std::vector<Descriptor> refused_;
  int heard_ = 0;
};

}  // namespace tt
