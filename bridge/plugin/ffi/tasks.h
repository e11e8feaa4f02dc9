// Work that a handler shares with XLA's own threads.
#pragma once

#include "xla/ffi/api/ffi.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <utility>

namespace tt {

// Tasks 0..count that any thread may take; the one that brought them takes part, so they end
// even when no other thread is free. Those that come late find nothing and leave.
class Tasks {
 public:
  Tasks(int32_t count, std::function<void(int32_t)> run) : count_(count), run_(std::move(run)) {}

  static void RunAll(xla::ffi::ThreadPool& threads, int32_t count, std::function<void(int32_t)> run) {
    auto tasks = std::make_shared<Tasks>(count, std::move(run));
    int64_t helpers = std::min<int64_t>(threads.num_threads(), count) - 1;
    for (int64_t i = 0; i < helpers; ++i) threads.Schedule([tasks] { tasks->Take(); });
    tasks->Take();
    tasks->Wait();
  }

 private:
  void Take() {
    for (int32_t task; (task = next_.fetch_add(1)) < count_;) {
      run_(task);
      if (done_.fetch_add(1) + 1 == count_) done_.notify_all();
    }
  }

  // Another thread is in its last task: look a while, then sleep, for it may have lost its core.
  void Wait() {
    for (int i = 0; i < 2000 && done_.load() < count_; ++i) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    for (int32_t done; (done = done_.load()) < count_;) done_.wait(done);
  }

  const int32_t count_;
  const std::function<void(int32_t)> run_;
  std::atomic<int32_t> next_{0}, done_{0};
};

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// Memory that begins a cache line; null when there is none.
using Memory = std::unique_ptr<void, Free>;
inline Memory Allocate(int64_t bytes) { return Memory(std::aligned_alloc(64, (bytes + 63) / 64 * 64)); }

}  // namespace tt
