// Reads protobuf's wire format just far enough to drop entries of one map
// field, so that no protobuf library is linked into a process that has others.
#include "compile_options.h"

#include <cstdint>
#include <optional>

#include "config.h"

namespace tt {
namespace {

constexpr int kEnvOptionOverrides = 7;  // CompileOptionsProto.env_option_overrides
constexpr int kMapKey = 1;

struct Field {
  int number;
  std::string_view whole;  // with its tag
  std::string_view body;   // of a length-delimited field
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
  Field field{static_cast<int>(*tag >> 3), {}, {}};
  uint64_t size = 0;
  switch (*tag & 7) {
    case 0:
      if (!TakeVarint(rest)) return std::nullopt;
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

}  // namespace

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
