// The family "three_stage": the plain scheme, a block per sample and group, one element an access.
//
// GroupStatisticsApplyKernel reads its group three times (mean, then the centred variance, then y):
// an exact two-pass in double, without workspace. Backward: GroupSumsKernel reads dy and x and
// leaves two numbers a group, all of the workspace; GroupGradientKernel reads them again and writes
// dx; ChannelSumsKernel reads them once more for dscale and dbias, a block for 32 neighbouring
// channels (channels last) or for one (channels first). It serves every problem, and is what the
// fast families are measured against.
#include "families.h"
#include "launch.h"
#include "sums.h"
#include "three_stage.h"

namespace jax_gn::cuda {
namespace {

// A matrix of rows that lie `stride` apart: element i = (row, column), and the step between the
// elements of a thread, without a division each.
struct Walk {
  int64_t columns, stride, row, column, row_step, column_step;

  __device__ Walk(int64_t columns, int64_t stride, int64_t first, int64_t step)
      : columns(columns),
        stride(stride),
        row(first / columns),
        column(first % columns),
        row_step(step / columns),
        column_step(step % columns) {}

  __device__ __forceinline__ int64_t Offset() const { return row * stride + column; }
  __device__ __forceinline__ void Next() {
    row += row_step;
    column += column_step;
    if (column >= columns) {
      column -= columns;
      ++row;
    }
  }
};

struct Sizes {
  int64_t spatial, channels, groups, group_size;
  bool last;

  explicit Sizes(const Problem& problem)
      : spatial(problem.spatial),
        channels(problem.channels),
        groups(problem.groups),
        group_size(problem.group_size()),
        last(problem.layout == Layout::kChannelsLast) {}
};

// The group of this block. Channels last its matrix is [S, D], channels first [D, S].
struct Group {
  int64_t index, n, first_channel, offset, elements;
  Sizes sizes;

  __device__ explicit Group(const Sizes& sizes) : sizes(sizes) {
    index = blockIdx.x;
    n = index / sizes.groups;
    first_channel = index % sizes.groups * sizes.group_size;
    offset = n * sizes.spatial * sizes.channels + first_channel * (sizes.last ? 1 : sizes.spatial);
    elements = sizes.spatial * sizes.group_size;
  }

  // f(offset in the tensor, channel) for this thread's elements.
  template <typename F>
  __device__ __forceinline__ void ForElements(F f) const {
    Walk walk(sizes.last ? sizes.group_size : sizes.spatial,
              sizes.last ? sizes.channels : sizes.spatial, threadIdx.x, kThreads);
    for (int64_t i = threadIdx.x; i < elements; i += kThreads, walk.Next()) {
      f(offset + walk.Offset(), first_channel + (sizes.last ? walk.column : walk.row));
    }
  }
};

template <typename E>
__global__ void __launch_bounds__(kThreads)
    GroupStatisticsApplyKernel(Sizes sizes, ForwardInputs<E> in, Statistics<Accumulator<E>> results,
                               E* y) {
  using T = Accumulator<E>;
  const Group group(sizes);
  const double count = static_cast<double>(group.elements);
  const auto number = [&](int64_t at, int64_t channel) {
    return ToNumber(in.x[at]) + in.addend.LoadOne(group.n, channel, 0.0);
  };
  const double shift = number(group.offset, group.first_channel);  // exact for a constant group
  double sum = 0, m2 = 0;
  group.ForElements([&](int64_t at, int64_t channel) { sum += number(at, channel) - shift; });
  const double exact_mean = shift + LaneSum(sum, kThreads) / count;
  group.ForElements([&](int64_t at, int64_t channel) {
    const double deviation = number(at, channel) - exact_mean;
    m2 += deviation * deviation;
  });
  const GroupResult<T> result(exact_mean, LaneSum(m2, kThreads), group.elements, results.epsilon);
  if (threadIdx.x == 0) results.Store(group.index, result);
  if (y == nullptr) return;
  group.ForElements([&](int64_t at, int64_t channel) {
    const T slope = result.rstd * in.scale.LoadOne(group.n, channel, T(1));
    const Centre<T> centre(result.mean, result.mean_low, in.addend.LoadOne(group.n, channel, T(0)));
    const T offset = in.bias.LoadOne(group.n, channel, T(0)) - centre.rest * slope;
    T z[] = {(ToNumber(in.x[at]) - centre.value) * slope + offset};
    ActivateAll(in.activation, z);
    y[at] = ToElement<E>(z[0]);
  });
}

// Of one element: xhat and dz.
template <typename E>
struct Gradient {
  using T = Accumulator<E>;
  T xhat, dz, scale;

