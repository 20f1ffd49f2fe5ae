// No spatial axis, a group being a row of whole packs of one warp (cut.warp_lanes): both passes in
// one kernel, each tensor read or written once. Threads stand as rows.h says; each takes kRows
// samples at a time, sums over its group go through the warp, no barrier is needed.
//
// FeatureForwardKernel reads x, writes mean, rstd and y. FeatureBackwardKernel reads dy and x,
// writes dx, and leaves dz and dz * xhat summed over the block's samples in a row of the workspace
// (or as they are, where a parameter is per sample).
#include "launch.h"
#include "rows_backward.h"
#include "streaming.h"

namespace jax_gn::cuda {
namespace {

// Samples that a thread loads at a time: 32 bytes of each tensor. In the backward pass, where
// elements are larger than 16 bits, half of that, the next ones before it works on the last: H200,
// mlp_rows, float32, 275 us instead of 348; 16 bits would take 22 % longer, for want of registers.
template <typename E>
inline constexpr bool kReadsAhead = sizeof(E) > 2;
template <typename E, int kSize>
inline constexpr int kRows = 32 / (kSize * static_cast<int>(sizeof(E)));
template <typename E, int kSize>
inline constexpr int kGradientRows = kRows<E, kSize> / (kReadsAhead<E> ? 2 : 1);

// Samples n, n + batch, … of a thread that lie in the block, up to kRows.
template <int kRows>
__device__ __forceinline__ int RowsFrom(const RowCut& cut, const RowBlock& block, int64_t n) {
  int rows = 0;
#pragma unroll
  for (int u = 0; u < kRows; ++u) rows += n + u * cut.batch < block.end_sample ? 1 : 0;
  return rows;
}

// What the backward pass loads at a time; zeros beyond `rows`.
template <typename E, int kSize>
struct FeatureGradientPacks {
  int rows;
  Pack<E, kSize> x[kGradientRows<E, kSize>] = {}, dy[kGradientRows<E, kSize>] = {};
  Accumulator<E> mean[kGradientRows<E, kSize>] = {}, rstd[kGradientRows<E, kSize>] = {};

  __device__ __forceinline__ void LoadStatistics(const BackwardInputs<E>& in, int64_t group,
                                                 int row) {
    mean[row] = in.mean[group];
    rstd[row] = in.rstd[group];
  }
};

// scale and bias of a thread's channels: read once, unless they are the samples'.
template <typename T, int kSize>
struct FeatureParameters {
  T scale[kSize], bias[kSize];
  bool per_sample;

  __device__ FeatureParameters(const Parameter& scale_in, const Parameter& bias_in,
                               const RowThread& thread)
      : per_sample(scale_in.sample_stride != 0 || bias_in.sample_stride != 0) {
    Load(scale_in, bias_in, thread, 0);
  }
  __device__ __forceinline__ void Load(const Parameter& scale_in, const Parameter& bias_in,
                                       const RowThread& thread, int64_t n) {
    scale_in.Load(n, thread.channel, thread.channels, T(1), scale);
    bias_in.Load(n, thread.channel, thread.channels, T(0), bias);
  }
};

template <typename E, int kSize>
__global__ void __launch_bounds__(kThreads)
    FeatureForwardKernel(RowCut cut, const E* x, Parameter scale, Parameter bias,
                         Activation activation, Accumulator<E> epsilon, E* y, Accumulator<E>* mean,
                         Accumulator<E>* rstd) {
  using T = Accumulator<E>;
  const RowBlock block(cut, blockIdx.x);
  const RowThread thread = RowThread::Here<kSize>(cut, block);
  const bool whole_x = WholePacks<kSize>(cut, x), whole_y = WholePacks<kSize>(cut, y);
  const bool leads = thread.channels > 0 && thread.pack % cut.warp_lanes == 0;
  const int64_t stride = cut.batch * cut.channels, group = thread.channel / cut.group_size;
  const T share = T(1) / static_cast<T>(cut.group_size);
  FeatureParameters<T, kSize> parameters(scale, bias, thread);
  // All threads of a warp take all steps: the sums need them.
  for (int64_t first = block.first_sample; first < block.end_sample;
       first += kRows<E, kSize> * cut.batch) {
    const int64_t n = first + thread.slot;
    const int rows = thread.channels > 0 ? RowsFrom<kRows<E, kSize>>(cut, block, n) : 0;
    const int64_t at = n * cut.channels + thread.channel;
    Pack<E, kSize> packs[kRows<E, kSize>] = {};
    LoadRows(x + at, stride, rows, thread.channels, whole_x, packs);
#pragma unroll
    for (int u = 0; u < kRows<E, kSize>; ++u) {
      // Two passes over the group's numbers: exact. `shift` is one of them; shares are added, as a
      // sum of values could overflow.
      T z[kSize], sum = 0, m2 = 0;
      ToNumbers(packs[u], z);
      const T shift = __shfl_sync(0xffffffffu, z[0], 0, cut.warp_lanes);
#pragma unroll
      for (int i = 0; i < kSize; ++i) sum += (z[i] - shift) * share;
      const TwoSum<T> centre(shift, WarpSum(sum, cut.warp_lanes));
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        z[i] = (z[i] - centre.sum) - centre.rest;
        m2 += z[i] * z[i];
      }
      const T inverse = InverseRoot(WarpSum(m2, cut.warp_lanes) * share + epsilon);
      if (u >= rows) continue;
      const int64_t sample = n + u * cut.batch;
      if (leads) {
        mean[sample * cut.groups + group] = centre.sum;
        rstd[sample * cut.groups + group] = inverse;
      }
      if (parameters.per_sample) parameters.Load(scale, bias, thread, sample);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        z[i] = z[i] * (inverse * parameters.scale[i]) + parameters.bias[i];
      }
      ActivateAll(activation, z);
      StoreRow(y + at + u * stride, ToPack<E>(z), thread.channels, whole_y);
    }
  }
}

