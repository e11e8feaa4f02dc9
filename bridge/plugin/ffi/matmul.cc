// The matmul of the emulated chip: x [M, K] times weights, [N, K] as torch keeps them or
// [K, N], in float or bfloat16, with sums in float. XLA's CPU compiler reads weights at
// a tenth of the memory's speed for the few rows of a decode step; this reads them once, at
// about that speed, on XLA's own threads. The instruction set is chosen at run time.
#include "xla/ffi/api/ffi.h"

#include <atomic>
#include <cstdint>
#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "handlers.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tt {
namespace {

namespace ffi = xla::ffi;

using Bfloat16 = uint16_t;
typedef float Quad __attribute__((vector_size(16)));

constexpr int kTile = 4;         // rows of x that share a pass over the weights
constexpr int kPanel = 64;       // rows of x that stay in the second cache
constexpr int kDepth = 8;        // rows of [K, N] weights that share a pass over the sums
constexpr int kWidth = 256;      // columns of [K, N] weights whose sums stay in the first cache
constexpr int kMostRowsKN = 64;  // the most rows of x with [K, N] weights
constexpr int64_t kTaskBytes = 64 << 10;

// One weight's product as the kernels see it.
struct Problem {
  const void* x;      // rows of x, prepared for [N, K] weights
  int64_t stride;     // elements from one prepared row to the next
  const void* weights;
  void* result;       // [M, N]
  bool result_bf16;
  int64_t m, k, n;
};

struct Kernels {
  int lanes;
  void (*prepare_f32)(const float*, int64_t rows, int64_t k, int64_t stride, void*);
  void (*prepare_bf16)(const Bfloat16*, int64_t rows, int64_t k, int64_t stride, void*);
  void (*nk_f32)(const Problem&, int64_t begin, int64_t end);
  void (*nk_bf16)(const Problem&, int64_t begin, int64_t end);
  void (*kn_f32)(const Problem&, int64_t begin, int64_t end);
  void (*kn_bf16)(const Problem&, int64_t begin, int64_t end);
  int prepared_bf16_size;  // bytes of an element of prepared bfloat16 rows
};

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
#include "matmul_kernels.inc"
}  // namespace generic

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
constexpr int kLanes = 8, kRows = 2;
#include "matmul_kernels.inc"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma")
namespace avx512 {
constexpr int kLanes = 16, kRows = 4;
#include "matmul_kernels.inc"
}  // namespace avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")
#define TT_BF16_DOT
namespace avx512bf16 {
constexpr int kLanes = 16, kRows = 4;
#include "matmul_kernels.inc"
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

// The best instruction set, or the one that a test asks for by the attribute `isa`; null if there is none.
const Kernels* Choose(std::string_view wanted) {
  for (const InstructionSet& set : InstructionSets())
    if (set.there && (wanted.empty() || wanted == set.name)) return set.kernels;
  return nullptr;
}

// Tasks 0..count that any thread may take; the one that brought them takes part, so they end
// even when no other thread is free. Those that come late find nothing and leave.
class Tasks {
 public:
  Tasks(int32_t count, std::function<void(int32_t)> run) : count_(count), run_(std::move(run)) {}

  static void RunAll(ffi::ThreadPool& threads, int32_t count, std::function<void(int32_t)> run) {
    auto tasks = std::make_shared<Tasks>(count, std::move(run));
    int64_t helpers = Smaller(threads.num_threads(), count) - 1;
    for (int64_t i = 0; i < helpers; ++i) threads.Schedule([tasks] { tasks->Take(); });
    tasks->Take();
    tasks->Wait();
  }

 private:
  void Take() {
    for (int32_t task; (task = next_.fetch_add(1)) < count_;) {
      run_(task);
      if (done_.fetch_add(1) + 1 == count_) done_.notify_all();
    }
  }

  // Another thread is in its last task: look a while, then sleep, for it may have lost its core.
  void Wait() {
    for (int i = 0; i < 2000 && done_.load() < count_; ++i) {
#if defined(__x86_64__)
      _mm_pause();
#endif
    }
    for (int32_t done; (done = done_.load()) < count_;) done_.wait(done);
  }

