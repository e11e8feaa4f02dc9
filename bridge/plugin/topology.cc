// Topologies: of a client, or made by a name such as "v5e:2x2", with no client
// and no chip; and the TPU topology extension, which counts chips and places
// them. Extensions of the inner plugin that take a topology or a description
// get the inner one here.
#include <cstring>
#include <regex>

#include "config.h"
#include "errors.h"
#include "extensions.h"
#include "mesh.h"
#include "pjrt.h"

namespace tt {
namespace {

const Topology& Of(const void* topology) { return *static_cast<const Topology*>(topology); }

constexpr const char* kSerialized = "tt-tpu-topology ";

PJRT_Error* Parse(const std::string& text, Topology** topology) {
  std::smatch match;
  static const std::regex pattern("(\\d{1,3})(?:x(\\d{1,3}))?(?:x(\\d{1,3}))?");
  Bounds bounds{1, 1, 1};
  if (!std::regex_match(text, match, pattern)) {
    return InvalidArgument("topology bounds '" + text + "' are not of the form 2x2 or 2x2x1");
  }
  for (int i = 0; i < 3; ++i) {
    if (match[i + 1].matched) bounds[i] = std::stoi(match[i + 1]);
    if (bounds[i] < 1) return InvalidArgument("topology bounds '" + text + "' hold a 0");
  }
  *topology = new Topology(bounds, false, nullptr, {});
  return nullptr;
}

PJRT_Error* Create(PJRT_TopologyDescription_Create_Args* args) {
  std::string name(View(args->topology_name, args->topology_name_size));
  std::smatch match;
  static const std::regex pattern("(v5e|v5litepod|tt):(.+)");
  if (!std::regex_match(name, match, pattern)) {
    return InvalidArgument("topology '" + name + "' is unknown: chips are presented as v5e, so write v5e:2x2");
  }
  Topology* topology = nullptr;
  PJRT_Error* error = Parse(match[2], &topology);
  args->topology = topology;
  return error;
}

PJRT_Error* OfClient(PJRT_Client_TopologyDescription_Args* args) {
  args->topology = ClientTopology(args->client);
  return args->topology != nullptr ? nullptr : InvalidArgument("the client is not alive");
}

PJRT_Error* Destroy(PJRT_TopologyDescription_Destroy_Args* args) {
  auto* topology = static_cast<Topology*>(args->topology);
  if (topology->inner == nullptr) delete topology;  // a client's own goes with the client
  return nullptr;
}

PJRT_Error* PlatformName(PJRT_TopologyDescription_PlatformName_Args* args) {
  args->platform_name = const_cast<char*>("tpu");
  args->platform_name_size = 3;
  return nullptr;
}

PJRT_Error* PlatformVersion(PJRT_TopologyDescription_PlatformVersion_Args* args) {
  const std::string& version = GetConfig().platform_version;
  args->platform_version = const_cast<char*>(version.data());
  args->platform_version_size = version.size();
  return nullptr;
}

PJRT_Error* Descriptions(PJRT_TopologyDescription_GetDeviceDescriptions_Args* args) {
  const auto& pointers = Of(args->topology).pointers;
  args->descriptions = const_cast<void**>(pointers.data());
  args->num_descriptions = pointers.size();
  return nullptr;
}

PJRT_Error* Attributes(PJRT_TopologyDescription_Attributes_Args* args) {
  args->attributes = nullptr;
  args->num_attributes = 0;
  return nullptr;
}

PJRT_Error* Serialize(PJRT_TopologyDescription_Serialize_Args* args) {
  auto* text = new std::string(kSerialized + Of(args->topology).Name());
  args->serialized_bytes = text->data();
  args->serialized_bytes_size = text->size();
  args->serialized_topology = text;
  args->serialized_topology_deleter =
      reinterpret_cast<void*>(+[](void* owned) { delete static_cast<std::string*>(owned); });
  return nullptr;
}

PJRT_Error* Deserialize(PJRT_TopologyDescription_Deserialize_Args* args) {
  std::string text(View(args->serialized_topology, args->serialized_topology_size));
  if (text.rfind(kSerialized, 0) != 0) return InvalidArgument("not a topology that this plugin serialized");
  Topology* topology = nullptr;
  PJRT_Error* error = Parse(text.substr(strlen(kSerialized)), &topology);
  args->topology = topology;
  return error;
}

PJRT_Error* Fingerprint(PJRT_TopologyDescription_Fingerprint_Args* args) {
  args->fingerprint = std::hash<std::string>()(GetConfig().fingerprint + Of(args->topology).Name());
  return nullptr;
}

// For functions that only the inner plugin can answer: swaps the topology for the inner one.
template <Slot slot, class Args>
PJRT_Error* Forward(Args* args) {
  void* ours = args->topology;
  if (Of(ours).inner == nullptr) {
    return Unimplemented(std::string(kSlotNames[static_cast<int>(slot)]) +
                         " needs the topology of a live client; this one was made by name");
  }
  args->topology = Of(ours).inner;
  PJRT_Error* error = CallInner(slot, args);
  args->topology = ours;
  return error;
}

PJRT_Error* CompileWithoutClient(PJRT_Compile_Args*) {
  return Unimplemented("PJRT_Compile without a client is not supported: compile through PJRT_Client_Compile");
}

// ---- The TPU topology extension. One process drives all chips of a topology, or each its own.

template <class Args, auto field>
PJRT_Error* Chips(Args* args) {
  args->*field = Of(args->topology).chips();
  return nullptr;
}

template <class Args, auto field>
PJRT_Error* One(Args* args) {
  args->*field = 1;
  return nullptr;
}

template <class Args, auto field>
PJRT_Error* No(Args* args) {
  args->*field = false;
  return nullptr;
}

PJRT_Error* Copy(const Bounds& values, void* out, size_t room, size_t* count) {
  if (room < values.size()) return InvalidArgument("room for " + std::to_string(room) + " dimensions, 3 are needed");
  memcpy(out, values.data(), sizeof values);
  *count = values.size();
  return nullptr;
}

PJRT_Error* CheckChip(const Topology& topology, int chip) {
  if (chip >= 0 && chip < topology.chips()) return nullptr;
  return InvalidArgument("chip " + std::to_string(chip) + " is not in a topology of " +
                         std::to_string(topology.chips()));
}

template <class Args, auto field>
PJRT_Error* Processes(Args* args) {
  args->*field = Of(args->topology).processes();
  return nullptr;
}

template <class Args, auto field>
PJRT_Error* ChipsPerProcess(Args* args) {
  args->*field = Of(args->topology).chips_per_process();
  return nullptr;
}

PJRT_Error* Count(int first, int count, int room, void* out) {
  if (room < count) return InvalidArgument("room for " + std::to_string(room) + " ids, " + std::to_string(count) + " are needed");
  for (int i = 0; i < count; ++i) static_cast<int32_t*>(out)[i] = first + i;
  return nullptr;
}

PJRT_Error* ProcessIds(PJRT_TpuTopology_ProcessIds_Args* args) {
  args->num_process_ids = Of(args->topology).processes();
  return Count(0, args->num_process_ids, args->max_process_ids, args->process_ids);
}

PJRT_Error* DeviceIds(PJRT_TpuTopology_LogiDeviceIdsOnProcess_Args* args) {
  const Topology& topology = Of(args->topology);
  args->num_logical_device_ids = topology.chips_per_process();
  return Count(topology.spread ? args->process_id : 0, args->num_logical_device_ids, args->max_logical_device_ids,
               args->logical_device_of_default_type_ids);
}

PJRT_Error* ProcessOfChip(PJRT_TpuTopology_ProcIdAndIdxOnProcForChip_Args* args) {
  const Topology& topology = Of(args->topology);
  args->process_id = topology.spread ? args->chip_id : 0;
  args->index_on_process = topology.spread ? 0 : args->chip_id;
  return CheckChip(topology, args->chip_id);
}

PJRT_Error* ProcessOfDevice(PJRT_TpuTopology_ProcIdAndIdxOnProcForLogiDevice_Args* args) {
  const Topology& topology = Of(args->topology);
  args->process_id = topology.spread ? args->device_id : 0;
  args->index_on_process = topology.spread ? 0 : args->device_id;
  return CheckChip(topology, args->device_id);
}

PJRT_Error* ProcessCoord(PJRT_TpuTopology_ProcessCoordFromId_Args* args) {
  const Topology& topology = Of(args->topology);
  Bounds at = topology.spread ? topology.Coords(args->process_id) : Bounds{0, 0, 0};
  return Copy(at, args->coords, args->coords_max_dims, &args->coords_num_dims);
}

PJRT_Error* ChipAt(const Topology& topology, const void* coords, size_t dims, int32_t* id) {
  const auto* at = static_cast<const int32_t*>(coords);
  for (size_t i = 0; i < 3; ++i) {
    if (dims != 3 || at[i] < 0 || at[i] >= topology.bounds[i]) {
      return InvalidArgument("coordinates outside a topology of " + topology.Name());
    }
  }
  *id = topology.Id(at);
  return nullptr;
}

PJRT_Error* ChipFromCoord(PJRT_TpuTopology_ChipIdFromCoord_Args* args) {
  return ChipAt(Of(args->topology), args->coords, args->coords_num_dims, &args->chip_id);
}

PJRT_Error* DeviceFromCoord(PJRT_TpuTopology_LogiDeviceIdFromChipCoordAndIdx_Args* args) {
  return ChipAt(Of(args->topology), args->chip_coords, args->chip_coords_num_dims,
                &args->logical_device_of_default_type_id);
}

PJRT_Error* CoordOfDevice(PJRT_TpuTopology_ChipCoordAndIdxForLogiDevice_Args* args) {
  const Topology& topology = Of(args->topology);
  if (PJRT_Error* error = CheckChip(topology, args->device_id)) return error;
  args->device_index_on_chip = 0;
  return Copy(topology.Coords(args->device_id), args->chip_coords, args->chip_coords_max_dims,
              &args->chip_coords_num_dims);
}

PJRT_Error* ProcessChipBounds(PJRT_TpuTopology_ChipsPerProcessBounds_Args* args) {
  const Topology& topology = Of(args->topology);
  return Copy(topology.spread ? Bounds{1, 1, 1} : topology.bounds, args->chip_per_process_bounds,
              args->chip_per_process_bounds_max_dims, &args->chip_per_process_bounds_num_dims);
}

PJRT_Error* ChipBounds(PJRT_TpuTopology_ChipBounds_Args* args) {
  return Copy(Of(args->topology).bounds, args->chip_bounds, args->chip_bounds_max_dims, &args->chip_bounds_num_dims);
}

PJRT_Error* ProcessBounds(PJRT_TpuTopology_ProcessBounds_Args* args) {
  const Topology& topology = Of(args->topology);
  return Copy(topology.spread ? topology.bounds : Bounds{1, 1, 1}, args->process_bounds, args->process_bounds_max_dims, &args->process_bounds_num_dims);
}

PJRT_Error* NotHere(void*) {
  return Unimplemented("slices of a topology, routing and platform configurations are a TPU pod's; there are none here");
}

// ---- Extensions of the inner plugin that take one of our objects.

PJRT_MemoryDescriptions_Extension* inner_memory_descriptions;

PJRT_Error* MemoryDescriptions(PJRT_DeviceDescription_MemoryDescriptions_Args* args) {
  auto inner = *args;
  inner.device_description = static_cast<const Description*>(args->device_description)->inner;
  if (inner.device_description == nullptr) return Unimplemented("memories of a chip that is not here are unknown");
  auto function = reinterpret_cast<PJRT_Error* (*)(PJRT_DeviceDescription_MemoryDescriptions_Args*)>(
      inner_memory_descriptions->PJRT_DeviceDescription_MemoryDescriptions);
  PJRT_Error* error = function(&inner);
  args->memory_descriptions = inner.memory_descriptions;
  args->num_memory_descriptions = inner.num_memory_descriptions;
  args->default_memory_index = inner.default_memory_index;
  return error;
}

template <class F>
void* Untyped(F* function) {
  return reinterpret_cast<void*>(function);
}

}  // namespace

PJRT_Extension_Base* MemoryDescriptionsExtension() {
  inner_memory_descriptions = reinterpret_cast<PJRT_MemoryDescriptions_Extension*>(
      InnerExtension(PJRT_Extension_Type_MemoryDescriptions));
  if (inner_memory_descriptions == nullptr) return nullptr;
  static PJRT_MemoryDescriptions_Extension extension = *inner_memory_descriptions;
  extension.PJRT_DeviceDescription_MemoryDescriptions = Untyped(MemoryDescriptions);
  return &extension.base;
}

#define TOPOLOGY_FIELD(kind, function, field) \
  Untyped(kind<PJRT_TpuTopology_##function##_Args, &PJRT_TpuTopology_##function##_Args::field>)

PJRT_Extension_Base* TpuTopologyExtension() {
  static PJRT_TpuTopology_Extension extension{};
  extension.base.struct_size = sizeof extension;
  extension.base.type = PJRT_Extension_Type_TpuTopology;
  auto& e = extension;
  e.subslice = e.subslice_device_id_from_full_device_id = e.replace_host_bounds = Untyped(NotHere);
  e.get_routing_strategy = e.get_slice_config = e.get_slice_configs = Untyped(NotHere);
  e.get_default_platform_config = Untyped(NotHere);
  e.is_subslice_topology = TOPOLOGY_FIELD(No, IsSubsliceTopology, is_subslice_topology);
  e.is_enhanced_barrier_enabled = TOPOLOGY_FIELD(No, IsEnhancedBarrierEnabled, is_enhanced_barrier_enabled);
  e.has_limited_ici_connectivity = TOPOLOGY_FIELD(No, HasLimitedIciConnectivity, has_limited_ici_connectivity);
  e.is_reachable_over_limited_ici = TOPOLOGY_FIELD(No, IsReachableOverLimitedIci, is_reachable_over_limited_ici);
  e.process_count = TOPOLOGY_FIELD(Processes, ProcessCount, process_count);
  e.chips_per_process = TOPOLOGY_FIELD(ChipsPerProcess, ChipsPerProcess, chips_per_process);
  e.core_count_per_chip = TOPOLOGY_FIELD(One, CoreCountPerChip, core_count_of_default_type_per_chip);
  e.chip_count = TOPOLOGY_FIELD(Chips, ChipCount, chip_count);
  e.core_count = TOPOLOGY_FIELD(Chips, CoreCount, core_count_of_default_type);
  e.logical_device_count_per_process =
      TOPOLOGY_FIELD(ChipsPerProcess, LogiDeviceCountPerProcess, logical_device_count_of_default_type_per_process);
  e.logical_device_count = TOPOLOGY_FIELD(Chips, LogiDeviceCount, logical_device_count_of_default_type);
  e.logical_device_count_per_chip =
      TOPOLOGY_FIELD(One, LogiDeviceCountPerChip, logical_device_count_of_default_type_per_chip);
  e.core_count_per_process =
      TOPOLOGY_FIELD(ChipsPerProcess, CoreCountPerProcess, core_count_of_default_type_per_process);
  e.process_ids = Untyped(ProcessIds);
  e.logical_device_ids_on_process = Untyped(DeviceIds);
  e.proc_id_and_idx_on_proc_for_chip = Untyped(ProcessOfChip);
  e.proc_id_and_idx_on_proc_for_logi_device = Untyped(ProcessOfDevice);
  e.process_coord_from_id = Untyped(ProcessCoord);
  e.chip_id_from_coord = Untyped(ChipFromCoord);
  e.logical_device_id_from_chip_coord_and_idx = Untyped(DeviceFromCoord);
  e.chip_coord_and_idx_for_logi_device = Untyped(CoordOfDevice);
  e.chips_per_process_bounds = Untyped(ProcessChipBounds);
  e.chip_bounds = Untyped(ChipBounds);
  e.process_bounds = Untyped(ProcessBounds);
  return &extension.base;
}

void InstallTopology(PJRT_Api* api) {
  SetFunction(api, Slot::Client_TopologyDescription, OfClient);
  SetFunction(api, Slot::TopologyDescription_Create, Create);
  SetFunction(api, Slot::TopologyDescription_Destroy, Destroy);
  SetFunction(api, Slot::TopologyDescription_PlatformName, PlatformName);
  SetFunction(api, Slot::TopologyDescription_PlatformVersion, PlatformVersion);
  SetFunction(api, Slot::TopologyDescription_GetDeviceDescriptions, Descriptions);
  SetFunction(api, Slot::TopologyDescription_Attributes, Attributes);
  SetFunction(api, Slot::TopologyDescription_Serialize, Serialize);
  SetFunction(api, Slot::TopologyDescription_Deserialize, Deserialize);
  SetFunction(api, Slot::TopologyDescription_Fingerprint, Fingerprint);
  SetFunction(api, Slot::TopologyDescription_GetMemorySpaceKindIds,
              Forward<Slot::TopologyDescription_GetMemorySpaceKindIds, PJRT_TopologyDescription_GetMemorySpaceKindIds_Args>);
  SetFunction(api, Slot::TopologyDescription_MakeCanonicalShapeForMemorySpace,
              Forward<Slot::TopologyDescription_MakeCanonicalShapeForMemorySpace,
                      PJRT_TopologyDescription_MakeCanonicalShapeForMemorySpace_Args>);
  SetFunction(api, Slot::Compile, CompileWithoutClient);
}

}  // namespace tt
