// A receiver makes its buffers and listens on a socket that the message's key names; the sender, which knows
// the key too, connects, says what it sends, and writes it in pieces, so that the memory needed does not grow with
// the message. Beside the collectives' shared memory rather than through it: messages of several
// pairs of ranks are under way at once, in no order, while collectives go on. What ends a wait is the same.
#include "transfers.h"

#include <errno.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "collectives_group.h"
#include "config.h"
#include "errors.h"
#include "extensions.h"
#include "memory.h"
#include "mesh.h"
#include "sockets.h"
#include "stream.h"
#include "transfers_abi.h"

extern "C" const PJRT_Api* GetPjrtApi();

namespace tt {
namespace {

constexpr size_t kPiece = size_t{1} << 20;

// What this thread receives next, as bridge/messages.py announced it.
struct Expected {
  std::string key;
  int source = -1;
  int number = 0;
};
thread_local Expected expected;

// Numbers of the messages that this process expects. One is used again when its message has come or failed:
// torch_tpu never forgets what it wrote into its store under a number.
class Numbers {
 public:
  int Take() {
    std::lock_guard lock(mutex_);
    if (free_.empty()) return next_++;
    return free_.extract(free_.begin()).value();
  }
  void GiveBack(int number) {
    std::lock_guard lock(mutex_);
    free_.insert(number);
  }

 private:
  std::mutex mutex_;
  std::set<int> free_;
  int next_ = 0;
};

Numbers& TheNumbers() {
  static auto* numbers = new Numbers;
  return *numbers;
}

std::atomic<int> receives{0};  // threads that receive
std::atomic<bool> ending{false};

// Through our own function, which counts memory, rather than the inner plugin's.
template <class Args>
PJRT_Error* CallOwn(Slot slot, Args* args) {
  return Table(const_cast<PJRT_Api*>(GetPjrtApi()))[static_cast<int>(slot)](args);
}

// "", or the message of an error, which is destroyed.
// Waits for an event, which is destroyed; its error's text, or "".
std::string Await(void* event) {
  if (event == nullptr) return "";
  auto await = MakeArgs<PJRT_Event_Await_Args>();
  await.event = event;
  std::string problem = TakeMessage(CallInner(Slot::Event_Await, &await));
  DestroyEvent(event);
  return problem;
}

// An array's type and size, as the two ends compare them.
struct Array {
  uint32_t type = 0;
  int64_t bytes = 0;
  char text[80] = {};  // "f32[4, 8]"
};

Array Describe(uint32_t type, const int64_t* dims, size_t num_dims) {
  static constexpr const char* kNames[] = {"?",   "bool", "s8",  "s16", "s32", "s64",  "u8",  "u16",
                                           "u32", "u64",  "f16", "f32", "f64", "bf16", "c64", "c128"};
  std::string text = type < std::size(kNames) ? kNames[type] : "type " + std::to_string(type);
  text += "[";
  for (size_t i = 0; i < num_dims; ++i) text += (i > 0 ? ", " : "") + std::to_string(dims[i]);
  text += "]";
  Array array{type, SizeInBytes(type, dims, num_dims)};
  text.copy(array.text, sizeof array.text - 1);
  return array;
}

// What a sender says first.
struct Hello {
  static constexpr uint32_t kAsk = UINT32_MAX;  // for the message's number, and nothing else

