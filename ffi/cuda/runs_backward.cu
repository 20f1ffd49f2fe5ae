// Channels first, backward: RunSumsKernel reads dy and x, the runs being channels, and leaves the
// sums of dz and dz * xhat over each piece in a row of the workspace; RunGradientKernel reads both
// again, in the opposite order, and writes dx. Threads walk as runs.h says.
#include "launch.h"
#include "runs.h"
#include "streaming.h"

namespace jax_gn::cuda {
namespace {

constexpr int kPacks = 2;  // of dy and of x in flight a thread

// What a thread knows of its channel.
template <typename E, typename T = Accumulator<E>>
struct RunCoefficients {
  T mean, rstd, scale, bias;

  __device__ RunCoefficients(const RunCut& cut, const RunPiece& piece, int64_t group,
                             const BackwardInputs<E>& in) {
    const int64_t n = piece.run / cut.runs, channel = piece.run % cut.runs;
    mean = in.mean[group];
    rstd = in.rstd[group];
    scale = in.scale.LoadOne(n, channel, T(1));
    bias = in.bias.LoadOne(n, channel, T(0));
  }
};

// Calls f(at, xhat, dz) for the thread's packs; dz is 0 beyond the piece.
template <typename E, typename F>
__device__ __forceinline__ void WalkGradients(const RunCut& cut, const RunPiece& piece,
                                              const BackwardInputs<E>& in,
                                              const RunCoefficients<E>& c, F f) {
  using T = Accumulator<E>;
  constexpr int kSize = kPackSize<E>;
  const int phase = Phase(in.x);
  const RunPacks<const E> x_packs(in.x, phase), dy_packs(in.dy, phase);
  const auto differentiate = [&](int64_t at, const Pack<E>& x_pack, const Pack<E>& dy_pack) {
    T x[kSize], dy[kSize], z[kSize];
    ToNumbers(x_pack, x);
    ToNumbers(dy_pack, dy);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      x[i] = (x[i] - c.mean) * c.rstd;
      z[i] = x[i] * c.scale + c.bias;
    }
    ActivateBackwardAll(in.activation, z, dy);
    f(at, x, dy);
  };
  WalkRun<kSize, kPacks>(
      cut, piece, phase,
      [&](int64_t at, int64_t stride) {
        Pack<E> x[kPacks], dy[kPacks];
#pragma unroll
        for (int u = 0; u < kPacks; ++u) x[u] = LoadPack(in.x + at + u * stride);
#pragma unroll
        for (int u = 0; u < kPacks; ++u) {
          dy[u] = dy_packs.Load(at + u * stride, piece.begin, piece.end);
        }
#pragma unroll
        for (int u = 0; u < kPacks; ++u) differentiate(at + u * stride, x[u], dy[u]);
      },
      [&](int64_t at) {
        differentiate(at, x_packs.Load(at, piece.begin, piece.end),
                      dy_packs.Load(at, piece.begin, piece.end));
      });
}

template <typename E>
__global__ void __launch_bounds__(kThreads, 3)
    RunSumsKernel(RunCut cut, int64_t group_size, BackwardInputs<E> in,
                  Pair<Accumulator<E>>* channel_rows) {
  using T = Accumulator<E>;
  constexpr int kSize = kPackSize<E>;
  const RunPiece piece(cut, blockIdx.x);
  Pair<T> sum = {0, 0};
  if (piece.valid) {
    const RunCoefficients<E> coefficients(cut, piece, piece.run / group_size, in);
    WalkGradients(cut, piece, in, coefficients,
                  [&](int64_t at, const T(&xhat)[kSize], const T(&dz)[kSize]) {
                    Pair<T> pack_sum = {0, 0};
#pragma unroll
                    for (int i = 0; i < kSize; ++i) {
                      if (at + i < piece.begin || at + i >= piece.end) continue;
                      pack_sum.first += dz[i];
                      pack_sum.second += dz[i] * xhat[i];
                    }
                    sum.first += pack_sum.first;
                    sum.second += pack_sum.second;
                  });
  }
  const Pair<double> total = LaneSum(Pair<double>{sum.first, sum.second}, cut.lanes);
  if (!piece.valid || piece.lane != 0) return;
  const int64_t n = piece.run / cut.runs, channel = piece.run % cut.runs;
  channel_rows[(n * cut.pieces + piece.piece) * cut.runs + channel] = {
      static_cast<T>(total.first), static_cast<T>(total.second)};
}

template <typename E>
__global__ void __launch_bounds__(kThreads)
    RunGradientKernel(RunCut cut, int64_t group_size, BackwardInputs<E> in,
                      const Pair<Accumulator<E>>* means, E* dx) {
  using T = Accumulator<E>;
  constexpr int kSize = kPackSize<E>;
  const RunPiece piece(cut, gridDim.x - 1 - blockIdx.x);
  if (!piece.valid) return;
  const int64_t group = piece.run / group_size;
  const RunCoefficients<E> c(cut, piece, group, in);
  const Pair<T> mean = means[group];
  const RunPacks<E> out(dx, Phase(in.x));
  WalkGradients(cut, piece, in, c, [&](int64_t at, const T(&xhat)[kSize], const T(&dz)[kSize]) {
    T result[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      result[i] = GradientOf(c.scale, dz[i], xhat[i], c.rstd, mean);
    }
    out.Store(at, piece.begin, piece.end, ToPack<E>(result));
  });
}

}  // namespace

template <typename E>
Status LaunchRunSums(const Problem& problem, const RunCut& cut, const Stage& stage,
                     const BackwardArgs& args, const BackwardSpace<E>& space, cudaStream_t stream) {
  RunSumsKernel<E><<<Grid(stage), stage.threads, 0, stream>>>(
      cut, problem.group_size(), BackwardInputs<E>(problem, args), space.channel_rows);
  return JAX_GN_LAUNCHED("RunSumsKernel");
}

template <typename E>
Status LaunchRunGradient(const Problem& problem, const RunCut& cut, const Stage& stage,
                         const BackwardArgs& args, const BackwardSpace<E>& space,
                         cudaStream_t stream) {
  RunGradientKernel<E><<<Grid(stage), stage.threads, 0, stream>>>(
      cut, problem.group_size(), BackwardInputs<E>(problem, args), space.means,
      static_cast<E*>(args.dx));
  return JAX_GN_LAUNCHED("RunGradientKernel");
}

#define JAX_GN_INSTANTIATE(E)                                                                   \
  template Status LaunchRunSums<E>(const Problem&, const RunCut&, const Stage&,                 \
                                   const BackwardArgs&, const BackwardSpace<E>&, cudaStream_t); \
  template Status LaunchRunGradient<E>(const Problem&, const RunCut&, const Stage&,             \
                                       const BackwardArgs&, const BackwardSpace<E>&,            \
                                       cudaStream_t);
JAX_GN_FOR_ALL_ELEMENTS(JAX_GN_INSTANTIATE)

}  // namespace jax_gn::cuda
