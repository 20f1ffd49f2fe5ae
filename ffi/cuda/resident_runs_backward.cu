// The backward pass of resident_runs.h.
#include "resident_runs.h"

namespace jax_gn::cuda {
namespace {

// From the segments' sums, [items][owners]: those of the channels, into the row of dscale's and
// dbias's partial sums; and times scale, in each thread those of some segments.
template <int kSize>
__device__ __forceinline__ Pair<float> ReduceSegments(const ResidentCut& cut, const RunPlace& place,
                                                      const Run<kSize>& run, const Parameter& scale,
                                                      float rstd, const Pair<float>* segments,
                                                      Pair<float>* channel_rows) {
  const int count = cut.items * place.owners, first = place.rank * count;
  const int size = static_cast<int>(cut.group_size);
  if (channel_rows != nullptr) {
    Pair<float>* const row = ChannelRow(cut, channel_rows, run.n, place.rank, run.first_channel);
    for (int channel = place.thread; channel < size; channel += cut.slab_threads) {
      Pair<float> sum = {0, 0};
      const int to = min((channel + 1) * cut.segments, first + count);
      for (int index = max(channel * cut.segments, first); index < to; ++index) {
        sum.first += segments[index - first].first;
        sum.second += segments[index - first].second;
      }
      row[channel] = {sum.first, sum.second * rstd};
    }
  }
  Pair<float> sums = {0, 0};
  for (int index = place.thread; index < count; index += cut.slab_threads) {
    const int channel = (first + index) / cut.segments;
    if (channel >= size) break;
    const float factor = scale.LoadOne(run.n, run.first_channel + channel, 1.0f);
    sums.first += factor * segments[index].first;
    sums.second += factor * (segments[index].second * rstd);
  }
  return sums;
}

// What a thread of the backward pass knows of its slab, and of one channel.
template <typename E>
struct RunGradient {
  static constexpr int kSize = kPackSize<E>;
  struct AtChannel {
    float mean, slope, bias;  // without the addend, as it comes off x; rstd * scale
  };
  const ResidentCut& cut;
  const BackwardInputs<E>& in;
  Pack<E>* slots;  // this thread's: x's and dy's in turn
  int n, first_channel;
  float mean, rstd;

  __device__ RunGradient(const ResidentCut& cut, const Run<kSize>& run, const BackwardInputs<E>& in,
                         Pack<E>* slots)
      : cut(cut),
        in(in),
        slots(slots),
        n(run.n),
        first_channel(run.first_channel),
        mean(in.mean[run.slab]),
        rstd(in.rstd[run.slab]) {}