// Blocks of a multiprocessor, as far as registers go.
template <typename E>
inline constexpr int kBlocks = sizeof(E) == 4 ? 3 : 2;

template <typename E, int kSize>
__global__ void __launch_bounds__(kThreads, kBlocks<E>)
    FeatureBackwardKernel(RowCut cut, BackwardInputs<E> in, bool per_sample,
                          Pair<Accumulator<E>>* channel_rows, E* dx) {
  using T = Accumulator<E>;
  extern __shared__ __align__(16) char shared[];
  const Exchange<Pair<T>, kSize> exchange{reinterpret_cast<Pair<T>*>(shared)};
  const RowBlock block(cut, blockIdx.x);
  const RowThread thread = RowThread::Here<kSize>(cut, block);
  const bool whole_x = WholePacks<kSize>(cut, in.x), whole_dy = WholePacks<kSize>(cut, in.dy);
  const bool whole_dx = WholePacks<kSize>(cut, dx);
  const int64_t stride = cut.batch * cut.channels, group = thread.channel / cut.group_size;
  const T share = T(1) / static_cast<T>(cut.group_size);
  FeatureParameters<T, kSize> parameters(in.scale, in.bias, thread);
  Pair<T> sums[kSize] = {};
  constexpr int kSamples = kGradientRows<E, kSize>;
  const auto load = [&](int64_t n) {
    const int rows = thread.channels > 0 ? RowsFrom<kSamples>(cut, block, n) : 0;
    FeatureGradientPacks<E, kSize> loaded = {rows};
    const int64_t at = n * cut.channels + thread.channel;
    LoadRows(in.x + at, stride, rows, thread.channels, whole_x, loaded.x);
    LoadRows(in.dy + at, stride, rows, thread.channels, whole_dy, loaded.dy);
    if constexpr (kReadsAhead<E>) {
#pragma unroll
      for (int u = 0; u < kSamples; ++u) {
        if (u < rows) loaded.LoadStatistics(in, (n + u * cut.batch) * cut.groups + group, u);
      }
    }
    return loaded;
  };
  FeatureGradientPacks<E, kSize> next = {};
  if constexpr (kReadsAhead<E>) next = load(block.first_sample + thread.slot);
  for (int64_t first = block.first_sample; first < block.end_sample;) {
    const int64_t n = first + thread.slot;
    auto loaded = kReadsAhead<E> ? next : load(n);
    const int rows = loaded.rows;
    first += kSamples * cut.batch;
    if (kReadsAhead<E> && first < block.end_sample) next = load(first + thread.slot);
#pragma unroll
    for (int u = 0; u < kSamples; ++u) {
      const int64_t sample = n + u * cut.batch, at = sample * cut.channels + thread.channel;
      if (!kReadsAhead<E> && u < rows) {
        loaded.LoadStatistics(in, sample * cut.groups + group, u);
      }
      const T mean = loaded.mean[u], rstd = loaded.rstd[u];
      T xhat[kSize], z[kSize], dz[kSize];
      ToNumbers(loaded.x[u], xhat);
      ToNumbers(loaded.dy[u], dz);
      if (parameters.per_sample && u < rows) parameters.Load(in.scale, in.bias, thread, sample);
      Pair<T> total = {0, 0};
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        xhat[i] = (xhat[i] - mean) * rstd;
        z[i] = xhat[i] * parameters.scale[i] + parameters.bias[i];
      }
      ActivateBackwardAll(in.activation, z, dz);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const Pair<T> product = {dz[i], dz[i] * xhat[i]};
        if (u < rows) {
          sums[i] = {sums[i].first + product.first, sums[i].second + product.second};
          if (per_sample && channel_rows != nullptr && i < thread.channels) {
            channel_rows[sample * cut.channels + thread.channel + i] = product;
          }
        }
        total.first += parameters.scale[i] * product.first;
        total.second += parameters.scale[i] * product.second;
      }
      total = WarpSum(total, cut.warp_lanes);
      const Pair<T> means = {total.first * share, total.second * share};
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        dz[i] = GradientOf(parameters.scale[i], dz[i], xhat[i], rstd, means);
      }
      if (u < rows) StoreRow(dx + at, ToPack<E>(dz), thread.channels, whole_dx);
    }
  }
  if (channel_rows == nullptr || per_sample) return;
