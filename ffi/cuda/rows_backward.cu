// Channels last, backward: RowSumsKernel reads dy and x. Over each group, as far as it lies in the
// block, it sums scale * dz and scale * dz * xhat into the group's place of the workspace (or,
// where that is the whole group, leaves the means that dx needs); over each channel it sums dz and
// dz * xhat into one row of the workspace for the block's samples, or for each of them where a
// parameter is per sample. RowGradientKernel reads dy and x again, in the opposite order, and
// writes dx. Threads stand as rows.h says.
#include "launch.h"
#include "rows_backward.h"
#include "streaming.h"

namespace jax_gn::cuda {
namespace {

// Rows of dy and of x in flight a thread: 32 bytes of each.
template <typename E>
inline constexpr int kRows = 32 / (kRowPack<E> * static_cast<int>(sizeof(E)));

// Blocks of a multiprocessor, as far as registers go.
template <typename E>
inline constexpr int kBlocks = sizeof(E) == 8 ? 2 : 3;

// Calls f(offset of the row, x - mean, dz) for the thread's rows of one sample.
template <Activation kActivation, typename E, typename F>
__device__ __forceinline__ void WalkGradients(const RowCut& cut, const RowThread& thread,
                                              int64_t offset, const BackwardInputs<E>& in,
                                              const RowCoefficients<E>& coefficients, F f) {
  using T = Accumulator<E>;
  const bool whole_x = WholePacks<kRowPack<E>>(cut, in.x),
             whole_dy = WholePacks<kRowPack<E>>(cut, in.dy);
  const int64_t stride = cut.sample_rows * cut.channels;
  WalkRows<kRows<E>>(offset, stride, thread.rows, [&](int64_t at, int rows) {
    Pack<E, kRowPack<E>> x_packs[kRows<E>], dy_packs[kRows<E>];
    LoadRows(in.x + at, stride, rows, thread.channels, whole_x, x_packs);
    LoadRows(in.dy + at, stride, rows, thread.channels, whole_dy, dy_packs);
#pragma unroll
    for (int u = 0; u < kRows<E>; ++u) {
      if (u >= rows) break;
      T x[kRowPack<E>], dy[kRowPack<E>];
      ToNumbers(x_packs[u], x);
      ToNumbers(dy_packs[u], dy);
      coefficients.template Differentiate<kActivation>(x, dy);
      f(at + u * stride, x, dy);
    }
  });
}

// Reads the thread's rows of sample n. Adds to its channel sums (or sets them, where each sample
// has its own) and leaves the scaled sums in the exchange.
template <typename E, typename T = Accumulator<E>>
__device__ __forceinline__ void ReadSums(const RowCut& cut, const RowBlock& block,
                                         const RowThread& thread, int64_t n,
                                         const BackwardInputs<E>& in, bool per_sample,
                                         const Exchange<Pair<T>, kRowPack<E>>& exchange,
                                         const Exchange<Pair<T>, kRowPack<E>>& channel_sums) {
  constexpr int kSize = kRowPack<E>;
  Pair<T> sums[kSize] = {};
  RowCoefficients<E> coefficients;
  coefficients.Load(cut, thread, n, in);
  WithActivation(in.activation, [&](auto tag) {
    WalkGradients<tag()>(cut, thread, thread.Offset(cut, block, n), in, coefficients,
                         [&](int64_t, const T(&deviation)[kSize], const T(&dz)[kSize]) {
#pragma unroll
                           for (int i = 0; i < kSize; ++i) {
                             sums[i].first += dz[i];
                             sums[i].second += dz[i] * deviation[i];
                           }
                         });
  });
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const Pair<T> before = per_sample ? Pair<T>{0, 0} : channel_sums.Mine(i);
    sums[i].second *= coefficients.rstd[i];
    channel_sums.Mine(i) = {before.first + sums[i].first, before.second + sums[i].second};
    exchange.Mine(i) = {coefficients.scale[i] * sums[i].first,
                        coefficients.scale[i] * sums[i].second};
  }
}

// What becomes of the groups' sums.
template <typename T>
struct GroupSums {
  Pair<T>* parts;   // nullptr: each group is whole
  Pair<T>* means;   // nullptr: nobody wants any
  double elements;  // of a group