  __device__ __forceinline__ AtChannel Channel(const Segment<kSize>& segment) const {
    if (segment.count == 0) return {0, 0, 0};
    const int channel = first_channel + segment.channel;
    return {mean - in.addend.LoadOne(n, channel, 0.0f), rstd * in.scale.LoadOne(n, channel, 1.0f),
            in.bias.LoadOne(n, channel, 0.0f)};
  }
  // x - mean and dz of a slot. `taken` is called when both are out of shared memory.
  template <Activation kActivation, typename Taken>
  __device__ __forceinline__ void Differentiate(int slot, const AtChannel& at,
                                                float (&deviation)[kSize], float (&dz)[kSize],
                                                Taken taken) const {
    Pack<E>* const packs = slots + 2 * slot * cut.threads;
    ToNumbers(packs[0], deviation);
    ToNumbers(packs[cut.threads], dz);
    taken(packs);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      deviation[i] -= at.mean;
      dz[i] = FastBackward<E, kActivation>(dz[i], deviation[i] * at.slope + at.bias);
    }
  }
};

// Leaves the sums of each segment, of dz and dz * (x - mean), in `segments` [items][owners].
template <typename E>
__device__ __forceinline__ void SumSegments(const ResidentCut& cut, const RunPlace& place,
                                            int phase, const Segment<kPackSize<E>>& first_segment,
                                            const RunGradient<E>& gradient, CopyParts* parts,
                                            Pair<float>* segments) {
  constexpr int kSize = kPackSize<E>;
  WithActivation(gradient.in.activation, [&](auto tag) {
    Pair<float>* result = segments + place.owner;
    ForSegments<kSize>(
        cut, place, phase, first_segment, [&](const Segment<kSize>& segment, int first_slot) {
          const auto at = gradient.Channel(segment);
          Pair<float> sums = {0, 0};
          const auto add = [&](int step, int from, int to) {
            float deviation[kSize], dz[kSize];
            gradient.template Differentiate<tag()>(first_slot + step, at, deviation, dz,
                                                   [](Pack<E>*) {});
            KeepGradient<E, tag()>(dz,
                                   gradient.slots + (2 * (first_slot + step) + 1) * cut.threads);
            Pair<float> pack = {0, 0};
            Pair<float>& into = kTwoLevels<E> ? pack : sums;
            ForElements<kSize>(from, to, [&](int i) {
              into.first += dz[i];
              into.second = fmaf(dz[i], deviation[i], into.second);
            });
            if (kTwoLevels<E>) sums = {sums.first + pack.first, sums.second + pack.second};
          };
          segment.ForWhole([&](int step) { return parts->Ready(first_slot + step) - first_slot; },
                           [&](int step) { add(step, 0, kSize); });
          segment.ForParts([&](int step, int from, int to) {
            parts->WaitUpTo(first_slot + cut.item_steps);
            add(step, from, to);
          });
          sums = WarpSum(sums, cut.lanes);
          if (place.lane == 0) *result = sums;
          result += place.owners;
        });
  });
}

template <typename E>
__global__ void __launch_bounds__(kRunThreads, 2)
    ResidentRunBackwardKernel(ResidentCut cut, BackwardInputs<E> in, Pair<float>* channel_rows,
                              E* dx) {
  constexpr int kSize = kPackSize<E>;
  extern __shared__ __align__(16) char shared[];
  const ResidentShared space(cut, shared, 2 * cut.steps);
  const Team team(cut, space);
  const RunPlace place(cut, team.rank());
  const SlabWalk walk(cut);
  if (walk.first >= walk.end) return;  // a warp of its own
  Pack<E>* const slots = space.Slots<E>();
  CopyParts parts(cut.steps);
  Run<kSize> run(cut, walk.first);
  const Segment<kSize> first_segment(cut, place, run.phase, 0);
  ForSegments<kSize>(
      cut, place, run.phase, first_segment, [&](const Segment<kSize>& segment, int first_slot) {
        CopySegment<E>(cut, run.origin, segment, slots, first_slot, &parts, in.x, in.dy);
      });
  parts.AllIssued();
  // [items][owners] for each slab of the block, and behind them what SlabSum needs.
  Pair<float>* const warp_sums = reinterpret_cast<Pair<float>*>(space.scratch);
  Pair<float>* const segments =
      warp_sums + kRunThreads / 32 + (cut.solo() ? threadIdx.x / 32 * cut.items * place.owners : 0);
  int exchange = 0;
  for (unsigned slab = walk.first; slab < walk.end; slab += walk.stride, ++exchange) {
    const RunGradient<E> gradient(cut, run, in, slots);
    SumSegments<E>(cut, place, run.phase, first_segment, gradient, &parts, segments);
    if (cut.solo()) {
      __syncwarp();
    } else {
      __syncthreads();
    }
    const Pair<float> total = SlabSum(
        cut, ReduceSegments(cut, place, run, in.scale, gradient.rstd, segments, channel_rows),
        warp_sums, team, exchange);
    const GroupGradient terms = GroupGradient::Of(total, gradient.rstd, cut.share);
    const Run<kSize> now = run;
    const bool more = slab + walk.stride < walk.end;
    if (more) {
      run = Run<kSize>(cut, slab + walk.stride);
      Prefetch(in.mean + run.slab);
      Prefetch(in.rstd + run.slab);
    }
    parts.StartIssuing();
    WithActivationLeft<E>(in.activation, [&](auto tag) {
      ForSegments<kSize>(
          cut, place, now.phase, first_segment, [&](const Segment<kSize>& segment, int first_slot) {
            const auto at = gradient.Channel(segment);
            E* const to = dx + now.origin + segment.offset;
            const int64_t from = run.origin + segment.offset;
            const auto apply = [&](int step) {
              float deviation[kSize], dz[kSize];
              gradient.template Differentiate<tag()>(
                  first_slot + step, at, deviation, dz, [&](Pack<E>* packs) {
                    if (!more) return;
                    CopyAsync(SharedAddress(packs), in.x + from + step * segment.stride);
                    CopyAsync(SharedAddress(packs + cut.threads),
                              in.dy + from + step * segment.stride);
                  });
#pragma unroll
              for (int i = 0; i < kSize; ++i) {
                dz[i] = terms(at.slope, dz[i], deviation[i]);
              }
              return ToPack<E>(dz);
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
Status LaunchResidentRunBackward(const Problem& problem, const ResidentCut& cut, const Stage& stage,
                                 const BackwardArgs& args, cudaStream_t stream) {
  return LaunchResident<E>(ResidentRunBackwardKernel<E>, "ResidentRunBackwardKernel", problem, cut,
                           stage, args, stream);
}

#define JAX_GN_INSTANTIATE(E)                                                                    \
  template Status LaunchResidentRunBackward<E>(const Problem&, const ResidentCut&, const Stage&, \
                                               const BackwardArgs&, cudaStream_t);
JAX_GN_FOR_RESIDENT_ELEMENTS(JAX_GN_INSTANTIATE)

}  // namespace jax_gn::cuda
