// The forward pass of resident_packs.h.
#include "resident_packs.h"

namespace jax_gn::cuda {
namespace {

template <typename E, int kTogether>
__global__ void __launch_bounds__(kRunThreads, 2)
    ResidentPackForwardKernel(ResidentCut cut, ForwardInputs<E> in, float epsilon, float* mean,
                              float* rstd, E* y) {
  constexpr int kSize = kPackSize<E>;
  extern __shared__ __align__(16) char shared[];
  const ResidentShared space(cut, shared, cut.steps);
  const Team team(cut, space);
  const PackPlace<kSize> place(cut, team.rank());
  if (!place.valid) return;  // a warp of its own
  const int stride = cut.slab_threads * kSize;
  Pack<E>* const slots = space.Slots<E>();
  CopyParts parts(cut.steps);
  for (int step = 0; step < place.steps; ++step) {
    CopyAsync(SharedAddress(slots + step * cut.threads), in.x + place.offset + step * stride);
    parts.Issued(step);
  }
  parts.AllIssued();
  Pair<float>* const table = PackScratch::Of<0>(cut, space, place).table;
  FillTable(cut, place, in.scale, in.bias, table);
  if (cut.solo()) __syncwarp();  // else the sums' barriers do

  int exchanges = 0;
  const E* const first = in.x + place.slab * cut.group_size * cut.spatial;
  const GroupNumbers numbers = GroupStatistics(
      cut, [&](int64_t i) { return ToNumber(first[i]); }, space, team, epsilon, &exchanges,
      [&](const ShiftedSums& shifted, bool again) {
        Pair<float> sums = {0, 0};
        for (int step = 0; step < place.steps;) {
          const int stop = again ? place.steps : min(place.steps, parts.Ready(step));
#pragma unroll 2
          for (; step < stop; ++step) shifted.AddPack(slots[step * cut.threads], sums);
        }
        return sums;
      });
  if (place.rank == 0 && place.thread == 0) {
    mean[place.slab] = numbers.mean_high;
    rstd[place.slab] = numbers.rstd;
  }
  WithActivation(in.activation, [&](auto tag) {
    ChannelCursor at = place.begin;
    E* to = y + place.offset;
#pragma unroll 2
    for (int step = 0; step < place.steps; ++step) {
      const PackChannels<kSize, kTogether, Normaliser> channels(
          table, at, [&](float s, float b) { return Normaliser(numbers, s, b); });
      float z[kSize];
      ToNumbers(slots[step * cut.threads], z);
#pragma unroll
      for (int i = 0; i < kSize; ++i) z[i] = Activate<tag()>(channels.Of(i)(z[i]));
      StorePack(to, ToPack<E>(z));
      to += stride;
      at.Advance(cut);
    }
  });
}

}  // namespace

template <typename E>
Status LaunchResidentPackForward(const Problem& problem, const ResidentCut& cut, const Stage& stage,
                                 const ForwardArgs& args, cudaStream_t stream) {
  return WithTogether<E>(problem, [&](auto together) {
    return LaunchResident<E>(ResidentPackForwardKernel<E, together()>, "ResidentPackForwardKernel",
                             problem, cut, stage, args, stream);
  });
}

#define JAX_GN_INSTANTIATE(E)                                                                    \
  template Status LaunchResidentPackForward<E>(const Problem&, const ResidentCut&, const Stage&, \
                                               const ForwardArgs&, cudaStream_t);
JAX_GN_FOR_RESIDENT_ELEMENTS(JAX_GN_INSTANTIATE)

}  // namespace jax_gn::cuda
