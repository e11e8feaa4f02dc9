// The processes of a mesh that run on other hosts: where they are, and connections to them (TCP).
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "meeting.h"
#include "mesh.h"
#include "sockets.h"

namespace tt {

class Hosts {
 public:
  // Meets all ranks at the world's meeting place, where rank 0 listens, and connects to each rank of another host.
  // `problem` is what has gone wrong on this host already, which all ranks hear. An error text, or "".
  static std::string Join(const World& world, const std::string& build, const std::string& problem,
                          std::chrono::seconds patience, std::unique_ptr<Hosts>* hosts);

  // The connection to a rank of another host, once; for the collectives alone.
  Descriptor TakeLink(int rank) {
    std::lock_guard lock(mutex_);
    return std::move(links_[rank]);
  }
  // As World's, and the same on all hosts.
  const std::string& job() const { return job_; }
  // "process 1234 on 10.0.0.2"
  std::string Where(int rank) const;
  // A connection of its own to what listens at that rank under this name (a unix socket of its process); not a valid
  // one where nothing does. The names of messages only.
  Descriptor Call(int rank, const std::string& name) const;

 private:
  struct Place {
    char address[64];
    uint16_t port;
    int32_t pid;
  };
  struct Welcome;
  struct Knock;

  Hosts(const World& world, Descriptor listener) : world_(world), listener_(std::move(listener)), links_(world.size) {}

  std::string Receive(const Hello& hello, std::string problem, Clock::time_point deadline);
  std::string Visit(const Hello& hello, Clock::time_point deadline);
  std::string ConnectAll(Clock::time_point deadline);
  void CloseInChildren();
  void Answer();
  void AnswerOne(Descriptor socket);

  const World world_;
  const Descriptor listener_;
  std::string job_;
  bool answering_ = false;
  std::vector<Place> places_;
  std::mutex mutex_;  // of the links, until all are there
  std::condition_variable linked_;
  std::vector<Descriptor> links_;
};

}  // namespace tt
