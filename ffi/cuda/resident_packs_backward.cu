// The backward pass of resident_packs.h.
#include "resident_packs.h"

namespace jax_gn::cuda {
namespace {

// rstd * scale and bias of a channel.
struct SlopeAndBias {
  float slope, bias;
};

// What a thread of the backward pass knows of its slab.
template <typename E, int kTogether>
struct PackGradient {
  static constexpr int kSize = kPackSize<E>;
  using Channels = PackChannels<kSize, kTogether, SlopeAndBias>;
  Pack<E>* slots;  // this thread's: x's and dy's in turn
  const Pair<float>* table;
  int threads;
  float mean, rstd;

  __device__ __forceinline__ Channels At(const ChannelCursor& cursor) const {
    return Channels(table, cursor,
                    [this](float scale, float bias) { return SlopeAndBias{rstd * scale, bias}; });
  }
  // x - mean and dz of a step.
  template <Activation kActivation>
  __device__ __forceinline__ void Differentiate(int step, const Channels& channels,
                                                float (&deviation)[kSize],
                                                float (&dz)[kSize]) const {
    ToNumbers(slots[2 * step * threads], deviation);
    ToNumbers(slots[(2 * step + 1) * threads], dz);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const SlopeAndBias at = channels.Of(i);
      deviation[i] -= mean;
      dz[i] = FastBackward<E, kActivation>(dz[i], deviation[i] * at.slope + at.bias);
    }
  }
};

// Leaves each pack's sums of dz and dz * (x - mean), of its first channel and, if it may have one,
// its second, in `sums`: [1 or 2][packs of the block].
template <typename E, int kTogether>
__device__ __forceinline__ void SumPacks(const ResidentCut& cut,
                                         const PackPlace<kPackSize<E>>& place,
                                         const PackGradient<E, kTogether>& gradient,
                                         Activation activation, CopyParts* parts,
                                         Pair<float>* sums) {
  constexpr int kSize = kPackSize<E>;
  WithActivation(activation, [&](auto tag) {
    ChannelCursor at = place.begin;
    Pair<float>* to = sums + place.thread;
    for (int step = 0; step < place.steps;) {
      const int stop = min(place.steps, parts->Ready(step));
#pragma unroll 1
      for (; step < stop; ++step) {
        const auto channels = gradient.At(at);
        float deviation[kSize], dz[kSize];
        gradient.template Differentiate<tag()>(step, channels, deviation, dz);
        KeepGradient<E, tag()>(dz, gradient.slots + (2 * step + 1) * gradient.threads);
        Pair<float> first = {0, 0}, second = {0, 0};
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          if (channels.InFirst(i)) {  // no reference to one of them: it would live in memory
            first.first += dz[i];
            first.second = fmaf(dz[i], deviation[i], first.second);
          } else {
            second.first += dz[i];
            second.second = fmaf(dz[i], deviation[i], second.second);
          }
        }
        *to = first;
        if constexpr (channels.kSplit) to[cut.steps * cut.slab_threads] = second;
        to += cut.slab_threads;
        at.Advance(cut);
      }
    }
  });
}

// From the packs' sums: those of the channels, into the row of dscale's and dbias's partial sums;
// and times scale, in each thread those of some channels.
template <typename E, int kTogether>
__device__ __forceinline__ Pair<float> ReducePacks(const ResidentCut& cut,
                                                   const PackPlace<kPackSize<E>>& place,
                                                   const PackGradient<E, kTogether>& gradient,
                                                   const Pair<float>* packs,
                                                   Pair<float>* channel_rows) {
  constexpr int kSize = kPackSize<E>;
  const int channels = static_cast<int>(cut.group_size), spatial = static_cast<int>(cut.spatial);
  const int first = place.FirstPack(cut), capacity = cut.steps * cut.slab_threads;
  const int lane = place.thread & (cut.channel_lanes - 1),
            log2_lanes = __ffs(cut.channel_lanes) - 1;
  Pair<float>* const row = ChannelRow(cut, channel_rows, place.n, place.rank, place.first_channel);
  Pair<float> total = {0, 0};
  for (int base = 0; base < channels; base += cut.slab_threads >> log2_lanes) {
    const int channel = base + (place.thread >> log2_lanes);
    Pair<float> sum = {0, 0};
    if (channel < channels) {
      const int begin = channel * spatial, end = begin + spatial;
      const int from = begin / kSize, to = min((end + kSize - 1) / kSize, first + capacity);
      for (int pack = max(from, first) + lane; pack < to; pack += cut.channel_lanes) {
        // The pack in which the channel begins may begin with another.
        const bool second = kTogether < kSize && pack * kSize < begin;
        const Pair<float> part = packs[(second ? capacity : 0) + pack - first];
        sum = {sum.first + part.first, sum.second + part.second};
      }
    }
    sum = WarpSum(sum, cut.channel_lanes);
    if (channel >= channels || lane != 0) continue;
    sum.second *= gradient.rstd;
    if (channel_rows != nullptr) row[channel] = sum;
    const float scale = gradient.table[channel].first;
    total.first += scale * sum.first;
    total.second += scale * sum.second;
  }
  return total;
}

