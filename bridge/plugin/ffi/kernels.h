// The inner loops that the emulated chip's handlers share, for each instruction set that this CPU
// may have: products with weights of a few rows, and the softmax of a row, taken block by block.
#pragma once

#include <cstdint>
#include <string_view>

namespace tt {

using Bfloat16 = uint16_t;

constexpr int kMostRowsKN = 64;  // the most rows of x with [K, N] weights

// The way ahead in a matrix that is read from memory once, in the order of its addresses.
constexpr int64_t kStreamAhead = 8192;

// x [M, K] times weights, as the kernels see it.
struct Problem {
  const void* x;   // [N, K] weights: rows made by Kernels::prepare_*; [K, N] weights: rows of float
  int64_t stride;  // elements from one row of x to the next
  const void* weights;
  void* result;  // [M, N]
  bool result_bf16;
  int64_t m, k, n;
  // What is read after the weights, and called for from memory meanwhile. Null: the weights are a part of a stream, what
  // follows them in memory comes next; the weights themselves: it is not known.
  const void* next = nullptr;

  bool Streamed() const { return next == nullptr; }
  // Bytes from a place in the weights to the one that is called for.
  int64_t Ahead() const {
    return Streamed() ? kStreamAhead : reinterpret_cast<intptr_t>(next) - reinterpret_cast<intptr_t>(weights);
  }
};

struct Kernels {
  int lanes;               // floats in a vector
  int prepared_bf16_size;  // bytes of an element of prepared bfloat16 rows
  void (*prepare_f32)(const float*, int64_t rows, int64_t k, int64_t stride, void*);
  void (*prepare_bf16)(const Bfloat16*, int64_t rows, int64_t k, int64_t stride, void*);
  // Columns [begin, end) of the result.
  void (*nk_f32)(const Problem&, int64_t begin, int64_t end);
  void (*nk_bf16)(const Problem&, int64_t begin, int64_t end);
  void (*kn_f32)(const Problem&, int64_t begin, int64_t end);
  void (*kn_bf16)(const Problem&, int64_t begin, int64_t end);
  // Replaces scores by exp(score - highest), `highest` being at least as high as all of them; their sum. `narrow`
  // rounds them to bfloat16 after they are summed.
  float (*exponentials)(float* scores, int64_t count, float highest, bool narrow);
  // Multiplies scores by `scale`; the highest of them, -inf of none, NaN where one is.
  float (*scale)(float* scores, int64_t count, float scale);

  // Elements from one prepared row of k to the next: whole vectors.
  int64_t Stride(int64_t k, bool bf16) const {
    int64_t step = bf16 ? 2 * lanes : lanes;
    return (k + step - 1) / step * step;
  }
  int64_t PreparedSize(bool bf16) const { return bf16 ? prepared_bf16_size : sizeof(float); }
};

// The best instruction set, or the named one ("avx512bf16", "avx512", "avx2", "generic"); null
// where the CPU lacks it.
const Kernels* FindKernels(std::string_view name = "");

inline int64_t Smaller(int64_t a, int64_t b) { return a < b ? a : b; }

inline float ToFloat(float value) { return value; }
inline float ToFloat(Bfloat16 value) {
  uint32_t bits = static_cast<uint32_t>(value) << 16;
  float wide;
  __builtin_memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// To the nearest, ties to even; a NaN stays one.
inline Bfloat16 ToBfloat16(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return (bits >> 16) | 0x40;
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

}  // namespace tt
