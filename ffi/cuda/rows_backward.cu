// Channels last, backward: RowSumsKernel reads dy and x. Over each group, as far as it lies in the
// block, it sums scale * dz and scale * dz * xhat into the group's place of the workspace (or,
// where that is the whole group, leaves the means that dx needs); over each channel it sums dz and
// dz * xhat into one row of the workspace for the block's samples, or for each of them where a
// parameter is per sample. RowGradientKernel reads dy and x again, in the opposite order, and
// writes dx. Threads stand as rows.h says.
#include "launch.h"
#include "rows.h"
#include "streaming.h"

namespace jax_gn::cuda {
namespace {

constexpr int kRows = 2;  // of dy and of x in flight a thread

// What a thread knows of its channels, for one sample.
template <typename E, typename T = Accumulator<E>>
struct RowCoefficients {
  static constexpr int kSize = kRowPack<E>;
  T mean[kSize] = {}, rstd[kSize] = {}, scale[kSize], bias[kSize];

  __device__ __forceinline__ void Load(const RowCut& cut, const RowThread& thread, int64_t n,
                                       const BackwardInputs<E>& in) {
    in.scale.Load(n, thread.channel, thread.channels, T(1), scale);
    in.bias.Load(n, thread.channel, thread.channels, T(0), bias);
    ForGroups<kSize>(cut, thread.channel, thread.channels, [&](int i, int64_t group) {
      mean[i] = in.mean[n * cut.groups + group];
      rstd[i] = in.rstd[n * cut.groups + group];
    });
  }

  // x becomes xhat and dy becomes dz.
  __device__ __forceinline__ void Differentiate(Activation activation, T (&x)[kSize],
                                                T (&dy)[kSize]) const {
    T z[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      x[i] = (x[i] - mean[i]) * rstd[i];
      z[i] = x[i] * scale[i] + bias[i];
    }
    ActivateBackwardAll(activation, z, dy);
  }
};

// Calls f(offset of the row, xhat, dz) for the thread's rows of one sample.
template <typename E, typename F>
__device__ __forceinline__ void WalkGradients(const RowCut& cut, const RowThread& thread,
                                              int64_t offset, const BackwardInputs<E>& in,
                                              const RowCoefficients<E>& coefficients, F f) {
  using T = Accumulator<E>;
  const bool whole_x = WholePacks<kRowPack<E>>(cut, in.x),
             whole_dy = WholePacks<kRowPack<E>>(cut, in.dy);
  const int64_t stride = cut.sample_rows * cut.channels;
  WalkRows<kRows>(offset, stride, thread.rows, [&](int64_t at, int rows) {
    Pack<E, kRowPack<E>> x_packs[kRows], dy_packs[kRows];
    LoadRows(in.x + at, stride, rows, thread.channels, whole_x, x_packs);
    LoadRows(in.dy + at, stride, rows, thread.channels, whole_dy, dy_packs);
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (u >= rows) break;
      T x[kRowPack<E>], dy[kRowPack<E>];
      ToNumbers(x_packs[u], x);
      ToNumbers(dy_packs[u], dy);
      coefficients.Differentiate(in.activation, x, dy);
      f(at + u * stride, x, dy);
    }
  });
}

// The threads' sums, over a rectangle of lines and columns.
template <typename T, int kSize>
__device__ __forceinline__ Pair<double> SumRectangle(const RowCut& cut,
                                                     const Exchange<Pair<T>, kSize>& exchange,
                                                     int line, int lines, int column, int columns,
                                                     int lanes) {
  Pair<double> sum = {0, 0};
  if (columns > 0) {
    VisitRectangle(line, lines, column, columns, threadIdx.x % lanes, lanes, [&](int l, int c) {
      const Pair<T> pair = exchange.At(cut, l, c);
      sum.first += pair.first;
      sum.second += pair.second;
    });
  }
  return LaneSum(sum, lanes);
}

// Adds up the threads' channel sums and writes them: a row for each sample of the batch that starts
// at `first`, or one for all samples of the block.
template <typename T, int kSize>
__device__ __forceinline__ void WriteChannels(const RowCut& cut, const RowBlock& block,
                                              int64_t first, bool per_sample,
                                              const Exchange<Pair<T>, kSize>& exchange,
                                              Pair<T>* channel_rows) {
  const int lines = per_sample ? cut.sample_rows : cut.sample_rows * cut.batch;
  const int units = block.columns * (per_sample ? cut.batch : 1);
  for (int base = 0; base < units; base += kThreads / cut.channel_lanes) {
    const int unit = base + threadIdx.x / cut.channel_lanes;
    const int slot = unit / block.columns, column = unit % block.columns;
    const bool valid = unit < units && first + slot < block.end_sample;
    const Pair<double> sum = SumRectangle(cut, exchange, slot * cut.sample_rows, lines, column,
                                          valid ? 1 : 0, cut.channel_lanes);
    if (!valid || threadIdx.x % cut.channel_lanes != 0) continue;
    const int64_t row = (per_sample ? first + slot : block.sample_block) * cut.pieces + block.piece;
    channel_rows[row * cut.channels + block.first_channel + column] = {static_cast<T>(sum.first),
                                                                       static_cast<T>(sum.second)};
  }
}

template <typename E>
__global__ void __launch_bounds__(kThreads, 2)
    RowSumsKernel(RowCut cut, BackwardInputs<E> in, bool per_sample,
                  Pair<Accumulator<E>>* channel_rows, Pair<Accumulator<E>>* parts,
                  Pair<Accumulator<E>>* means) {
  using T = Accumulator<E>;
  constexpr int kSize = kRowPack<E>;
  extern __shared__ __align__(16) char shared[];
  using Sums = Exchange<Pair<T>, kSize>;
  const Sums exchange{reinterpret_cast<Pair<T>*>(shared)};
  // A thread's channel sums wait in shared memory: registers are short.
  const Sums channel_sums{reinterpret_cast<Pair<T>*>(shared + Sums::kBytes)};
  const RowBlock block(cut, blockIdx.x);
  const RowThread thread = RowThread::Here<kSize>(cut, block);
#pragma unroll
  for (int i = 0; i < kSize; ++i) channel_sums.Mine(i) = {0, 0};
  for (int64_t first = block.first_sample; first < block.end_sample; first += cut.batch) {
    const int64_t n = first + thread.slot;
    Pair<T> sums[kSize] = {};
    RowCoefficients<E> coefficients;
    if (thread.channels > 0 && n < block.end_sample) {
      coefficients.Load(cut, thread, n, in);
      WalkGradients(cut, thread, thread.Offset(cut, block, n), in, coefficients,
                    [&](int64_t, const T(&xhat)[kSize], const T(&dz)[kSize]) {
#pragma unroll
                      for (int i = 0; i < kSize; ++i) {
                        sums[i].first += dz[i];
                        sums[i].second += dz[i] * xhat[i];
                      }
                    });
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const Pair<T> before = per_sample ? Pair<T>{} : channel_sums.Mine(i);
        channel_sums.Mine(i) = {before.first + sums[i].first, before.second + sums[i].second};
        exchange.Mine(i) = {coefficients.scale[i] * sums[i].first,
                            coefficients.scale[i] * sums[i].second};
      }
    }
    __syncthreads();
    ForUnits(cut, block, first, [&](const RowUnit& unit) {
      const Pair<double> sum =
          SumRectangle(cut, exchange, unit.slot * cut.sample_rows, cut.sample_rows,
                       unit.first_column, unit.columns, cut.lanes);
      if (unit.columns == 0 || threadIdx.x % cut.lanes != 0) return;
      if (parts != nullptr) {
        parts[unit.place] = {static_cast<T>(sum.first), static_cast<T>(sum.second)};
      } else {
        StoreMeans(means, unit.n * cut.groups + unit.group, sum,
                   static_cast<double>(cut.spatial) * cut.group_size);
      }
    });
    if (channel_rows != nullptr && per_sample) {
      WriteChannels(cut, block, first, per_sample, channel_sums, channel_rows);
    }
    __syncthreads();
  }
  if (channel_rows != nullptr && !per_sample) {
    WriteChannels(cut, block, block.first_sample, per_sample, channel_sums, channel_rows);
  }
}

