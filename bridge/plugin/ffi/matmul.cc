// The matmul of the emulated chip: x [M, K] times weights, [N, K] as torch keeps them or
// [K, N], in float or bfloat16, with sums in float. XLA's CPU compiler reads weights at
// a tenth of the memory's speed for the few rows of a decode step; this reads them once, at
// about that speed, on XLA's own threads.
#include "xla/ffi/api/ffi.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "handlers.h"
#include "kernels.h"
#include "tasks.h"

namespace tt {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kTaskBytes = 64 << 10;
constexpr int64_t kMostRowsAtOnce = 1024;  // rows of x whose copy is in memory

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

// A copy of x's rows as the kernels want them, where they are not that already; false when there is no memory.
bool PrepareRows(const Kernels& kernels, bool nk, bool bf16, Problem* problem, Memory* rows) {
  if (!nk && !bf16) return true;
  problem->stride = nk ? kernels.Stride(problem->k, bf16) : problem->k;
  *rows = Allocate(problem->m * problem->stride * (nk ? kernels.PreparedSize(bf16) : sizeof(float)));
  if (*rows == nullptr) return false;
  const void* x = std::exchange(problem->x, rows->get());
  auto* narrow = static_cast<const Bfloat16*>(x);
  if (!nk) {
    auto* wide = static_cast<float*>(rows->get());
    for (int64_t i = 0; i < problem->m * problem->k; ++i) wide[i] = ToFloat(narrow[i]);
  } else if (bf16) {
    kernels.prepare_bf16(narrow, problem->m, problem->k, problem->stride, rows->get());
  } else {
    kernels.prepare_f32(static_cast<const float*>(x), problem->m, problem->k, problem->stride, rows->get());
  }
  return true;
}

// How many columns of the result one task computes: some 64 KiB of weights.
int64_t TaskWidth(bool nk, int64_t row_bytes) {
  int64_t least = nk ? 8 : 64, most = nk ? 64 : 256;
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
  const Kernels* kernels = FindKernels(isa);
  if (kernels == nullptr) return Wrong("this CPU has no " + std::string(isa));

  int64_t m = x.dimensions()[0], k = x.dimensions()[1], n = result->dimensions()[1];
  bool result_bf16 = result->element_type() == ffi::BF16;
  int64_t size = bf16 ? sizeof(Bfloat16) : sizeof(float), result_size = result_bf16 ? sizeof(Bfloat16) : sizeof(float);
  auto run = nk ? (bf16 ? kernels->nk_bf16 : kernels->nk_f32) : (bf16 ? kernels->kn_bf16 : kernels->kn_f32);
  int64_t width = TaskWidth(nk, k * size);
  for (int64_t row = 0; row < m; row += kMostRowsAtOnce) {
    const void* rows_of_x = static_cast<const char*>(x.untyped_data()) + row * k * size;
    void* rows_of_result = static_cast<char*>(result->untyped_data()) + row * n * result_size;
    int64_t count = Smaller(kMostRowsAtOnce, m - row);
    Problem problem{rows_of_x, k, weights.untyped_data(), rows_of_result, result_bf16, count, k, n};
    Memory rows;
    if (k > 0 && !PrepareRows(*kernels, nk, bf16, &problem, &rows))
      return ffi::Error(ffi::ErrorCode::kResourceExhausted, "tt_tpu.matmul: no memory for rows of x");
    Tasks::RunAll(threads, (n + width - 1) / width,
                  [&](int32_t task) { run(problem, task * width, Smaller((task + 1) * width, n)); });
  }
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