  const int32_t count_;
  const std::function<void(int32_t)> run_;
  std::atomic<int32_t> next_{0}, done_{0};
};

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

ffi::Error Wrong(std::string what) { return ffi::Error::InvalidArgument("tt_tpu.matmul: " + std::move(what)); }

// Empty when the operands fit each other.
std::string Mismatch(const ffi::AnyBuffer& x, const ffi::AnyBuffer& weights, const ffi::AnyBuffer& result, bool nk) {
  auto a = x.dimensions(), b = weights.dimensions(), c = result.dimensions();
  if (a.size() != 2 || b.size() != 2 || c.size() != 2) return "operands must be matrices";
  int64_t k = b[nk ? 1 : 0], n = b[nk ? 0 : 1];
  if (a[1] != k || c[0] != a[0] || c[1] != n) return "the shapes do not fit each other";
  if (!nk && a[0] > kMostRowsKN) return "more than " + std::to_string(kMostRowsKN) + " rows with [K, N] weights";
  auto type = x.element_type();
  if (type != ffi::F32 && type != ffi::BF16) return "x must be float or bfloat16";
  if (weights.element_type() != type) return "weights must have the type of x";
  auto out = result.element_type();
  if (out != ffi::F32 && out != ffi::BF16) return "result must be float or bfloat16";
  return "";
}

// A copy of x's rows as the kernels want them; null when there is no memory for it.
std::unique_ptr<void, Free> PrepareRows(const Kernels& kernels, const ffi::AnyBuffer& x, Problem* problem) {
  bool bf16 = x.element_type() == ffi::BF16;
  int64_t step = bf16 ? 2 * kernels.lanes : kernels.lanes;
  problem->stride = (problem->k + step - 1) / step * step;
  int64_t bytes = problem->m * problem->stride * (bf16 ? kernels.prepared_bf16_size : sizeof(float));
  std::unique_ptr<void, Free> rows(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
  if (rows == nullptr) return rows;
  if (bf16) {
    kernels.prepare_bf16(static_cast<const Bfloat16*>(problem->x), problem->m, problem->k, problem->stride, rows.get());
  } else {
    kernels.prepare_f32(static_cast<const float*>(problem->x), problem->m, problem->k, problem->stride, rows.get());
  }
  problem->x = rows.get();
  return rows;
}

// How many columns of the result one task computes: some 64 KiB of weights.
int64_t TaskWidth(bool nk, int64_t row_bytes) {
  int64_t least = nk ? 8 : 64, most = nk ? kPanel : kWidth;
  return std::clamp(kTaskBytes / std::max<int64_t>(1, row_bytes) / least * least, least, most);
}

ffi::Error Matmul(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer weights, ffi::Result<ffi::AnyBuffer> result,
                  ffi::Dictionary attributes) {
  auto layout = attributes.get<bool>("nk");
  if (!layout.has_value()) return Wrong("attribute nk is missing");
  bool nk = layout.value(), bf16 = x.element_type() == ffi::BF16;
  std::string mismatch = Mismatch(x, weights, *result, nk);
  if (!mismatch.empty()) return Wrong(mismatch);
  auto isa = attributes.contains("isa") ? attributes.get<std::string_view>("isa").value() : std::string_view();
  const Kernels* kernels = Choose(isa);
  if (kernels == nullptr) return Wrong("this CPU has no " + std::string(isa));

  int64_t m = x.dimensions()[0], k = x.dimensions()[1], n = result->dimensions()[1];
  Problem problem{x.untyped_data(), k, weights.untyped_data(), result->untyped_data(),
                  result->element_type() == ffi::BF16, m, k, n};
  std::unique_ptr<void, Free> rows;
  if (nk && m > 0 && k > 0) {
    rows = PrepareRows(*kernels, x, &problem);
    if (rows == nullptr) return ffi::Error(ffi::ErrorCode::kResourceExhausted, "tt_tpu.matmul: no memory for x");
  }
  auto run = nk ? (bf16 ? kernels->nk_bf16 : kernels->nk_f32) : (bf16 ? kernels->kn_bf16 : kernels->kn_f32);
  int64_t width = TaskWidth(nk, k * (bf16 ? sizeof(Bfloat16) : sizeof(float)));
  Tasks::RunAll(threads, (n + width - 1) / width,
                [&](int32_t task) { run(problem, task * width, Smaller((task + 1) * width, n)); });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kMatmul, Matmul,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attrs());

}  // namespace

FfiHandler MatmulHandler() { return {"tt_tpu.matmul", reinterpret_cast<void*>(kMatmul)}; }

}  // namespace tt
