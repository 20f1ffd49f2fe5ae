// The small steps between and after the streaming passes, each in a fixed order.
//
// CombineMomentsKernel, CombineSumsKernel: `lanes` neighbouring threads add up the parts of one
// group, read from the workspace, to mean and rstd, or to the means that dx needs. ParameterSums-
// Kernel: a block takes `columns` channels, its threads below each other share the rows; it reads
// the channel sums once and writes dbias and dscale.
#include "launch.h"
#include "streaming.h"

namespace jax_gn::cuda {
namespace {

// Where the parts of a group lie: part i of sample n and group g, of `parts`.
struct GroupParts {
  int64_t n, groups, channels, group_size;
  int64_t pieces, extent, length;  // pieces of the rows (channels last) or of the group's run
  int64_t tile, tiles;             // channels last; else tile = 0
  int lanes;

  GroupParts(const Problem& problem)
      : n(problem.n),
        groups(problem.groups),
        channels(problem.channels),
        group_size(problem.group_size()),
        lanes(CombineLanes(problem)) {
    if (LayoutOf(problem) == Layout::kChannelsLast && !GroupsAreRuns(problem)) {
      const RowCut cut = CutRows(problem);
      pieces = cut.pieces;
      extent = cut.extent;
      length = problem.spatial;
      tile = cut.tile;
      tiles = cut.tiles;
    } else {
      const RunCut cut = CutRuns(problem, problem.op == Op::kForward ? groups : channels);
      pieces = cut.pieces;
      extent = cut.extent;
      length = cut.length;
      tile = tiles = 0;
    }
  }
};

// Calls f(place, elements) for a lane's share of a group's parts.
template <typename F>
__device__ __forceinline__ void ForParts(const GroupParts& parts, int64_t n, int64_t g, int lane,
                                         F f) {
  if (parts.tile == 0) {
    for (int64_t piece = lane; piece < parts.pieces; piece += parts.lanes) {
      f((n * parts.groups + g) * parts.pieces + piece,
        min(parts.extent, parts.length - piece * parts.extent));
    }
    return;
  }
  const int64_t begin = g * parts.group_size, end = begin + parts.group_size;
  const int64_t places = parts.groups + parts.tiles;
  for (int64_t t = begin / parts.tile; t * parts.tile < end; ++t) {
    const int64_t columns = min(end, (t + 1) * parts.tile) - max(begin, t * parts.tile);
    for (int64_t piece = lane; piece < parts.pieces; piece += parts.lanes) {
      f((n * parts.pieces + piece) * places + g + t,
        columns * min(parts.extent, parts.length - piece * parts.extent));
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    CombineMomentsKernel(GroupParts cut, const Moments* parts, Statistics<T> results) {
  const int64_t index =
      static_cast<int64_t>(blockIdx.x) * (kThreads / cut.lanes) + threadIdx.x / cut.lanes;
  const int lane = threadIdx.x % cut.lanes;
  const bool valid = index < cut.n * cut.groups;
  const int64_t n = index / cut.groups, g = index % cut.groups;
  double shift = 0, total = 0, sum = 0, m2 = 0;
  const auto visit = [&](auto f) {
    if (valid) ForParts(cut, n, g, lane, f);
  };
  visit([&](int64_t place, int64_t elements) {
    if (total == 0) shift = parts[place].mean;
    total += static_cast<double>(elements);
  });
  shift = FirstLane(shift, cut.lanes);
  total = LaneSum(total, cut.lanes);
  visit([&](int64_t place, int64_t elements) {
    sum += static_cast<double>(elements) * (parts[place].mean - shift);
  });
  const double mean = shift + LaneSum(sum, cut.lanes) / (valid ? total : 1);
  visit([&](int64_t place, int64_t elements) {
    const double deviation = parts[place].mean - mean;
    m2 += parts[place].m2 + static_cast<double>(elements) * deviation * deviation;
  });
  m2 = LaneSum(m2, cut.lanes);
  if (!valid || lane != 0) return;
  results.Store(index, GroupResult<T>(mean, m2, static_cast<int64_t>(total), results.epsilon));
}

// Channels first the parts are the channels, not yet scaled, a row of `channel_rows` per piece.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    CombineSumsKernel(GroupParts cut, Parameter scale, const Pair<T>* channel_rows,
                      const Pair<T>* parts, double elements, Pair<T>* means) {
  const int64_t index =
      static_cast<int64_t>(blockIdx.x) * (kThreads / cut.lanes) + threadIdx.x / cut.lanes;
  const int lane = threadIdx.x % cut.lanes;
  const bool valid = index < cut.n * cut.groups;
  const int64_t n = index / cut.groups, g = index % cut.groups;
  Pair<double> sum = {0, 0};
  const auto add = [&](double factor, Pair<T> pair) {
    sum.first += factor * pair.first;
    sum.second += factor * pair.second;
  };
  if (valid && cut.tile != 0) {
    ForParts(cut, n, g, lane, [&](int64_t place, int64_t) { add(1, parts[place]); });
  } else if (valid) {
    for (int64_t i = lane; i < cut.pieces * cut.group_size; i += cut.lanes) {
      const int64_t channel = g * cut.group_size + i % cut.group_size;
      const int64_t row = n * cut.pieces + i / cut.group_size;
      add(scale.LoadOne(n, channel, T(1)), channel_rows[row * cut.channels + channel]);
    }
  }
  sum = LaneSum(sum, cut.lanes);
  if (valid && lane == 0) StoreMeans(means, index, sum, elements);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    ParameterSumsKernel(ParameterCut cut, int64_t channels, const Pair<T>* channel_rows,
                        DType bias_dtype, void* dbias, DType scale_dtype, void* dscale) {
  __shared__ Pair<double> sums[kThreads];
  const int64_t tiles = CeilDiv(channels, cut.columns);
  const int64_t result = blockIdx.x / tiles;
  const int64_t channel = blockIdx.x % tiles * cut.columns + threadIdx.x % cut.columns;
  const int lines = kThreads / cut.columns;
  Pair<double> sum = {0, 0};
  if (channel < channels) {
    const Pair<T>* rows = channel_rows + result * cut.rows * channels + channel;
#pragma unroll 8
    for (int64_t row = threadIdx.x / cut.columns; row < cut.rows; row += lines) {
      const Pair<T> pair = rows[row * channels];
      sum.first += pair.first;
      sum.second += pair.second;
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x >= cut.columns || channel >= channels) return;
  for (int line = 1; line < lines; ++line) {
    sum.first += sums[line * cut.columns + threadIdx.x].first;
    sum.second += sums[line * cut.columns + threadIdx.x].second;
  }
  if (dbias != nullptr) StoreAs(bias_dtype, dbias, result * channels + channel, sum.first);
  if (dscale != nullptr) StoreAs(scale_dtype, dscale, result * channels + channel, sum.second);
}

}  // namespace

template <typename T>
Status LaunchCombineMoments(const Problem& problem, const Stage& stage, const Moments* parts,
                            const Statistics<T>& results, cudaStream_t stream) {
  CombineMomentsKernel<T>
      <<<Grid(stage), stage.threads, 0, stream>>>(GroupParts(problem), parts, results);
  return JAX_GN_LAUNCHED("CombineMomentsKernel");
}

template <typename T>
Status LaunchCombineSums(const Problem& problem, const Stage& stage, const BackwardArgs& args,
                         const Pair<T>* channel_rows, const Pair<T>* parts, Pair<T>* means,
                         cudaStream_t stream) {
  CombineSumsKernel<T><<<Grid(stage), stage.threads, 0, stream>>>(
      GroupParts(problem), ScaleOf(problem, args), channel_rows, parts,
      static_cast<double>(problem.group_elements()), means);
  return JAX_GN_LAUNCHED("CombineSumsKernel");
}

template <typename T>
Status LaunchParameterSums(const Problem& problem, const Stage& stage, const BackwardArgs& args,
                           Param form, int64_t rows, const Pair<T>* channel_rows,
                           cudaStream_t stream) {
  ParameterSumsKernel<T><<<Grid(stage), stage.threads, 0, stream>>>(
      CutParameters(problem, form, rows), problem.channels, channel_rows, problem.dbias_dtype(),
      problem.dbias() == form ? args.dbias : nullptr, problem.dscale_dtype(),
      problem.dscale() == form ? args.dscale : nullptr);
  return JAX_GN_LAUNCHED("ParameterSumsKernel");
}

#define JAX_GN_INSTANTIATE(T)                                                                      \
  template Status LaunchCombineMoments<T>(const Problem&, const Stage&, const Moments*,            \
                                          const Statistics<T>&, cudaStream_t);                     \
  template Status LaunchCombineSums<T>(const Problem&, const Stage&, const BackwardArgs&,          \
                                       const Pair<T>*, const Pair<T>*, Pair<T>*, cudaStream_t);    \
  template Status LaunchParameterSums<T>(const Problem&, const Stage&, const BackwardArgs&, Param, \
                                         int64_t, const Pair<T>*, cudaStream_t);
JAX_GN_INSTANTIATE(float)
JAX_GN_INSTANTIATE(double)

}  // namespace jax_gn::cuda
