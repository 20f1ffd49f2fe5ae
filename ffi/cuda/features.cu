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

template <typename E>
inline constexpr int kRows = 32 / (kRowPack<E> * static_cast<int>(sizeof(E)));

// Samples n, n + batch, … of a thread that lie in the block, up to kRows.
template <int kRows>
__device__ __forceinline__ int RowsFrom(const RowCut& cut, const RowBlock& block, int64_t n) {
  int rows = 0;
#pragma unroll
  for (int u = 0; u < kRows; ++u) rows += n + u * cut.batch < block.end_sample ? 1 : 0;
  return rows;
}

// mean and m2 of the group, a thread holding some of its numbers; centred on the exact mean.
template <int kSize, typename T>
__device__ __forceinline__ Moments GroupMoments(const RowCut& cut, const T (&x)[kSize]) {
  const T shift = __shfl_sync(0xffffffffu, x[0], 0, cut.warp_lanes);
  T sum = 0, m2 = 0;
#pragma unroll
  for (int i = 0; i < kSize; ++i) sum += (x[i] - shift) / static_cast<T>(kSize);
  const double mean = LaneSum(sum, cut.warp_lanes) / cut.warp_lanes;
  const T centre = static_cast<T>(mean);
#pragma unroll
  for (int i = 0; i < kSize; ++i) m2 += (x[i] - shift - centre) * (x[i] - shift - centre);
  return {shift + mean, LaneSum(m2, cut.warp_lanes)};
}

template <typename E>
__global__ void __launch_bounds__(kThreads)
    FeatureForwardKernel(RowCut cut, const E* x, Parameter scale, Parameter bias,
                         Activation activation, double epsilon, E* y, Accumulator<E>* mean,
                         Accumulator<E>* rstd) {
  using T = Accumulator<E>;
  constexpr int kSize = kRowPack<E>;
  const RowBlock block(cut, blockIdx.x);
  const RowThread thread = RowThread::Here<kSize>(cut, block);
  const bool whole_x = WholePacks<kSize>(cut, x), whole_y = WholePacks<kSize>(cut, y);
  const bool leads = thread.channels > 0 && thread.pack % cut.warp_lanes == 0;
  const int64_t stride = cut.batch * cut.channels, group = thread.channel / cut.group_size;
  // All threads of a warp take all steps: the sums need them.
  for (int64_t first = block.first_sample; first < block.end_sample;
       first += kRows<E> * cut.batch) {
    const int64_t n = first + thread.slot;
    const int rows = thread.channels > 0 ? RowsFrom<kRows<E>>(cut, block, n) : 0;
    const int64_t at = n * cut.channels + thread.channel;
    Pack<E, kSize> packs[kRows<E>] = {};
    LoadRows(x + at, stride, rows, thread.channels, whole_x, packs);
#pragma unroll
    for (int u = 0; u < kRows<E>; ++u) {
      T z[kSize];
      ToNumbers(packs[u], z);
      const Moments moments = GroupMoments(cut, z);
      if (u >= rows) continue;
      const int64_t sample = n + u * cut.batch;
      const GroupResult<T> result(moments.mean, moments.m2, cut.group_size, epsilon);
      if (leads) {
        mean[sample * cut.groups + group] = result.mean;
        rstd[sample * cut.groups + group] = result.rstd;
      }
      T scales[kSize], biases[kSize];
      scale.Load(sample, thread.channel, thread.channels, T(1), scales);
      bias.Load(sample, thread.channel, thread.channels, T(0), biases);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const T slope = result.rstd * scales[i];
        z[i] = (z[i] - result.mean) * slope + (biases[i] - result.mean_low * slope);
      }
      ActivateAll(activation, z);
      StoreRow(y + at + u * stride, ToPack<E>(z), thread.channels, whole_y);
    }
  }
}

