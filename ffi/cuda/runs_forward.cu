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
    RunMomentsKernel(RunCut cut, const E* x, Moments* parts, Statistics<Accumulator<E>> results) {
  using T = Accumulator<E>;
  constexpr int kSize = kPackSize<E>;
  const RunPiece piece(cut, blockIdx.x);
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
    if (count == 0) moments.shift = values[0][0];
    moments.template Add<kPacks * kSize>(
        static_cast<T>(count), T(kPacks * kSize),
        [&](int i) { return values[i / kSize][i % kSize]; }, [](int) { return true; });
    count += kPacks * kSize;
  };
  const auto part = [&](int64_t at) {
    T values[kSize];
    ToNumbers(packs.LoadPart(at, piece.begin, piece.end), values);
    const int first = packs.First(at, piece.begin);
    const int last = packs.template Last<kSize>(at, piece.end);
    if (count == 0) moments.shift = ToNumber(x[at + first]);
    moments.template Add<kSize>(
        static_cast<T>(count), static_cast<T>(last - first), [&](int i) { return values[i]; },
        [&](int i) { return first <= i && i < last; });
    count += last - first;
  };
  WalkRun<kSize, kPacks>(cut, piece, phase, full, part);

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
    RunApplyKernel(RunCut cut, int64_t group_size, const E* x, Parameter scale, Parameter bias,
                   Statistics<Accumulator<E>> statistics, Activation activation, E* y) {
  using T = Accumulator<E>;
  constexpr int kSize = kPackSize<E>;
  const RunPiece piece(cut, gridDim.x - 1 - blockIdx.x);
  if (!piece.valid) return;
  const int phase = Phase(x);
  const RunPacks<const E> in(x, phase);
  const RunPacks<E> out(y, phase);
  const int64_t n = piece.run / cut.runs, channel = piece.run % cut.runs;
  const int64_t group = piece.run / group_size;
  const T mean = statistics.mean[group];
  const T slope = statistics.rstd[group] * scale.LoadOne(n, channel, T(1));
  const T shift = bias.LoadOne(n, channel, T(0)) - statistics.mean_low[group] * slope;
  WithActivation(activation, [&](auto tag) {
    const auto apply = [&](const Pack<E>& loaded) {
      T z[kSize];
      ToNumbers(loaded, z);
#pragma unroll
      for (int i = 0; i < kSize; ++i) z[i] = Activate<tag()>((z[i] - mean) * slope + shift);
      return ToPack<E>(z);
    };
    WalkRun<kSize, kPacks>(
        cut, piece, phase,
        [&](int64_t at, int64_t stride) {
          Pack<E> loaded[kPacks];
#pragma unroll
          for (int u = 0; u < kPacks; ++u) loaded[u] = LoadPack(x + at + u * stride);
#pragma unroll
          for (int u = 0; u < kPacks; ++u) out.Store(at + u * stride, apply(loaded[u]));
        },
        [&](int64_t at) {
          out.StorePart(at, piece.begin, piece.end, apply(in.LoadPart(at, piece.begin, piece.end)));
        });
  });
}

}  // namespace

template <typename E>
Status LaunchRunMoments(const Problem&, const RunCut& cut, const Stage& stage,
                        const ForwardArgs& args, const ForwardSpace<E>& space,
                        cudaStream_t stream) {
  RunMomentsKernel<E><<<Grid(stage), stage.threads, 0, stream>>>(
      cut, static_cast<const E*>(args.x), cut.pieces == 1 ? nullptr : space.parts,
      space.statistics);
  return JAX_GN_LAUNCHED("RunMomentsKernel");
}

template <typename E>
Status LaunchRunApply(const Problem& problem, const RunCut& cut, const Stage& stage,
                      const ForwardArgs& args, const ForwardSpace<E>& space, cudaStream_t stream) {
  RunApplyKernel<E><<<Grid(stage), stage.threads, 0, stream>>>(
      cut, problem.group_size(), static_cast<const E*>(args.x), ScaleOf(problem, args),
      BiasOf(problem, args), space.statistics, problem.activation, static_cast<E*>(args.y));
  return JAX_GN_LAUNCHED("RunApplyKernel");
}

#define JAX_GN_INSTANTIATE(E)                                                                    \
  template Status LaunchRunMoments<E>(const Problem&, const RunCut&, const Stage&,               \
                                      const ForwardArgs&, const ForwardSpace<E>&, cudaStream_t); \
  template Status LaunchRunApply<E>(const Problem&, const RunCut&, const Stage&,                 \
                                    const ForwardArgs&, const ForwardSpace<E>&, cudaStream_t);
JAX_GN_FOR_ALL_ELEMENTS(JAX_GN_INSTANTIATE)

}  // namespace jax_gn::cuda
