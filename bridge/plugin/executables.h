// What is known of a loaded program beside what the inner plugin knows.
#pragma once

#include <string>
#include <vector>

#include "pjrt.h"

namespace tt {

struct ProgramInfo {
  std::vector<int> donated;           // parameters that an execution may overwrite
  std::vector<int64_t> output_bytes;  // of each result
  int64_t total_output_bytes = 0;
  int64_t temporary_bytes = 0;        // needed while it runs
  int collectives = 0;                // with other processes
  std::vector<int> chips;             // where it runs, in the order of an execution's argument lists
  // The inner plugin's serialized form that it was loaded from, or "" where it was compiled in this
  // process. Kept, since XLA's CPU plugin loses the code when it serializes what it deserialized.
  std::string serialized;
};

// Learns what there is to know of a program that the inner plugin has just loaded.
PJRT_Error* RegisterProgram(void* loaded, std::vector<int> donated, int collectives, std::string serialized);

}  // namespace tt
