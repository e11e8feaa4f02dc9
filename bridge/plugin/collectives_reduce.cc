// The arithmetic of all_reduce and reduce_scatter. Blocks of elements are kept in registers and
// L1 while every rank's array is read once, so the speed is the memory's.
#include "collectives_reduce.h"

#include <algorithm>
#include <complex>
#include <cstring>
#include <limits>
#include <type_traits>

#include "xla/ffi/api/c_api.h"

#pragma GCC optimize("O3")  // vectors in the loops below

// One copy for processors with AVX2 and F16C, chosen when the library is loaded.
#if defined(__x86_64__)
#define TT_CLONES __attribute__((target_clones("arch=haswell", "default")))
#else
#define TT_CLONES
#endif
#define TT_INLINE inline __attribute__((always_inline))

namespace tt {
namespace {

constexpr size_t kBlock = 512;

struct Bfloat16 {
  uint16_t bits;
};

// How an element is held while it is accumulated.
template <class T>
struct Held {
  using Type = T;
  static TT_INLINE T Load(T value) { return value; }
  static TT_INLINE T Store(T value) { return value; }
};

template <>
struct Held<_Float16> {
  using Type = float;
  static TT_INLINE float Load(_Float16 value) { return static_cast<float>(value); }
  static TT_INLINE _Float16 Store(float value) { return static_cast<_Float16>(value); }
};

template <>
struct Held<Bfloat16> {
  using Type = float;
  static TT_INLINE float Load(Bfloat16 value) {
    uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
  }
  // To the nearest, ties to even; a NaN stays one.
  static TT_INLINE Bfloat16 Store(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return {static_cast<uint16_t>(value != value ? (bits >> 16 | 0x40) : rounded)};
  }
};

template <class T>
constexpr bool kIsComplex = false;
template <class T>
constexpr bool kIsComplex<std::complex<T>> = true;

// Signed sums and products wrap, as StableHLO's do.
template <class T>
using Wrapping = typename std::conditional_t<std::is_integral_v<T> && !std::is_same_v<T, bool>, std::make_unsigned<T>,
                                             std::type_identity<T>>::type;

struct Sum {
  template <class T>
  static TT_INLINE T Apply(T a, T b) {
    if constexpr (std::is_same_v<T, bool>) return a || b;
    else return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
  }
};

struct Product {
  template <class T>
  static TT_INLINE T Apply(T a, T b) {
    if constexpr (std::is_same_v<T, bool>) return a && b;
    else if constexpr (sizeof(T) < sizeof(int) && std::is_integral_v<T>)
      return static_cast<T>(static_cast<unsigned>(a) * static_cast<unsigned>(b));
    else return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
  }
};

// NaN wins over every number, as in StableHLO.
struct Minimum {
  template <class T>
  static TT_INLINE T Apply(T a, T b) { return a < b || a != a ? a : b; }
};

struct Maximum {
  template <class T>
  static TT_INLINE T Apply(T a, T b) { return a > b || a != a ? a : b; }
};

struct And {
  template <class T>
  static TT_INLINE T Apply(T a, T b) { return a & b; }
};

struct Or {
  template <class T>
  static TT_INLINE T Apply(T a, T b) { return a | b; }
};

struct Xor {
  template <class T>
  static TT_INLINE T Apply(T a, T b) { return a ^ b; }
};

template <class T, class Op>
TT_INLINE void Reduce(const void* const* sources, int count, void* out, size_t elements) {
  using Type = typename Held<T>::Type;
  Type held[kBlock];
  for (size_t start = 0; start < elements; start += kBlock) {
    const size_t size = std::min(kBlock, elements - start);
    const T* first = static_cast<const T*>(sources[0]) + start;
    for (size_t i = 0; i < size; ++i) held[i] = Held<T>::Load(first[i]);
    for (int rank = 1; rank < count; ++rank) {
      const T* next = static_cast<const T*>(sources[rank]) + start;
      for (size_t i = 0; i < size; ++i) held[i] = Op::Apply(held[i], Held<T>::Load(next[i]));
    }
    T* result = static_cast<T*>(out) + start;
    for (size_t i = 0; i < size; ++i) result[i] = Held<T>::Store(held[i]);
  }
}

// The common case has its loop compiled for newer processors too.
#define TT_FAST(Name, T, Op) \
  TT_CLONES void Name(const void* const* s, int c, void* o, size_t n) { Reduce<T, Op>(s, c, o, n); }
TT_FAST(SumF32, float, Sum)
TT_FAST(SumBf16, Bfloat16, Sum)
TT_FAST(SumF16, _Float16, Sum)
TT_FAST(MaxF32, float, Maximum)
TT_FAST(MaxBf16, Bfloat16, Maximum)
#undef TT_FAST

template <class T, class Op>
void Plain(const void* const* sources, int count, void* out, size_t elements) {
  Reduce<T, Op>(sources, count, out, elements);
}

template <class T>
Reducer ForType(Reduction reduction) {
  switch (reduction) {
    case Reduction::kSum: return Plain<T, Sum>;
    case Reduction::kProduct: return Plain<T, Product>;
    default: break;
  }
  if constexpr (!kIsComplex<T>) {
    if (reduction == Reduction::kMinimum) return Plain<T, Minimum>;
    if (reduction == Reduction::kMaximum) return Plain<T, Maximum>;
  }
  if constexpr (std::is_integral_v<T>) {
    if (reduction == Reduction::kAnd) return Plain<T, And>;
    if (reduction == Reduction::kOr) return Plain<T, Or>;
    if (reduction == Reduction::kXor) return Plain<T, Xor>;
  }
  return nullptr;
}

}  // namespace

Reducer FindReducer(int type, Reduction reduction) {
  if (reduction == Reduction::kSum) {
    if (type == XLA_FFI_DataType_F32) return SumF32;
    if (type == XLA_FFI_DataType_BF16) return SumBf16;
    if (type == XLA_FFI_DataType_F16) return SumF16;
  }
  if (reduction == Reduction::kMaximum) {
    if (type == XLA_FFI_DataType_F32) return MaxF32;
    if (type == XLA_FFI_DataType_BF16) return MaxBf16;
  }
  switch (type) {
    case XLA_FFI_DataType_PRED: return ForType<bool>(reduction);
    case XLA_FFI_DataType_S8: return ForType<int8_t>(reduction);
    case XLA_FFI_DataType_S16: return ForType<int16_t>(reduction);
    case XLA_FFI_DataType_S32: return ForType<int32_t>(reduction);
    case XLA_FFI_DataType_S64: return ForType<int64_t>(reduction);
    case XLA_FFI_DataType_U8: return ForType<uint8_t>(reduction);
    case XLA_FFI_DataType_U16: return ForType<uint16_t>(reduction);
    case XLA_FFI_DataType_U32: return ForType<uint32_t>(reduction);
    case XLA_FFI_DataType_U64: return ForType<uint64_t>(reduction);
    case XLA_FFI_DataType_F16: return ForType<_Float16>(reduction);
    case XLA_FFI_DataType_BF16: return ForType<Bfloat16>(reduction);
    case XLA_FFI_DataType_F32: return ForType<float>(reduction);
    case XLA_FFI_DataType_F64: return ForType<double>(reduction);
    case XLA_FFI_DataType_C64: return ForType<std::complex<float>>(reduction);
    case XLA_FFI_DataType_C128: return ForType<std::complex<double>>(reduction);
    default: return nullptr;
  }
}

size_t ElementSize(int type) {
  switch (type) {
    case XLA_FFI_DataType_INVALID: case XLA_FFI_DataType_TOKEN: return 0;
    case XLA_FFI_DataType_S1: case XLA_FFI_DataType_U1: case XLA_FFI_DataType_S2: case XLA_FFI_DataType_U2:
    case XLA_FFI_DataType_S4: case XLA_FFI_DataType_U4: case XLA_FFI_DataType_F4E2M1FN: return 0;
    case XLA_FFI_DataType_S16: case XLA_FFI_DataType_U16: case XLA_FFI_DataType_F16: case XLA_FFI_DataType_BF16:
      return 2;
    case XLA_FFI_DataType_S32: case XLA_FFI_DataType_U32: case XLA_FFI_DataType_F32: return 4;
    case XLA_FFI_DataType_S64: case XLA_FFI_DataType_U64: case XLA_FFI_DataType_F64: case XLA_FFI_DataType_C64:
      return 8;
    case XLA_FFI_DataType_C128: return 16;
    default: return 1;  // booleans, bytes and the eight-bit floats
  }
}

const char* TypeName(int type) {
  switch (type) {
    case XLA_FFI_DataType_PRED: return "bool";
    case XLA_FFI_DataType_S8: return "i8";
    case XLA_FFI_DataType_S16: return "i16";
    case XLA_FFI_DataType_S32: return "i32";
    case XLA_FFI_DataType_S64: return "i64";
    case XLA_FFI_DataType_U8: return "u8";
    case XLA_FFI_DataType_U16: return "u16";
    case XLA_FFI_DataType_U32: return "u32";
    case XLA_FFI_DataType_U64: return "u64";
    case XLA_FFI_DataType_F16: return "f16";
    case XLA_FFI_DataType_BF16: return "bf16";
    case XLA_FFI_DataType_F32: return "f32";
    case XLA_FFI_DataType_F64: return "f64";
    case XLA_FFI_DataType_C64: return "c64";
    case XLA_FFI_DataType_C128: return "c128";
    default: return "other";
  }
}

const char* ReductionName(Reduction reduction) {
  switch (reduction) {
    case Reduction::kSum: return "sum";
    case Reduction::kProduct: return "product";
    case Reduction::kMinimum: return "minimum";
    case Reduction::kMaximum: return "maximum";
    case Reduction::kAnd: return "and";
    case Reduction::kOr: return "or";
    case Reduction::kXor: return "xor";
    default: return "";
  }
}

}  // namespace tt
