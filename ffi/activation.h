// The fused activations, their derivatives, and what they do to a cotangent.
//
// V is float or double, or (on the host) a vector of them: the same formulas serve one CUDA lane
// and one SIMD register. Everything stays finite for finite z: no inf * 0, and NaN stays NaN.
#ifndef JAX_GN_ACTIVATION_H_
#define JAX_GN_ACTIVATION_H_

#include "element.h"
#include "problem.h"

#if defined(__CUDACC__)
#include <cmath>
#else
#include "cpu/exp.h"
#endif

namespace jax_gn {

#if defined(__CUDACC__)
JAX_GN_HOST_DEVICE float Exp(float x) {
#if defined(__CUDA_ARCH__)
  return expf(x);  // __expf is off by |x| ULP: too much for float32 results
#else
  return std::exp(x);
#endif
}
JAX_GN_HOST_DEVICE double Exp(double x) { return exp(x); }
template <typename V>
using Scalar = V;
#else
using cpu::Exp;
using cpu::Scalar;
#endif

inline constexpr double kLeakyReluSlope = 0.01;  // jax.nn.leaky_relu's default
inline constexpr double kGeluTwiceRootTwoOverPi = 1.5957691216057308;
inline constexpr double kGeluCubic = 0.044715;

namespace internal {

template <typename V>
JAX_GN_HOST_DEVICE V Sigmoid(V z) {
  return Scalar<V>(1) / (Scalar<V>(1) + Exp(-z));
}

// max(z, bound); NaN stays NaN.
template <typename V>
JAX_GN_HOST_DEVICE V AtLeast(V z, Scalar<V> bound) {
  return z < V{} + bound ? V{} + bound : z;
}

// The sigmoid s and 1 - s. The difference is taken as e s, with e = exp(-z) = (1 - s) / s, as
// subtracting from 1 would cancel for large z. For z >= -88, where e stays finite.
template <typename V>
struct SigmoidPair {
  V s, rest;
};
template <typename V>
JAX_GN_HOST_DEVICE SigmoidPair<V> SigmoidAndRest(V z) {
  const V e = Exp(-z);
  const V s = Scalar<V>(1) / (Scalar<V>(1) + e);
  return {s, e * s};
}

// 2u of gelu(z) = z/2 (1 + tanh u) = z sigmoid(2u).
template <typename V>
JAX_GN_HOST_DEVICE V GeluArgument(V z) {
  return z * (Scalar<V>(kGeluTwiceRootTwoOverPi) +
              Scalar<V>(kGeluTwiceRootTwoOverPi * kGeluCubic) * (z * z));
}

}  // namespace internal

// y of z.
template <Activation kActivation, typename V>
JAX_GN_HOST_DEVICE V Activate(V z) {
  if constexpr (kActivation == Activation::kSilu) {
    return z * internal::Sigmoid(z);
  } else if constexpr (kActivation == Activation::kRelu) {
    return z <= V{} ? V{} : z;  // keeps NaN
  } else if constexpr (kActivation == Activation::kGelu) {
    return z * internal::Sigmoid(internal::GeluArgument(z));
  } else if constexpr (kActivation == Activation::kLeakyRelu) {
    return z >= V{} ? z : z * Scalar<V>(kLeakyReluSlope);
  } else {
    return z;
  }
}

// dy/dz at z.
template <Activation kActivation, typename V>
JAX_GN_HOST_DEVICE V ActivationGrad(V z) {
  using S = Scalar<V>;
  const V one = V{} + S(1);
  if constexpr (kActivation == Activation::kSilu) {
    const internal::SigmoidPair<V> at = internal::SigmoidAndRest(internal::AtLeast(z, S(-80)));
    return at.s * (one + z * at.rest);
  } else if constexpr (kActivation == Activation::kRelu) {
    return z > V{} ? one : V{};
  } else if constexpr (kActivation == Activation::kGelu) {
    // Beyond 10 the derivative is 0 or 1 to within 1e-35; the bound keeps z^2 and the exp finite.
    const V clamped = -internal::AtLeast(-internal::AtLeast(z, S(-10)), S(-10));
    const internal::SigmoidPair<V> at = internal::SigmoidAndRest(internal::GeluArgument(clamped));
    const V slope = S(kGeluTwiceRootTwoOverPi) +
                    S(3 * kGeluTwiceRootTwoOverPi * kGeluCubic) * (clamped * clamped);
    return at.s * (one + clamped * slope * at.rest);
  } else if constexpr (kActivation == Activation::kLeakyRelu) {
    return z >= V{} ? one : V{} + S(kLeakyReluSlope);
  } else {
    return one;
  }
}

// dz from dy: dy times the derivative, but a select where jax.nn selects, so that relu drops even
// an infinite dy.
template <Activation kActivation, typename V>
JAX_GN_HOST_DEVICE V ActivationBackward(V dy, V z) {
  if constexpr (kActivation == Activation::kNone) {
    return dy;
  } else if constexpr (kActivation == Activation::kRelu) {
    return z > V{} ? dy : V{};
  } else {
    return dy * ActivationGrad<kActivation>(z);
  }
}

}  // namespace jax_gn

#endif  // JAX_GN_ACTIVATION_H_
