// Channels last, forward: RowMomentsKernel reads x and leaves mean and m2 of each group, as far as
// it lies in the block, in its place of the workspace (or, where that is the whole group, mean and
// rstd themselves); RowApplyKernel reads x again, in the opposite order to find its end in the L2,
// and writes y. Threads stand as rows.h says.
#include "launch.h"
#include "rows.h"
#include "streaming.h"

namespace jax_gn::cuda {
namespace {

// Rows in flight a thread: of the reading pass 64 bytes; the writing pass has more threads instead.
template <typename E>
inline constexpr int kRows = 64 / (kRowPack<E> * static_cast<int>(sizeof(E)));
constexpr int kApplyRows = 4;

template <typename E, typename T = Accumulator<E>>
struct MomentsExchange {
  static constexpr int kSize = kRowPack<E>;
  Exchange<double, kSize> means;
  Exchange<T, kSize> m2s;

  __device__ explicit MomentsExchange(char* shared)
      : means{reinterpret_cast<double*>(shared)},
        m2s{reinterpret_cast<T*>(shared + Exchange<double, kSize>::kBytes)} {}
};

// Reads the thread's rows of sample n, which begin at x, and leaves its channels' moments.
template <typename E>
__device__ __forceinline__ void ReadMoments(const RowCut& cut, const RowThread& thread, const E* x,
                                            bool whole, const Parameter& addend, int64_t n,
                                            const MomentsExchange<E>& exchange) {
  using T = Accumulator<E>;
  RunningMoments<T> moments[kRowPack<E>];
  const int64_t stride = cut.sample_rows * cut.channels;
  T count = 0;
  WalkRows<kRows<E>>(0, stride, thread.rows, [&](int64_t offset, int rows) {
    Pack<E, kRowPack<E>> packs[kRows<E>];
    LoadRows(x + offset, stride, rows, thread.channels, whole, packs);
    T values[kRows<E>][kRowPack<E>];
#pragma unroll
    for (int u = 0; u < kRows<E>; ++u) ToNumbers(packs[u], values[u]);
#pragma unroll
    for (int i = 0; i < kRowPack<E>; ++i) {
      if (offset == 0) moments[i].shift = values[0][i];
      moments[i].template Add<kRows<E>>(
          count, static_cast<T>(rows), [&](int u) { return values[u][i]; },
          [&](int u) { return u < rows; });
    }
    count += rows;
  });
  double added[kRowPack<E>];
  addend.Load(n, thread.channel, thread.channels, 0.0, added);
#pragma unroll
  for (int i = 0; i < kRowPack<E>; ++i) {
    exchange.means.Mine(i) = moments[i].Mean() + added[i];
    exchange.m2s.Mine(i) = moments[i].m2;
  }
}

// The moments of a unit, from those of its threads and channels: two sums, as if it were data.
template <typename E>
__device__ __forceinline__ Moments UnitMoments(const RowCut& cut, const RowBlock& block,
                                               const RowUnit& unit,
                                               const MomentsExchange<E>& exchange) {
  const int lane = threadIdx.x % cut.lanes, first_line = unit.slot * cut.sample_rows;
  const auto visit = [&](auto f) {
    if (unit.columns == 0) return;
    VisitRectangle(first_line, cut.sample_rows, unit.first_column, unit.columns, lane, cut.lanes,
                   [&](int line, int column) {
                     f(static_cast<double>(block.RowsOf(line - first_line)), line, column);
                   });
  };
  const double total = static_cast<double>(block.rows) * unit.columns;
  const double shift =
      unit.columns == 0 ? 0 : exchange.means.At(cut, first_line, unit.first_column);
  double sum = 0, m2 = 0;
  visit([&](double count, int line, int column) {
    sum += count * (exchange.means.At(cut, line, column) - shift);
  });
  const double mean = shift + LaneSum(sum, cut.lanes) / (total == 0 ? 1 : total);
  visit([&](double count, int line, int column) {
    const double deviation = exchange.means.At(cut, line, column) - mean;
    m2 += exchange.m2s.At(cut, line, column) + count * deviation * deviation;
  });
  return {mean, LaneSum(m2, cut.lanes)};
}

template <typename E>
__global__ void __launch_bounds__(kThreads)
    RowMomentsKernel(RowCut cut, const E* x, Parameter addend, Moments* parts,
                     Statistics<Accumulator<E>> results) {
  using T = Accumulator<E>;
  extern __shared__ __align__(16) char shared[];
  const MomentsExchange<E> exchange(shared);
  const RowBlock block(cut, blockIdx.x);
  const RowThread thread = RowThread::Here<kRowPack<E>>(cut, block);
  const bool whole = WholePacks<kRowPack<E>>(cut, x);
  for (int64_t first = block.first_sample; first < block.end_sample; first += cut.batch) {
    const int64_t n = first + thread.slot;
    if (thread.channels > 0 && n < block.end_sample) {
      ReadMoments(cut, thread, x + thread.Offset(cut, block, n), whole, addend, n, exchange);
    }
    __syncthreads();
    ForUnits(cut, block, first, [&](const RowUnit& unit) {
      const Moments moments = UnitMoments<E>(cut, block, unit, exchange);
      if (unit.columns == 0 || threadIdx.x % cut.lanes != 0) return;
      if (parts != nullptr) {
        parts[unit.place] = moments;
      } else {
        results.Store(unit.n * cut.groups + unit.group,
                      GroupResult<T>(moments.mean, moments.m2, cut.spatial * cut.group_size,
                                     results.epsilon));
      }
    });
    __syncthreads();
  }
}

template <typename E>
__global__ void __launch_bounds__(kThreads)
    RowApplyKernel(RowCut cut, ForwardInputs<E> in, Statistics<Accumulator<E>> statistics, E* y) {
  using T = Accumulator<E>;
  constexpr int kSize = kRowPack<E>;
  const RowBlock block(cut, gridDim.x - 1 - blockIdx.x);
  const RowThread thread = RowThread::Here<kSize>(cut, block);
  if (thread.channels == 0) return;
  const bool whole_x = WholePacks<kRowPack<E>>(cut, in.x),
             whole_y = WholePacks<kRowPack<E>>(cut, y);
  const int64_t stride = cut.sample_rows * cut.channels;
  T centre[kSize] = {}, slope[kSize], shift[kSize], scales[kSize], biases[kSize];
  for (int64_t n = block.first_sample + thread.slot; n < block.end_sample; n += cut.batch) {
    in.scale.Load(n, thread.channel, thread.channels, T(1), scales);
    in.bias.Load(n, thread.channel, thread.channels, T(0), biases);
    ForGroups<kSize>(cut, thread.channel, thread.channels, [&](int i, int64_t group) {
      const int64_t at = n * cut.groups + group;
      centre[i] = statistics.mean[at];
      slope[i] = statistics.rstd[at] * scales[i];
      shift[i] = biases[i] - statistics.mean_low[at] * slope[i];
    });
    if (in.addend.data != nullptr) {
      in.addend.Load(n, thread.channel, thread.channels, T(0), biases);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const Centre<T> c(centre[i], T(0), biases[i]);
        centre[i] = c.value;
        shift[i] -= c.rest * slope[i];
      }
    }
    WithActivation(in.activation, [&](auto tag) {
      WalkRows<kApplyRows>(
          thread.Offset(cut, block, n), stride, thread.rows, [&](int64_t at, int rows) {
            Pack<E, kSize> packs[kApplyRows];
            LoadRows(in.x + at, stride, rows, thread.channels, whole_x, packs);
#pragma unroll
            for (int u = 0; u < kApplyRows; ++u) {
              if (u >= rows) break;
              T z[kSize];
              ToNumbers(packs[u], z);
#pragma unroll
              for (int i = 0; i < kSize; ++i) {
                z[i] = Activate<tag()>((z[i] - centre[i]) * slope[i] + shift[i]);
              }
              StoreRow(y + at + u * stride, ToPack<E>(z), thread.channels, whole_y);
            }
          });
    });
  }
}

}  // namespace