  uint32_t index;  // of the buffer among those of the receiver's call
  int32_t rank;
  Array array;
};

// The receiver's answer, to a question and once before the data and once after it: what is wrong, or "".
struct Answer {
  int32_t number = 0;
  char problem[1000] = {};
};

std::string SocketName(const Patience& patience, const std::string& key) {
  return kMessageSockets + (patience.hosts() != nullptr ? patience.hosts()->job() : GetWorld().job) + "-" + key;
}

// A connection to the receiver of this name at a rank; not a valid one where it does not listen (yet, or any more).
Descriptor Connect(const Patience& patience, int rank, const std::string& name) {
  return patience.world().IsHere(rank) ? ConnectHere(name) : patience.hosts()->Call(rank, name);
}

// The failure of a message, which is one of the mesh: the other ranks hear of it in their next collective or message.
Failure Explain(const Patience& patience, Failure failure, const std::string& what, int peer) {
  if (failure.code == PJRT_Error_Code_DEADLINE_EXCEEDED) {
    failure.message = patience.Who(peer) + " did nothing for " + std::to_string(patience.limit().count()) +
                      " s (TT_TPU_COLLECTIVE_TIMEOUT)";
  } else if (failure.message.empty()) {
    failure.message = patience.Who(peer) + " has ended or given up";
  }
  failure.message = what + ": " + failure.message;
  if (failure.code == PJRT_Error_Code_ABORTED || failure.code == PJRT_Error_Code_CANCELLED) return failure;
  return *patience.Fail(failure.code, failure.message);
}

// ---- Receiving

// The buffers of one call, until all of them have come.
class Inbox {
 public:
  Inbox(const Patience& patience, const Expected& message)
      : patience_(patience), source_(message.source), number_(message.number), name_(SocketName(patience, message.key)) {}

  ~Inbox() { TheNumbers().GiveBack(number_); }
  Inbox(const Inbox&) = delete;

