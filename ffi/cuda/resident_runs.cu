// Channels first, resident: a team of blocks (or a warp alone) holds a group of one sample in
// shared memory. `lanes` neighbouring threads take a segment of a channel, pack by pack in turn,
// and then `items` - 1 others, so that scale and bias are one number at a time. Packs lie on
// 16-byte boundaries, wherever a channel begins: those at its ends are shared with its neighbours,
// and worked on in part.
//
// Forward: copy x in; sums of each thread; over the block; over the team; write y.
// Backward: copy x and dy in; sums of each segment, whose sums by channel are also a row of
// dscale's and dbias's partial sums; over the block; over the team; write dx. Where all groups
// begin with a pack, a team goes on to another: as soon as a thread has taken a pack out of its
// place for the writing, it asks for the next slab's, so that reading never stops.
#include "resident_kernels.h"

namespace jax_gn::cuda {
namespace {

// Where a thread stands in every slab.
struct RunPlace {
  int rank, thread, owner, lane, owners;  // owner: the threads at one segment

  __device__ RunPlace(const ResidentCut& cut, int rank) : rank(rank) {
    thread = static_cast<int>(cut.solo() ? threadIdx.x % 32 : threadIdx.x);
    const int log2_lanes = __ffs(cut.lanes) - 1;
    owner = thread >> log2_lanes;
    lane = thread & (cut.lanes - 1);
    owners = cut.slab_threads >> log2_lanes;
  }
};

// A slab: a group of a sample. `origin`: the last pack boundary before it, `phase` elements back.
template <int kSize>
struct Run {
  int phase;
  int64_t slab, n, first_channel, origin;

  __device__ Run(const ResidentCut& cut, unsigned index) : slab(index) {
    const unsigned groups = static_cast<unsigned>(cut.groups), sample = index / groups;
    n = sample;
    first_channel = static_cast<int64_t>(index - sample * groups) * cut.group_size;
    const int64_t begin = slab * cut.group_size * cut.spatial;
    phase = static_cast<int>(begin % kSize);
    origin = begin - phase;
  }
};

// What a thread takes of a segment: `count` packs, the first at element `offset` behind the slab's
// origin, the next ones `stride` elements on. `head` elements of the first pack belong to the
// channel before, and those from `tail` on of the last to the one behind.
template <int kSize>
struct Segment {
  int channel;  // of the group
  int count, head = 0, tail = kSize;
  int offset, stride;

  __device__ Segment(const ResidentCut& cut, const RunPlace& place, int phase, int item) {
    const int index = (place.rank * cut.items + item) * place.owners + place.owner;
    channel = index;
    int part = 0;
    if (cut.segments > 1) {
      channel = index / cut.segments;
      part = index - channel * cut.segments;
    }
    const int begin = phase + channel * static_cast<int>(cut.spatial);
    const int end = begin + static_cast<int>(cut.spatial);
    const int origin = begin / kSize + part * cut.segment_packs;  // in packs
    const int last = min(origin + cut.segment_packs, (end + kSize - 1) / kSize);
    const int first = origin + place.lane;
    count = channel < static_cast<int>(cut.group_size)
                ? max(0, last - first + cut.lanes - 1) >> (__ffs(cut.lanes) - 1)
                : 0;
    offset = first * kSize;
    stride = cut.lanes * kSize;
    head = max(0, begin - offset);
    tail = min(kSize, end - (offset + (count - 1) * stride));
  }
  // Calls whole(step) for the packs within the channel. ready(step) waits for a step, and says how
  // far that goes.
  template <typename Ready, typename Whole>
  __device__ __forceinline__ void ForWhole(Ready ready, Whole whole) const {
    const int begin = head > 0 ? 1 : 0, end = tail < kSize ? count - 1 : count;
    for (int step = begin; step < end;) {
      const int stop = min(end, ready(step));
#pragma unroll 2
      for (; step < stop; ++step) whole(step);
    }
  }
  // Calls part(step, from, to) for the packs whose elements [from, to) alone are.
  template <typename Part>
  __device__ __forceinline__ void ForParts(Part part) const {
    if (count == 0 || (head == 0 && tail == kSize)) return;
    if (head > 0) part(0, head, count == 1 ? tail : kSize);
    if (tail < kSize && (count > 1 || head == 0)) part(count - 1, 0, tail);
  }
};

// visit(segment, first_slot) for the segments of a thread; the first is at hand.
template <int kSize, typename Visit>
__device__ __forceinline__ void ForSegments(const ResidentCut& cut, const RunPlace& place,
                                            int phase, Segment<kSize> segment, Visit visit) {
  for (int item = 0;;) {
    visit(segment, item * cut.item_steps);
    if (++item == cut.items) return;
    segment = Segment<kSize>(cut, place, phase, item);
  }
}

// Copies what a thread takes of a segment from tensors that lie alike, packs of theirs in turn.
template <typename E, typename... Tensors>
__device__ __forceinline__ void CopySegment(const ResidentCut& cut, int64_t origin,
                                            const Segment<kPackSize<E>>& segment, Pack<E>* slots,
                                            int first_slot, CopyParts* parts, Tensors... tensors) {
  constexpr int kSize = kPackSize<E>;
  constexpr int kTensors = sizeof...(Tensors);
  const int64_t at = origin + segment.offset;
  const int64_t left = cut.n * cut.channels * cut.spatial - at;  // to the tensor's end
  // The last pack may reach beyond the end.
  const bool beyond = segment.count > 0 && (segment.count - 1) * segment.stride + kSize > left;
  const int count = segment.count - (beyond ? 1 : 0);
  Pack<E>* slot = slots + static_cast<int64_t>(kTensors) * first_slot * cut.threads;
  for (int step = 0; step < count; ++step) {
    const int64_t from = at + step * segment.stride;
    ((CopyAsync(SharedAddress(slot), tensors + from), slot += cut.threads), ...);
    parts->Issued(first_slot + step);
  }
  if (beyond) {
    const int64_t from = at + count * segment.stride;
    ((*slot = LoadPart<E>(tensors + from, 0, static_cast<int>(left - count * segment.stride)),
      slot += cut.threads),
     ...);
  }
  parts->IssuedUpTo(first_slot + cut.item_steps);
}

// f(i) for the elements [from, to) of a pack.
template <int kSize, typename F>
__device__ __forceinline__ void ForElements(int from, int to, F f) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if (from <= i && i < to) f(i);
  }
}

