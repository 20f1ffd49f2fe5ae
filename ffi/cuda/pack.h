// Device access to memory: packs of elements and their numbers, parameters of any type.
//
// A pack is 16 bytes, or half of that where a kernel's registers are short. It is loaded and stored
// in one access where its address allows, else element by element: any alignment is right. Numbers
// are float, or double for double elements.
#ifndef JAX_GN_CUDA_PACK_H_
#define JAX_GN_CUDA_PACK_H_

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "../activation.h"
#include "../element.h"
#include "../problem.h"
#include "cut.h"

namespace jax_gn::internal {

// Five instructions: exp and the reciprocal are special functions, each within 2 ULP (exp of a
// small argument: |z| / 2 ULP more). Denormals are taken for 0, infinity has the reciprocal 0.
template <>
JAX_GN_HOST_DEVICE SigmoidPair<float> SigmoidAndRest(float z) {
#if defined(__CUDA_ARCH__)
  float e, s;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(z * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + e));
#else
  const float e = std::exp(-z), s = 1.0f / (1.0f + e);
#endif
  return {s, e * s};
}
template <>
JAX_GN_HOST_DEVICE float Sigmoid(float z) {
  return SigmoidAndRest(z).s;
}

}  // namespace jax_gn::internal

namespace jax_gn::cuda {

template <typename E>
inline constexpr int kPackSize = kPackBytes / static_cast<int>(sizeof(E));

template <typename E, int kSize = kPackSize<E>>
struct alignas(kSize * sizeof(E)) Pack {
  E values[kSize];
  using Raw = std::conditional_t<kSize * sizeof(E) == kPackBytes, uint4, uint2>;
};

// How many elements `pointer` lies behind a 16-byte boundary.
template <typename E>
__device__ __forceinline__ int Phase(const E* pointer) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(pointer) % kPackBytes / sizeof(E));
}

// `from` is aligned as a pack is.
template <typename E, int kSize = kPackSize<E>>
__device__ __forceinline__ Pack<E, kSize> LoadPack(const E* from) {
  Pack<E, kSize> pack;
  const auto raw = __ldg(reinterpret_cast<const typename Pack<E, kSize>::Raw*>(from));
  memcpy(&pack, &raw, sizeof(pack));
  return pack;
}

// Past the caches, which keep what other passes still read.
template <typename E, int kSize>
__device__ __forceinline__ void StorePack(E* to, const Pack<E, kSize>& pack) {
  typename Pack<E, kSize>::Raw raw;
  memcpy(&raw, &pack, sizeof(raw));
  __stcs(reinterpret_cast<decltype(raw)*>(to), raw);
}

// Elements of 16 bits are handled two at a time, as words: the compiler would otherwise take packs
// apart, and put them together again, also where they are loaded whole.
template <typename E>
inline constexpr bool kPaired = sizeof(E) == 2;
template <typename E, int kSize>
struct Words {
  unsigned words[kSize / 2];

  Words() = default;
  __device__ __forceinline__ explicit Words(const Pack<E, kSize>& pack) {
    memcpy(words, &pack, sizeof(words));
  }
  __device__ __forceinline__ Pack<E, kSize> ToPack() const {
    Pack<E, kSize> pack;
    memcpy(&pack, words, sizeof(words));
    return pack;
  }
};

// Elements first .. last - 1 of the pack at `from`; the others are zeros.
template <typename E, int kSize = kPackSize<E>>
__device__ __forceinline__ Pack<E, kSize> LoadPart(const E* from, int first, int last) {
  if constexpr (kPaired<E>) {
    Words<E, kSize> pairs = {};
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (first <= i && i < last) {
        pairs.words[i / 2] |= static_cast<unsigned>(from[i].bits) << (i % 2 * 16);
      }
    }
    return pairs.ToPack();
  } else {
    Pack<E, kSize> pack = {};
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (first <= i && i < last) pack.values[i] = from[i];
    }
    return pack;
  }
}

template <typename E, int kSize>
__device__ __forceinline__ void StorePart(E* to, const Pack<E, kSize>& pack, int first, int last) {
  if constexpr (kPaired<E>) {
    const Words<E, kSize> pairs(pack);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (first <= i && i < last) {
        to[i].bits = static_cast<uint16_t>(pairs.words[i / 2] >> (i % 2 * 16));
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (first <= i && i < last) to[i] = pack.values[i];
    }
  }
}

__device__ __forceinline__ float2 ToPair(BFloat16, unsigned word) {
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
}
__device__ __forceinline__ float2 ToPair(Half, unsigned word) {
  __half2 pair;
  memcpy(&pair, &word, sizeof(pair));
  return __half22float2(pair);
}
__device__ __forceinline__ unsigned ToWord(BFloat16, float first, float second) {
  unsigned word;
  const __nv_bfloat162 pair =
      __floats2bfloat162_rn(first, second);  // one instruction from sm_80 on
  memcpy(&word, &pair, sizeof(word));
  return word;
}
__device__ __forceinline__ unsigned ToWord(Half, float first, float second) {
  unsigned word;
  const __half2 pair = __floats2half2_rn(first, second);
  memcpy(&word, &pair, sizeof(word));
  return word;
}

