// The backward pass of resident_spans.h.
#include "resident_spans.h"

namespace jax_gn::cuda {
namespace {

constexpr int kRing = GridTeam::kRing;

// What a thread of the backward pass knows of its channel.
struct SpanGradient {
  float mean, rstd, scale, slope, bias;  // mean: without the addend, as it comes off x

  template <typename E>
  __device__ __forceinline__ SpanGradient(const BackwardInputs<E>& in, const Span& span)
      : mean(in.mean[span.slab] - in.addend.LoadOne(span.n, span.channel, 0.0f)),
        rstd(in.rstd[span.slab]),
        scale(in.scale.LoadOne(span.n, span.channel, 1.0f)),
        slope(rstd * scale),
        bias(in.bias.LoadOne(span.n, span.channel, 0.0f)) {}

  // x - mean and dz of a step, from its packs.
  template <Activation kActivation, typename E>
  __device__ __forceinline__ void Differentiate(const InputPacks<E>& packs,
                                                float (&deviation)[kPackSize<E>],
                                                float (&dz)[kPackSize<E>]) const {
    ToNumbers(packs.x, deviation);
    ToNumbers(packs.dy, dz);
#pragma unroll
    for (int i = 0; i < kPackSize<E>; ++i) {
      deviation[i] -= mean;
      dz[i] = FastBackward<E, kActivation>(dz[i], deviation[i] * slope + bias);
    }
  }
};

// The sums of dz and dz * xhat over the block's span, left in its row of channel_rows; times scale
// and over the team they are returned.
__device__ __forceinline__ Pair<float> SpanSum(const ResidentCut& cut, Pair<float> sums,
                                               const SpanGradient& gradient, int segment,
                                               const Span& span, Pair<float>* warp_sums,
                                               const GridTeam& team, Pair<float>* channel_rows,
                                               int exchange) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  sums = WarpSum(sums);
  if (lane == 0) warp_sums[warp] = sums;
  __syncthreads();
  if (warp == 0) {
    sums = WarpSum(lane < cut.threads / 32 ? warp_sums[lane] : Pair<float>{0, 0});
    sums.second *= gradient.rstd;
    if (channel_rows != nullptr && lane == 0) {
      const int64_t row = static_cast<int64_t>(span.n) * cut.segments + segment;
      channel_rows[row * cut.channels + span.channel] = sums;
    }
    team.Put(exchange, 0, {gradient.scale * sums.first, gradient.scale * sums.second});
  }
  team.Exchange(exchange);
  return team.Total(exchange, 0);
}

template <typename E>
__global__ void __launch_bounds__(kRunThreads, kGridBlocks)
    ResidentSpanBackwardKernel(ResidentCut cut, GridTeam::Space team_space, BackwardInputs<E> in,
                               Pair<float>* channel_rows, E* dx) {
  constexpr int kSize = kPackSize<E>;
  extern __shared__ __align__(16) char shared[];
  const ResidentShared space(cut, shared, 2 * cut.placed());
  const GridTeam team(cut, space, team_space);
  const SpanPlace<kSize> place(cut, team.rank());
  Pack<E>* const slots = space.Slots<E>();
  CopyParts parts(cut.held);
  const SlabWalk walk(cut);
  Span span(cut, place, walk.first);
  const auto slot = [&](int step) { return slots + 2 * StepPlace<kRing>(cut, step) * cut.threads; };
  const auto copy = [&](int step) {
    const int64_t at = span.offset + step * place.stride;
    CopyAsync(SharedAddress(slot(step)), in.x + at);
    CopyAsync(SharedAddress(slot(step) + cut.threads), in.dy + at);
  };
  const auto take = [&](int step) { return InputPacks<E>{slot(step)[0], slot(step)[cut.threads]}; };
  AskForSlab<kRing>(place, &parts, copy);
  int exchange = 0;
  for (unsigned slab = walk.first; slab < walk.end; slab += walk.stride, ++exchange) {
    const SpanGradient gradient(in, span);
    Pair<float> sums = {0, 0};
    WithActivation(in.activation, [&](auto tag) {
      const auto add = [&](const InputPacks<E>& packs, int step) {
        float deviation[kSize], dz[kSize];
        gradient.Differentiate<tag()>(packs, deviation, dz);
        if (step < place.held) KeepGradient<E, tag()>(dz, slot(step) + cut.threads);
        Pair<float> part = {0, 0};
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          part.first += dz[i];
          part.second = fmaf(dz[i], deviation[i], part.second);
        }
        sums = {sums.first + part.first, sums.second + part.second};
      };
      for (int step = 0; step < place.held;) {
        const int stop = min(place.held, parts.Ready<kRing>(step));
#pragma unroll 1
        for (; step < stop; ++step) add(take(step), step);
      }
      ForPassing<kRing>(place, false, copy, take, add);
    });
    const Pair<float> total =
        SpanSum(cut, sums, gradient, place.segment, span,
                reinterpret_cast<Pair<float>*>(space.scratch), team, channel_rows, exchange);
    const GroupGradient terms = GroupGradient::Of(total, gradient.rstd, cut.share);
    E* const to = dx + span.offset;
    const auto store = [&](auto tag, const InputPacks<E>& packs, int step) {
      float deviation[kSize], dz[kSize];
      gradient.Differentiate<tag()>(packs, deviation, dz);
#pragma unroll
      for (int i = 0; i < kSize; ++i) dz[i] = terms(gradient.slope, dz[i], deviation[i]);
      StorePack(to + step * place.stride, ToPack<E>(dz));
    };
    WithActivation(in.activation, [&](auto tag) {
      ForPassing<kRing>(place, true, copy, take,
                        [&](const InputPacks<E>& packs, int step) { store(tag, packs, step); });
    });
    const bool more = slab + walk.stride < walk.end;
    if (more) span = Span(cut, place, slab + walk.stride);
    parts.StartIssuing();
    WithActivationLeft<E>(in.activation, [&](auto tag) {
#pragma unroll 1
      for (int step = 0; step < place.held; ++step) {
        const InputPacks<E> packs = take(step);
        if (more) copy(step);
        parts.Issued(step);
        store(tag, packs, step);
      }
    });
    parts.AllIssued();
    if (more) FillRing<kRing>(place, copy);
  }
}

}  // namespace

template <typename E>
Status LaunchResidentSpanBackward(const Problem& problem, const ResidentCut& cut,
                                  const Stage& stage, const BackwardArgs& args,
                                  cudaStream_t stream) {
  return LaunchGridTeams<E>(ResidentSpanBackwardKernel<E>, "ResidentSpanBackwardKernel", problem,
                            cut, stage, args, stream);
}

#define JAX_GN_INSTANTIATE(E)                                                                     \
  template Status LaunchResidentSpanBackward<E>(const Problem&, const ResidentCut&, const Stage&, \
                                                const BackwardArgs&, cudaStream_t);
JAX_GN_FOR_RESIDENT_ELEMENTS(JAX_GN_INSTANTIATE)

}  // namespace jax_gn::cuda
