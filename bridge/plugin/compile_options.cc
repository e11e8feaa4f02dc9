// Reads and writes protobuf's wire format just far enough to change a few fields,
// so that no protobuf library is linked into a process that has others.
#include "compile_options.h"

#include <algorithm>
#include <cstdint>
#include <optional>

#include "config.h"
#include "errors.h"
#include "mesh.h"

namespace tt {
namespace {

// CompileOptionsProto
constexpr int kExecutableBuildOptions = 3;
constexpr int kEnvOptionOverrides = 7;
// ExecutableBuildOptionsProto
constexpr int kNumReplicas = 4;
constexpr int kNumPartitions = 5;
constexpr int kDeviceAssignment = 9;
// DeviceAssignmentProto, and the ComputationDevice in it
constexpr int kReplicaCount = 1;
constexpr int kComputationCount = 2;
constexpr int kComputationDevices = 3;
constexpr int kReplicaDeviceIds = 1;
constexpr int kMapKey = 1;

struct Field {
  int number;
  std::string_view whole;  // with its tag
  std::string_view body;   // of a length-delimited field
  uint64_t number_value;   // of a varint
};

std::optional<uint64_t> TakeVarint(std::string_view* rest) {
  uint64_t value = 0;
  for (int shift = 0; shift < 64 && !rest->empty(); shift += 7) {
    auto byte = static_cast<uint8_t>(rest->front());
    rest->remove_prefix(1);
    value |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if (byte < 0x80) return value;
  }
  return std::nullopt;
}

// The next field, which is taken off `rest`; nothing where the bytes are no message.
std::optional<Field> TakeField(std::string_view* rest) {
  std::string_view start = *rest;
  auto tag = TakeVarint(rest);
  if (!tag) return std::nullopt;
  Field field{static_cast<int>(*tag >> 3), {}, {}, 0};
  uint64_t size = 0;
  switch (*tag & 7) {
    case 0:
      if (auto value = TakeVarint(rest)) field.number_value = *value;
      else return std::nullopt;
      break;
    case 1: size = 8; break;
    case 2:
      if (auto length = TakeVarint(rest)) size = *length;
      else return std::nullopt;
      break;
    case 5: size = 4; break;
    default: return std::nullopt;
  }
  if (size > rest->size()) return std::nullopt;
  field.body = rest->substr(0, size);
  rest->remove_prefix(size);
  field.whole = start.substr(0, start.size() - rest->size());
  return field;
}

std::string_view KeyOf(std::string_view entry) {
  while (auto field = TakeField(&entry)) {
    if (field->number == kMapKey) return field->body;
  }
  return {};
}

bool StartsWith(std::string_view text, std::string_view start) { return text.substr(0, start.size()) == start; }

bool Keep(std::string_view key) {
  if (!GetConfig().emulated()) return !StartsWith(key, "xla_");
  for (const char* understood : {"xla_cpu_", "xla_backend_optimization_level", "xla_llvm_", "xla_dump_"}) {
    if (StartsWith(key, understood)) return true;
  }
  return false;
}

void PutVarint(uint64_t value, std::string* out) {
  for (; value >= 0x80; value >>= 7) out->push_back(static_cast<char>(value | 0x80));
  out->push_back(static_cast<char>(value));
}

void PutNumber(int field, uint64_t value, std::string* out) {
  PutVarint(field << 3, out);
  PutVarint(value, out);
}

void PutMessage(int field, std::string_view body, std::string* out) {
  PutVarint(field << 3 | 2, out);
  PutVarint(body.size(), out);
  out->append(body);
}

// One replica of one partition, on the inner client's first device.
std::string FirstDevice() {
  std::string devices, assignment;
  PutNumber(kReplicaDeviceIds, 0, &devices);
  PutNumber(kReplicaCount, 1, &assignment);
  PutNumber(kComputationCount, 1, &assignment);
  PutMessage(kComputationDevices, devices, &assignment);
  return assignment;
}

// The ids of an assignment, partition by partition.
void ReadAssignment(std::string_view assignment, std::vector<int64_t>* devices) {
  while (auto field = TakeField(&assignment)) {
    if (field->number != kComputationDevices) continue;
    std::string_view partition = field->body;
    while (auto ids = TakeField(&partition)) {
      if (ids->number != kReplicaDeviceIds) continue;
      if (ids->body.empty()) devices->push_back(ids->number_value);  // each by itself, or packed
      for (std::string_view packed = ids->body; !packed.empty();) {
        auto id = TakeVarint(&packed);
        if (!id) return;
        devices->push_back(*id);
      }
    }
  }
}

// Replaces what says where a program runs; the rest stays.
std::string Relocate(std::string_view build_options, Placement* placement) {
  std::string kept;
  while (auto field = TakeField(&build_options)) {
    switch (field->number) {
      case kNumReplicas: placement->replicas = field->number_value; break;
      case kNumPartitions: placement->partitions = field->number_value; break;
      case kDeviceAssignment: ReadAssignment(field->body, &placement->devices); break;
      default: kept += field->whole;
    }
  }
  PutNumber(kNumReplicas, 1, &kept);
  PutNumber(kNumPartitions, 1, &kept);
  PutMessage(kDeviceAssignment, FirstDevice(), &kept);
  return kept;
}

PJRT_Error* CheckPlacement(Placement* placement) {
  const World& world = GetWorld();
  auto& [replicas, partitions, devices] = *placement;
  const int64_t wanted = std::max<int64_t>(replicas, 1) * std::max<int64_t>(partitions, 1);
  if (wanted == 1) {
    if (devices.empty()) devices = {world.rank};
    if (devices[0] == world.rank) return nullptr;
    return InvalidArgument("a program for device " + std::to_string(devices[0]) + " was handed to rank " +
                           std::to_string(world.rank) + ", which drives device " + std::to_string(world.rank));
  }
  if (wanted != world.size || (replicas > 1 && partitions > 1)) {
    return Unimplemented("a program of " + std::to_string(replicas) + " replica(s) and " + std::to_string(partitions) +
                         " partition(s) in a mesh of " + std::to_string(world.size) +
                         " processes: it must have one replica, or else one partition, for each");
  }
  if (devices.empty()) {
    for (int64_t id = 0; id < wanted; ++id) devices.push_back(id);
  }
  std::vector<int64_t> sorted = devices;
  std::sort(sorted.begin(), sorted.end());
  for (int64_t id = 0; id < wanted; ++id) {
    if (static_cast<int64_t>(sorted.size()) != wanted || sorted[id] != id) {
      return InvalidArgument("the program's device assignment does not name each of the " + std::to_string(wanted) +
                             " devices once");
    }
  }
  return nullptr;
}

}  // namespace

std::string Placement::Text() const {
  std::string text = std::to_string(replicas) + " " + std::to_string(partitions);
  for (int64_t device : devices) text += " " + std::to_string(device);
  return text;
}

PJRT_Error* PlaceOnOwnDevice(std::string* options, Placement* placement) {
  std::string placed;
  bool found = false;
  std::string_view rest = *options;
  while (!rest.empty()) {
    auto field = TakeField(&rest);
    if (!field) return InvalidArgument("the compile options are not a CompileOptionsProto");
    if (field->number != kExecutableBuildOptions) {
      placed += field->whole;
    } else {
      found = true;
      PutMessage(kExecutableBuildOptions, Relocate(field->body, placement), &placed);
    }
  }
  if (!found) PutMessage(kExecutableBuildOptions, Relocate({}, placement), &placed);
  *options = std::move(placed);
  return CheckPlacement(placement);
}

int64_t DeviceCount(std::string_view options) {
  int64_t replicas = 1, partitions = 1;
  while (auto field = TakeField(&options)) {
    if (field->number != kExecutableBuildOptions) continue;
    std::string_view build_options = field->body;
    while (auto inner = TakeField(&build_options)) {
      if (inner->number == kNumReplicas) replicas = inner->number_value;
      if (inner->number == kNumPartitions) partitions = inner->number_value;
    }
  }
  return std::max<int64_t>(replicas, 1) * std::max<int64_t>(partitions, 1);
}

std::string FilterCompileOptions(std::string_view serialized) {
  std::string kept;
  std::string_view rest = serialized;
  while (!rest.empty()) {
    auto field = TakeField(&rest);
    if (!field) return std::string(serialized);  // the inner plugin says best what is wrong with it
    if (field->number == kEnvOptionOverrides && !Keep(KeyOf(field->body))) {
      Log(Level::kDebug, "compile option " + std::string(KeyOf(field->body)) + " has no meaning here and is dropped");
      continue;
    }
    kept += field->whole;
  }
  return kept;
}

}  // namespace tt