template <typename E, int kSize, typename T>
__device__ __forceinline__ void ToNumbers(const Pack<E, kSize>& pack, T (&numbers)[kSize]) {
  if constexpr (kPaired<E>) {
    const Words<E, kSize> pairs(pack);
#pragma unroll
    for (int i = 0; i < kSize; i += 2) {
      const float2 pair = ToPair(E(), pairs.words[i / 2]);
      numbers[i] = pair.x;
      numbers[i + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) numbers[i] = ToNumber(pack.values[i]);
  }
}

template <typename E, int kSize, typename T>
__device__ __forceinline__ Pack<E, kSize> ToPack(const T (&numbers)[kSize]) {
  if constexpr (kPaired<E>) {
    Words<E, kSize> pairs;
#pragma unroll
    for (int i = 0; i < kSize; i += 2) {
      pairs.words[i / 2] = ToWord(E(), numbers[i], numbers[i + 1]);
    }
    return pairs.ToPack();
  } else {
    Pack<E, kSize> pack;
#pragma unroll
    for (int i = 0; i < kSize; ++i) pack.values[i] = ToElement<E>(numbers[i]);
    return pack;
  }
}

// scale, bias or addend: nullptr where absent.
struct Parameter {
  const void* data;
  DType dtype;
  int64_t sample_stride;  // 0 per channel, C per sample

  Parameter(const void* data, DType dtype, Param form, int64_t channels)
      : data(data), dtype(dtype), sample_stride(form == Param::kPerSample ? channels : 0) {}

  // Channels channel .. channel + count - 1; `fallback` where absent or beyond.
  template <int kCount, typename T>
  __device__ __forceinline__ void Load(int64_t n, int64_t channel, int count, T fallback,
                                       T (&numbers)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) numbers[i] = fallback;
    if (data == nullptr) return;
    const int64_t first = n * sample_stride + channel;
    switch (dtype) {
      case DType::kFloat32:
        return LoadAs<float>(first, count, numbers);
      case DType::kFloat16:
        return LoadAs<Half>(first, count, numbers);
      case DType::kBFloat16:
        return LoadAs<BFloat16>(first, count, numbers);
      case DType::kFloat64:
        return LoadAs<double>(first, count, numbers);
    }
  }

  template <typename T>
  __device__ __forceinline__ T LoadOne(int64_t n, int64_t channel, T fallback) const {
    T number[1];
    Load(n, channel, 1, fallback, number);
    return number[0];
  }

 private:
  template <typename E, int kCount, typename T>
  __device__ __forceinline__ void LoadAs(int64_t first, int count, T (&numbers)[kCount]) const {
    const E* from = static_cast<const E*>(data) + first;
    constexpr int kBytes = kCount * static_cast<int>(sizeof(E));
    if constexpr (kBytes % kPackBytes == 0) {
      if (count == kCount && reinterpret_cast<uintptr_t>(from) % kPackBytes == 0) {
        constexpr int kSize = kPackSize<E>;
#pragma unroll
        for (int i = 0; i < kCount; i += kSize) {
          const Pack<E> pack = LoadPack<E>(from + i);
#pragma unroll
          for (int j = 0; j < kSize; ++j) numbers[i + j] = static_cast<T>(ToNumber(pack.values[j]));
        }
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count) numbers[i] = static_cast<T>(ToNumber(from[i]));
    }
  }
};

// A gradient of a parameter, of any type.
__device__ __forceinline__ void StoreAs(DType dtype, void* to, int64_t index, double value) {
  switch (dtype) {
    case DType::kFloat32:
      static_cast<float*>(to)[index] = static_cast<float>(value);
      return;
    case DType::kFloat16:
      static_cast<Half*>(to)[index] = ToElement<Half>(static_cast<float>(value));
      return;
    case DType::kBFloat16:
      static_cast<BFloat16*>(to)[index] = ToElement<BFloat16>(static_cast<float>(value));
      return;
    case DType::kFloat64:
      static_cast<double*>(to)[index] = value;
      return;
  }
}

// The activation is an argument of the kernels, a fifth of the instantiations: a uniform branch
// before a loop, or for each pack. Calls f(tag), tag() a constant.
template <Activation kActivation>
struct ActivationTag {
  __device__ constexpr Activation operator()() const { return kActivation; }
};
template <typename F>
__device__ __forceinline__ void WithActivation(Activation activation, F f) {
  switch (activation) {
    case Activation::kNone:
      return f(ActivationTag<Activation::kNone>());
    case Activation::kSilu:
      return f(ActivationTag<Activation::kSilu>());
    case Activation::kRelu:
      return f(ActivationTag<Activation::kRelu>());
    case Activation::kGelu:
      return f(ActivationTag<Activation::kGelu>());
    case Activation::kLeakyRelu:
      return f(ActivationTag<Activation::kLeakyRelu>());
  }
}

// dz from dy. silu's derivative for 16-bit elements takes 1 - s as it comes, off by less than
// 1e-7 |z| of 1: an instruction less, and no bound on z.
template <typename E, Activation kActivation, typename T>
__device__ __forceinline__ T FastBackward(T dy, T z) {
  if constexpr (sizeof(E) == 2 && kActivation == Activation::kSilu) {
    const T s = internal::Sigmoid(z);
    return dy * fmaf(s * z, 1 - s, s);
  } else {
    return ActivationBackward<kActivation>(dy, z);
  }
}

// y of z, in place.
template <int kCount, typename T>
__device__ __forceinline__ void ActivateAll(Activation activation, T (&z)[kCount]) {
  WithActivation(activation, [&z](auto tag) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) z[i] = Activate<tag()>(z[i]);
  });
}

// dz of dy, in place.
template <int kCount, typename T>
__device__ __forceinline__ void ActivateBackwardAll(Activation activation, const T (&z)[kCount],
                                                    T (&dy)[kCount]) {
  WithActivation(activation, [&z, &dy](auto tag) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) dy[i] = ActivationBackward<tag()>(dy[i], z[i]);
  });
}

}  // namespace jax_gn::cuda

#endif  // JAX_GN_CUDA_PACK_H_
