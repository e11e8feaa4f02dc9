// Keeps what is known of each client's devices: which chip each is, where it
// sits in the box of chips, which process drives it and which memory is its own.
#include "mesh.h"

#include <stdlib.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "config.h"
#include "errors.h"

namespace tt {
namespace {

struct KnownClient {
  std::unique_ptr<Topology> topology;
  ClientDevices devices;
};

struct KnownDevice {
  int chip;  // of this process, or -1
  Description* description;
};

struct Registry {
  std::shared_mutex mutex;
  std::unordered_map<const void*, KnownClient> clients;
  std::unordered_map<const void*, KnownDevice> devices;
  std::unordered_map<const void*, int> memories;
};

Registry& GetRegistry() {
  static Registry* registry = new Registry;
  return *registry;
}

World& MutableWorld() {
  static World* world = new World;
  return *world;
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

void AppendMemories(void* device, std::vector<void*>* memories) {
  auto args = MakeArgs<PJRT_Device_AddressableMemories_Args>();
  args.device = device;
  if (PJRT_Error* error = CallInner(Slot::Device_AddressableMemories, &args)) {
    TakeMessage(error);
    return;
  }
  auto** first = reinterpret_cast<void**>(const_cast<void*>(static_cast<const void*>(args.memories)));
  memories->insert(memories->end(), first, first + args.num_memories);
}

std::string Variable(const char* name) {
  const char* value = getenv(name);
  return value != nullptr ? value : "";
}

// A whole number from an environment variable; an error names it, its value and what it must be.
PJRT_Error* ReadNumber(const char* name, int least, int most, int* number) {
  std::string text = Variable(name);
  char* end = nullptr;
  long value = strtol(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || value < least || value > most) {
    return InvalidArgument(std::string(name) + "='" + text + "' is not a whole number from " + std::to_string(least) +
                           " to " + std::to_string(most) + ": start the processes with torchrun or tt-tpu run");
  }
  *number = static_cast<int>(value);
  return nullptr;
}

// The box of chips that the launcher chose ("2,2,1"), or a row of them.
Bounds ReadBounds(int size) {
  Bounds bounds{1, 1, 1};
  std::string text = Variable("TORCH_TPU_TOPOLOGY");
  int read = sscanf(text.c_str(), "%d%*[,x]%d%*[,x]%d", &bounds[0], &bounds[1], &bounds[2]);
  bool fits = read >= 1 && static_cast<int64_t>(bounds[0]) * bounds[1] * bounds[2] == size;
  return fits ? bounds : Bounds{size, 1, 1};
}

// FNV-1a
uint64_t Hash(const std::string& text) {
  uint64_t hash = 14695981039346656037u;
  for (unsigned char c : text) hash = (hash ^ c) * 1099511628211u;
  return hash;
}

// What only the processes of one launch have in common.
std::string Job() {
  std::string text = std::to_string(getuid());
  for (const char* name : {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}) {
    text += "\n" + Variable(name);
  }
  char digits[17];
  snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(Hash(text)));
  return digits;
}

uint64_t UserMesh() {
  std::ifstream file(Variable("TT_MESH_GRAPH_DESC_PATH"));
  if (!file) return 0;
  return Hash(std::string(std::istreambuf_iterator<char>(file), {}));
}

// A host's ranks must follow each other.
PJRT_Error* CheckLocalRank(const World& world) {
  int local = 0;
  if (Variable("LOCAL_RANK").empty()) return nullptr;
  if (PJRT_Error* error = ReadNumber("LOCAL_RANK", 0, world.local_size - 1, &local)) return error;
  if (local == world.rank % world.local_size) return nullptr;
  return InvalidArgument("RANK=" + std::to_string(world.rank) + " with LOCAL_RANK=" + std::to_string(local) +
                         " and LOCAL_WORLD_SIZE=" + std::to_string(world.local_size) +
                         ": number the ranks of one host after each other, as torchrun does");
}

// A TPU's processes meet at these addresses, one a rank; ours all at the first.
PJRT_Error* ReadMeetingPlace(World* world) {
  const std::string all = Variable("TORCH_TPU_SLICEBUILDER_ADDRESSES"), first = all.substr(0, all.find(','));
  const size_t colon = first.rfind(':');
  const int port = colon == std::string::npos ? 0 : atoi(first.c_str() + colon + 1);
  if (port < 1 || port > 65535) {
    return InvalidArgument("TORCH_TPU_SLICEBUILDER_ADDRESSES='" + all + "' does not begin with rank 0's HOST:PORT, where "
                           "the processes of several hosts meet");
  }
  world->meeting_address = first.substr(0, colon);
  if (first[0] == '[' && colon > 1 && first[colon - 1] == ']') world->meeting_address = first.substr(1, colon - 2);
  world->meeting_port = static_cast<uint16_t>(port);
  return nullptr;
}

}  // namespace

PJRT_Error* ReadWorld() {
  World world;
  if (Variable("WORLD_SIZE").empty() || Variable("RANK").empty()) {
    MutableWorld() = world;
    return nullptr;
  }
  if (PJRT_Error* error = ReadNumber("WORLD_SIZE", 1, 4096, &world.size)) return error;
  if (PJRT_Error* error = ReadNumber("RANK", 0, world.size - 1, &world.rank)) return error;
  world.local_size = world.size;
  if (!Variable("LOCAL_WORLD_SIZE").empty()) {
    if (PJRT_Error* error = ReadNumber("LOCAL_WORLD_SIZE", 1, world.size, &world.local_size)) return error;
  }
  if (world.size % world.local_size != 0) {
    return InvalidArgument("WORLD_SIZE=" + std::to_string(world.size) + " with LOCAL_WORLD_SIZE=" +
                           std::to_string(world.local_size) + ": start as many processes on each host");
  }
  if (world.spread() && GetConfig().chips > 1) {
    return InvalidArgument("TT_TPU_EMULATED_CHIPS=" + std::to_string(GetConfig().chips) + " beside WORLD_SIZE=" +
                           std::to_string(world.size) + ": in a mesh each process drives one chip; unset it");
  }
  world.bounds = ReadBounds(world.size);
  world.job = Job();
  world.launch = Hash(Variable("MASTER_PORT") + "\n" + Variable("TORCHELASTIC_RUN_ID"));
  world.mesh = UserMesh();
  if (world.hosts() > 1) {
    if (PJRT_Error* error = CheckLocalRank(world)) return error;
    if (PJRT_Error* error = ReadMeetingPlace(&world)) return error;
  }
  MutableWorld() = world;
  return nullptr;
}

const World& GetWorld() { return MutableWorld(); }

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

Topology::Topology(Bounds bounds, bool spread, void* inner, const std::vector<void*>& inner_descriptions)
    : bounds(bounds), spread(spread), inner(inner) {
  for (int id = 0; id < chips(); ++id) {
    void* description = id < static_cast<int>(inner_descriptions.size()) ? inner_descriptions[id] : nullptr;
    descriptions.push_back(std::make_unique<Description>(id, spread ? id : 0, Coords(id), description));
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

void RegisterClient(void* client, const std::vector<void*>& inner_devices) {
  const World& world = GetWorld();
  const int count = static_cast<int>(inner_devices.size());
  KnownClient known;
  auto& [all, own, memories] = known.devices;
  // Turned round so that this process's device, the inner client's first, has its rank as id.
  for (int id = 0; id < count; ++id) {
    all.push_back(inner_devices[world.spread() ? (id - world.rank + count) % count : id]);
  }
  own = world.spread() ? std::vector<void*>{inner_devices.front()} : all;
  for (void* device : own) AppendMemories(device, &memories);
  std::vector<void*> inner;
  for (void* device : all) inner.push_back(InnerDescription(device));
  Bounds bounds = world.spread() ? world.bounds : Bounds{count, 1, 1};
  known.topology = std::make_unique<Topology>(bounds, world.spread(), InnerTopology(client), inner);
  Registry& registry = GetRegistry();
  std::unique_lock lock(registry.mutex);
  for (int id = 0; id < count; ++id) {
    void* device = all[id];
    int chip = !world.spread() ? id : id == world.rank ? 0 : -1;
    registry.devices[device] = {chip, known.topology->descriptions[id].get()};
    registry.memories[DefaultMemory(device)] = chip;
  }
  registry.clients[client] = std::move(known);
}

void ForgetClient(void* client) {
  Registry& registry = GetRegistry();
  std::unique_lock lock(registry.mutex);
  auto found = registry.clients.find(client);
  if (found == registry.clients.end()) return;
  for (void* device : found->second.devices.all) registry.devices.erase(device);
  registry.clients.erase(found);
}

Topology* ClientTopology(void* client) {
  Registry& registry = GetRegistry();
  std::shared_lock lock(registry.mutex);
  auto found = registry.clients.find(client);
  return found == registry.clients.end() ? nullptr : found->second.topology.get();
}

const ClientDevices* DevicesOfClient(const void* client) {
  Registry& registry = GetRegistry();
  std::shared_lock lock(registry.mutex);
  auto found = registry.clients.find(client);
  return found == registry.clients.end() ? nullptr : &found->second.devices;
}

int ChipOfDevice(const void* device) {
  Registry& registry = GetRegistry();
  std::shared_lock lock(registry.mutex);
  auto found = registry.devices.find(device);
  return found == registry.devices.end() ? -1 : found->second.chip;
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
  return found == registry.devices.end() ? nullptr : found->second.description;
}

}  // namespace tt
