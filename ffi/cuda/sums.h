// Device arithmetic of the sums: running moments, sums across threads, the groups' results.
//
// All orders are fixed, so that the bits are. Threads merge in double: few numbers, no
// cancellation.
#ifndef JAX_GN_CUDA_SUMS_H_
#define JAX_GN_CUDA_SUMS_H_

#include <cmath>
#include <cstdint>

#include "cut.h"

namespace jax_gn::cuda {

// Two sums side by side: of dz and of dz * xhat, or scaled ones.
template <typename T>
struct Pair {
  T first, second;
};

// The sum over `lanes` neighbouring threads, in all of them: a power of two up to 32, or all
// kThreads. Every thread of the block calls it.
__device__ __forceinline__ double LaneSum(double value, int lanes) {
  __shared__ double warp_sums[kThreads / 32];
  for (int offset = (lanes < 32 ? lanes : 32) / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  if (lanes <= 32) return value;
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) value += warp_sums[i];
  __syncthreads();
  return value;
}

// The value of the first of those threads.
__device__ __forceinline__ double FirstLane(double value, int lanes) {
  __shared__ double first;
  if (lanes <= 32) return __shfl_sync(0xffffffffu, value, 0, lanes);
  if (threadIdx.x == 0) first = value;
  __syncthreads();
  value = first;
  __syncthreads();
  return value;
}

__device__ __forceinline__ Pair<double> LaneSum(Pair<double> value, int lanes) {
  return {LaneSum(value.first, lanes), LaneSum(value.second, lanes)};
}

// The moments of the numbers added so far, about `shift`, one of them: exact for a constant, and
// where the mean is large. Each chunk is centred on its own mean and merged by Chan's formula, so
// that a shift that is an outlier costs nothing.
template <typename T>
struct RunningMoments {
  T shift = 0, mean = 0, m2 = 0;

  // Adds value(i), i < size, those with valid(i): `count` of them, after `before` others. The
  // chunk's mean is a sum of quotients: a sum of values could overflow.
  template <int kSize, typename Value, typename Valid>
  __device__ __forceinline__ void Add(T before, T count, Value value, Valid valid) {
    const T quotient = T(1) / count;
    T deviation[kSize], chunk_mean = 0, chunk_m2 = 0;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      deviation[i] = value(i) - shift;
      if (valid(i)) chunk_mean += deviation[i] * quotient;
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const T centred = deviation[i] - chunk_mean;
      if (valid(i)) chunk_m2 += centred * centred;
    }
    const T delta = chunk_mean - mean;
    const T weight = count / (before + count);
    mean += delta * weight;
    m2 += chunk_m2 + delta * (delta * (before * weight));  // no infinity times 0
  }

  __device__ __forceinline__ double Mean() const {
    return static_cast<double>(shift) + static_cast<double>(mean);
  }
};

// a + b, and what rounding left of it.
template <typename T>
struct TwoSum {
  T sum, rest;

  __device__ __forceinline__ TwoSum(T a, T b) {
    sum = a + b;
    const T part = sum - a;
    rest = (a - (sum - part)) + (b - part);
  }
};

// What comes off x, so that x + addend is centred: no element costs an addition more.
template <typename T>
struct Centre {
  T value, rest;

  __device__ __forceinline__ Centre(T mean, T mean_low, T addend) : value(mean), rest(mean_low) {
    if (addend == T(0)) return;  // an infinite mean has no rest
    const TwoSum<T> difference(mean, -addend);
    value = difference.sum;
    rest += difference.rest;
  }
};

// The sum over `lanes` neighbouring threads of a warp, in all of them, in the accumulator's type:
// of a number or a pair.
template <typename T>
__device__ __forceinline__ T AddFromLane(T value, int offset) {
  return value + __shfl_xor_sync(0xffffffffu, value, offset);
}
template <typename T>
__device__ __forceinline__ Pair<T> AddFromLane(Pair<T> pair, int offset) {
  return {AddFromLane(pair.first, offset), AddFromLane(pair.second, offset)};
}
template <typename T>
__device__ __forceinline__ T WarpSum(T value, int lanes = 32) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) value = AddFromLane(value, offset);
  return value;
}

// 1 / sqrt(x), correctly rounded but for a few values: a Newton step with the residual in full. A
// quarter of the instructions that the two functions take.
__device__ __forceinline__ float InverseRoot(float x) {
  const float r = rsqrtf(x);
  const float root = x * r, rest = fmaf(x, r, -root);  // x r, in two parts
  const float residual = fmaf(rest, r, fmaf(root, r, -1.0f));
  return r > 0 && r < HUGE_VALF ? fmaf(-0.5f * r, residual, r) : r;
}
__device__ __forceinline__ double InverseRoot(double x) { return 1 / sqrt(x); }

// Results of a group: mean and rstd, and what the saved mean lacks, which only y still needs.
template <typename T>
struct GroupResult {
  T mean, mean_low, variance, rstd;

  __device__ __forceinline__ GroupResult(double exact_mean, double m2, int64_t count,
                                         double epsilon) {
    mean = static_cast<T>(exact_mean);
    mean_low = static_cast<T>(exact_mean - static_cast<double>(mean));
    // In the accumulator's range, as the definition has it: x of 1e30 gives infinity and rstd 0.
    variance = static_cast<T>(m2 / static_cast<double>(count));
    rstd = static_cast<T>(1 / sqrt(static_cast<double>(variance) + epsilon));
  }
};

// Where they go.
template <typename T>
struct Statistics {
  T* mean;      // [N, G]
  T* rstd;      // [N, G]; nullptr: the variance is wanted instead
  T* mean_low;  // [N, G]; nullptr: nobody needs it
  double epsilon;
  T* variance;  // [N, G]

  __device__ __forceinline__ void Store(int64_t group, const GroupResult<T>& result) const {
    mean[group] = result.mean;
    if (rstd != nullptr) {
      rstd[group] = result.rstd;
    } else {
      variance[group] = result.variance;
    }
    if (mean_low != nullptr) mean_low[group] = result.mean_low;
  }
};

// A product that is rounded: never a part of a fused multiply-add.
__device__ __forceinline__ float Rounded(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double Rounded(double a, double b) { return __dmul_rn(a, b); }

// dx of one element; `means` as StoreMeans leaves them, or xhat is x - mean and the second of them
// times rstd. Where the element is the whole group, its scale * dz is the mean, and dx 0 exactly.
template <typename T>
__device__ __forceinline__ T GradientOf(T scale, T dz, T xhat, T rstd, const Pair<T>& means) {
  return rstd * (Rounded(scale, dz) - means.first - xhat * means.second);
}

// The means over a group of scale * dz and of scale * dz * xhat: what dx subtracts.
template <typename T>
__device__ __forceinline__ void StoreMeans(Pair<T>* means, int64_t group, Pair<double> sums,
                                           double count) {
  means[group] = {static_cast<T>(sums.first / count), static_cast<T>(sums.second / count)};
}

}  // namespace jax_gn::cuda

#endif  // JAX_GN_CUDA_SUMS_H_
