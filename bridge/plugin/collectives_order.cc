// A gate that one program at a time may pass. Its owner learns of its end from its completion event.
#include "collectives_order.h"

#include <condition_variable>
#include <mutex>

#include "errors.h"

namespace tt {
namespace {

class Gate {
 public:
  void Enter() {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [this] { return !running_; });
    running_ = true;
  }
  void Leave() {
    std::lock_guard lock(mutex_);
    running_ = false;
    ended_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  bool running_ = false;
};

Gate& TheGate() {
  static auto* gate = new Gate;
  return *gate;
}

// `event` is ours and goes with the program, or null where the caller has one of its own.
void Ended(PJRT_Error* error, void* event) {
  TakeMessage(error);  // the results carry it too
  DestroyEvent(event);
  TheGate().Leave();
}

}  // namespace

PJRT_Error* ExecuteInOrder(PJRT_LoadedExecutable_Execute_Args* args) {
  if (args->num_devices != 1) return Unimplemented("a program with collectives runs on one device of each process");
  TheGate().Enter();
  void* own = nullptr;
  const bool asked = args->device_complete_events != nullptr;
  if (!asked) args->device_complete_events = &own;
  PJRT_Error* error = CallInner(Slot::LoadedExecutable_Execute, args);
  if (!asked) args->device_complete_events = nullptr;
  if (error != nullptr) {
    TheGate().Leave();
    return error;
  }
  auto ready = MakeArgs<PJRT_Event_OnReady_Args>();
  ready.event = asked ? *static_cast<void**>(args->device_complete_events) : own;
  ready.callback = reinterpret_cast<void*>(Ended);
  ready.user_arg = own;
  if (PJRT_Error* lost = CallInner(Slot::Event_OnReady, &ready)) Ended(lost, own);
  return nullptr;
}

}  // namespace tt
