// CompileOptionsProto, as far as the plugin must change it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "pjrt.h"

namespace tt {

// The options without those that the inner plugin would refuse: a TPU's own
// (xla_tpu_…) always, libtt's (enable_trace, …) on the emulated chip, where
// they mean nothing. Dropped ones are logged at debug level.
std::string FilterCompileOptions(std::string_view serialized);

// How many devices the options (serialized) are for: replicas times partitions.
int64_t DeviceCount(std::string_view options);

// Which devices a program is for.
struct Placement {
  int64_t replicas = 1, partitions = 1;
  std::vector<int64_t> devices;  // ids, by replica or by partition, whichever there are more of

  std::string Text() const;  // "1 4 0 1 2 3", for the compile service
};

// For a mesh whose processes have one chip each: takes the program's placement out of the options, and
// leaves the one device on which a process runs it, the same in all of them.
PJRT_Error* PlaceOnOwnDevice(std::string* options, Placement* placement);

}  // namespace tt
