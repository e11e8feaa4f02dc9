// PJRT_Error objects made by this plugin. Newer callers reach an error through
// its function table, older ones through PJRT_Error_*: both ways work for ours
// and for the inner plugin's, told apart by the address of the table.
#include "errors.h"

namespace tt {
namespace {

struct OwnError : PJRT_Error {
  int code;
  std::string text;
};

void Destroy(PJRT_Error* error) { delete static_cast<OwnError*>(error); }

void Message(const PJRT_Error* error, const char** message, size_t* size) {
  const auto& text = static_cast<const OwnError*>(error)->text;
  *message = text.data();
  *size = text.size();
}

int32_t Code(const PJRT_Error* error) { return static_cast<const OwnError*>(error)->code; }

void ForEachPayload(const PJRT_Error*, void* /*visitor*/, void* /*user_arg*/) {}

PJRT_Error_FunctionTable function_table = {
    .struct_size = sizeof(PJRT_Error_FunctionTable),
    .instance_size = sizeof(OwnError),
    .extension_start = nullptr,
    .destroy = reinterpret_cast<void*>(Destroy),
    .message = reinterpret_cast<void*>(Message),
    .get_code = reinterpret_cast<void*>(Code),
    .for_each_payload = reinterpret_cast<void*>(ForEachPayload),
};

bool IsOwn(const void* error) { return static_cast<const PJRT_Error*>(error)->vtable == &function_table; }

PJRT_Error* ErrorDestroy(PJRT_Error_Destroy_Args* args) {
  if (args->error == nullptr) return nullptr;
  if (!IsOwn(args->error)) return CallInner(Slot::Error_Destroy, args);
  Destroy(static_cast<PJRT_Error*>(args->error));
  return nullptr;
}

PJRT_Error* ErrorMessage(PJRT_Error_Message_Args* args) {
  if (!IsOwn(args->error)) return CallInner(Slot::Error_Message, args);
  const char* message;
  Message(static_cast<PJRT_Error*>(args->error), &message, &args->message_size);
  args->message = const_cast<char*>(message);
  return nullptr;
}

PJRT_Error* ErrorGetCode(PJRT_Error_GetCode_Args* args) {
  if (!IsOwn(args->error)) return CallInner(Slot::Error_GetCode, args);
  args->code = Code(static_cast<PJRT_Error*>(args->error));
  return nullptr;
}

PJRT_Error* ErrorForEachPayload(PJRT_Error_ForEachPayload_Args* args) {
  return IsOwn(args->error) ? nullptr : CallInner(Slot::Error_ForEachPayload, args);
}

}  // namespace

PJRT_Error* MakeError(int code, std::string message) {
  auto* error = new OwnError;
  error->vtable = &function_table;
  error->code = code;
  error->text = std::move(message);
  return error;
}

std::string TakeMessage(PJRT_Error* error) {
  if (error == nullptr) return "";
  auto message = MakeArgs<PJRT_Error_Message_Args>();
  message.error = error;
  ErrorMessage(&message);
  std::string text(View(message.message, message.message_size));
  auto destroy = MakeArgs<PJRT_Error_Destroy_Args>();
  destroy.error = error;
  ErrorDestroy(&destroy);
  return text;
}

void DestroyEvent(void* event) {
  if (event == nullptr) return;
  auto destroy = MakeArgs<PJRT_Event_Destroy_Args>();
  destroy.event = event;
  TakeMessage(CallInner(Slot::Event_Destroy, &destroy));
}

void InstallErrors(PJRT_Api* api) {
  SetFunction(api, Slot::Error_Destroy, ErrorDestroy);
  SetFunction(api, Slot::Error_Message, ErrorMessage);
  SetFunction(api, Slot::Error_GetCode, ErrorGetCode);
  SetFunction(api, Slot::Error_ForEachPayload, ErrorForEachPayload);
}

}  // namespace tt