// A thread's share of one sample: dz becomes dx.
template <typename E, typename T = Accumulator<E>>
__device__ __forceinline__ void GroupGradient(const RowCut& cut,
                                              const RowCoefficients<E>& coefficients,
                                              const T (&xhat)[kRowPack<E>], T (&dz)[kRowPack<E>]) {
  constexpr int kSize = kRowPack<E>;
  Pair<double> sum = {0, 0};
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const T scaled = Rounded(coefficients.scale[i], dz[i]);
    sum.first += scaled;
    sum.second += static_cast<double>(scaled) * xhat[i];
  }
  sum = LaneSum(sum, cut.warp_lanes);
  const double quotient = 1.0 / static_cast<double>(cut.group_size);
  const Pair<T> means = {static_cast<T>(sum.first * quotient),
                         static_cast<T>(sum.second * quotient)};
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    dz[i] = GradientOf(coefficients.scale[i], dz[i], xhat[i], coefficients.rstd[i], means);
  }
}

template <typename E>
__global__ void __launch_bounds__(kThreads, 2)
    FeatureBackwardKernel(RowCut cut, BackwardInputs<E> in, bool per_sample,
                          Pair<Accumulator<E>>* channel_rows, E* dx) {
  using T = Accumulator<E>;
  constexpr int kSize = kRowPack<E>;
  extern __shared__ __align__(16) char shared[];
  const Exchange<Pair<T>, kSize> exchange{reinterpret_cast<Pair<T>*>(shared)};
  const RowBlock block(cut, blockIdx.x);
  const RowThread thread = RowThread::Here<kSize>(cut, block);
  const bool whole_x = WholePacks<kSize>(cut, in.x), whole_dy = WholePacks<kSize>(cut, in.dy);
  const bool whole_dx = WholePacks<kSize>(cut, dx);
  const int64_t stride = cut.batch * cut.channels;
  Pair<T> sums[kSize] = {};
  for (int64_t first = block.first_sample; first < block.end_sample;
       first += kRows<E> * cut.batch) {
    const int64_t n = first + thread.slot;
    const int rows = thread.channels > 0 ? RowsFrom<kRows<E>>(cut, block, n) : 0;
    const int64_t at = n * cut.channels + thread.channel;
    Pack<E, kSize> x_packs[kRows<E>] = {}, dy_packs[kRows<E>] = {};
    LoadRows(in.x + at, stride, rows, thread.channels, whole_x, x_packs);
    LoadRows(in.dy + at, stride, rows, thread.channels, whole_dy, dy_packs);
#pragma unroll
    for (int u = 0; u < kRows<E>; ++u) {
      RowCoefficients<E> coefficients;
      T x[kSize] = {}, dz[kSize] = {};
      const int64_t sample = n + u * cut.batch;
      if (u < rows) {
        coefficients.Load(cut, thread, sample, in);
        ToNumbers(x_packs[u], x);
        ToNumbers(dy_packs[u], dz);
        coefficients.Differentiate(in.activation, x, dz);
      }
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const Pair<T> product = {dz[i], dz[i] * x[i]};
        sums[i] = {sums[i].first + product.first, sums[i].second + product.second};
        if (per_sample && channel_rows != nullptr && u < rows && i < thread.channels) {
          channel_rows[sample * cut.channels + thread.channel + i] = product;
        }
      }
      GroupGradient<E>(cut, coefficients, x, dz);
      if (u < rows) StoreRow(dx + at + u * stride, ToPack<E>(dz), thread.channels, whole_dx);
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
  FeatureForwardKernel<E><<<Grid(stage), stage.threads, 0, stream>>>(
      cut, static_cast<const E*>(args.x), ScaleOf(problem, args), BiasOf(problem, args),
      problem.activation, args.epsilon, static_cast<E*>(args.y), static_cast<T*>(args.mean),
      static_cast<T*>(args.rstd));
  return JAX_GN_LAUNCHED("FeatureForwardKernel");
}

template <typename E>
Status LaunchFeatureBackward(const Problem& problem, const RowCut& cut, const Stage& stage,
                             const BackwardArgs& args, const BackwardSpace<E>& space,
                             cudaStream_t stream) {
  FeatureBackwardKernel<E><<<Grid(stage), stage.threads, stage.shared_bytes, stream>>>(
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