  // Makes the buffers, and a socket that does not listen yet.
  PJRT_Error* Open(MakeReceiveBuffersArgs* args) {
    sockaddr_un address;
    socklen_t size = AbstractAddress(name_, &address);
    Descriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (bind(socket.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) {
      return Internal(std::string("cannot make a socket for a message: ") + strerror(errno));
    }
    listener_ = std::make_unique<Stream>(std::move(socket), patience_, source_, &ending);
    return MakeBuffers(args);
  }

  size_t count() const { return arrays_.size(); }
  std::string Address(size_t index) const {
    return name_ + " " + std::to_string(index) + " " + std::to_string(patience_.rank());
  }

  // Until everything has come, or cannot come any more.
  void Receive() {
    listen(listener_->socket(), 16);
    for (left_ = count(); left_ > 0;) {
      MaybeFailure failure = listener_->Await(POLLIN);
      if (failure) failure = Explain(patience_, *failure, What(Next()), source_);
      else failure = Accept();
      if (failure) Fail(*failure);
    }
    auto destroy = MakeArgs<PJRT_AsyncHostToDeviceTransferManager_Destroy_Args>();
    destroy.transfer_manager = manager_;
    TakeMessage(CallOwn(Slot::AsyncHostToDeviceTransferManager_Destroy, &destroy));
  }

 private:
  PJRT_Error* MakeBuffers(MakeReceiveBuffersArgs* args) {
    std::vector<PJRT_ShapeSpec> specs;
    for (size_t i = 0; i < args->num_shapes; ++i) {
      auto spec = MakeArgs<PJRT_ShapeSpec>();
      spec.dims = const_cast<int64_t*>(args->dims[i]);
      spec.num_dims = args->num_dims[i];
      spec.element_type = args->element_types[i];
      specs.push_back(spec);
      arrays_.push_back(Describe(args->element_types[i], args->dims[i], args->num_dims[i]));
    }
    arrived_.assign(count(), false);
    auto memory = MakeArgs<PJRT_Device_DefaultMemory_Args>();
    memory.device = args->device;
    if (PJRT_Error* error = CallInner(Slot::Device_DefaultMemory, &memory)) return error;
    auto create = MakeArgs<PJRT_Client_CreateBuffersForAsyncHostToDevice_Args>();
    create.client = args->client;
    create.shape_specs = specs.data();
    create.num_shape_specs = specs.size();
    create.memory = memory.memory;
    if (PJRT_Error* error = CallOwn(Slot::Client_CreateBuffersForAsyncHostToDevice, &create)) return error;
    manager_ = create.transfer_manager;
    for (size_t i = 0; i < count(); ++i) {
      auto retrieve = MakeArgs<PJRT_AsyncHostToDeviceTransferManager_RetrieveBuffer_Args>();
      retrieve.transfer_manager = manager_;
      retrieve.buffer_index = static_cast<int>(i);
      if (PJRT_Error* error = CallOwn(Slot::AsyncHostToDeviceTransferManager_RetrieveBuffer, &retrieve)) return error;
      args->buffers[i] = retrieve.buffer_out;
    }
    args->num_buffers = count();
    return nullptr;
  }

  MaybeFailure Accept() {
    Descriptor socket(accept4(listener_->socket(), nullptr, nullptr, SOCK_CLOEXEC));
    ucred process{};
    if (!SameUser(socket.get(), &process)) return std::nullopt;
    Stream sender(std::move(socket), patience_, source_, &ending);
    Hello hello;
    MaybeFailure failure = sender.Read(&hello, sizeof hello);
    if (!failure && hello.index == Hello::kAsk) {
      Answer answer;
      answer.number = number_;
      sender.Write(&answer, sizeof answer);
      return std::nullopt;
    }
    if (failure) return Explain(patience_, *failure, What(Next()), source_);
    if (hello.rank != source_ || hello.index >= count() || arrived_[hello.index]) return std::nullopt;
    failure = Take(sender, hello);
    if (!failure) return std::nullopt;
    failure = Explain(patience_, *failure, What(hello.index), source_);
    Answer answer;
    failure->message.copy(answer.problem, sizeof answer.problem - 1);
    sender.Write(&answer, sizeof answer);
    return failure;
  }

  MaybeFailure Take(const Stream& sender, const Hello& hello) {
    const Array& wanted = arrays_[hello.index];
    if (hello.array.type != wanted.type || hello.array.bytes != wanted.bytes) {
      return Failure{PJRT_Error_Code_INVALID_ARGUMENT, "it sends " + std::string(hello.array.text) +
                                                           ": both must have the same type and number of elements"};
    }
    const Answer well;
    MaybeFailure failure = sender.Write(&well, sizeof well);
    if (!failure) failure = Store(sender, hello.index);
    if (failure) return failure;
    arrived_[hello.index] = true;
    --left_;
    sender.Write(&well, sizeof well);  // a sender that has ended meanwhile does not matter any more
    return std::nullopt;
  }

  MaybeFailure Store(const Stream& sender, size_t index) {
    const size_t total = arrays_[index].bytes;
    std::unique_ptr<char[]> piece(new char[std::min(kPiece, total)]);
    size_t at = 0;
    do {
      const size_t size = std::min(kPiece, total - at);
      if (MaybeFailure failure = sender.Read(piece.get(), size)) return failure;
      auto transfer = MakeArgs<PJRT_AsyncHostToDeviceTransferManager_TransferData_Args>();
      transfer.transfer_manager = manager_;
      transfer.buffer_index = static_cast<int>(index);
      transfer.data = piece.get();
      transfer.offset = static_cast<int64_t>(at);
      transfer.transfer_size = static_cast<int64_t>(size);
      transfer.is_last_transfer = at + size == total;
      std::string problem = TakeMessage(CallInner(Slot::AsyncHostToDeviceTransferManager_TransferData, &transfer));
      if (problem.empty()) problem = Await(transfer.done_with_h2d_transfer);
      if (!problem.empty()) return Failure{PJRT_Error_Code_INTERNAL, problem};
      at += size;
    } while (at < total);
    return std::nullopt;
  }

  // All that has not come gets an error in its place.
  void Fail(const Failure& failure) {
    for (size_t i = 0; i < count(); ++i) {
      if (arrived_[i]) continue;
      auto set = MakeArgs<PJRT_AsyncHostToDeviceTransferManager_SetBufferError_Args>();
      set.transfer_manager = manager_;
      set.buffer_index = static_cast<int>(i);
      set.error_code = failure.code;
      set.error_message = const_cast<char*>(failure.message.data());
      set.error_message_size = failure.message.size();
      TakeMessage(CallInner(Slot::AsyncHostToDeviceTransferManager_SetBufferError, &set));
    }
    left_ = 0;
  }

  size_t Next() const { return std::find(arrived_.begin(), arrived_.end(), false) - arrived_.begin(); }

  // "receive of f32[4, 8] from rank 0 on rank 1"
  std::string What(size_t index) const {
    return std::string("receive of ") + arrays_[index].text + " from rank " + std::to_string(source_) + " on rank " +
           std::to_string(patience_.rank());
  }

  const Patience& patience_;
  const int source_, number_;
  const std::string name_;
  std::unique_ptr<Stream> listener_;
  void* manager_ = nullptr;
  std::vector<Array> arrays_;
  std::vector<bool> arrived_;
  size_t left_ = 0;
};

// A receiver's wish to stop the sender; which comes too late, since senders wait until all has come.
void CannotCancel(const char*, size_t, int, const char*, size_t, void (*canceled)(PJRT_Error*, void*), void* arg, void*) {
  if (canceled == nullptr) return;
  PJRT_Error* error = Unimplemented("a message cannot be cancelled");
  canceled(error, arg);
  TakeMessage(error);
}

PJRT_Error* NoMesh() {
  return MakeError(PJRT_Error_Code_FAILED_PRECONDITION,
                   "this process is not part of a mesh: there is no rank to send to or receive from");
}

PJRT_Error* MakeReceiveBuffers(MakeReceiveBuffersArgs* args) {
  const Patience* patience = MeshPatience();
  if (patience == nullptr) return NoMesh();
  if (MaybeFailure failure = patience->FailedBefore()) return MakeError(failure->code, failure->message);
  const Expected message = std::exchange(expected, {});
  if (message.source < 0) {
    return MakeError(PJRT_Error_Code_FAILED_PRECONDITION,
                     "a receive without a source: use torch.distributed's recv, irecv or batch_isend_irecv");
  }
  auto inbox = std::make_shared<Inbox>(*patience, message);
  if (PJRT_Error* error = inbox->Open(args)) return error;
  std::vector<std::string> texts;
  for (size_t i = 0; i < inbox->count(); ++i) texts.push_back(inbox->Address(i));
  std::vector<const char*> descriptors;
  std::vector<size_t> sizes;
  for (const std::string& text : texts) {
    descriptors.push_back(text.data());
    sizes.push_back(text.size());
  }
  // Before it listens, so that a sender which finds it listening finds the descriptor too.
  args->notifier.notify(nullptr, descriptors.data(), sizes.data(), descriptors.size(), args->notifier.user_arg,
                        CannotCancel, nullptr);
  ++receives;
  std::thread([inbox]() mutable {
    inbox->Receive();
    inbox.reset();
    --receives;
  }).detach();
  return nullptr;
}

// ---- Sending

// What is in a buffer, once it is there, and where: the emulated chip's memory is the host's, so that it can be sent
// from its place. An error text, or "".
std::string Locate(void* buffer, const char** data, Array* array) {
  auto ready = MakeArgs<PJRT_Buffer_ReadyEvent_Args>();
  ready.buffer = buffer;
  std::string problem = TakeMessage(CallInner(Slot::Buffer_ReadyEvent, &ready));
  if (problem.empty()) problem = Await(ready.event);
  if (!problem.empty()) return problem;
  auto pointer = MakeArgs<PJRT_Buffer_UnsafePointer_Args>();
  pointer.buffer = buffer;
  auto type = MakeArgs<PJRT_Buffer_ElementType_Args>();
  type.buffer = buffer;
  auto dims = MakeArgs<PJRT_Buffer_Dimensions_Args>();
  dims.buffer = buffer;
  if (PJRT_Error* error = CallInner(Slot::Buffer_UnsafePointer, &pointer)) return TakeMessage(error);
  if (PJRT_Error* error = CallInner(Slot::Buffer_ElementType, &type)) return TakeMessage(error);
  if (PJRT_Error* error = CallInner(Slot::Buffer_Dimensions, &dims)) return TakeMessage(error);
  *data = reinterpret_cast<const char*>(pointer.buffer_pointer);
  *array = Describe(type.type, static_cast<const int64_t*>(dims.dims), dims.num_dims);
  return "";
}

// Where a descriptor leads.
struct Destination {
  std::string socket;
  unsigned index = 0;
  int rank = -1;

