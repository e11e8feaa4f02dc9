// What every file of the plugin shares: the C API's structures, the inner
// plugin's table, and the way a function of ours takes the place of one of its.
#pragma once

#include <string>
#include <string_view>

#include "pjrt_c_api.h"  // made by generate_pjrt_header.py

namespace tt {

using Function = PJRT_Error* (*)(void*);

// The inner plugin's API, or null while `InnerError` says why there is none.
const PJRT_Api* Inner();
const std::string& InnerError();

inline Function* Table(PJRT_Api* api) {
  return reinterpret_cast<Function*>(reinterpret_cast<char*>(api) + kTableOffset);
}

// Calls a function of the inner plugin.
template <class Args>
PJRT_Error* CallInner(Slot slot, Args* args) {
  auto* table = Table(const_cast<PJRT_Api*>(Inner()));
  return table[static_cast<int>(slot)](args);
}

// A zeroed argument structure with its size filled in.
template <class Args>
Args MakeArgs() {
  Args args{};
  args.struct_size = sizeof(Args);
  return args;
}

template <class Args>
void SetFunction(PJRT_Api* api, Slot slot, PJRT_Error* (*function)(Args*)) {
  Table(api)[static_cast<int>(slot)] = reinterpret_cast<Function>(function);
}

inline std::string_view View(const void* data, size_t size) {
  return {static_cast<const char*>(data), size};
}

// Each file puts its functions into the table that GetPjrtApi hands out.
void InstallErrors(PJRT_Api*);
void InstallClient(PJRT_Api*);
void InstallDevices(PJRT_Api*);
void InstallTopology(PJRT_Api*);
void InstallBuffers(PJRT_Api*);
void InstallCompile(PJRT_Api*);
void InstallExecutables(PJRT_Api*);

}  // namespace tt
