// What the channels-last backward kernels share: a thread's coefficients, the sums over channels.
#ifndef JAX_GN_CUDA_ROWS_BACKWARD_H_
#define JAX_GN_CUDA_ROWS_BACKWARD_H_

#include "launch.h"
#include "rows.h"

namespace jax_gn::cuda {

// What a thread knows of its channels, for one sample.
template <typename E, typename T = Accumulator<E>>
struct RowCoefficients {
  static constexpr int kSize = kRowPack<E>;
  // mean: without the addend, as it comes off x.
  T mean[kSize] = {}, rstd[kSize] = {}, scale[kSize] = {}, bias[kSize] = {};

  __device__ __forceinline__ void Load(const RowCut& cut, const RowThread& thread, int64_t n,
                                       const BackwardInputs<E>& in) {
    in.scale.Load(n, thread.channel, thread.channels, T(1), scale);
    in.bias.Load(n, thread.channel, thread.channels, T(0), bias);
    T added[kSize];
    in.addend.Load(n, thread.channel, thread.channels, T(0), added);
    ForGroups<kSize>(cut, thread.channel, thread.channels, [&](int i, int64_t group) {
      mean[i] = in.mean[n * cut.groups + group] - added[i];
      rstd[i] = in.Rstd(n * cut.groups + group);
    });
  }

  // x becomes its deviation from the mean and dy becomes dz.
  template <Activation kActivation>
  __device__ __forceinline__ void Differentiate(T (&x)[kSize], T (&dy)[kSize]) const {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      x[i] -= mean[i];
      dy[i] = FastBackward<E, kActivation>(dy[i], x[i] * (rstd[i] * scale[i]) + bias[i]);
    }
  }
};

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

}  // namespace jax_gn::cuda

#endif  // JAX_GN_CUDA_ROWS_BACKWARD_H_
