// Channels first, forward: RunMomentsKernel reads x, the runs being whole groups, and leaves mean
// and m2 of each piece in its place of the workspace (or, where a piece is the whole group, mean
// and rstd themselves); RunApplyKernel reads x again, the runs being channels, in the opposite
// order to find its end in the L2, and writes y. Threads walk as runs.h says.
#include "launch.h"
#include "runs.h"
#include "streaming.h"

namespace jax_gn::cuda {
namespace {

constexpr int kPacks = 4;  // loads in flight a thread

template <typename E>
__global__ void __launch_bounds__(kThreads)
    RunMomentsKernel(RunCut cut, int64_t spatial, int64_t channels, const E* x, Parameter addend,
                     Moments* parts, Statistics<Accumulator<E>> results) {
  using T = Accumulator<E>;
  constexpr int kSize = kPackSize<E>;
  const RunPiece piece(cut, blockIdx.x);
  RunPiece segment = piece;  // as far as one number is added
  T added = 0;
  const int phase = Phase(x);
  const RunPacks<const E> packs(x, phase);
  RunningMoments<T> moments;
  int64_t count = 0;
  const auto full = [&](int64_t at, int64_t stride) {
    if (!packs.aligned) __builtin_unreachable();  // the phase is x's own
    Pack<E> loaded[kPacks];
#pragma unroll
    for (int u = 0; u < kPacks; ++u) loaded[u] = LoadPack(x + at + u * stride);
    T values[kPacks][kSize];
#pragma unroll
    for (int u = 0; u < kPacks; ++u) ToNumbers(loaded[u], values[u]);
    if (count == 0) moments.shift = values[0][0] + added;
    moments.template Add<kPacks * kSize>(
        static_cast<T>(count), T(kPacks * kSize),
        [&](int i) { return values[i / kSize][i % kSize] + added; }, [](int) { return true; });
    count += kPacks * kSize;
  };
  const auto part = [&](int64_t at) {
    T values[kSize];
    ToNumbers(packs.LoadPart(at, segment.begin, segment.end), values);
    const int first = packs.First(at, segment.begin);
    const int last = packs.template Last<kSize>(at, segment.end);
    if (count == 0) moments.shift = ToNumber(x[at + first]) + added;
    moments.template Add<kSize>(
        static_cast<T>(count), static_cast<T>(last - first),
        [&](int i) { return values[i] + added; }, [&](int i) { return first <= i && i < last; });
    count += last - first;
  };
  for (int64_t begin = piece.begin; begin < piece.end; begin = segment.end) {
    segment.begin = begin;
    if (addend.data != nullptr) {  // channel by channel
      const int64_t channel = begin / spatial;
      segment.end = min(piece.end, (channel + 1) * spatial);
      added = addend.LoadOne(channel / channels, channel % channels, T(0));
    }
    WalkRun<kSize, kPacks>(cut, segment, phase, full, part);
  }

  // The threads' moments merge as if they were data. Lane 0 always has some.
  const double own = moments.Mean(), shift = FirstLane(own, cut.lanes);
  const double total = piece.valid ? static_cast<double>(piece.end - piece.begin) : 1;
  const double weight = static_cast<double>(count);
  const double mean = shift + LaneSum(weight * (own - shift), cut.lanes) / total;
  const double m2 = LaneSum(moments.m2 + weight * (own - mean) * (own - mean), cut.lanes);
  if (!piece.valid || piece.lane != 0) return;
  if (parts != nullptr) {
    parts[piece.run * cut.pieces + piece.piece] = {mean, m2};
  } else {
    results.Store(piece.run, GroupResult<T>(mean, m2, cut.length, results.epsilon));
  }
}

template <typename E>
__global__ void __launch_bounds__(kThreads)
    RunApplyKernel(RunCut cut, int64_t group_size, ForwardInputs<E> in,
                   Statistics<Accumulator<E>> statistics, E* y) {
  using T = Accumulator<E>;
  constexpr int kSize = kPackSize<E>;
  const RunPiece piece(cut, gridDim.x - 1 - blockIdx.x);
  if (!piece.valid) return;
  const int phase = Phase(in.x);
  const RunPacks<const E> from(in.x, phase);
  const RunPacks<E> out(y, phase);
  const int64_t n = piece.run / cut.runs, channel = piece.run % cut.runs;
  const int64_t group = piece.run / group_size;
  const Centre<T> centre(statistics.mean[group], statistics.mean_low[group],
                         in.addend.LoadOne(n, channel, T(0)));
  const T slope = statistics.rstd[group] * in.scale.LoadOne(n, channel, T(1));
  const T shift = in.bias.LoadOne(n, channel, T(0)) - centre.rest * slope;
  WithActivation(in.activation, [&](auto tag) {
    const auto apply = [&](const Pack<E>& loaded) {
      T z[kSize];
      ToNumbers(loaded, z);
#pragma unroll
      for (int i = 0; i < kSize; ++i) z[i] = Activate<tag()>((z[i] - centre.value) * slope + shift);
      return ToPack<E>(z);
    };
    WalkRun<kSize, kPacks>(
        cut, piece, phase,
        [&](int64_t at, int64_t stride) {
          Pack<E> loaded[kPacks];
#pragma unroll
          for (int u = 0; u < kPacks; ++u) loaded[u] = LoadPack(in.x + at + u * stride);
#pragma unroll
          for (int u = 0; u < kPacks; ++u) out.Store(at + u * stride, apply(loaded[u]));
        },
        [&](int64_t at) {
          out.StorePart(at, piece.begin, piece.end,
                        apply(from.LoadPart(at, piece.begin, piece.end)));
        });
  });
}

}  // namespace

template <typename E>
Status LaunchRunMoments(const Problem& problem, const RunCut& cut, const Stage& stage,
                        const ForwardArgs& args, const ForwardSpace<E>& space,
                        cudaStream_t stream) {
  RunMomentsKernel<E><<<Grid(stage), stage.threads, 0, stream>>>(
      cut, problem.spatial, problem.channels, static_cast<const E*>(args.x),
      AddendOf(problem, args), cut.pieces == 1 ? nullptr : space.parts, space.statistics);
  return JAX_GN_LAUNCHED("RunMomentsKernel");
}

template <typename E>
Status LaunchRunApply(const Problem& problem, const RunCut& cut, const Stage& stage,
                      const ForwardArgs& args, const ForwardSpace<E>& space, cudaStream_t stream) {
  RunApplyKernel<E><<<Grid(stage), stage.threads, 0, stream>>>(
      cut, problem.group_size(), ForwardInputs<E>(problem, args), space.statistics,
      static_cast<E*>(args.y));
  return JAX_GN_LAUNCHED("RunApplyKernel");
}

#define JAX_GN_INSTANTIATE(E)                                                                    \
  template Status LaunchRunMoments<E>(const Problem&, const RunCut&, const Stage&,               \
                                      const ForwardArgs&, const ForwardSpace<E>&, cudaStream_t); \
  template Status LaunchRunApply<E>(const Problem&, const RunCut&, const Stage&,                 \
                                    const ForwardArgs&, const ForwardSpace<E>&, cudaStream_t);
JAX_GN_FOR_ALL_ELEMENTS(JAX_GN_INSTANTIATE)

}  // namespace jax_gn::cuda
