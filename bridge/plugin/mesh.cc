// Keeps what is known of each client's devices: which chip each is, where it
// sits in the box of chips, and which memory is its own.
#include "mesh.h"

#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "config.h"
#include "errors.h"

namespace tt {
namespace {

struct Registry {
  std::shared_mutex mutex;
  std::unordered_map<const void*, std::unique_ptr<Topology>> topologies;  // by client
  std::unordered_map<const void*, std::pair<int, Description*>> devices;
  std::unordered_map<const void*, int> memories;
};

Registry& GetRegistry() {
  static Registry* registry = new Registry;
  return *registry;
}

PJRT_NamedValue Named(const char* name) {
  auto value = MakeArgs<PJRT_NamedValue>();
  value.name = const_cast<char*>(name);
  value.name_size = std::char_traits<char>::length(name);
  value.type = PJRT_NamedValue_kInt64;
  value.value_size = 1;
  return value;
}

void* InnerDescription(void* device) {
  auto args = MakeArgs<PJRT_Device_GetDescription_Args>();
  args.device = device;
  if (PJRT_Error* error = CallInner(Slot::Device_GetDescription, &args)) {
    TakeMessage(error);
    return nullptr;
  }
  return args.device_description;
}

void* InnerTopology(void* client) {
  auto args = MakeArgs<PJRT_Client_TopologyDescription_Args>();
  args.client = client;
  if (PJRT_Error* error = CallInner(Slot::Client_TopologyDescription, &args)) {
    TakeMessage(error);
    return nullptr;
  }
  return args.topology;
}

const void* DefaultMemory(void* device) {
  auto args = MakeArgs<PJRT_Device_DefaultMemory_Args>();
  args.device = device;
  if (PJRT_Error* error = CallInner(Slot::Device_DefaultMemory, &args)) {
    TakeMessage(error);
    return nullptr;
  }
  return args.memory;
}

}  // namespace

Description::Description(int id, int process, Bounds coords, void* inner)
    : id(id), process(process), coords(coords), inner(inner), coords64(coords.begin(), coords.end()) {
  std::string at = std::to_string(coords[0]) + "," + std::to_string(coords[1]) + "," + std::to_string(coords[2]);
  text = "TpuDevice(id=" + std::to_string(id) + ", process_index=" + std::to_string(process) + ", coords=(" + at +
         "), core_on_chip=0)";
  debug = "TPU_" + std::to_string(id) + "(" + GetConfig().platform_version + ")";
  PJRT_NamedValue place = Named("coords");
  place.type = PJRT_NamedValue_kInt64List;
  place.int64_array_value = coords64.data();
  place.value_size = coords64.size();
  attributes.push_back(place);
  attributes.push_back(Named("core_on_chip"));
  attributes.push_back(Named("slice_index"));
  PJRT_NamedValue cores = Named("num_cores");
  cores.int64_value = 1;
  attributes.push_back(cores);
}

Topology::Topology(Bounds bounds, void* inner, const std::vector<void*>& inner_descriptions)
    : bounds(bounds), inner(inner) {
  for (int id = 0; id < chips(); ++id) {
    void* description = id < static_cast<int>(inner_descriptions.size()) ? inner_descriptions[id] : nullptr;
    descriptions.push_back(std::make_unique<Description>(id, 0, Coords(id), description));
    pointers.push_back(descriptions.back().get());
  }
}

Bounds Topology::Coords(int id) const {
  return {id % bounds[0], id / bounds[0] % bounds[1], id / (bounds[0] * bounds[1])};
}

int Topology::Id(const int32_t* c) const { return c[0] + bounds[0] * (c[1] + bounds[1] * c[2]); }

std::string Topology::Name() const {
  return std::to_string(bounds[0]) + "x" + std::to_string(bounds[1]) + "x" + std::to_string(bounds[2]);
}

void RegisterClient(void* client, const std::vector<void*>& devices) {
  std::vector<void*> inner;
  for (void* device : devices) inner.push_back(InnerDescription(device));
  auto topology =
      std::make_unique<Topology>(Bounds{static_cast<int32_t>(devices.size()), 1, 1}, InnerTopology(client), inner);
  Registry& registry = GetRegistry();
  std::unique_lock lock(registry.mutex);
  for (size_t chip = 0; chip < devices.size(); ++chip) {
    registry.devices[devices[chip]] = {static_cast<int>(chip), topology->descriptions[chip].get()};
    registry.memories[DefaultMemory(devices[chip])] = static_cast<int>(chip);
  }
  registry.topologies[client] = std::move(topology);
}

void ForgetClient(void* client) {
  Registry& registry = GetRegistry();
  std::unique_lock lock(registry.mutex);
  auto found = registry.topologies.find(client);
  if (found == registry.topologies.end()) return;
  std::erase_if(registry.devices, [&](const auto& entry) {
    return found->second->descriptions[entry.second.first].get() == entry.second.second;
  });
  registry.topologies.erase(found);
}

Topology* ClientTopology(void* client) {
  Registry& registry = GetRegistry();
  std::shared_lock lock(registry.mutex);
  auto found = registry.topologies.find(client);
  return found == registry.topologies.end() ? nullptr : found->second.get();
}

int ChipOfDevice(const void* device) {
  Registry& registry = GetRegistry();
  std::shared_lock lock(registry.mutex);
  auto found = registry.devices.find(device);
  return found == registry.devices.end() ? -1 : found->second.first;
}

int ChipOfMemory(const void* memory) {
  Registry& registry = GetRegistry();
  std::shared_lock lock(registry.mutex);
  auto found = registry.memories.find(memory);
  return found == registry.memories.end() ? -1 : found->second;
}

Description* DescriptionOfDevice(const void* device) {
  Registry& registry = GetRegistry();
  std::shared_lock lock(registry.mutex);
  auto found = registry.devices.find(device);
  return found == registry.devices.end() ? nullptr : found->second.second;
}

}  // namespace tt
