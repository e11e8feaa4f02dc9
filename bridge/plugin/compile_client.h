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
};

// Sends a program to the service, which is started at the first call, and waits
// for the answer. Never enters Python. Thread-safe; calls run in parallel.
PJRT_Error* CompileRemotely(std::string_view program, std::string_view format, std::string_view options,
                            CompiledProgram* result);

}  // namespace tt
