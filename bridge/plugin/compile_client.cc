// Starts the compile service as a process of its own and talks to it over a
// private Unix socket. In this process no Python may run for a compilation:
// the caller's threads wait for it, some of them with the GIL held.
#include "compile_client.h"

#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <fstream>
#include <memory>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>

#include "config.h"
#include "errors.h"
#include "mesh.h"
#include "sockets.h"

namespace tt {
namespace {

constexpr uint32_t kMagic = 0x31545454;
constexpr size_t kLongestFolder = 90;  // a socket's path in it must fit 107 bytes
enum Kind : uint32_t { kHello = 0, kCompile = 1, kProgram = 3, kFailed = 4 };  // kCompile answers kCompile

class Socket : public Descriptor {
 public:
  using Descriptor::Descriptor;

  static Socket Connect(const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.size() >= sizeof address.sun_path) return Socket();
    memcpy(address.sun_path, path.data(), path.size());
    Socket socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (socket.valid() && connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) {
      return socket;
    }
    return Socket();
  }

  bool Send(uint32_t kind, const std::vector<std::string_view>& blobs) const {
    uint32_t head[3] = {kMagic, kind, static_cast<uint32_t>(blobs.size())};
    bool sent = SendAll(get(), head, sizeof head);
    for (auto blob : blobs) {
      uint64_t size = blob.size();
      sent = sent && SendAll(get(), &size, sizeof size);
    }
    for (auto blob : blobs) sent = sent && SendAll(get(), blob.data(), blob.size());
    return sent;
  }

  bool Receive(uint32_t* kind, std::vector<std::string>* blobs) const {
    uint32_t head[3];
    if (!Read(head, sizeof head) || head[0] != kMagic || head[2] > 16) return false;
    *kind = head[1];
    std::vector<uint64_t> sizes(head[2]);
    if (!Read(sizes.data(), sizes.size() * sizeof(uint64_t))) return false;
    for (uint64_t size : sizes) {
      if (size > (uint64_t{1} << 36)) return false;
      blobs->emplace_back(size, '\0');
      if (!Read(blobs->back().data(), size)) return false;
    }
    return true;
  }

 private:
  // However long the compiler takes.
  bool Read(void* data, size_t size) const { return ReceiveAll(get(), data, size, Clock::time_point::max()); }
};

// A process that we started, waited for by a thread: it may end at any time and leaves no zombie.
class Child {
 public:
  explicit Child(pid_t pid) {
    std::thread([pid, end = end_] {
      int status = 0;
      pid_t waited;
      while ((waited = waitpid(pid, &status, 0)) < 0 && errno == EINTR) {
      }
      *end = waited == pid && !(WIFEXITED(status) && WEXITSTATUS(status) == 0) ? kFailed : kEnded;
    }).detach();
  }
  bool failed() const { return *end_ == kFailed; }

 private:
  enum End { kRuns, kEnded, kFailed };
  std::shared_ptr<std::atomic<End>> end_ = std::make_shared<std::atomic<End>>(kRuns);
};

std::string Tail(const std::string& path) {
  std::ifstream file(path);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  return text.size() > 2000 ? "…" + text.substr(text.size() - 2000) : text;
}

// A variable of the service's environment: ours where we have one to give.
std::vector<std::string> ServiceEnvironment() {
  std::vector<std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    std::string_view text = *variable;
    if (text.rfind("LIBTT_TPU_COMPAT=", 0) == 0 || text.rfind("TT_TPU_PLUGIN_CONFIG=", 0) == 0) continue;
    variables.emplace_back(text);
  }
  variables.push_back("TT_TPU_PLUGIN_CONFIG=" + GetConfig().text);
  return variables;
}

class Service {
 public:
  // Connects, after starting the service where it does not answer.
  PJRT_Error* Connect(Socket* socket) {
    std::lock_guard lock(mutex_);
    if (owner_ != getpid()) {  // first use, or a forked child: its parent's connections are not its own
      owner_ = getpid();
      folder_.clear();
    }
    if (!folder_.empty()) {
      *socket = Socket::Connect(path());
      if (socket->valid()) return nullptr;
    }
    if (PJRT_Error* error = Start()) return error;
    *socket = Socket::Connect(path());
    return socket->valid() ? nullptr : Unavailable();
  }

  PJRT_Error* Unavailable() const {
    return MakeError(PJRT_Error_Code_UNAVAILABLE, "the compile service ended; its log says: " + Tail(log()));
  }

 private:
  std::string path() const { return folder_ + "/compile.sock"; }
  std::string log() const { return folder_ + "/service.log"; }

  // The ranks of one mesh share a service; elsewhere the user may name a folder. "" for a folder of its own.
  static std::string SharedFolder(const std::string& base) {
    if (const char* named = getenv("TT_TPU_SERVICE_DIR")) return named;
    if (!GetWorld().spread()) return "";
    const std::string name = "/tt-tpu-mesh-" + GetWorld().job;
    return base.size() + name.size() < kLongestFolder ? base + name : "/tmp" + name;
  }