template <typename E>
Status LaunchRowMoments(const Problem& problem, const RowCut& cut, const Stage& stage,
                        const ForwardArgs& args, const ForwardSpace<E>& space,
                        cudaStream_t stream) {
  RowMomentsKernel<E><<<Grid(stage), stage.threads, stage.shared_bytes, stream>>>(
      cut, static_cast<const E*>(args.x), AddendOf(problem, args),
      cut.whole_groups() ? nullptr : space.parts, space.statistics);
  return JAX_GN_LAUNCHED("RowMomentsKernel");
}

template <typename E>
Status LaunchRowApply(const Problem& problem, const RowCut& cut, const Stage& stage,
                      const ForwardArgs& args, const ForwardSpace<E>& space, cudaStream_t stream) {
  RowApplyKernel<E><<<Grid(stage), stage.threads, 0, stream>>>(
      cut, ForwardInputs<E>(problem, args), space.statistics, static_cast<E*>(args.y));
  return JAX_GN_LAUNCHED("RowApplyKernel");
}

#define JAX_GN_INSTANTIATE(E)                                                                    \
  template Status LaunchRowMoments<E>(const Problem&, const RowCut&, const Stage&,               \
                                      const ForwardArgs&, const ForwardSpace<E>&, cudaStream_t); \
  template Status LaunchRowApply<E>(const Problem&, const RowCut&, const Stage&,                 \
                                    const ForwardArgs&, const ForwardSpace<E>&, cudaStream_t);
JAX_GN_FOR_ALL_ELEMENTS(JAX_GN_INSTANTIATE)

}  // namespace jax_gn::cuda
