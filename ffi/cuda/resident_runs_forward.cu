// The forward pass of resident_runs.h.
#include "resident_runs.h"

namespace jax_gn::cuda {
namespace {

// The results of a group, in all of its threads, from the packs in `slots`.
template <typename E>
__device__ __forceinline__ GroupNumbers RunStatistics(const ResidentCut& cut, const RunPlace& place,
                                                      const Run<kPackSize<E>>& run,
                                                      const Segment<kPackSize<E>>& first_segment,
                                                      const ResidentShared& space, const Team& team,
                                                      const ForwardInputs<E>& in,
                                                      const Pack<E>* slots, CopyParts* parts,
                                                      float epsilon, int* exchanges) {
  constexpr int kSize = kPackSize<E>;
  const auto sum = [&](const ShiftedSums& shifted, bool again) {
    Pair<float> sums = {0, 0};
    ForSegments<kSize>(
        cut, place, run.phase, first_segment, [&](const Segment<kSize>& segment, int first_slot) {
          const ShiftedSums of_x = {shifted.shift - OfChannel(run, segment, in.addend, 0.0f),
                                    shifted.share};
          const auto add = [&](int step, int from, int to) {
            of_x.AddPack(slots[(first_slot + step) * cut.threads], sums, from, to);
          };
          segment.ForWhole(
              [&](int step) {
                return again ? segment.count : parts->Ready(first_slot + step) - first_slot;
              },
              [&](int step) { add(step, 0, kSize); });
          segment.ForParts([&](int step, int from, int to) {
            if (!again) parts->WaitUpTo(first_slot + cut.item_steps);
            add(step, from, to);
          });
        });
    return sums;
  };
  const E* const x = in.x + run.origin + run.phase;
  const auto at = [&](int64_t i) {
    return ToNumber(x[i]) + in.addend.LoadOne(run.n, run.first_channel + i / cut.spatial, 0.0f);
  };
  return GroupStatistics(cut, at, space, team, epsilon, exchanges, sum);
}

template <typename E>
__global__ void __launch_bounds__(kRunThreads, 2)
    ResidentRunForwardKernel(ResidentCut cut, ForwardInputs<E> in, float epsilon, float* mean,
                             float* rstd, E* y) {
  constexpr int kSize = kPackSize<E>;
  extern __shared__ __align__(16) char shared[];
  const ResidentShared space(cut, shared, cut.steps);
  const Team team(cut, space);
  const RunPlace place(cut, team.rank());
  const SlabWalk walk(cut);
  if (walk.first >= walk.end) return;  // a warp of its own
  Pack<E>* const slots = space.Slots<E>();
  CopyParts parts(cut.steps);
  Run<kSize> run(cut, walk.first);
  const Segment<kSize> first_segment(cut, place, run.phase, 0);
  ForSegments<kSize>(cut, place, run.phase, first_segment,
                     [&](const Segment<kSize>& segment, int first_slot) {
                       CopySegment<E>(cut, run.origin, segment, slots, first_slot, &parts, in.x);
                     });
  parts.AllIssued();
  int exchanges = 0;
  for (unsigned slab = walk.first; slab < walk.end; slab += walk.stride) {
    const GroupNumbers numbers = RunStatistics<E>(cut, place, run, first_segment, space, team, in,
                                                  slots, &parts, epsilon, &exchanges);
    if (place.rank == 0 && place.thread == 0) {
      mean[run.slab] = numbers.mean_high;
      rstd[run.slab] = numbers.rstd;
    }
    const Run<kSize> now = run;
    const bool more = slab + walk.stride < walk.end;
    if (more) {
      run = Run<kSize>(cut, slab + walk.stride);
      if (place.thread < kShiftElements) {
        Prefetch(in.x + run.origin + run.phase + ShiftElement(cut, place.thread));
      }
    }
    parts.StartIssuing();
    WithActivation(in.activation, [&](auto tag) {
      ForSegments<kSize>(cut, place, now.phase, first_segment,
                         [&](const Segment<kSize>& segment, int first_slot) {
                           Normaliser normalise(numbers, OfChannel(now, segment, in.scale, 1.0f),
                                                OfChannel(now, segment, in.bias, 0.0f));
                           normalise.Add(OfChannel(now, segment, in.addend, 0.0f));
                           E* const to = y + now.origin + segment.offset;
                           const E* const from = in.x + run.origin + segment.offset;
                           const auto apply = [&](int step) {
                             Pack<E>* const slot = slots + (first_slot + step) * cut.threads;
                             float z[kSize];
                             ToNumbers(*slot, z);
                             if (more) CopyAsync(SharedAddress(slot), from + step * segment.stride);
#pragma unroll
                             for (int i = 0; i < kSize; ++i)
                               z[i] = Activate<tag()>(normalise(z[i]));
                             return ToPack<E>(z);
                           };
                           segment.ForParts([&](int step, int begin, int end) {
                             StorePart(to + step * segment.stride, apply(step), begin, end);
                           });
                           segment.ForWhole([&](int) { return segment.count; },
                                            [&](int step) {
                                              StorePack(to + step * segment.stride, apply(step));
                                              parts.Issued(first_slot + step);
                                            });
                           parts.IssuedUpTo(first_slot + cut.item_steps);
                         });
    });
    parts.AllIssued();
  }
}

}  // namespace

template <typename E>
Status LaunchResidentRunForward(const Problem& problem, const ResidentCut& cut, const Stage& stage,
                                const ForwardArgs& args, cudaStream_t stream) {
  return LaunchResident<E>(ResidentRunForwardKernel<E>, "ResidentRunForwardKernel", problem, cut,
                           stage, args, stream);
}

#define JAX_GN_INSTANTIATE(E)                                                                   \
  template Status LaunchResidentRunForward<E>(const Problem&, const ResidentCut&, const Stage&, \
                                              const ForwardArgs&, cudaStream_t);
JAX_GN_FOR_RESIDENT_ELEMENTS(JAX_GN_INSTANTIATE)

}  // namespace jax_gn::cuda
