// SIMD registers as GCC vector types, and how elements of every type get into and out of them.
//
// Included by loops.cc alone, which is compiled once per instruction set: all of it lives in that
// compilation's own namespace.
#ifndef JAX_GN_CPU_VECTOR_H_
#define JAX_GN_CPU_VECTOR_H_

#include <cstdint>
#if defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#include "../element.h"

namespace jax_gn::cpu::JAX_GN_ISA {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif

#define JAX_GN_INLINE inline __attribute__((always_inline))

typedef float FloatV __attribute__((vector_size(kVectorBytes)));
typedef float FloatHalfV __attribute__((vector_size(kVectorBytes / 2)));
typedef double DoubleV __attribute__((vector_size(kVectorBytes)));
typedef uint32_t UintV __attribute__((vector_size(kVectorBytes)));
typedef uint16_t UshortV __attribute__((vector_size(kVectorBytes / 2)));

template <typename T>
struct VecFor;
template <>
struct VecFor<float> {
  using type = FloatV;
};
template <>
struct VecFor<double> {
  using type = DoubleV;
};
// A register of numbers, T = float or double.
template <typename T>
using Vec = typename VecFor<T>::type;

template <typename T>
inline constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

template <typename To, typename From>
JAX_GN_INLINE To BitCast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename T>
JAX_GN_INLINE Vec<T> Broadcast(T value) {
  return Vec<T>{} + value;
}

// How much of a register an access covers: all of it, or its first `count` lanes.
struct Full {};
struct Partial {
  int count;
};

JAX_GN_INLINE FloatV Load(Full, const float* p) {
  FloatV v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

JAX_GN_INLINE DoubleV Load(Full, const double* p) {
  DoubleV v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

JAX_GN_INLINE FloatV Load(Full, const BFloat16* p) {
  UshortV v;
  __builtin_memcpy(&v, p, sizeof(v));
  return BitCast<FloatV>(__builtin_convertvector(v, UintV) << 16);
}

JAX_GN_INLINE FloatV Load(Full, const Half* p) {
#if defined(__AVX512F__)
  // The zero-masked forms: GCC 12 warns of the undefined register in the plain ones.
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__) && defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  FloatV v;
  for (int i = 0; i < kLanes<float>; ++i) v[i] = ToNumber(p[i]);
  return v;
#endif
}

// The other lanes are zero.
template <typename E>
JAX_GN_INLINE Vec<Accumulator<E>> Load(Partial part, const E* p) {
  Vec<Accumulator<E>> v = {};
  for (int i = 0; i < part.count; ++i) v[i] = ToNumber(p[i]);
  return v;
}

JAX_GN_INLINE void Store(Full, float* p, FloatV v) { __builtin_memcpy(p, &v, sizeof(v)); }

JAX_GN_INLINE void Store(Full, double* p, DoubleV v) { __builtin_memcpy(p, &v, sizeof(v)); }

JAX_GN_INLINE void Store(Full, BFloat16* p, FloatV v) {
  const UintV bits = BitCast<UintV>(v);
  const UintV rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const UintV kept = v == v ? rounded : (bits | 0x400000u);  // NaN stays one, and gets quiet
  const UshortV out = __builtin_convertvector(kept >> 16, UshortV);
  __builtin_memcpy(p, &out, sizeof(out));
}

JAX_GN_INLINE void Store(Full, Half* p, FloatV v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__) && defined(__AVX2__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes<float>; ++i) p[i] = ToElement<Half>(v[i]);
#endif
}

// A store of a register to an address aligned for it, past the cache: a large result leaves the
// cache anyway, and its lines need not be read before they are written (Zen 3, 42 MB float32: -25 %
// of the forward pass). StreamFence() after the last one. AVX-512: not measured, so not used.
#if defined(__AVX2__) && !defined(__AVX512F__)
JAX_GN_INLINE void Stream(float* p, FloatV v) { _mm256_stream_ps(p, BitCast<__m256>(v)); }
JAX_GN_INLINE void Stream(double* p, DoubleV v) { _mm256_stream_pd(p, BitCast<__m256d>(v)); }
template <typename E>
JAX_GN_INLINE void Stream(E* p, FloatV v) {
  alignas(16) E out[kLanes<float>];
  Store(Full(), out, v);
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), *reinterpret_cast<const __m128i*>(out));
}
inline constexpr bool kHasStream = true;
JAX_GN_INLINE void StreamFence() { _mm_sfence(); }
#else
template <typename E>
JAX_GN_INLINE void Stream(E* p, Vec<Accumulator<E>> v) {
  Store(Full(), p, v);
}
inline constexpr bool kHasStream = false;
JAX_GN_INLINE void StreamFence() {}
#endif

template <typename E>
JAX_GN_INLINE void Store(Partial part, E* p, Vec<Accumulator<E>> v) {
  for (int i = 0; i < part.count; ++i) p[i] = ToElement<E>(v[i]);
}

// sums[i] += v[i], in double.
JAX_GN_INLINE void AddTo(double* sums, DoubleV v) { Store(Full(), sums, Load(Full(), sums) + v); }

JAX_GN_INLINE void AddTo(double* sums, FloatV v) {
  FloatHalfV halves[2];
  __builtin_memcpy(halves, &v, sizeof(v));
  AddTo(sums, __builtin_convertvector(halves[0], DoubleV));
  AddTo(sums + kLanes<double>, __builtin_convertvector(halves[1], DoubleV));
}

}  // namespace jax_gn::cpu::JAX_GN_ISA

#endif  // JAX_GN_CPU_VECTOR_H_
