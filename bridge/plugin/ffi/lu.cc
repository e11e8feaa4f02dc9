// LuDecomposition, the one decomposition that torch_tpu and JAX leave to a custom call of the
// TPU which XLA's CPU compiler does not expand by itself (it does Qr, Eigh and the rest).
// jaxlib's LAPACK handlers are no way here: they are had from Python only, and a program runs
// while another thread may hold Python's lock and wait for it.
#include "xla/ffi/api/ffi.h"

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <numeric>
#include <utility>

#include "handlers.h"

#pragma GCC optimize("O3")  // vectors in the loops below

namespace tt {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kBlock = 32;  // columns that are eliminated before the rest is updated

// LAPACK's measure for pivots: no square root for complex numbers.
template <class T>
T Size(T value) { return std::abs(value); }
template <class T>
T Size(std::complex<T> value) { return std::abs(value.real()) + std::abs(value.imag()); }

// y -= factor * x. Written on the parts: the complex product of the standard library looks for NaN first.
template <class T>
void Subtract(T* y, const T* x, T factor, int64_t count) {
  for (int64_t i = 0; i < count; ++i) y[i] -= factor * x[i];
}
template <class T>
void Subtract(std::complex<T>* y, const std::complex<T>* x, std::complex<T> factor, int64_t count) {
  T re = factor.real(), im = factor.imag();
  auto* to = reinterpret_cast<T*>(y);
  auto* from = reinterpret_cast<const T*>(x);
  for (int64_t i = 0; i < 2 * count; i += 2) {
    T a = from[i], b = from[i + 1];
    to[i] -= re * a - im * b;
    to[i + 1] -= re * b + im * a;
  }
}

template <class T>
int64_t Pivot(const T* a, int64_t rows, int64_t columns, int64_t k) {
  int64_t best = k;
  for (int64_t i = k + 1; i < rows; ++i)
    if (Size(a[i * columns + k]) > Size(a[best * columns + k])) best = i;
  return best;
}

// Row i of L's block has been computed up to column `end`: take the block's part off the rest of row i.
template <class T>
void UpdateRow(T* a, int64_t columns, int64_t i, int64_t begin, int64_t end) {
  for (int64_t k = begin; k < std::min(end, i); ++k)
    Subtract(a + i * columns + end, a + k * columns + end, a[i * columns + k], columns - end);
}

// A = P' L U in place, rows and columns row-major, L's unit diagonal left out. Row i was
// exchanged with row pivots[i] >= i; row i of the result is row order[i] of A. A column
// without a pivot is left as it is, and U's diagonal then holds the zero.
template <class T>
void Decompose(T* a, int64_t rows, int64_t columns, int32_t* pivots, int32_t* order) {
  std::iota(order, order + rows, 0);
  int64_t rank = std::min(rows, columns);
  for (int64_t begin = 0; begin < rank; begin += kBlock) {
    int64_t end = std::min(begin + kBlock, rank);
    for (int64_t k = begin; k < end; ++k) {
      int64_t pivot = Pivot(a, rows, columns, k);
      pivots[k] = static_cast<int32_t>(pivot);
      if (pivot != k) {
        std::swap_ranges(a + k * columns, a + (k + 1) * columns, a + pivot * columns);
        std::swap(order[k], order[pivot]);
      }
      T diagonal = a[k * columns + k];
      if (diagonal == T(0)) continue;
      for (int64_t i = k + 1; i < rows; ++i) {
        T factor = a[i * columns + k] /= diagonal;
        Subtract(a + i * columns + k + 1, a + k * columns + k + 1, factor, end - k - 1);
      }
    }
    for (int64_t i = begin + 1; i < rows; ++i) UpdateRow(a, columns, i, begin, end);
  }
}

template <class T>
ffi::Error DecomposeAll(const ffi::AnyBuffer& a, ffi::AnyBuffer& lu, ffi::AnyBuffer& pivots, ffi::AnyBuffer& order) {
  auto shape = a.dimensions();
  int64_t rows = shape[shape.size() - 2], columns = shape[shape.size() - 1], rank = std::min(rows, columns);
  int64_t count = 1;
  for (size_t i = 0; i + 2 < shape.size(); ++i) count *= shape[i];
  auto* to = static_cast<T*>(lu.untyped_data());
  if (to != a.untyped_data()) std::copy_n(static_cast<const T*>(a.untyped_data()), count * rows * columns, to);
  auto* pivot = static_cast<int32_t*>(pivots.untyped_data());
  auto* row = static_cast<int32_t*>(order.untyped_data());
  for (int64_t i = 0; i < count; ++i)
    Decompose(to + i * rows * columns, rows, columns, pivot + i * rank, row + i * rows);
  return ffi::Error::Success();
}

ffi::Error LuDecomposition(ffi::AnyBuffer a, ffi::Result<ffi::AnyBuffer> lu, ffi::Result<ffi::AnyBuffer> pivots,
                           ffi::Result<ffi::AnyBuffer> order) {
  auto shape = a.dimensions();
  int64_t count = 1;
  for (size_t i = 0; i + 2 < shape.size(); ++i) count *= shape[i];
  if (shape.size() < 2 || lu->element_type() != a.element_type() || lu->element_count() != a.element_count() ||
      pivots->element_type() != ffi::S32 || order->element_type() != ffi::S32 ||
      static_cast<int64_t>(pivots->element_count()) != count * std::min(shape[shape.size() - 2], shape.back()) ||
      static_cast<int64_t>(order->element_count()) != count * shape[shape.size() - 2]) {
    return ffi::Error::InvalidArgument("LuDecomposition: want [..., m, n] to the same, int32 pivots and int32 rows");
  }
  switch (a.element_type()) {
    case ffi::F32: return DecomposeAll<float>(a, *lu, *pivots, *order);
    case ffi::F64: return DecomposeAll<double>(a, *lu, *pivots, *order);
    case ffi::C64: return DecomposeAll<std::complex<float>>(a, *lu, *pivots, *order);
    case ffi::C128: return DecomposeAll<std::complex<double>>(a, *lu, *pivots, *order);
    default: return ffi::Error::InvalidArgument("LuDecomposition: only float32, float64 and their complex types");
  }
}

XLA_FFI_DEFINE_HANDLER(kLuDecomposition, LuDecomposition,
                       ffi::Ffi::Bind()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>());

}  // namespace

FfiHandler LuDecompositionHandler() { return {"LuDecomposition", reinterpret_cast<void*>(kLuDecomposition)}; }

}  // namespace tt
