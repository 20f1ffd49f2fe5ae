// Channels first, resident: a team of blocks holds a group of one sample in shared memory. `lanes`
// neighbouring threads take a segment of a channel, pack by pack in turn, and then `items` - 1
// others, so that scale and bias are one number at a time. Packs lie on 16-byte boundaries, wherever
// a channel begins: those at its ends are shared with its neighbours, and worked on in part.
//
// Forward: copy x in; sums of each thread; over the block; over the team; write y.
// Backward: copy x and dy in; sums of each segment, whose sums by channel are also a row of dscale's
// and dbias's partial sums; over the block; over the team; write dx.
#include "resident_kernels.h"

namespace jax_gn::cuda {
namespace {

// Where a thread stands.
template <int kSize>
struct RunPlace {
  int rank, thread, owner, lane, owners;  // owner: the threads at one segment
  int phase;                              // of the slab: elements behind `origin`
  int64_t slab, n, group, origin;

  __device__ RunPlace(const ResidentCut& cut, int rank) : rank(rank) {
    // Divisions, of 64 bits above all, take long for a thread that has a dozen packs.
    const unsigned block = blockIdx.x / static_cast<unsigned>(cut.team);
    const unsigned groups = static_cast<unsigned>(cut.groups);
    const unsigned index = cut.solo() ? block * (blockDim.x / 32) + threadIdx.x / 32 : block;
    slab = index;
    n = index / groups;
    group = index - static_cast<unsigned>(n) * groups;
    thread = static_cast<int>(cut.solo() ? threadIdx.x % 32 : threadIdx.x);
    const int log2_lanes = __ffs(cut.lanes) - 1;
    owner = thread >> log2_lanes;
    lane = thread & (cut.lanes - 1);
    owners = cut.slab_threads >> log2_lanes;
    const int64_t begin = slab * cut.group_size * cut.spatial;
    phase = static_cast<int>(begin % kSize);
    origin = begin - phase;
  }
  __device__ __forceinline__ bool exists(const ResidentCut& cut) const {
    return slab < cut.n * cut.groups;
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

  __device__ Segment(const ResidentCut& cut, const RunPlace<kSize>& place, int item) {
    const int index = (place.rank * cut.items + item) * place.owners + place.owner;
    channel = index;
    int part = 0;
    if (cut.segments > 1) {
      channel = index / cut.segments;
      part = index - channel * cut.segments;
    }
    const int begin = place.phase + channel * static_cast<int>(cut.spatial);
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
  // Calls whole(step) for the packs within the channel, then part(step, from, to) for those whose
  // elements [from, to) alone are. ready(step) waits for a step, and says how far that goes.
  template <typename Ready, typename Whole, typename Part>
  __device__ __forceinline__ void ForSteps(Ready ready, Whole whole, Part part) const {
    const int begin = head > 0 ? 1 : 0, end = tail < kSize ? count - 1 : count;
    for (int step = begin; step < end;) {
      const int stop = min(end, ready(step));
#pragma unroll 2
      for (; step < stop; ++step) whole(step);
    }
    if (count == 0 || (head == 0 && tail == kSize)) return;
    if (head > 0) part(0, head, count == 1 ? tail : kSize);
    if (tail < kSize && (count > 1 || head == 0)) part(count - 1, 0, tail);
  }
};

// visit(segment, first_slot, steps) for the segments of a thread, each of up to `steps` packs; the
// first is at hand.
template <int kSize, typename Visit>
__device__ __forceinline__ void ForSegments(const ResidentCut& cut, const RunPlace<kSize>& place,
                                            Segment<kSize> segment, Visit visit) {
  for (int item = 0;;) {
    visit(segment, item * cut.item_steps, cut.item_steps);
    if (++item == cut.items) return;
    segment = Segment<kSize>(cut, place, item);
  }
}

// Copies what a thread takes of a segment from tensors that lie alike, `Pack`s of theirs in turn, to
// `slots`.
template <typename E, typename... Tensors>
__device__ __forceinline__ void CopySegment(const ResidentCut& cut,
                                            const RunPlace<kPackSize<E>>& place,
                                            const Segment<kPackSize<E>>& segment, Pack<E>* slots,
                                            int first_slot, int steps, CopyParts* parts,
                                            Tensors... tensors) {
  constexpr int kSize = kPackSize<E>;
  constexpr int kTensors = sizeof...(Tensors);
  const int64_t at = place.origin + segment.offset;
  const int64_t left = cut.n * cut.channels * cut.spatial - at;  // to the tensor's end
  // Its last pack may reach beyond the end.
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
  parts->IssuedUpTo(first_slot + steps);
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
                                               int round) {
  sums = WarpSum(sums);
  if (cut.solo()) return sums;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) warp_sums[warp] = sums;
  __syncthreads();
  if (round == 0) team.Begin();
  if (warp == 0) {
    sums = lane < cut.threads / 32 ? warp_sums[lane] : Pair<float>{0, 0};
    team.Put(round, 0, WarpSum(sums));
  }
  team.Exchange();
  return team.Total(round, 0);
}

template <typename E>
__global__ void __launch_bounds__(kRunThreads, 2)
    ResidentRunForwardKernel(ResidentCut cut, const E* x, Parameter scale, Parameter bias,
                             float epsilon, Activation activation, float* mean, float* rstd,
                             E* y) {
  constexpr int kSize = kPackSize<E>;
  extern __shared__ __align__(16) char shared[];
  const ResidentShared space(cut, shared, cut.steps);
  const Team team(cut, space.places);
  const RunPlace<kSize> place(cut, team.rank());
  if (!place.exists(cut)) return;  // a warp of its own
  Pack<E>* const slots = space.Slots<E>();
  float shift = ToNumber(x[place.slab * cut.group_size * cut.spatial]);
  const Segment<kSize> first_segment(cut, place, 0);
  CopyParts parts(cut.steps);
  ForSegments<kSize>(cut, place, first_segment, [&](const Segment<kSize>& segment, int first_slot, int steps) {
    CopySegment<E>(cut, place, segment, slots, first_slot, steps, &parts, x);
  });
  parts.AllIssued();

  GroupNumbers numbers;
  for (int round = 0;; ++round) {
    const ShiftedSums shifted = {shift, cut.share};
    Pair<float> sums = {0, 0};
    ForSegments<kSize>(cut, place, first_segment, [&](const Segment<kSize>& segment, int first_slot, int steps) {
      const auto add = [&](int step, auto each) {
        float values[kSize];
        ToNumbers(slots[(first_slot + step) * cut.threads], values);
        each([&](int i) { shifted.Add(values[i], sums); });
      };
      segment.ForSteps(
          [&](int step) {
            return round == 0 ? parts.Ready(first_slot + step) - first_slot : segment.count;
          },
          [&](int step) { add(step, [](auto f) { ForElements<kSize>(0, kSize, f); }); },
          [&](int step, int from, int to) {
            if (round == 0) parts.WaitUpTo(first_slot + steps);
            add(step, [&](auto f) { ForElements<kSize>(from, to, f); });
          });
    });
    sums = SlabSum(cut, sums, reinterpret_cast<Pair<float>*>(space.scratch), team, round);
    // All threads come to the same result.
    if (FinishGroup(sums, shifted, epsilon, &numbers) || round == 1) break;
    shift = numbers.mean_high;
  }
  if (place.rank == 0 && place.thread == 0) {
    mean[place.slab] = numbers.mean_high;
    rstd[place.slab] = numbers.rstd;
  }
  WithActivation(activation, [&](auto tag) {
    ForSegments<kSize>(cut, place, first_segment, [&](const Segment<kSize>& segment, int first_slot, int) {
      if (segment.count == 0) return;
      const int64_t channel = place.group * cut.group_size + segment.channel;
      const Normaliser<E> normalise(numbers, scale.LoadOne(place.n, channel, 1.0f),
                                    bias.LoadOne(place.n, channel, 0.0f));
      const auto apply = [&](int step) {
        float z[kSize];
        ToNumbers(slots[(first_slot + step) * cut.threads], z);
#pragma unroll
        for (int i = 0; i < kSize; ++i) z[i] = Activate<tag()>(normalise(z[i]));
        return ToPack<E>(z);
      };
      E* const to = y + place.origin + segment.offset;
      segment.ForSteps([&](int) { return segment.count; },
                       [&](int step) { StorePack(to + step * segment.stride, apply(step)); },
                       [&](int step, int from, int end) {
                         StorePart(to + step * segment.stride, apply(step), from, end);
                       });
    });
  });
}

// From the segments' sums, [items][owners]: those of the channels, into the row of dscale's and
// dbias's partial sums; and times scale, in each thread those of some segments.
template <int kSize>
__device__ __forceinline__ Pair<float> ReduceSegments(const ResidentCut& cut,
                                                      const RunPlace<kSize>& place,
                                                      const Parameter& scale, float rstd,
                                                      const Pair<float>* segments,
                                                      Pair<float>* channel_rows) {
  const int count = cut.items * place.owners, first = place.rank * count;
  const int size = static_cast<int>(cut.group_size);
  const int64_t first_channel = place.group * cut.group_size;
  if (channel_rows != nullptr) {
    Pair<float>* const row =
        channel_rows + (place.n * cut.team + place.rank) * cut.channels + first_channel;
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
    const float factor = scale.LoadOne(place.n, first_channel + channel, 1.0f);
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
  const RunPlace<kSize>& place;
  const BackwardInputs<E>& in;
  const Pack<E>* slots;  // this thread's: x's and dy's in turn
  float mean, rstd;

  __device__ RunGradient(const ResidentCut& cut, const RunPlace<kSize>& place,
                         const BackwardInputs<E>& in, const Pack<E>* slots)
      : cut(cut), place(place), in(in), slots(slots), mean(in.mean[place.slab]),
        rstd(in.rstd[place.slab]) {}

  __device__ __forceinline__ AtChannel Channel(const Segment<kSize>& segment) const {
    if (segment.count == 0) return {0, 0};
    const int64_t channel = place.group * cut.group_size + segment.channel;
    return {rstd * in.scale.LoadOne(place.n, channel, 1.0f),
            in.bias.LoadOne(place.n, channel, 0.0f)};
  }
  // x - mean and dz of a slot.
  template <Activation kActivation>
  __device__ __forceinline__ void Differentiate(int slot, const AtChannel& at,
                                                float (&deviation)[kSize],
                                                float (&dz)[kSize]) const {
    ToNumbers(slots[2 * slot * cut.threads], deviation);
    ToNumbers(slots[(2 * slot + 1) * cut.threads], dz);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      deviation[i] -= mean;
      dz[i] = FastBackward<E, kActivation>(dz[i], deviation[i] * at.slope + at.bias);
    }
  }
};

template <typename E>
__global__ void __launch_bounds__(kRunThreads, 2)
    ResidentRunBackwardKernel(ResidentCut cut, BackwardInputs<E> in, Pair<float>* channel_rows,
                              E* dx) {
  constexpr int kSize = kPackSize<E>;
  extern __shared__ __align__(16) char shared[];
  const ResidentShared space(cut, shared, 2 * cut.steps);
  const Team team(cut, space.places);
  const RunPlace<kSize> place(cut, team.rank());
  if (!place.exists(cut)) return;  // a warp of its own
  Pack<E>* const slots = space.Slots<E>();
  const Segment<kSize> first_segment(cut, place, 0);
  CopyParts parts(cut.steps);
  ForSegments<kSize>(cut, place, first_segment, [&](const Segment<kSize>& segment, int first_slot, int steps) {
    CopySegment<E>(cut, place, segment, slots, first_slot, steps, &parts, in.x, in.dy);
  });
  parts.AllIssued();

  const RunGradient<E> gradient(cut, place, in, slots);
  // [items][owners], and behind them what SlabSum needs.
  Pair<float>* const all_segments = reinterpret_cast<Pair<float>*>(space.scratch);
  Pair<float>* const segments =
      all_segments + (cut.solo() ? threadIdx.x / 32 * cut.items * place.owners : 0);
  WithActivation(in.activation, [&](auto tag) {
    ForSegments<kSize>(cut, place, first_segment, [&](const Segment<kSize>& segment, int first_slot, int steps) {
      const auto at = gradient.Channel(segment);
      Pair<float> sums = {0, 0};
      const auto add = [&](int step, int from, int to) {
        float deviation[kSize], dz[kSize];
        gradient.template Differentiate<tag()>(first_slot + step, at, deviation, dz);
        ForElements<kSize>(from, to, [&](int i) {
          sums.first += dz[i];
          sums.second = fmaf(dz[i], deviation[i], sums.second);
        });
      };
      segment.ForSteps(
          [&](int step) { return parts.Ready(first_slot + step) - first_slot; },
          [&](int step) { add(step, 0, kSize); },
          [&](int step, int from, int to) {
            parts.WaitUpTo(first_slot + steps);
            add(step, from, to);
          });
      sums = WarpSum(sums, cut.lanes);
      if (place.lane == 0) segments[first_slot / steps * place.owners + place.owner] = sums;
    });
  });
  if (cut.solo()) {
    __syncwarp();
  } else {
    __syncthreads();
  }
  const Pair<float> total =
      SlabSum(cut, ReduceSegments(cut, place, in.scale, gradient.rstd, segments, channel_rows),
              all_segments + cut.items * place.owners, team, 0);
  const float constant = gradient.rstd * (total.first * cut.share);
  const float linear = gradient.rstd * (total.second * cut.share) * gradient.rstd;
  WithActivation(in.activation, [&](auto tag) {
    ForSegments<kSize>(cut, place, first_segment, [&](const Segment<kSize>& segment, int first_slot, int) {
      const auto at = gradient.Channel(segment);
      const auto apply = [&](int step) {
        float deviation[kSize], dz[kSize];
        gradient.template Differentiate<tag()>(first_slot + step, at, deviation, dz);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          dz[i] = at.slope * dz[i] - constant - deviation[i] * linear;
        }
        return ToPack<E>(dz);
      };
      E* const to = dx + place.origin + segment.offset;
      segment.ForSteps([&](int) { return segment.count; },
                       [&](int step) { StorePack(to + step * segment.stride, apply(step)); },
                       [&](int step, int from, int end) {
                         StorePart(to + step * segment.stride, apply(step), from, end);
                       });
    });
  });
}

}  // namespace

template <typename E>
Status LaunchResidentRunForward(const Problem& problem, const ResidentCut& cut, const Stage& stage,
                                const ForwardArgs& args, cudaStream_t stream) {
  return LaunchResident(ResidentRunForwardKernel<E>, "ResidentRunForwardKernel", cut, stage,
                        stream, cut, static_cast<const E*>(args.x), ScaleOf(problem, args),
                        BiasOf(problem, args), static_cast<float>(args.epsilon), problem.activation,
                        static_cast<float*>(args.mean), static_cast<float*>(args.rstd),
                        static_cast<E*>(args.y));
}

template <typename E>
Status LaunchResidentRunBackward(const Problem& problem, const ResidentCut& cut, const Stage& stage,
                                 const BackwardArgs& args, cudaStream_t stream) {
  return LaunchResident(
      ResidentRunBackwardKernel<E>, "ResidentRunBackwardKernel", cut, stage, stream, cut,
      BackwardInputs<E>(problem, args),
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
