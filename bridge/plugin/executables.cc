// Loaded programs: executions count their memory, and what is serialized
// carries a stamp, so that another plugin's or version's is refused by name.
#include "executables.h"

#include <cstring>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "collectives_order.h"
#include "compile_options.h"
#include "config.h"
#include "errors.h"
#include "memory.h"
#include "mesh.h"

namespace tt {
namespace {

using Info = std::shared_ptr<const ProgramInfo>;

class Programs {
 public:
  void Put(const void* key, Info info) {
    std::unique_lock lock(mutex_);
    programs_[key] = std::move(info);
  }
  Info Get(const void* key) {
    std::shared_lock lock(mutex_);
    auto found = programs_.find(key);
    return found == programs_.end() ? nullptr : found->second;
  }
  // Without a share in it, for as long as the caller has the executable.
  const ProgramInfo* Borrow(const void* key) {
    std::shared_lock lock(mutex_);
    auto found = programs_.find(key);
    return found == programs_.end() ? nullptr : found->second.get();
  }
  void Erase(const void* key) {
    std::unique_lock lock(mutex_);
    programs_.erase(key);
  }

 private:
  std::shared_mutex mutex_;
  std::unordered_map<const void*, Info> programs_;
};

// By PJRT_LoadedExecutable*, and by the PJRT_Executable* that callers get of it in order to serialize.
Programs& Loaded() {
  static auto* programs = new Programs;
  return *programs;
}

Programs& Plain() {
  static auto* programs = new Programs;
  return *programs;
}

PJRT_Error* OutputSizes(void* executable, ProgramInfo* info) {
  auto types = MakeArgs<PJRT_Executable_OutputElementTypes_Args>();
  types.executable = executable;
  if (PJRT_Error* error = CallInner(Slot::Executable_OutputElementTypes, &types)) return error;
  auto dims = MakeArgs<PJRT_Executable_OutputDimensions_Args>();
  dims.executable = executable;
  if (PJRT_Error* error = CallInner(Slot::Executable_OutputDimensions, &dims)) return error;
  const auto* next = static_cast<const int64_t*>(dims.dims);
  for (size_t i = 0; i < types.num_output_types; ++i) {
    size_t rank = static_cast<const size_t*>(dims.dim_sizes)[i];
    info->output_bytes.push_back(SizeInBytes(static_cast<const uint32_t*>(types.output_types)[i], next, rank));
    info->total_output_bytes += info->output_bytes.back();
    next += rank;
  }
  return nullptr;
}

int64_t TemporaryBytes(void* executable) {
  auto stats = MakeArgs<PJRT_Executable_GetCompiledMemoryStats_Args>();
  stats.executable = executable;
  if (PJRT_Error* error = CallInner(Slot::Executable_GetCompiledMemoryStats, &stats)) {
    TakeMessage(error);  // some plugins do not know: then only buffers count
    return 0;
  }
  return stats.temp_size_in_bytes;
}

std::vector<int> ChipsOf(void* loaded) {
  auto args = MakeArgs<PJRT_LoadedExecutable_AddressableDevices_Args>();
  args.executable = loaded;
  std::vector<int> chips;
  if (PJRT_Error* error = CallInner(Slot::LoadedExecutable_AddressableDevices, &args)) {
    TakeMessage(error);
    return chips;
  }
  for (size_t i = 0; i < args.num_addressable_devices; ++i) {
    chips.push_back(ChipOfDevice(static_cast<void**>(args.addressable_devices)[i]));
  }
  return chips;
}

// ---- Execution

int ChipOfRun(const ProgramInfo& info, const PJRT_LoadedExecutable_Execute_Args& args, size_t device) {
  if (args.execute_device != nullptr) return ChipOfDevice(args.execute_device);
  return device < info.chips.size() ? info.chips[device] : -1;
}

bool MayDonate(const PJRT_ExecuteOptions* options, int parameter) {
  if (options == nullptr) return true;
  const auto* kept = static_cast<const int64_t*>(options->non_donatable_input_indices);
  for (size_t i = 0; i < options->num_non_donatable_input_indices; ++i) {
    if (kept[i] == parameter) return false;
  }
  return true;
}

// The arguments that this execution may overwrite; their memory becomes the results'.
std::vector<void*> DonatedArguments(const ProgramInfo& info, const PJRT_LoadedExecutable_Execute_Args& args,
                                    size_t device) {
  std::vector<void*> donated;
  auto* const* arguments = static_cast<void***>(args.argument_lists)[device];
  for (int parameter : info.donated) {
    if (parameter < static_cast<int>(args.num_args) &&
        MayDonate(static_cast<const PJRT_ExecuteOptions*>(args.options), parameter)) {
      donated.push_back(arguments[parameter]);
    }
  }
  return donated;
}

bool IsDeleted(void* buffer) {
  auto args = MakeArgs<PJRT_Buffer_IsDeleted_Args>();
  args.buffer = buffer;
  if (PJRT_Error* error = CallInner(Slot::Buffer_IsDeleted, &args)) {
    TakeMessage(error);
    return false;
  }
  return args.is_deleted;
}

// What one device's part of an execution has taken, to be given back if it fails.
struct Taken {
  int chip;
  int64_t bytes;
  std::vector<void*> donated;
};

PJRT_Error* Take(const ProgramInfo& info, const PJRT_LoadedExecutable_Execute_Args& args, std::vector<Taken>* taken) {
  for (size_t device = 0; device < args.num_devices; ++device) {
    Taken one{ChipOfRun(info, args, device), info.total_output_bytes, DonatedArguments(info, args, device)};
    if (one.chip < 0) continue;
    // Results take the place of donated arguments, so that those count once.
    int64_t donated = 0;
    for (void* buffer : one.donated) donated += BytesOfBuffer(buffer);
    int64_t reused = std::min(donated, one.bytes);
    if (PJRT_Error* error = MemoryOf(one.chip).Reserve(one.bytes, info.temporary_bytes - reused)) return error;
    taken->push_back(std::move(one));
  }
  return nullptr;
}

PJRT_Error* Execute(PJRT_LoadedExecutable_Execute_Args* args) {
  const ProgramInfo* info = Loaded().Borrow(args->executable);
  if (info == nullptr) return InvalidArgument("the program was not compiled or loaded by this plugin");
  std::vector<Taken> taken;
  PJRT_Error* error = Take(*info, *args, &taken);
  if (error == nullptr) {
    error = info->collectives > 0 ? ExecuteInOrder(args) : CallInner(Slot::LoadedExecutable_Execute, args);
  }
  if (error != nullptr) {
    for (const Taken& one : taken) MemoryOf(one.chip).Release(one.bytes);
    return error;
  }
  for (size_t device = 0; device < taken.size(); ++device) {
    for (void* buffer : taken[device].donated) {
      if (IsDeleted(buffer)) ReleaseBuffer(buffer);
    }
    void* const* outputs = static_cast<void***>(args->output_lists)[device];
    for (size_t i = 0; i < info->output_bytes.size(); ++i) {
      AttachBuffer(outputs[i], taken[device].chip, info->output_bytes[i]);
    }
  }
  return nullptr;
}

// ---- Life and serialization

PJRT_Error* Destroy(PJRT_LoadedExecutable_Destroy_Args* args) {
  Loaded().Erase(args->executable);
  return CallInner(Slot::LoadedExecutable_Destroy, args);
}

PJRT_Error* GetExecutable(PJRT_LoadedExecutable_GetExecutable_Args* args) {
  PJRT_Error* error = CallInner(Slot::LoadedExecutable_GetExecutable, args);
  if (error == nullptr) Plain().Put(args->executable, Loaded().Get(args->loaded_executable));
  return error;
}

PJRT_Error* DestroyExecutable(PJRT_Executable_Destroy_Args* args) {
  Plain().Erase(args->executable);
  return CallInner(Slot::Executable_Destroy, args);
}

// stamp: "TTPU", then the fingerprint and the donated parameters, each with its count before it, and the
// number of collectives.
constexpr char kMagic[4] = {'T', 'T', 'P', 'U'};

std::string Stamp(const ProgramInfo& info) {
  std::string stamp(kMagic, sizeof kMagic);
  auto put = [&](uint32_t number) { stamp.append(reinterpret_cast<const char*>(&number), sizeof number); };
  put(GetConfig().fingerprint.size());
  stamp += GetConfig().fingerprint;
  put(info.donated.size());
  for (int parameter : info.donated) put(parameter);
  put(info.collectives);
  return stamp;
}

PJRT_Error* Foreign() {
  return MakeError(PJRT_Error_Code_FAILED_PRECONDITION,
                   "the serialized executable was made by another plugin, version or processor; it is compiled anew");
}

// Takes the stamp off `bytes`; an error where it is not the one that this plugin puts on.
PJRT_Error* TakeStamp(std::string_view* bytes, std::vector<int>* donated, int* collectives) {
  auto take = [&](void* out, size_t size) {
    if (bytes->size() < size) return false;
    memcpy(out, bytes->data(), size);
    bytes->remove_prefix(size);
    return true;
  };
  const std::string& ours = GetConfig().fingerprint;
  char magic[sizeof kMagic];
  uint32_t size = 0, count = 0;
  if (!take(magic, sizeof magic) || memcmp(magic, kMagic, sizeof magic) != 0) return Foreign();
  if (!take(&size, sizeof size) || size != ours.size() || bytes->substr(0, size) != ours) return Foreign();
  bytes->remove_prefix(size);
  if (!take(&count, sizeof count) || count > bytes->size() / sizeof(uint32_t)) return Foreign();
  for (uint32_t i = 0; i < count; ++i) {
    uint32_t parameter = 0;
    take(&parameter, sizeof parameter);
    donated->push_back(static_cast<int>(parameter));
  }
  return take(collectives, sizeof *collectives) ? nullptr : Foreign();
}

// What the inner plugin makes of a program that it has compiled itself.
PJRT_Error* AppendSerialized(PJRT_Executable_Serialize_Args args, std::string* bytes) {
  if (PJRT_Error* error = CallInner(Slot::Executable_Serialize, &args)) return error;
  bytes->append(View(args.serialized_bytes, args.serialized_bytes_size));
  if (args.serialized_executable_deleter != nullptr) {
    reinterpret_cast<void (*)(void*)>(args.serialized_executable_deleter)(args.serialized_executable);
  }
  return nullptr;
}

PJRT_Error* Serialize(PJRT_Executable_Serialize_Args* args) {
  Info info = Plain().Get(args->executable);
  if (info == nullptr) return InvalidArgument("the program was not compiled or loaded by this plugin");
  auto* stamped = new std::string(Stamp(*info));
  if (!info->serialized.empty()) {
    stamped->append(info->serialized);
  } else if (PJRT_Error* error = AppendSerialized(*args, stamped)) {
    delete stamped;
    return error;
  }
  args->serialized_bytes = stamped->data();
  args->serialized_bytes_size = stamped->size();
  args->serialized_executable = stamped;
  args->serialized_executable_deleter =
      reinterpret_cast<void*>(+[](void* owned) { delete static_cast<std::string*>(owned); });
  return nullptr;
}

PJRT_Error* DeserializeAndLoad(PJRT_Executable_DeserializeAndLoad_Args* args) {
  std::string_view bytes = View(args->serialized_executable, args->serialized_executable_size);
  std::vector<int> donated;
  int collectives = 0;
  if (PJRT_Error* error = TakeStamp(&bytes, &donated, &collectives)) return error;
  auto inner = *args;
  std::string options =
      FilterCompileOptions(View(args->overridden_serialized_compile_options,
                                args->overridden_serialized_compile_options_size));
  if (GetWorld().spread() && GetConfig().emulated() && args->overridden_serialized_compile_options != nullptr) {
    Placement placement;
    if (PJRT_Error* error = PlaceOnOwnDevice(&options, &placement)) return error;
  }
  inner.serialized_executable = const_cast<char*>(bytes.data());
  inner.serialized_executable_size = bytes.size();
  if (args->overridden_serialized_compile_options != nullptr) {
    inner.overridden_serialized_compile_options = options.data();
    inner.overridden_serialized_compile_options_size = options.size();
  }
  if (PJRT_Error* error = CallInner(Slot::Executable_DeserializeAndLoad, &inner)) return error;
  args->loaded_executable = inner.loaded_executable;
  return RegisterProgram(inner.loaded_executable, std::move(donated), collectives, std::string(bytes));
}

}  // namespace

PJRT_Error* RegisterProgram(void* loaded, std::vector<int> donated, int collectives, std::string serialized) {
  auto get = MakeArgs<PJRT_LoadedExecutable_GetExecutable_Args>();
  get.loaded_executable = loaded;
  if (PJRT_Error* error = CallInner(Slot::LoadedExecutable_GetExecutable, &get)) return error;
  auto info = std::make_shared<ProgramInfo>();
  info->donated = std::move(donated);
  info->collectives = collectives;
  info->serialized = std::move(serialized);
  info->chips = ChipsOf(loaded);
  PJRT_Error* error = OutputSizes(get.executable, info.get());
  info->temporary_bytes = TemporaryBytes(get.executable);
  auto destroy = MakeArgs<PJRT_Executable_Destroy_Args>();
  destroy.executable = get.executable;
  TakeMessage(CallInner(Slot::Executable_Destroy, &destroy));
  if (error == nullptr) Loaded().Put(loaded, std::move(info));
  return error;
}

void InstallExecutables(PJRT_Api* api) {
  SetFunction(api, Slot::LoadedExecutable_Execute, Execute);
  SetFunction(api, Slot::LoadedExecutable_Destroy, Destroy);
  SetFunction(api, Slot::LoadedExecutable_GetExecutable, GetExecutable);
  SetFunction(api, Slot::Executable_Destroy, DestroyExecutable);
  SetFunction(api, Slot::Executable_Serialize, Serialize);
  SetFunction(api, Slot::Executable_DeserializeAndLoad, DeserializeAndLoad);
}

}  // namespace tt
