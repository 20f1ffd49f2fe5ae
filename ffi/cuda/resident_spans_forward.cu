// The forward pass of resident_spans.h.
#include "resident_spans.h"

namespace jax_gn::cuda {
namespace {

constexpr int kRing = GridTeam::kRing;

template <typename E>
__global__ void __launch_bounds__(kRunThreads, kGridBlocks)
    ResidentSpanForwardKernel(ResidentCut cut, GridTeam::Space team_space, ForwardInputs<E> in,
                              float epsilon, float* mean, float* rstd, E* y) {
  constexpr int kSize = kPackSize<E>;
  extern __shared__ __align__(16) char shared[];
  const ResidentShared space(cut, shared, cut.placed());
  const GridTeam team(cut, space, team_space);
  const SpanPlace<kSize> place(cut, team.rank());
  Pack<E>* const slots = space.Slots<E>();
  CopyParts parts(cut.held);
  const SlabWalk walk(cut);
  Span span(cut, place, walk.first);
  const auto slot = [&](int step) { return slots + StepPlace<kRing>(cut, step) * cut.threads; };
  const auto copy = [&](int step) {
    CopyAsync(SharedAddress(slot(step)), in.x + span.offset + step * place.stride);
  };
  const auto take = [&](int step) { return *slot(step); };
  // The i-th number of the group, of which some make the shift.
  const auto element = [&](int64_t i) {
    const int64_t first_channel = span.channel - place.channel;
    return ToNumber(in.x[span.offset - place.offset + i]) +
           in.addend.LoadOne(span.n, first_channel + i / cut.spatial, 0.0f);
  };
  AskForSlab<kRing>(place, &parts, copy);
  int exchanges = 0;
  for (unsigned slab = walk.first; slab < walk.end; slab += walk.stride) {
    const float added = in.addend.LoadOne(span.n, span.channel, 0.0f);
    const auto sum = [&](const ShiftedSums& about, bool again) {
      const ShiftedSums shifted = {about.shift - added, about.share};
      Pair<float> sums = {0, 0};
      for (int step = 0; step < place.held;) {
        const int stop = again ? place.held : min(place.held, parts.Ready<kRing>(step));
#pragma unroll 2
        for (; step < stop; ++step) shifted.AddPack(slots[step * cut.threads], sums);
      }
      if (again) {  // what passes has gone by
        for (int step = place.held; step < place.steps; ++step) {
          shifted.AddPack(LoadPack(in.x + span.offset + step * place.stride), sums);
        }
      } else {
        ForPassing<kRing>(place, false, copy, take,
                          [&](const Pack<E>& pack, int) { shifted.AddPack(pack, sums); });
      }
      return sums;
    };
    const GroupNumbers numbers =
        GroupStatistics(cut, element, space, team, epsilon, &exchanges, sum);
    if (place.rank == 0 && threadIdx.x == 0) {
      mean[span.slab] = numbers.mean_high;
      rstd[span.slab] = numbers.rstd;
    }
    Normaliser normalise(numbers, in.scale.LoadOne(span.n, span.channel, 1.0f),
                         in.bias.LoadOne(span.n, span.channel, 0.0f));
    normalise.Add(added);
    E* to = y + span.offset;
    WithActivation(in.activation, [&](auto tag) {
      const auto apply = [&](const Pack<E>& pack) {
        float z[kSize];
        ToNumbers(pack, z);
#pragma unroll
        for (int i = 0; i < kSize; ++i) z[i] = Activate<tag()>(normalise(z[i]));
        return ToPack<E>(z);
      };
      ForPassing<kRing>(place, true, copy, take, [&](const Pack<E>& pack, int step) {
        StorePack(to + step * place.stride, apply(pack));
      });
      const bool more = slab + walk.stride < walk.end;
      if (more) {
        span = Span(cut, place, slab + walk.stride);
        if (threadIdx.x < kShiftElements) {
          Prefetch(in.x + span.offset - place.offset + ShiftElement(cut, threadIdx.x));
        }
      }
      parts.StartIssuing();
#pragma unroll 2
      for (int step = 0; step < place.held; ++step) {
        const Pack<E> pack = slots[step * cut.threads];
        if (more) copy(step);
        parts.Issued(step);
        StorePack(to + step * place.stride, apply(pack));
      }
      parts.AllIssued();
      if (more) FillRing<kRing>(place, copy);
    });
  }
}

}  // namespace

template <typename E>
Status LaunchResidentSpanForward(const Problem& problem, const ResidentCut& cut, const Stage& stage,
                                 const ForwardArgs& args, cudaStream_t stream) {
  return LaunchGridTeams<E>(ResidentSpanForwardKernel<E>, "ResidentSpanForwardKernel", problem, cut,
                            stage, args, stream);
}

#define JAX_GN_INSTANTIATE(E)                                                                    \
  template Status LaunchResidentSpanForward<E>(const Problem&, const ResidentCut&, const Stage&, \
                                               const ForwardArgs&, cudaStream_t);
JAX_GN_FOR_RESIDENT_ELEMENTS(JAX_GN_INSTANTIATE)

}  // namespace jax_gn::cuda