// The sums of all threads of a slab: over the warp, the block, the team.
__device__ __forceinline__ Pair<float> SlabSum(const ResidentCut& cut, Pair<float> sums,
                                               Pair<float>* warp_sums, const Team& team,
                                               int exchange) {
  sums = WarpSum(sums);
  if (cut.solo()) return sums;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) warp_sums[warp] = sums;
  __syncthreads();
  if (exchange == 0) team.Begin();
  if (warp == 0) {
    sums = lane < cut.threads / 32 ? warp_sums[lane] : Pair<float>{0, 0};
    team.Put(exchange, 0, WarpSum(sums));
  }
  team.Exchange();
  return team.Total(exchange, 0);
}

// The results of a group, in all of its threads, from the packs in `slots`. `exchanges` counts the
// team's.
template <typename E>
__device__ __forceinline__ GroupNumbers RunStatistics(
    const ResidentCut& cut, const RunPlace& place, const Run<kPackSize<E>>& run,
    const Segment<kPackSize<E>>& first_segment, const ResidentShared& space, const Team& team,
    const E* x, const Pack<E>* slots, CopyParts* parts, float epsilon, int* exchanges) {
  constexpr int kSize = kPackSize<E>;
  ShiftedSums shifted = {ToNumber(x[run.origin + run.phase]), cut.share};
  for (bool again = false;; again = true) {
    Pair<float> sums = {0, 0};
    ForSegments<kSize>(
        cut, place, run.phase, first_segment, [&](const Segment<kSize>& segment, int first_slot) {
          const auto add = [&](int step, int from, int to) {
            float values[kSize];
            Pair<float> pack = {0, 0};
            Pair<float>& into = kTwoLevels<E> ? pack : sums;
            ToNumbers(slots[(first_slot + step) * cut.threads], values);
            ForElements<kSize>(from, to, [&](int i) { shifted.Add(values[i], into); });
            if (kTwoLevels<E>) sums = {sums.first + pack.first, sums.second + pack.second};
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
    sums = SlabSum(cut, sums, reinterpret_cast<Pair<float>*>(space.scratch), team, *exchanges);
    ++*exchanges;
    GroupNumbers numbers;
    if (FinishGroup(sums, shifted, epsilon, &numbers) || again) return numbers;
    shifted.shift = numbers.mean_high;
  }
}

template <typename E>
__global__ void __launch_bounds__(kRunThreads, 2)
    ResidentRunForwardKernel(ResidentCut cut, const E* x, Parameter scale, Parameter bias,
                             float epsilon, Activation activation, float* mean, float* rstd, E* y) {
  constexpr int kSize = kPackSize<E>;
  extern __shared__ __align__(16) char shared[];
  const ResidentShared space(cut, shared, cut.steps);
  const Team team(cut, space.places);
  const RunPlace place(cut, team.rank());
  const SlabWalk walk(cut);
  if (walk.first >= walk.end) return;  // a warp of its own
  Pack<E>* const slots = space.Slots<E>();
  CopyParts parts(cut.steps);
  Run<kSize> run(cut, walk.first);
  const Segment<kSize> first_segment(cut, place, run.phase, 0);
  ForSegments<kSize>(cut, place, run.phase, first_segment,
                     [&](const Segment<kSize>& segment, int first_slot) {
                       CopySegment<E>(cut, run.origin, segment, slots, first_slot, &parts, x);
                     });
  parts.AllIssued();
  int exchanges = 0;
  for (unsigned slab = walk.first; slab < walk.end; slab += walk.stride) {
    const GroupNumbers numbers = RunStatistics<E>(cut, place, run, first_segment, space, team, x,
                                                  slots, &parts, epsilon, &exchanges);
    if (place.rank == 0 && place.thread == 0) {
      mean[run.slab] = numbers.mean_high;
      rstd[run.slab] = numbers.rstd;
    }
    const Run<kSize> now = run;
    const bool more = slab + walk.stride < walk.end;
    if (more) {
      run = Run<kSize>(cut, slab + walk.stride);
      Prefetch(x + run.origin);  // the shift
    }
    WithActivation(activation, [&](auto tag) {
      ForSegments<kSize>(
          cut, place, now.phase, first_segment, [&](const Segment<kSize>& segment, int first_slot) {
            const int64_t channel = now.first_channel + segment.channel;
            const Normaliser normalise(numbers,
                                       segment.count > 0 ? scale.LoadOne(now.n, channel, 1.0f) : 0,
                                       segment.count > 0 ? bias.LoadOne(now.n, channel, 0.0f) : 0);
            E* const to = y + now.origin + segment.offset;
            const E* const from = x + run.origin + segment.offset;
            const auto apply = [&](int step) {
              Pack<E>* const slot = slots + (first_slot + step) * cut.threads;
              float z[kSize];
              ToNumbers(*slot, z);
              if (more) CopyAsync(SharedAddress(slot), from + step * segment.stride);
#pragma unroll
              for (int i = 0; i < kSize; ++i) z[i] = Activate<tag()>(normalise(z[i]));
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
    Pair<float>* const row =
        channel_rows + (run.n * cut.team + place.rank) * cut.channels + run.first_channel;
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
    float slope, bias;  // rstd * scale
  };
  const ResidentCut& cut;
  const BackwardInputs<E>& in;
  Pack<E>* slots;  // this thread's: x's and dy's in turn
  int64_t n, first_channel;
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
    if (segment.count == 0) return {0, 0};
    const int64_t channel = first_channel + segment.channel;
    return {rstd * in.scale.LoadOne(n, channel, 1.0f), in.bias.LoadOne(n, channel, 0.0f)};
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
      deviation[i] -= mean;
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
  const Team team(cut, space.places);
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
    const float constant = gradient.rstd * (total.first * cut.share);
    const float linear = gradient.rstd * (total.second * cut.share) * gradient.rstd;
    const Run<kSize> now = run;
    const bool more = slab + walk.stride < walk.end;
    if (more) {
      run = Run<kSize>(cut, slab + walk.stride);
      Prefetch(in.mean + run.slab);
      Prefetch(in.rstd + run.slab);
    }
    WithActivation(in.activation, [&](auto tag) {
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
                dz[i] = at.slope * dz[i] - constant - deviation[i] * linear;
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
Status LaunchResidentRunForward(const Problem& problem, const ResidentCut& cut, const Stage& stage,
                                const ForwardArgs& args, cudaStream_t stream) {
  return LaunchResident(ResidentRunForwardKernel<E>, "ResidentRunForwardKernel", cut, stage, stream,
                        cut, static_cast<const E*>(args.x), ScaleOf(problem, args),
                        BiasOf(problem, args), static_cast<float>(args.epsilon), problem.activation,
                        static_cast<float*>(args.mean), static_cast<float*>(args.rstd),
                        static_cast<E*>(args.y));
}

template <typename E>
Status LaunchResidentRunBackward(const Problem& problem, const ResidentCut& cut, const Stage& stage,
                                 const BackwardArgs& args, cudaStream_t stream) {
  return LaunchResident(ResidentRunBackwardKernel<E>, "ResidentRunBackwardKernel", cut, stage,
                        stream, cut, BackwardInputs<E>(problem, args),
                        HasParam(problem) ? static_cast<Pair<float>*>(args.workspace) : nullptr,
                        static_cast<E*>(args.dx));
}

#define JAX_GN_INSTANTIATE(E)                                                                    \
  template Status LaunchResidentRunForward<E>(const Problem&, const ResidentCut&, const Stage&,  \
                                              const ForwardArgs&, cudaStream_t);                 \
  template Status LaunchResidentRunBackward<E>(const Problem&, const ResidentCut&, const Stage&, \
                                               const BackwardArgs&, cudaStream_t);
JAX_GN_FOR_RESIDENT_ELEMENTS(JAX_GN_INSTANTIATE)

}  // namespace jax_gn::cuda
