// The chips as the framework sees them: ids, coordinates, descriptions.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "pjrt.h"

namespace tt {

using Bounds = std::array<int32_t, 3>;

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
  Topology(Bounds bounds, void* inner, const std::vector<void*>& inner_descriptions);

  Bounds bounds;
  void* inner;  // the inner plugin's topology, or null where it was made by name
  std::vector<std::unique_ptr<Description>> descriptions;
  std::vector<void*> pointers;

  int chips() const { return bounds[0] * bounds[1] * bounds[2]; }
  Bounds Coords(int id) const;
  int Id(const int32_t* coords) const;
  std::string Name() const;  // "2x2x1"
};

// The devices of this process, numbered as the inner client lists them.
void RegisterClient(void* client, const std::vector<void*>& devices);
void ForgetClient(void* client);
Topology* ClientTopology(void* client);
// The chip that a PJRT_Device* or a PJRT_Memory* (of device memory) belongs to; -1 for host memory.
int ChipOfDevice(const void* device);
int ChipOfMemory(const void* memory);
Description* DescriptionOfDevice(const void* device);

}  // namespace tt
