// Element-wise reductions over the arrays of several ranks.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tt {

enum class Reduction : uint8_t { kNone, kSum, kProduct, kMinimum, kMaximum, kAnd, kOr, kXor };

// out[i] = sources[0][i] op sources[1][i] op …, from left to right; `out` may be one of the sources.
// bfloat16 and float16 are accumulated in float and rounded once.
using Reducer = void (*)(const void* const* sources, int count, void* out, size_t elements);

// For elements of an XLA_FFI_DataType; null where the operation is not defined on them.
Reducer FindReducer(int type, Reduction reduction);

// Bytes of one element, 0 for types that do not fill whole bytes.
size_t ElementSize(int type);
const char* TypeName(int type);
const char* ReductionName(Reduction reduction);

}  // namespace tt
