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
    mean = in.mean[group] - in.addend.LoadOne(n, channel, T(0));  // as it comes off x
    rstd = in.rstd[group];
    scale = in.scale.LoadOne(n, channel, T(1));
    bias = in.bias.LoadOne(n, channel, T(0));
  }
};

// Calls whole(at, x - mean, dz) for the thread's packs within the piece, and part(…) for those at
// its ends, of which elements beyond it are 0.
template <Activation kActivation, typename E, typename Whole, typename Part>
__device__ __forceinline__ void WalkGradients(const RunCut& cut, const RunPiece& piece,
                                              const BackwardInputs<E>& in,
                                              const RunCoefficients<E>& c, Whole whole, Part part) {
  using T = Accumulator<E>;
  constexpr int kSize = kPackSize<E>;
  const int phase = Phase(in.x);
  const RunPacks<const E> x_packs(in.x, phase), dy_packs(in.dy, phase);
  const auto differentiate = [&](const Pack<E>& x_pack, const Pack<E>& dy_pack, T(&x)[kSize],
                                 T(&dy)[kSize]) {
    ToNumbers(x_pack, x);
    ToNumbers(dy_pack, dy);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      x[i] -= c.mean;
      dy[i] = FastBackward<E, kActivation>(dy[i], x[i] * (c.rstd * c.scale) + c.bias);
    }
  };
  WalkRun<kSize, kPacks>(
      cut, piece, phase,
      [&](int64_t at, int64_t stride) {
        Pack<E> x_pack[kPacks], dy_pack[kPacks];
#pragma unroll
        for (int u = 0; u < kPacks; ++u) x_pack[u] = LoadPack(in.x + at + u * stride);
#pragma unroll
        for (int u = 0; u < kPacks; ++u) dy_pack[u] = dy_packs.Load(at + u * stride);
#pragma unroll
        for (int u = 0; u < kPacks; ++u) {
          T deviation[kSize], dz[kSize];
          differentiate(x_pack[u], dy_pack[u], deviation, dz);
          whole(at + u * stride, deviation, dz);
        }
      },
      [&](int64_t at) {
        T deviation[kSize], dz[kSize];
        differentiate(x_packs.LoadPart(at, piece.begin, piece.end),
                      dy_packs.LoadPart(at, piece.begin, piece.end), deviation, dz);
        part(at, deviation, dz);
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
    const auto add = [&](int first, int last, const T(&deviation)[kSize], const T(&dz)[kSize]) {
      Pair<T> pack_sum = {0, 0};
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (i < first || i >= last) continue;
        pack_sum.first += dz[i];
        pack_sum.second += dz[i] * deviation[i];
      }
      sum = {sum.first + pack_sum.first, sum.second + pack_sum.second};
    };
    using Packs = RunPacks<const E>;
    WithActivation(in.activation, [&](auto tag) {
      WalkGradients<tag()>(
          cut, piece, in, coefficients,
          [&](int64_t, const T(&deviation)[kSize], const T(&dz)[kSize]) {
            add(0, kSize, deviation, dz);
          },
          [&](int64_t at, const T(&deviation)[kSize], const T(&dz)[kSize]) {
            add(Packs::First(at, piece.begin), Packs::template Last<kSize>(at, piece.end),
                deviation, dz);
          });
    });
    sum.second *= coefficients.rstd;
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
  const Pair<T> mean = {means[group].first, means[group].second * c.rstd};
  const RunPacks<E> out(dx, Phase(in.x));
  const auto gradient = [&](const T(&deviation)[kSize], const T(&dz)[kSize]) {
    T result[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      result[i] = GradientOf(c.scale, dz[i], deviation[i], c.rstd, mean);
    }
    return ToPack<E>(result);
  };
  WithActivation(in.activation, [&](auto tag) {
    WalkGradients<tag()>(
        cut, piece, in, c,
        [&](int64_t at, const T(&deviation)[kSize], const T(&dz)[kSize]) {
          out.Store(at, gradient(deviation, dz));
        },
        [&](int64_t at, const T(&deviation)[kSize], const T(&dz)[kSize]) {
          out.StorePart(at, piece.begin, piece.end, gradient(deviation, dz));
        });
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
