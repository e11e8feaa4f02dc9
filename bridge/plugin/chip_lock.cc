// A chip's lock is a file that its process has locked and written its number to. The kernel ends the lock with the
// process; the number stays where it did not come to its end, and so tells who was killed on the chip. It must be
// found by all processes of the host, whatever their TMPDIR.
#include "chip_lock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "config.h"
#include "errors.h"

namespace tt {
namespace {

constexpr const char* kPrefix = "/tmp/tt-tpu-chip-";  // as launch/reset.py has it
constexpr const char* kDevices = "/dev/tenstorrent";
constexpr const char* kSysfs = "/sys/class/tenstorrent/tenstorrent!";

std::mutex mutex;
std::map<std::string, int> held;  // path → descriptor
pid_t owner = 0;

std::string PathOf(std::string chip) {
  std::error_code none;
  auto device = std::filesystem::read_symlink(kSysfs + chip + "/device", none);
  if (!device.empty()) chip = device.filename();  // its PCI address: users name chips either way
  std::replace(chip.begin(), chip.end(), '/', '-');
  return kPrefix + chip + ".lock";
}

int Open(const std::string& path) {
  constexpr int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW;
  // Not made anew where it is: Linux refuses that for another user's file in a folder that all may write.
  int file = open(path.c_str(), flags);
  if (file >= 0 || errno != ENOENT) return file;
  file = open(path.c_str(), flags | O_CREAT, 0666);
  if (file >= 0) fchmod(file, 0666);
  return file;
}

// Whether the file is still the one with this name: the process that had it before removes it at its end.
bool Current(int file, const std::string& path) {
  struct stat ours, named;
  return fstat(file, &ours) == 0 && stat(path.c_str(), &named) == 0 && ours.st_ino == named.st_ino;
}

std::string ReadOwner(int file) {
  char text[32] = {};
  ssize_t size = pread(file, text, sizeof text - 1, 0);
  return size > 0 ? std::string(text, size) : "";
}

// Gives the locks back; after a fork they are the parent's.
void Release() {
  if (owner != getpid()) return;
  for (auto& [path, file] : held) unlink(path.c_str());
}

// "" or why not.
std::string Claim(const std::string& chip) {
  const std::string path = PathOf(chip);
  std::lock_guard lock(mutex);
  if (owner == getpid() && held.count(path) > 0) return "";
  int file = -1;
  do {
    if (file >= 0) close(file);
    file = Open(path);
    if (file < 0) return "cannot open " + path + ", the lock of chip " + chip + ": " + strerror(errno);
    if (flock(file, LOCK_EX | LOCK_NB) != 0) {
      std::string refusal = "chip " + chip + " is in use by process " + ReadOwner(file) +
                            ": end that one, or choose another chip with TT_VISIBLE_DEVICES";
      close(file);
      return refusal;
    }
  } while (!Current(file, path));
  if (std::string last = ReadOwner(file); !last.empty()) {
    Log(Level::kWarning, "chip " + chip + ": its last process, " + last + ", was killed; taking over. If the chip hangs: tt-smi -r");
  }
  const std::string self = std::to_string(getpid());
  if (ftruncate(file, 0) != 0 || pwrite(file, self.data(), self.size(), 0) < 0) {
    close(file);
    return "cannot write " + path + ": " + strerror(errno);
  }
  if (owner != getpid()) {
    if (owner == 0) atexit(Release);
    owner = getpid();
    held.clear();
  }
  held[path] = file;
  return "";
}

std::vector<std::string> Wanted() {
  std::vector<std::string> chips;
  const char* visible = getenv("TT_VISIBLE_DEVICES");
  if (visible != nullptr && *visible != '\0') {
    std::stringstream names(visible);
    for (std::string name; std::getline(names, name, ',');) chips.push_back(name);
    return chips;
  }
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(kDevices, none)) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") == std::string::npos) chips.push_back(name);
  }
  return chips;
}

}  // namespace

PJRT_Error* ClaimChips() {
  const char* mocked = getenv("TT_METAL_MOCK_CLUSTER_DESC_PATH");
  if (GetConfig().emulated() || (mocked != nullptr && *mocked != '\0')) return nullptr;
  for (const std::string& chip : Wanted()) {
    std::string refusal = Claim(chip);
    if (!refusal.empty()) return MakeError(PJRT_Error_Code_FAILED_PRECONDITION, refusal);
  }
  return nullptr;
}

}  // namespace tt

// For tests, which have no chip: takes one's lock; "" or why not.
extern "C" __attribute__((visibility("default"))) const char* TtTpuClaimChip(const char* chip) {
  static std::string refusal;
  refusal = tt::Claim(chip);
  return refusal.c_str();
}
