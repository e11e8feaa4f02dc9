// The chips as the framework sees them: ids, coordinates, descriptions; and which of them is this process's own.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "pjrt.h"

namespace tt {

using Bounds = std::array<int32_t, 3>;

// This process among those of one mesh, each of which drives one chip.
struct World {
  int rank = 0;
  int size = 1;
  int local_size = 1;      // of them, those on each host; their ranks follow each other
  Bounds bounds{1, 1, 1};  // the box that the chips fill
  std::string job;         // 16 digits, the same in every process of the mesh on a host and in no other mesh's
  uint64_t launch = 0;     // a hash of what only the processes of one launch have in common, on all hosts
  uint64_t mesh = 0;       // a hash of the user's mesh graph descriptor; 0 where there is none
  std::string meeting_address;  // where rank 0 can be reached from other hosts
  uint16_t meeting_port = 0;

  bool spread() const { return size > 1; }
  int hosts() const { return size / local_size; }
  int HostOf(int other) const { return other / local_size; }
  bool IsHere(int other) const { return HostOf(other) == HostOf(rank); }
  int first_here() const { return HostOf(rank) * local_size; }
};

// Learns the world from the launcher's variables (RANK, WORLD_SIZE and so on): when a client is made
// and not before, since spawned processes get their rank after the plugin was loaded.
PJRT_Error* ReadWorld();
const World& GetWorld();

// What a PJRT_DeviceDescription* of ours points to.
struct Description {
  Description(int id, int process, Bounds coords, void* inner);
  Description(const Description&) = delete;

  int id;
  int process;
  Bounds coords;
  void* inner;  // the inner plugin's description of the same device, or null
  std::string debug, text;
  std::vector<int64_t> coords64;
  std::vector<PJRT_NamedValue> attributes;
};

// What a PJRT_TopologyDescription* of ours points to: a hole-free box of chips.
struct Topology {
  // `spread`: each chip has a process of its own.
  Topology(Bounds bounds, bool spread, void* inner, const std::vector<void*>& inner_descriptions);

  Bounds bounds;
  bool spread;
  void* inner;  // the inner plugin's topology, or null where it was made by name
  std::vector<std::unique_ptr<Description>> descriptions;
  std::vector<void*> pointers;

  int chips() const { return bounds[0] * bounds[1] * bounds[2]; }
  int processes() const { return spread ? chips() : 1; }
  int chips_per_process() const { return spread ? 1 : chips(); }
  Bounds Coords(int id) const;
  int Id(const int32_t* coords) const;
  std::string Name() const;  // "2x2x1"
};

struct ClientDevices {
  std::vector<void*> all;       // by id
  std::vector<void*> own;       // those that this process drives
  std::vector<void*> memories;  // of its own devices
};

// The devices of a client, as the inner client lists them. In a mesh of processes the inner
// client has one for each chip too: its first is this process's own, whatever the rank is (so that
// a compiled program fits every rank), and the others stand for chips that other processes drive.
void RegisterClient(void* client, const std::vector<void*>& inner_devices);
void ForgetClient(void* client);
Topology* ClientTopology(void* client);
const ClientDevices* DevicesOfClient(const void* client);  // null when it is not alive
// The chip of this process that a PJRT_Device* or a PJRT_Memory* (of device memory) belongs to; -1 for
// host memory, and for chips of other processes.
int ChipOfDevice(const void* device);
int ChipOfMemory(const void* memory);
Description* DescriptionOfDevice(const void* device);

}  // namespace tt