  __device__ __forceinline__ Gradient(const BackwardInputs<E>& in, int64_t at, int64_t n,
                                      int64_t channel, T mean, T rstd) {
    xhat = (ToNumber(in.x[at]) - (mean - in.addend.LoadOne(n, channel, T(0)))) * rstd;
    scale = in.scale.LoadOne(n, channel, T(1));
    T dy[] = {ToNumber(in.dy[at])};
    const T z[] = {xhat * scale + in.bias.LoadOne(n, channel, T(0))};
    ActivateBackwardAll(in.activation, z, dy);
    dz = dy[0];
  }
};

template <typename E>
__global__ void __launch_bounds__(kThreads)
    GroupSumsKernel(Sizes sizes, BackwardInputs<E> in, Pair<Accumulator<E>>* means) {
  const Group group(sizes);
  Pair<double> sum = {0, 0};
  group.ForElements([&](int64_t at, int64_t channel) {
    const Gradient<E> g(in, at, group.n, channel, in.mean[group.index], in.Rstd(group.index));
    sum.first += static_cast<double>(g.scale) * g.dz;
    sum.second += static_cast<double>(g.scale) * g.dz * g.xhat;
  });
  sum = LaneSum(sum, kThreads);
  if (threadIdx.x == 0) StoreMeans(means, group.index, sum, static_cast<double>(group.elements));
}

template <typename E>
__global__ void __launch_bounds__(kThreads)
    GroupGradientKernel(Sizes sizes, BackwardInputs<E> in, const Pair<Accumulator<E>>* means,
                        E* dx) {
  using T = Accumulator<E>;
  const Group group(sizes);
  const T rstd = in.Rstd(group.index);
  const Pair<T> mean = means[group.index];
  group.ForElements([&](int64_t at, int64_t channel) {
    const Gradient<E> g(in, at, group.n, channel, in.mean[group.index], rstd);
    dx[at] = ToElement<E>(GradientOf(g.scale, g.dz, g.xhat, rstd, mean));
  });
}

// dbias and dscale of `columns` channels, over the samples first .. first + samples - 1.
template <typename E>
__global__ void __launch_bounds__(kThreads)
    ChannelSumsKernel(Sizes sizes, BackwardInputs<E> in, int columns, int64_t samples,
                      DType bias_dtype, void* dbias, DType scale_dtype, void* dscale) {
  __shared__ Pair<double> sums[kThreads];
  const int64_t tiles = CeilDiv(sizes.channels, columns);
  const int64_t result = blockIdx.x / tiles;
  const int64_t channel = blockIdx.x % tiles * columns + threadIdx.x % columns;
  Pair<double> sum = {0, 0};
  if (channel < sizes.channels) {
    // Rows: samples, columns: positions.
    Walk walk(sizes.spatial, 0, threadIdx.x / columns, kThreads / columns);
    for (; walk.row < samples; walk.Next()) {
      const int64_t n = result * samples + walk.row, group = channel / sizes.group_size;
      const int64_t at = sizes.last ? (n * sizes.spatial + walk.column) * sizes.channels + channel
                                    : (n * sizes.channels + channel) * sizes.spatial + walk.column;
      const int64_t statistic = n * sizes.groups + group;
      const Gradient<E> g(in, at, n, channel, in.mean[statistic], in.Rstd(statistic));
      sum.first += g.dz;
      sum.second += static_cast<double>(g.dz) * g.xhat;
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x >= columns || channel >= sizes.channels) return;
  for (int i = threadIdx.x + columns; i < kThreads; i += columns) {
    sum.first += sums[i].first;
    sum.second += sums[i].second;
  }
  if (dbias != nullptr) StoreAs(bias_dtype, dbias, result * sizes.channels + channel, sum.first);
  if (dscale != nullptr) {
    StoreAs(scale_dtype, dscale, result * sizes.channels + channel, sum.second);
  }
}

template <typename E>
Status LaunchChannelSums(const Problem& problem, const Stage& stage, const BackwardArgs& args,
                         Param form, cudaStream_t stream) {
  ChannelSumsKernel<E><<<Grid(stage), stage.threads, 0, stream>>>(
      Sizes(problem), BackwardInputs<E>(problem, args),
      static_cast<int>(ChannelSumColumns(problem)), form == Param::kPerSample ? 1 : problem.n,
      problem.dbias_dtype(), problem.dbias() == form ? args.dbias : nullptr, problem.dscale_dtype(),
      problem.dscale() == form ? args.dscale : nullptr);
  return JAX_GN_LAUNCHED("ChannelSumsKernel");
}

}  // namespace

Status LaunchThreeStageForward(const Problem& problem, const Plan& plan, const ForwardArgs& args,
                               cudaStream_t stream) {
  return VisitElement(problem.dtype, [&](auto element) {
    using E = decltype(element);
    using T = Accumulator<E>;
    GroupStatisticsApplyKernel<E><<<Grid(plan.stages[0]), kThreads, 0, stream>>>(
        Sizes(problem), ForwardInputs<E>(problem, args),
        Statistics<T>{static_cast<T*>(args.mean), static_cast<T*>(args.rstd),
                      static_cast<T*>(args.mean_low), args.epsilon, static_cast<T*>(args.variance)},
        static_cast<E*>(args.y));
    return JAX_GN_LAUNCHED("GroupStatisticsApplyKernel");
  });
}

Status LaunchThreeStageBackward(const Problem& problem, const Plan& plan, const BackwardArgs& args,
                                cudaStream_t stream) {
  return VisitElement(problem.dtype, [&](auto element) {
    using E = decltype(element);
    auto* means = static_cast<Pair<Accumulator<E>>*>(args.workspace);
    const BackwardInputs<E> in(problem, args);
    const Stage* stage = plan.stages.data();
    if (!problem.sums_only) {
      GroupSumsKernel<E><<<Grid(*stage++), kThreads, 0, stream>>>(Sizes(problem), in, means);
      JAX_GN_TRY(JAX_GN_LAUNCHED("GroupSumsKernel"));
      GroupGradientKernel<E><<<Grid(*stage++), kThreads, 0, stream>>>(Sizes(problem), in, means,
                                                                      static_cast<E*>(args.dx));
      JAX_GN_TRY(JAX_GN_LAUNCHED("GroupGradientKernel"));
    }
    for (const Param form : {Param::kPerChannel, Param::kPerSample}) {
      if (problem.dscale() != form && problem.dbias() != form) continue;
      JAX_GN_TRY(LaunchChannelSums<E>(problem, *stage++, args, form, stream));
    }
    return Status();
  });
}

}  // namespace jax_gn::cuda
