// Errors of our own, which look to a caller like the inner plugin's.
#pragma once

#include <string>

#include "pjrt.h"

namespace tt {

PJRT_Error* MakeError(int code, std::string message);
inline PJRT_Error* InvalidArgument(std::string m) { return MakeError(PJRT_Error_Code_INVALID_ARGUMENT, std::move(m)); }
inline PJRT_Error* Unimplemented(std::string m) { return MakeError(PJRT_Error_Code_UNIMPLEMENTED, std::move(m)); }
inline PJRT_Error* Internal(std::string m) { return MakeError(PJRT_Error_Code_INTERNAL, std::move(m)); }
inline PJRT_Error* ResourceExhausted(std::string m) { return MakeError(PJRT_Error_Code_RESOURCE_EXHAUSTED, std::move(m)); }

// The message of an error, which is destroyed; "" of none.
std::string TakeMessage(PJRT_Error* error);

// Destroys an event of the inner plugin, or nothing.
void DestroyEvent(void* event);

}  // namespace tt
