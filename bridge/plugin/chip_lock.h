// One process drives a chip: it holds the chip's lock, which names it, until it ends.
#pragma once

#include "pjrt.h"

namespace tt {

// Takes the locks of the chips that libtt is going to open: those of TT_VISIBLE_DEVICES, or all of this host.
// An error names the process that has one of them.
PJRT_Error* ClaimChips();

}  // namespace tt