  static Destination Read(const std::string& descriptor) {
    Destination to;
    const size_t space = descriptor.find(' ');
    if (space == std::string::npos || descriptor.rfind(kMessageSockets, 0) != 0) return to;
    to.socket = descriptor.substr(0, space);
    sscanf(descriptor.c_str() + space, " %u %d", &to.index, &to.rank);
    return to;
  }
};

// Comes back when the receiver has everything.
MaybeFailure Deliver(const Patience& patience, const Destination& to, const Array& array, const char* data) {
  Stream receiver(Connect(patience, to.rank, to.socket), patience, to.rank, &ending);
  if (receiver.socket() < 0) {
    MaybeFailure before = patience.FailedBefore();
    return before ? before : Failure{PJRT_Error_Code_UNAVAILABLE, ""};
  }
  const Hello hello{to.index, patience.rank(), array};
  Answer answer;
  MaybeFailure failure = receiver.Write(&hello, sizeof hello);
  if (!failure) failure = receiver.Read(&answer, sizeof answer);
  if (!failure && answer.problem[0] == '\0') {
    failure = receiver.Write(data, array.bytes);
    // Where the receiver has stopped reading, its answer says why.
    MaybeFailure unanswered = receiver.Read(&answer, sizeof answer);
    if (!failure) failure = unanswered;
  }
  if (answer.problem[0] != '\0') return Failure{PJRT_Error_Code_ABORTED, answer.problem};
  return failure;
}

std::string SendText(const Patience& patience, const std::string& array, int rank) {
  return "send of " + array + " from rank " + std::to_string(patience.rank()) + " to rank " + std::to_string(rank);
}

MaybeFailure Send(void* buffer, const std::string& descriptor) {
  const Patience* patience = MeshPatience();
  if (patience == nullptr) return Failure{PJRT_Error_Code_FAILED_PRECONDITION, TakeMessage(NoMesh())};
  const Destination to = Destination::Read(descriptor);
  if (to.rank < 0 || to.rank >= patience->world().size) {
    return Failure{PJRT_Error_Code_INVALID_ARGUMENT, "cannot send: the receiver is not in this mesh (" + descriptor + ")"};
  }
  Array array;
  const char* data = nullptr;
  const std::string problem = Locate(buffer, &data, &array);
  const std::string what = SendText(*patience, array.text, to.rank);
  if (!problem.empty()) return Failure{PJRT_Error_Code_INTERNAL, what + ": " + problem};
  MaybeFailure failure = Deliver(*patience, to, array, data);
  if (failure) return Explain(*patience, *failure, what, to.rank);
  return std::nullopt;
}

// Whether rank `rank` listens for the message of this key, and which number it has given to it.
bool Ask(const Patience& patience, const std::string& key, int rank, int* number) {
  Stream receiver(Connect(patience, rank, SocketName(patience, key)), patience, rank, &ending);
  if (receiver.socket() < 0) return false;
  const Hello hello{Hello::kAsk, patience.rank(), {}};
  Answer answer;
  if (receiver.Write(&hello, sizeof hello) || receiver.Read(&answer, sizeof answer)) return false;
  *number = answer.number;
  return true;
}

// Until it listens.
MaybeFailure AwaitReceiver(const Patience& patience, const std::string& key, int rank, int* number) {
  const auto start = Clock::now();
  auto pause = std::chrono::microseconds(100);
  while (!Ask(patience, key, rank, number)) {
    if (MaybeFailure failure = patience.LookUp(start, SetOf(rank))) {
      return Explain(patience, *failure, SendText(patience, "a message", rank), rank);
    }
    std::this_thread::sleep_for(pause);
    pause = std::min<decltype(pause)>(pause * 2, std::chrono::milliseconds(5));
  }
  return std::nullopt;
}

// In the thread that made the descriptor ready, which is the caller's own and still in the caller's call where the
// descriptor was there before: the buffer need not outlive that. Nobody waits longer for it, since
// a receiver that handed out a descriptor takes what comes in a thread of its own.
void DescriptorReady(PJRT_Error* error, void* user_arg) {
  std::unique_ptr<CopyToRemoteDeviceArgs> args(static_cast<CopyToRemoteDeviceArgs*>(user_arg));
  if (error == nullptr) {
    MaybeFailure failure = Send(args->buffer, std::string(*args->descriptor, *args->descriptor_size));
    if (failure) error = MakeError(failure->code, failure->message);
  }
  if (args->destroy_descriptor != nullptr) args->destroy_descriptor(args->descriptor, args->descriptor_size);
  DestroyEvent(args->event);
  args->done(error, error == nullptr, args->done_arg);
  TakeMessage(error);
}

void CopyToRemoteDevice(CopyToRemoteDeviceArgs* args) {
  auto* copy = new CopyToRemoteDeviceArgs{};
  memcpy(copy, args, std::min(args->struct_size, sizeof *copy));
  if (args->event == nullptr) return DescriptorReady(nullptr, copy);
  auto ready = MakeArgs<PJRT_Event_OnReady_Args>();
  ready.event = args->event;
  ready.callback = reinterpret_cast<void*>(DescriptorReady);
  ready.user_arg = copy;
  if (PJRT_Error* error = CallInner(Slot::Event_OnReady, &ready)) DescriptorReady(error, copy);
}

PJRT_Error* ByKeys(void*) {
  return Unimplemented("messages by keys: use MakeCrossHostReceiveBuffers and CopyToRemoteDevice");
}

}  // namespace

void EndTransfers() {
  ending = true;
  while (receives.load() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  ending = false;
}

// On silicon the inner plugin has none that could be passed on.
PJRT_Extension_Base* TransfersExtension() {
  if (!GetConfig().emulated()) return nullptr;
  static CrossHostTransfersExtension extension{};
  extension.base.struct_size = sizeof extension;
  extension.base.type = PJRT_Extension_Type_CrossHostTransfers;
  extension.make_receive_buffers = MakeReceiveBuffers;
  extension.copy_to_remote_device = CopyToRemoteDevice;
  extension.receive_buffers = extension.send_buffers = ByKeys;
  return &extension.base;
}

}  // namespace tt

#define EXPORT extern "C" __attribute__((visibility("default")))

// The next receive of this thread is of the message of this key, at most 64 characters, from rank `source`. Returns
// the message's number, which whoever sends it is told too.
EXPORT int TtTpuExpectMessage(const char* key, int source) {
  tt::expected = {key, source, tt::TheNumbers().Take()};
  return tt::expected.number;
}

// Comes back when rank `destination` can be sent the message of this key, with the number that the receiver gave to
// it; what is wrong otherwise, or "".
EXPORT int TtTpuAwaitReceiver(const char* key, int destination, char* problem, size_t size) {
  problem[0] = '\0';
  int number = 0;
  const tt::Patience* patience = tt::MeshPatience();
  if (patience == nullptr) return number;  // the send itself says so
  tt::MaybeFailure failure = tt::AwaitReceiver(*patience, key, destination, &number);
  if (failure) problem[failure->message.copy(problem, size - 1)] = '\0';
  return number;
}
