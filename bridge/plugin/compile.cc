// Compile: the program goes to the compile service, and what comes back is
// loaded into the inner plugin. A program never reaches the inner plugin as it
// came: what no pass handled is an error there, not a wrong number here.
#include <atomic>

#include "compile_client.h"
#include "compile_options.h"
#include "config.h"
#include "errors.h"
#include "executables.h"
#include "mesh.h"
#include "pjrt.h"

namespace tt {
namespace {

std::atomic<unsigned long> compiled_programs{0};

PJRT_Error* Load(void* client, CompiledProgram* compiled, void** loaded) {
  auto args = MakeArgs<PJRT_Executable_DeserializeAndLoad_Args>();
  args.client = client;
  args.serialized_executable = compiled->bytes.data();
  args.serialized_executable_size = compiled->bytes.size();
  PJRT_Error* error = CallInner(Slot::Executable_DeserializeAndLoad, &args);
  *loaded = args.loaded_executable;
  return error;
}

PJRT_Error* CompileHere(void* client, CompiledProgram* compiled, std::string* options, void** loaded) {
  static const std::string_view format = "mlir";
  auto program = MakeArgs<PJRT_Program>();
  program.code = compiled->bytes.data();
  program.code_size = compiled->bytes.size();
  program.format = const_cast<char*>(format.data());
  program.format_size = format.size();
  auto args = MakeArgs<PJRT_Client_Compile_Args>();
  args.client = client;
  args.program = &program;
  args.compile_options = options->data();
  args.compile_options_size = options->size();
  PJRT_Error* error = CallInner(Slot::Client_Compile, &args);
  *loaded = args.executable;
  return error;
}

PJRT_Error* Compile(PJRT_Client_Compile_Args* args) {
  const auto& program = *static_cast<const PJRT_Program*>(args->program);
  std::string options = FilterCompileOptions(View(args->compile_options, args->compile_options_size));
  std::string placed;
  if (GetWorld().spread()) {
    std::string own_options = options;
    Placement placement;
    if (PJRT_Error* error = PlaceOnOwnDevice(&own_options, &placement)) return error;
    placed = placement.Text();
    if (GetConfig().emulated()) options = std::move(own_options);
  } else if (int64_t devices = DeviceCount(options); devices > 1) {
    placed = "here " + std::to_string(devices);
  }
  CompiledProgram compiled;
  if (PJRT_Error* error = CompileRemotely(View(program.code, program.code_size),
                                          View(program.format, program.format_size), options, placed, &compiled)) {
    return error;
  }
  void* loaded = nullptr;
  PJRT_Error* error = compiled.serialized ? Load(args->client, &compiled, &loaded)
                                          : CompileHere(args->client, &compiled, &options, &loaded);
  if (error != nullptr) return error;
  ++compiled_programs;
  args->executable = loaded;
  return RegisterProgram(loaded, std::move(compiled.donated), compiled.collectives,
                         compiled.serialized ? std::move(compiled.bytes) : "");
}

}  // namespace

void InstallCompile(PJRT_Api* api) { SetFunction(api, Slot::Client_Compile, Compile); }

}  // namespace tt

// How many programs this process has compiled: a server in steady state compiles none.
extern "C" __attribute__((visibility("default"))) unsigned long TtTpuCompiledProgramCount() {
  return tt::compiled_programs;
}