template <typename E, int kTogether>
__global__ void __launch_bounds__(kRunThreads, 2)
    ResidentPackBackwardKernel(ResidentCut cut, BackwardInputs<E> in, Pair<float>* channel_rows,
                               E* dx) {
  constexpr int kSize = kPackSize<E>;
  extern __shared__ __align__(16) char shared[];
  const ResidentShared space(cut, shared, 2 * cut.steps);
  const Team team(cut, space);
  const PackPlace<kSize> place(cut, team.rank());
  if (!place.valid) return;  // a warp of its own
  const int stride = cut.slab_threads * kSize;
  Pack<E>* const slots = space.Slots<E>();
  CopyParts parts(cut.steps);
  for (int step = 0; step < place.steps; ++step) {
    const int64_t at = place.offset + step * stride;
    CopyAsync(SharedAddress(slots + 2 * step * cut.threads), in.x + at);
    CopyAsync(SharedAddress(slots + (2 * step + 1) * cut.threads), in.dy + at);
    parts.Issued(step);
  }
  parts.AllIssued();
  const PackScratch scratch = PackScratch::Of<(kTogether < kSize ? 2 : 1)>(cut, space, place);
  FillTable(cut, place, in.scale, in.bias, scratch.table);
  const PackGradient<E, kTogether> gradient = {slots, scratch.table, cut.threads,
                                               in.mean[place.slab], in.rstd[place.slab]};
  SyncSlab(cut);
  SumPacks<E, kTogether>(cut, place, gradient, in.activation, &parts, scratch.pack_sums);
  SyncSlab(cut);
  const Pair<float> total =
      SlabSum(cut, ReducePacks<E, kTogether>(cut, place, gradient, scratch.pack_sums, channel_rows),
              scratch.warp_sums, team, 0);
  const GroupGradient terms = GroupGradient::Of(total, gradient.rstd, cut.share);
  WithActivationLeft<E>(in.activation, [&](auto tag) {
    ChannelCursor at = place.begin;
    E* to = dx + place.offset;
#pragma unroll 1
    for (int step = 0; step < place.steps; ++step) {
      const auto channels = gradient.At(at);
      float deviation[kSize], dz[kSize];
      gradient.template Differentiate<tag()>(step, channels, deviation, dz);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        dz[i] = terms(channels.Of(i).slope, dz[i], deviation[i]);
      }
      StorePack(to, ToPack<E>(dz));
      to += stride;
      at.Advance(cut);
    }
  });
}

}  // namespace

template <typename E>
Status LaunchResidentPackBackward(const Problem& problem, const ResidentCut& cut,
                                  const Stage& stage, const BackwardArgs& args,
                                  cudaStream_t stream) {
  return WithTogether<E>(problem, [&](auto together) {
    return LaunchResident<E>(ResidentPackBackwardKernel<E, together()>,
                             "ResidentPackBackwardKernel", problem, cut, stage, args, stream);
  });
}

#define JAX_GN_INSTANTIATE(E)                                                                     \
  template Status LaunchResidentPackBackward<E>(const Problem&, const ResidentCut&, const Stage&, \
                                                const BackwardArgs&, cudaStream_t);
JAX_GN_FOR_RESIDENT_ELEMENTS(JAX_GN_INSTANTIATE)

}  // namespace jax_gn::cuda