  __device__ __forceinline__ void Store(int64_t place, int64_t group, Pair<double> sum) const {
    if (parts != nullptr) {
      parts[place] = {static_cast<T>(sum.first), static_cast<T>(sum.second)};
    } else {
      StoreMeans(means, group, sum, elements);
    }
  }
};

template <typename E>
__global__ void __launch_bounds__(kThreads, kBlocks<E>)
    RowSumsKernel(RowCut cut, BackwardInputs<E> in, bool per_sample,
                  Pair<Accumulator<E>>* channel_rows, GroupSums<Accumulator<E>> groups) {
  using T = Accumulator<E>;
  constexpr int kSize = kRowPack<E>;
  using Sums = Exchange<Pair<T>, kSize>;
  extern __shared__ __align__(16) char shared[];
  const Sums exchange{reinterpret_cast<Pair<T>*>(shared)};
  // A thread's channel sums wait in shared memory: registers are short.
  const Sums channel_sums{reinterpret_cast<Pair<T>*>(shared + Sums::kBytes)};
  const RowBlock block(cut, blockIdx.x);
  const RowThread thread = RowThread::Here<kSize>(cut, block);
#pragma unroll
  for (int i = 0; i < kSize; ++i) channel_sums.Mine(i) = {0, 0};
  for (int64_t first = block.first_sample; first < block.end_sample; first += cut.batch) {
    const int64_t n = first + thread.slot;
    const bool active = thread.channels > 0 && n < block.end_sample;
    if (active) ReadSums(cut, block, thread, n, in, per_sample, exchange, channel_sums);
    __syncthreads();
    if (groups.means != nullptr) {
      ForUnits(cut, block, first, [&](const RowUnit& unit) {
        const Pair<double> sum =
            SumRectangle(cut, exchange, unit.slot * cut.sample_rows, cut.sample_rows,
                         unit.first_column, unit.columns, cut.lanes);
        if (unit.columns == 0 || threadIdx.x % cut.lanes != 0) return;
        groups.Store(unit.place, unit.n * cut.groups + unit.group, sum);
      });
    }
    if (channel_rows != nullptr && per_sample) {
      WriteChannels(cut, block, first, per_sample, channel_sums, channel_rows);
    }
    __syncthreads();
  }
  if (channel_rows == nullptr || per_sample) return;
  WriteChannels(cut, block, block.first_sample, per_sample, channel_sums, channel_rows);
}

template <typename E>
__global__ void __launch_bounds__(kThreads, kBlocks<E>)
    RowGradientKernel(RowCut cut, BackwardInputs<E> in, const Pair<Accumulator<E>>* means, E* dx) {
  using T = Accumulator<E>;
  constexpr int kSize = kRowPack<E>;
  const RowBlock block(cut, gridDim.x - 1 - blockIdx.x);
  const RowThread thread = RowThread::Here<kSize>(cut, block);
  if (thread.channels == 0) return;
  const bool whole_dx = WholePacks<kSize>(cut, dx);
  RowCoefficients<E> coefficients;
  Pair<T> mean[kSize] = {};  // the second one times rstd, to go with x - mean
  for (int64_t n = block.first_sample + thread.slot; n < block.end_sample; n += cut.batch) {
    coefficients.Load(cut, thread, n, in);
    ForGroups<kSize>(cut, thread.channel, thread.channels, [&](int i, int64_t group) {
      mean[i] = means[n * cut.groups + group];
      mean[i].second *= coefficients.rstd[i];
    });
    WithActivation(in.activation, [&](auto tag) {
      WalkGradients<tag()>(cut, thread, thread.Offset(cut, block, n), in, coefficients,
                           [&](int64_t at, const T(&deviation)[kSize], const T(&dz)[kSize]) {
                             T result[kSize];
#pragma unroll
                             for (int i = 0; i < kSize; ++i) {
                               result[i] = GradientOf(coefficients.scale[i], dz[i], deviation[i],
                                                      coefficients.rstd[i], mean[i]);
                             }
                             StoreRow(dx + at, ToPack<E>(result), thread.channels, whole_dx);
                           });
    });
  }
}

}  // namespace

template <typename E>
Status LaunchRowSums(const Problem& problem, const RowCut& cut, const Stage& stage,
                     const BackwardArgs& args, const BackwardSpace<E>& space, cudaStream_t stream) {
  RowSumsKernel<E><<<Grid(stage), stage.threads, stage.shared_bytes, stream>>>(
      cut, BackwardInputs<E>(problem, args), HasPerSample(problem),
      HasParam(problem) ? space.channel_rows : nullptr,
      GroupSums<Accumulator<E>>{cut.whole_groups() ? nullptr : space.parts, space.means,
                                static_cast<double>(problem.group_elements())});
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
