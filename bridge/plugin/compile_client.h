// The plugin's side of the compile service (bridge/compiler/service.py).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "pjrt.h"

namespace tt {

struct CompiledProgram {
  bool serialized = false;   // an executable of the inner plugin; else a program for it to compile
  std::string bytes;
  std::vector<int> donated;  // parameters that the program may overwrite
  int collectives = 0;       // how many it has
};

// Sends a program to the service, which is started at the first call, and waits
// for the answer. Never enters Python. Thread-safe; calls run in parallel. `placement` is a
// Placement's text in a mesh of processes, and empty elsewhere, where collectives are refused.
PJRT_Error* CompileRemotely(std::string_view program, std::string_view format, std::string_view options,
                            std::string_view placement, CompiledProgram* result);

}  // namespace tt
