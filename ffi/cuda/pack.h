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

// Two special functions: exp and the reciprocal, each within 2 ULP. Infinity has the reciprocal 0.
template <>
JAX_GN_HOST_DEVICE float Sigmoid(float z) {
#if defined(__CUDA_ARCH__)
  return __fdividef(1.0f, 1.0f + __expf(-z));
#else
  return 1.0f / (1.0f + std::exp(-z));
#endif
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

// Elements first .. last - 1 of the pack at `from`; the others are zeros.
template <typename E, int kSize = kPackSize<E>>
__device__ __forceinline__ Pack<E, kSize> LoadPart(const E* from, int first, int last) {
  Pack<E, kSize> pack = {};
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if (first <= i && i < last) pack.values[i] = from[i];
  }
  return pack;
}

template <typename E, int kSize>
__device__ __forceinline__ void StorePart(E* to, const Pack<E, kSize>& pack, int first, int last) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if (first <= i && i < last) to[i] = pack.values[i];
  }
}

template <typename E, int kSize, typename T>
__device__ __forceinline__ void ToNumbers(const Pack<E, kSize>& pack, T (&numbers)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) numbers[i] = ToNumber(pack.values[i]);
}

template <typename E, int kSize, typename T>
__device__ __forceinline__ Pack<E, kSize> ToPack(const T (&numbers)[kSize]) {
  Pack<E, kSize> pack;
  if constexpr (std::is_same_v<E, BFloat16>) {
    // Two at a time: one instruction from sm_80 on.
#pragma unroll
    for (int i = 0; i < kSize; i += 2) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(numbers[i], numbers[i + 1]);
      memcpy(&pack.values[i], &pair, sizeof(pair));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) pack.values[i] = ToElement<E>(numbers[i]);
  }
  return pack;
}

// scale or bias: nullptr where absent.
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

// The activation is an argument of the kernels: one uniform branch a pack, a fifth of the code.
// y of z, in place.
template <int kCount, typename T>
__device__ __forceinline__ void ActivateAll(Activation activation, T (&z)[kCount]) {
  const auto all = [&z](auto formula) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) z[i] = formula(z[i]);
  };
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kSilu:
      return all([](T v) { return Activate<Activation::kSilu>(v); });
    case Activation::kRelu:
      return all([](T v) { return Activate<Activation::kRelu>(v); });
    case Activation::kGelu:
      return all([](T v) { return Activate<Activation::kGelu>(v); });
    case Activation::kLeakyRelu:
      return all([](T v) { return Activate<Activation::kLeakyRelu>(v); });
  }
}

// dz of dy, in place.
template <int kCount, typename T>
__device__ __forceinline__ void ActivateBackwardAll(Activation activation, const T (&z)[kCount],
                                                    T (&dy)[kCount]) {
  const auto all = [&z, &dy](auto formula) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) dy[i] = formula(dy[i], z[i]);
  };
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kSilu:
      return all([](T d, T v) { return ActivationBackward<Activation::kSilu>(d, v); });
    case Activation::kRelu:
      return all([](T d, T v) { return ActivationBackward<Activation::kRelu>(d, v); });
    case Activation::kGelu:
      return all([](T d, T v) { return ActivationBackward<Activation::kGelu>(d, v); });
    case Activation::kLeakyRelu:
      return all([](T d, T v) { return ActivationBackward<Activation::kLeakyRelu>(d, v); });
  }
}

}  // namespace jax_gn::cuda

#endif  // JAX_GN_CUDA_PACK_H_