template <typename E>
__global__ void __launch_bounds__(kThreads)
    RowGradientKernel(RowCut cut, BackwardInputs<E> in, const Pair<Accumulator<E>>* means, E* dx) {
  using T = Accumulator<E>;
  constexpr int kSize = kRowPack<E>;
  const RowBlock block(cut, gridDim.x - 1 - blockIdx.x);
  const RowThread thread = RowThread::Here<kSize>(cut, block);
  if (thread.channels == 0) return;
  const bool whole_dx = WholePacks<kSize>(cut, dx);
  RowCoefficients<E> coefficients;
  Pair<T> mean[kSize] = {};
  for (int64_t n = block.first_sample + thread.slot; n < block.end_sample; n += cut.batch) {
    coefficients.Load(cut, thread, n, in);
    ForGroups<kSize>(cut, thread.channel, thread.channels,
                     [&](int i, int64_t group) { mean[i] = means[n * cut.groups + group]; });
    WalkGradients(cut, thread, thread.Offset(cut, block, n), in, coefficients,
                  [&](int64_t at, const T(&xhat)[kSize], const T(&dz)[kSize]) {
                    T result[kSize];
#pragma unroll
                    for (int i = 0; i < kSize; ++i) {
                      result[i] = GradientOf(coefficients.scale[i], dz[i], xhat[i],
                                             coefficients.rstd[i], mean[i]);
                    }
                    StoreRow(dx + at, ToPack<E>(result), thread.channels, whole_dx);
                  });
  }
}

}  // namespace

template <typename E>
Status LaunchRowSums(const Problem& problem, const RowCut& cut, const Stage& stage,
                     const BackwardArgs& args, const BackwardSpace<E>& space, cudaStream_t stream) {
  RowSumsKernel<E><<<Grid(stage), stage.threads, stage.shared_bytes, stream>>>(
      cut, BackwardInputs<E>(problem, args), HasPerSample(problem),
      HasParam(problem) ? space.channel_rows : nullptr, cut.whole_groups() ? nullptr : space.parts,
      space.means);
  return JAX_GN_LAUNCHED("RowSumsKernel");
}

template <typename E>
Status LaunchRowGradient(const Problem& problem, const RowCut& cut, const Stage& stage,
                         const BackwardArgs& args, const BackwardSpace<E>& space,
                         cudaStream_t stream) {
  RowGradientKernel<E><<<Grid(stage), stage.threads, 0, stream>>>(
      cut, BackwardInputs<E>(problem, args), space.means, static_cast<E*>(args.dx));
  return JAX_GN_LAUNCHED("RowGradientKernel");
}

#define JAX_GN_INSTANTIATE(E)                                                                   \
  template Status LaunchRowSums<E>(const Problem&, const RowCut&, const Stage&,                 \
                                   const BackwardArgs&, const BackwardSpace<E>&, cudaStream_t); \
  template Status LaunchRowGradient<E>(const Problem&, const RowCut&, const Stage&,             \
                                       const BackwardArgs&, const BackwardSpace<E>&,            \
                                       cudaStream_t);
JAX_GN_FOR_ALL_ELEMENTS(JAX_GN_INSTANTIATE)

}  // namespace jax_gn::cuda