#pragma unroll
  for (int i = 0; i < kSize; ++i) exchange.Mine(i) = sums[i];
  __syncthreads();
  WriteChannels(cut, block, block.first_sample, false, exchange, channel_rows);
}

}  // namespace

template <typename E>
Status LaunchFeatureForward(const Problem& problem, const RowCut& cut, const Stage& stage,
                            const ForwardArgs& args, cudaStream_t stream) {
  using T = Accumulator<E>;
  const auto kernel = cut.tile == cut.tile_packs * kPackSize<E>
                          ? FeatureForwardKernel<E, kPackSize<E>>
                          : FeatureForwardKernel<E, kRowPack<E>>;
  kernel<<<Grid(stage), stage.threads, 0, stream>>>(
      cut, static_cast<const E*>(args.x), ScaleOf(problem, args), BiasOf(problem, args),
      problem.activation, static_cast<T>(args.epsilon), static_cast<E*>(args.y),
      static_cast<T*>(args.mean), static_cast<T*>(args.rstd));
  return JAX_GN_LAUNCHED("FeatureForwardKernel");
}

template <typename E>
Status LaunchFeatureBackward(const Problem& problem, const RowCut& cut, const Stage& stage,
                             const BackwardArgs& args, const BackwardSpace<E>& space,
                             cudaStream_t stream) {
  const auto kernel = cut.tile == cut.tile_packs * kPackSize<E>
                          ? FeatureBackwardKernel<E, kPackSize<E>>
                          : FeatureBackwardKernel<E, kRowPack<E>>;
  kernel<<<Grid(stage), stage.threads, stage.shared_bytes, stream>>>(
      cut, BackwardInputs<E>(problem, args), HasPerSample(problem),
      HasParam(problem) ? space.channel_rows : nullptr, static_cast<E*>(args.dx));
  return JAX_GN_LAUNCHED("FeatureBackwardKernel");
}

#define JAX_GN_INSTANTIATE(E)                                                            \
  template Status LaunchFeatureForward<E>(const Problem&, const RowCut&, const Stage&,   \
                                          const ForwardArgs&, cudaStream_t);             \
  template Status LaunchFeatureBackward<E>(const Problem&, const RowCut&, const Stage&,  \
                                           const BackwardArgs&, const BackwardSpace<E>&, \
                                           cudaStream_t);
JAX_GN_FOR_ALL_ELEMENTS(JAX_GN_INSTANTIATE)

}  // namespace jax_gn::cuda
