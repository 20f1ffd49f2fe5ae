// exp in plain arithmetic, for float, double and SIMD vectors of them (GCC's vector extension).
#ifndef JAX_GN_CPU_EXP_H_
#define JAX_GN_CPU_EXP_H_

#include <cstdint>
#include <type_traits>
#include <utility>

namespace jax_gn::cpu {

// The element type of a vector; a scalar's own type.
template <typename V, typename = void>
struct ScalarOf {
  using type = V;
};
template <typename V>
struct ScalarOf<V, std::void_t<decltype(std::declval<V&>()[0])>> {
  using type = std::remove_reference_t<decltype(std::declval<V&>()[0])>;
};
template <typename V>
using Scalar = typename ScalarOf<V>::type;

// What exp needs to know of a floating-point format.
template <typename S>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  using Bits = uint32_t;
  static constexpr int kMantissa = 23, kBias = 127, kDegree = 7;
  static constexpr float kLow = -87.0f, kHigh = 88.8f;
  static constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  static constexpr float kRound = 0x1.8p23f;
};

template <>
struct ExpConstants<double> {
  using Bits = uint64_t;
  static constexpr int kMantissa = 52, kBias = 1023, kDegree = 13;
  static constexpr double kLow = -708.0, kHigh = 709.8;
  static constexpr double kLn2High = 6.93145751953125e-1, kLn2Low = 1.42860682030941723212e-6;
  static constexpr double kRound = 0x1.8p52;
};

inline constexpr double kInverseFactorial[] = {1.0,
                                               1.0,
                                               1.0 / 2,
                                               1.0 / 6,
                                               1.0 / 24,
                                               1.0 / 120,
                                               1.0 / 720,
                                               1.0 / 5040,
                                               1.0 / 40320,
                                               1.0 / 362880,
                                               1.0 / 3628800,
                                               1.0 / 39916800,
                                               1.0 / 479001600,
                                               1.0 / 6227020800};

// exp(x) to 1 or 2 units in the last place where it is a normal number; 0 < exp(x) < 2^-125
// (2^-1021) below that, infinity above, NaN for NaN. x = n ln 2 + r with n whole, exp(r) by
// Taylor's series.
template <typename V>
inline __attribute__((always_inline)) V Exp(V x) {
  using S = Scalar<V>;
  using C = ExpConstants<S>;
  x = x < V{} + C::kLow ? V{} + C::kLow : x;
  x = x > V{} + C::kHigh ? V{} + C::kHigh : x;
  // Adding 1.5 * 2^mantissa rounds to a whole number, which is then also in the low bits.
  const V shifted = x * S(1.4426950408889634) + C::kRound;
  const V n = shifted - C::kRound;
  const V r = (x - n * C::kLn2High) - n * C::kLn2Low;
  V sum = V{} + S(kInverseFactorial[C::kDegree]);
#pragma GCC unroll 16
  for (int k = C::kDegree - 1; k >= 0; --k) sum = sum * r + S(kInverseFactorial[k]);
  // 2^n by its bits; the largest n, one beyond the largest exponent, makes infinity.
  using Bits = typename C::Bits;
  typedef Bits BitsV __attribute__((vector_size(sizeof(V))));
  BitsV bits;
  __builtin_memcpy(&bits, &shifted, sizeof(V));
  bits = (bits + Bits(C::kBias)) << C::kMantissa;
  V power;
  __builtin_memcpy(&power, &bits, sizeof(V));
  return sum * power;
}

}  // namespace jax_gn::cpu

#endif  // JAX_GN_CPU_EXP_H_
