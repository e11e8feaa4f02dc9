// What the plugin was told: the resolved backend, as bridge/backend.py writes it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tt {

struct Config {
  std::string backend;            // "emulated" or "libtt"
  std::string inner_library;      // the inner PJRT plugin
  std::string platform_version;   // what Client_PlatformVersion answers
  std::string device_kind;        // "TPU v5 lite"
  std::string fingerprint;        // stamps serialized executables
  std::string log_level;          // debug, info, warning, error
  std::string python;             // the interpreter that runs the compile service
  int64_t chips = 1;              // devices that this process drives
  int64_t memory_bytes = 0;       // of one chip
  int64_t collective_timeout = 120;  // seconds that a rank waits for the others
  std::vector<int64_t> stablehlo_version;
  std::string text;               // all of the above as it was read

  bool emulated() const { return backend == "emulated"; }
};

// Read once: from TT_TPU_PLUGIN_CONFIG, or by asking `python -m bridge.backend`
// where nothing has set it. On failure `error` is filled and the rest is empty.
const Config& GetConfig();
const std::string& ConfigError();

enum class Level { kDebug, kInfo, kWarning, kError };
void Log(Level level, const std::string& message);

}  // namespace tt
