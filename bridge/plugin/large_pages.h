// Memory of the emulated chip in pages of 2 MiB.
#pragma once

#include <cstddef>

namespace tt {

// Memory that begins a cache line, or null when there is none.
void* AllocateInLargePages(size_t bytes);
void FreeInLargePages(void* memory);

}  // namespace tt