  // Whoever can write there could hand us programs of his own.
  static bool IsPrivate(const std::string& folder) {
    struct stat found;
    if (lstat(folder.c_str(), &found) == 0 && S_ISDIR(found.st_mode) && found.st_uid == getuid() &&
        (found.st_mode & 077) == 0) {
      return true;
    }
    errno = EPERM;
    return false;
  }

  PJRT_Error* MakeFolder() {
    const char* base = getenv("TMPDIR");
    folder_ = SharedFolder(base != nullptr ? base : "/tmp");
    if (!folder_.empty()) {
      if (mkdir(folder_.c_str(), 0700) == 0 || (errno == EEXIST && IsPrivate(folder_))) return nullptr;
    } else {
      for (const char* parent : {base != nullptr ? base : "/tmp", "/tmp"}) {
        folder_ = std::string(parent) + "/tt-tpu-XXXXXX";
        if (folder_.size() < kLongestFolder && mkdtemp(folder_.data()) != nullptr) return nullptr;
      }
    }
    PJRT_Error* error = Internal("cannot make the compile service's folder " + folder_ + ": " + strerror(errno) +
                                 "; set TMPDIR to a folder that can be written");
    folder_.clear();
    return error;
  }

  PJRT_Error* Spawn(pid_t* pid) {
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 1, log().c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    // A session of its own: Ctrl-C ends the program first, and the service when its last client is gone.
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID);
    std::string python = GetConfig().python, socket = path();
    char* argv[] = {python.data(), const_cast<char*>("-P"), const_cast<char*>("-m"),
                    const_cast<char*>("bridge.compiler.service"), socket.data(), nullptr};
    std::vector<std::string> variables = ServiceEnvironment();
    std::vector<char*> environment;
    for (auto& variable : variables) environment.push_back(variable.data());
    environment.push_back(nullptr);
    int failed = posix_spawnp(pid, python.c_str(), &actions, &attributes, argv, environment.data());
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
    return failed == 0 ? nullptr : Internal("cannot start the compile service with " + python + ": " + strerror(failed));
  }

  PJRT_Error* Start() {
    if (folder_.empty()) {
      if (PJRT_Error* error = MakeFolder()) return error;
    } else {
      mkdir(folder_.c_str(), 0700);  // an ended service has taken its folder with it
    }
    pid_t pid;
    if (PJRT_Error* error = Spawn(&pid)) return error;
    Child child(pid);
    constexpr int kWaitMilliseconds = 60000, kStep = 5;
    for (int waited = 0; waited < kWaitMilliseconds; waited += kStep) {
      Socket hello = Socket::Connect(path());
      if (hello.valid() && hello.Send(kHello, {})) {
        lifetime_ = std::move(hello);
        return nullptr;
      }
      // One that found another serving the same folder ends well: that one will answer.
      if (child.failed()) return Unavailable();
      usleep(kStep * 1000);
    }
    return Internal("the compile service did not answer within 60 s; its log says: " + Tail(log()));
  }

  std::mutex mutex_;
  pid_t owner_ = 0;
  std::string folder_;
  Socket lifetime_;  // open as long as we live: the service ends when no client is left
};

Service& GetService() {
  static auto* service = new Service;
  return *service;
}

// Reads the numbers of "donated": [1, 2] in the answer's metadata.
std::vector<int> Donated(const std::string& metadata) {
  std::vector<int> donated;
  size_t at = metadata.find("\"donated\"");
  size_t open = at == std::string::npos ? at : metadata.find('[', at);
  if (open == std::string::npos) return donated;
  std::stringstream numbers(metadata.substr(open + 1, metadata.find(']', open) - open - 1));
  for (std::string number; std::getline(numbers, number, ',');) {
    if (number.find_first_of("0123456789") != std::string::npos) donated.push_back(atoi(number.c_str()));
  }
  return donated;
}

// Reads "collectives": 3.
int Collectives(const std::string& metadata) {
  constexpr std::string_view key = "\"collectives\":";
  size_t at = metadata.find(key);
  return at == std::string::npos ? 0 : atoi(metadata.c_str() + at + key.size());
}

}  // namespace

PJRT_Error* CompileRemotely(std::string_view program, std::string_view format, std::string_view options,
                            std::string_view placement, CompiledProgram* result) {
  Service& service = GetService();
  Socket socket;
  if (PJRT_Error* error = service.Connect(&socket)) return error;
  uint32_t kind = 0;
  std::vector<std::string> blobs;
  if (!socket.Send(kCompile, {program, format, options, placement}) || !socket.Receive(&kind, &blobs)) {
    return service.Unavailable();
  }
  if (kind == kFailed && blobs.size() == 2 && blobs[0].size() == sizeof(uint32_t)) {
    uint32_t code;
    memcpy(&code, blobs[0].data(), sizeof code);
    return MakeError(static_cast<int>(code), blobs[1]);
  }
  if ((kind != kCompile && kind != kProgram) || blobs.size() != 2) {
    return Internal("the compile service answered with a frame of kind " + std::to_string(kind));
  }
  result->serialized = kind == kCompile;
  result->bytes = std::move(blobs[0]);
  result->donated = Donated(blobs[1]);
  result->collectives = Collectives(blobs[1]);
  return nullptr;
}

}  // namespace tt
