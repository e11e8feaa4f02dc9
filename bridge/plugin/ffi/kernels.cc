// One copy of the inner loops for each instruction set, and the choice among them at run time: one
// build of the plugin runs on any CPU of its architecture.
#include "kernels.h"

#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tt {
namespace {

typedef float Quad __attribute__((vector_size(16)));

constexpr int kTile = 4;     // rows of x that share a pass over the weights
constexpr int kPanel = 64;   // rows of x that stay in the second cache
constexpr int kDepth = 8;    // rows of [K, N] weights that share a pass over the sums
constexpr int kWidth = 256;  // columns of [K, N] weights whose sums stay in the first cache

inline void Store(const Problem& problem, int64_t row, int64_t column, int64_t count, const float* values) {
  int64_t place = row * problem.n + column;
  if (problem.result_bf16) {
    auto* result = static_cast<Bfloat16*>(problem.result) + place;
    for (int64_t i = 0; i < count; ++i) result[i] = ToBfloat16(values[i]);
  } else {
    __builtin_memcpy(static_cast<float*>(problem.result) + place, values, count * sizeof(float));
  }
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // wide vectors are passed to inlined functions only

namespace generic {
constexpr int kLanes = 4, kRows = 2;
#include "kernels.inc"
}  // namespace generic

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
constexpr int kLanes = 8, kRows = 2;
#include "kernels.inc"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma")
namespace avx512 {
constexpr int kLanes = 16, kRows = 4;
#include "kernels.inc"
}  // namespace avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")
#define TT_BF16_DOT
namespace avx512bf16 {
constexpr int kLanes = 16, kRows = 4;
#include "kernels.inc"
}  // namespace avx512bf16
#undef TT_BF16_DOT
#pragma GCC pop_options
#endif

#pragma GCC diagnostic pop

struct InstructionSet {
  std::string_view name;
  bool there;
  const Kernels* kernels;
};

// Best first.
const std::vector<InstructionSet>& InstructionSets() {
  static const std::vector<InstructionSet> sets = {
#if defined(__x86_64__)
      {"avx512bf16", static_cast<bool>(__builtin_cpu_supports("avx512bf16")), &avx512bf16::kKernels},
      {"avx512", __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"),
       &avx512::kKernels},
      {"avx2", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"), &avx2::kKernels},
#endif
      {"generic", true, &generic::kKernels},
  };
  return sets;
}

}  // namespace

const Kernels* FindKernels(std::string_view name) {
  for (const InstructionSet& set : InstructionSets())
    if (set.there && (name.empty() || name == set.name)) return set.kernels;
  return nullptr;
}

}  // namespace tt
