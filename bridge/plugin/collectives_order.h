// The order of programs with collectives.
#pragma once

#include "pjrt.h"

namespace tt {

// Executes a program with collectives once the one before it has ended. All ranks hand in their programs in
// the same order, but nothing keeps the inner plugin from running two of them at once, on one rank so
// and on another the other way round, until each waits for a collective that the other holds up.
PJRT_Error* ExecuteInOrder(PJRT_LoadedExecutable_Execute_Args* args);

}  // namespace tt
