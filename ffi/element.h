// The 16-bit storage types, and conversions between an element and the type it is computed in.
//
// Usable from host code and, where nvcc or clang compiles CUDA, from device code.
#ifndef JAX_GN_ELEMENT_H_
#define JAX_GN_ELEMENT_H_

#include <cstdint>
#include <cstring>

#include "problem.h"

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#define JAX_GN_HOST_DEVICE __host__ __device__ __forceinline__
#else
// Always inlined: these headers are compiled for several instruction sets, and the linker must not
// merge the copies into the one that an older CPU can't run.
#define JAX_GN_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace jax_gn {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// The type in which an element of type E is summed and computed.
template <typename E>
struct AccumulatorFor {
  using type = float;
};
template <>
struct AccumulatorFor<double> {
  using type = double;
};
template <typename E>
using Accumulator = typename AccumulatorFor<E>::type;

namespace internal {

JAX_GN_HOST_DEVICE float FloatFromBits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

JAX_GN_HOST_DEVICE uint32_t BitsFromFloat(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

JAX_GN_HOST_DEVICE float FloatFromHalfBits(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) return FloatFromBits(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  // Never by way of a subnormal float: XLA's threads take those for zeros.
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
  const float value =
      magnitude < 0x400u ? subnormal : FloatFromBits((magnitude << 13) + (112u << 23));
  return FloatFromBits(sign | BitsFromFloat(value));
}

JAX_GN_HOST_DEVICE uint16_t HalfBitsFromFloat(float value) {
  const uint32_t bits = BitsFromFloat(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);   // NaN, quiet
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to inf
  if (magnitude < 0x38800000u) {
    // Subnormal: adding 0.5 puts the unit of a subnormal half at the end of the float's mantissa,
    // so that the addition itself rounds to nearest even.
    const uint32_t rounded = BitsFromFloat(FloatFromBits(magnitude) + 0.5f) - 0x3f000000u;
    return static_cast<uint16_t>(sign | rounded);
  }
  const uint32_t to_even = 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + to_even) >> 13));
}

JAX_GN_HOST_DEVICE uint16_t BFloat16BitsFromFloat(float value) {
  const uint32_t bits = BitsFromFloat(value);
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<uint16_t>((is_nan ? bits | 0x400000u : rounded) >> 16);
}

}  // namespace internal

// Element -> number.
JAX_GN_HOST_DEVICE float ToNumber(float value) { return value; }
JAX_GN_HOST_DEVICE double ToNumber(double value) { return value; }
JAX_GN_HOST_DEVICE float ToNumber(BFloat16 value) {
  return internal::FloatFromBits(static_cast<uint32_t>(value.bits) << 16);
}
JAX_GN_HOST_DEVICE float ToNumber(Half value) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(value.bits));
#else
  return internal::FloatFromHalfBits(value.bits);
#endif
}

// Number -> element, rounding to nearest even. A double becomes a 16-bit element by way of float.
template <typename E>
struct ElementFrom {
  template <typename T>
  static JAX_GN_HOST_DEVICE E Convert(T value) {
    return static_cast<E>(value);
  }
};
template <>
struct ElementFrom<BFloat16> {
  static JAX_GN_HOST_DEVICE BFloat16 Convert(float value) {
    return BFloat16{internal::BFloat16BitsFromFloat(value)};
  }
};
template <>
struct ElementFrom<Half> {
  static JAX_GN_HOST_DEVICE Half Convert(float value) {
#if defined(__CUDA_ARCH__)
    return Half{__half_as_ushort(__float2half_rn(value))};
#else
    return Half{internal::HalfBitsFromFloat(value)};
#endif
  }
};
template <typename E, typename T>
JAX_GN_HOST_DEVICE E ToElement(T value) {
  return ElementFrom<E>::Convert(value);
}

// Calls visit(E()) with the element type of `dtype`, and returns what it returns.
template <typename Visitor>
inline auto VisitElement(DType dtype, Visitor&& visit) {
  switch (dtype) {
    case DType::kFloat16:
      return visit(Half());
    case DType::kBFloat16:
      return visit(BFloat16());
    case DType::kFloat64:
      return visit(double());
    case DType::kFloat32:
      break;
  }
  return visit(float());
}

}  // namespace jax_gn

#endif  // JAX_GN_ELEMENT_H_
