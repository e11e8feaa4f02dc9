// The plugin's configuration. All choosing is done in Python (bridge/backend.py),
// so that there is one place that reads the user's environment variables.
#include "config.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include <cstdio>
#include <sstream>

namespace tt {
namespace {

struct Loaded {
  Config config;
  std::string error;
};

// The interpreter that this process runs, else the one on PATH.
std::string Python() {
  if (const char* named = getenv("TT_TPU_PYTHON")) return named;
  auto program = reinterpret_cast<wchar_t* (*)()>(dlsym(RTLD_DEFAULT, "Py_GetProgramFullPath"));
  wchar_t* wide = program != nullptr ? program() : nullptr;
  if (wide == nullptr) return "python3";
  char path[4096];
  size_t size = wcstombs(path, wide, sizeof path);
  return size == static_cast<size_t>(-1) || size == 0 ? "python3" : std::string(path, size);
}

std::string Quote(const std::string& text) {
  std::string quoted = "'";
  for (char c : text) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

// Runs `python -m bridge.backend`, which prints the configuration or one line on what is wrong.
bool Ask(std::string* text) {
  // -P: a folder named bridge in the working directory must not shadow ours.
  std::string command = "LIBTT_TPU_COMPAT=0 " + Quote(Python()) + " -P -m bridge.backend 2>&1";
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) {
    *text = "cannot run " + command;
    return false;
  }
  char chunk[4096];
  size_t size;
  while ((size = fread(chunk, 1, sizeof chunk, pipe)) > 0) text->append(chunk, size);
  int status = pclose(pipe);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

std::vector<int64_t> Numbers(const std::string& text) {
  std::vector<int64_t> numbers;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, '.');) numbers.push_back(atoll(part.c_str()));
  return numbers;
}

Loaded Load() {
  Loaded loaded;
  Config& config = loaded.config;
  if (const char* given = getenv("TT_TPU_PLUGIN_CONFIG")) {
    config.text = given;
  } else if (!Ask(&config.text)) {
    loaded.error = config.text;
    return loaded;
  }
  std::stringstream stream(config.text);
  for (std::string line; std::getline(stream, line);) {
    size_t equals = line.find('=');
    if (equals == std::string::npos) continue;
    std::string key = line.substr(0, equals), value = line.substr(equals + 1);
    if (key == "backend") config.backend = value;
    else if (key == "inner_library") config.inner_library = value;
    else if (key == "platform_version") config.platform_version = value;
    else if (key == "device_kind") config.device_kind = value;
    else if (key == "fingerprint") config.fingerprint = value;
    else if (key == "log_level") config.log_level = value;
    else if (key == "chips") config.chips = atoll(value.c_str());
    else if (key == "memory_bytes") config.memory_bytes = atoll(value.c_str());
    else if (key == "collective_timeout") config.collective_timeout = atoll(value.c_str());
    else if (key == "stablehlo_version") config.stablehlo_version = Numbers(value);
    else if (key == "python") config.python = value;
  }
  if (config.python.empty()) config.python = Python();
  if (config.inner_library.empty()) loaded.error = "TT_TPU_PLUGIN_CONFIG names no inner_library; unset it";
  return loaded;
}

const Loaded& Once() {
  static const Loaded* loaded = new Loaded(Load());
  return *loaded;
}

Level Threshold() {
  const std::string& level = GetConfig().log_level;
  if (level == "debug") return Level::kDebug;
  if (level == "warning") return Level::kWarning;
  if (level == "error") return Level::kError;
  return Level::kInfo;
}

}  // namespace

const Config& GetConfig() { return Once().config; }
const std::string& ConfigError() { return Once().error; }

void Log(Level level, const std::string& message) {
  static const Level threshold = Threshold();
  if (level >= threshold) fprintf(stderr, "tt-tpu: %s\n", message.c_str());
}

}  // namespace tt
