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
struct RunPlace {
  int rank, owner, lane, owners;  // owner: the threads at one segment
  int64_t slab, n, group;

  __device__ RunPlace(const ResidentCut& cut, int rank) : rank(rank) {
    slab = blockIdx.x / static_cast<unsigned>(cut.team);
    n = slab / cut.groups;
    group = slab % cut.groups;
    owner = static_cast<int>(threadIdx.x) / cut.lanes;
    lane = static_cast<int>(threadIdx.x) % cut.lanes;
    owners = cut.threads / cut.lanes;
  }
};

// A segment: packs [first, last) of the tensor for this thread, every `lanes`-th, and the elements
// [begin, end) of the channel.
template <int kSize>
struct Segment {
  int channel;  // of the group; group_size: none
  int64_t first, last;
  int64_t begin, end;

  __device__ Segment(const ResidentCut& cut, const RunPlace& place, int item) {
    const int index = (place.rank * cut.items + item) * place.owners + place.owner;
    channel = min(index / cut.segments, static_cast<int>(cut.group_size));
    begin = (place.slab * cut.group_size + channel) * cut.spatial;
    end = channel < cut.group_size ? begin + cut.spatial : begin;
    const int64_t origin = begin / kSize + (index % cut.segments) * cut.segment_packs;
    last = end > begin ? min(origin + cut.segment_packs, (end + kSize - 1) / kSize) : origin;
    first = origin + place.lane;
  }
  // The elements of a pack that belong to it.
  __device__ __forceinline__ bool Whole(int64_t pack) const {
    return pack * kSize >= begin && (pack + 1) * kSize <= end;
  }
  // f(i) for those.
  template <typename F>
  __device__ __forceinline__ void ForElements(int64_t pack, F f) const {
    if (Whole(pack)) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) f(i);
    } else {
      const int from = From(pack), to = To(pack);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (from <= i && i < to) f(i);
      }
    }
  }
  __device__ __forceinline__ int From(int64_t pack) const {
    return static_cast<int>(max(begin - pack * kSize, static_cast<int64_t>(0)));
  }
  __device__ __forceinline__ int To(int64_t pack) const {
    return static_cast<int>(min(end - pack * kSize, static_cast<int64_t>(kSize)));
  }
};

// visit(segment, item, steps) for the segments of a thread, each of up to `steps` packs.
template <int kSize, typename Visit>
__device__ __forceinline__ void ForSegments(const ResidentCut& cut, const RunPlace& place,
                                            Visit visit) {
  const int steps = cut.steps / cut.items;
  for (int item = 0; item < cut.items; ++item) {
    const Segment<kSize> segment(cut, place, item);
    visit(segment, item, steps);
  }
}

template <typename E>
__device__ __forceinline__ void CopyPack(Pack<E>* slot, const E* tensor, int64_t pack,
                                         int64_t elements) {
  constexpr int kSize = kPackSize<E>;
  const E* const from = tensor + pack * kSize;
  if ((pack + 1) * kSize <= elements) {
    CopyAsync(slot, from);
  } else {  // the tensor ends inside
    *slot = LoadPart<E>(from, 0, static_cast<int>(elements - pack * kSize));
  }
}

template <typename E>
__device__ __forceinline__ void StoreOf(E* tensor, int64_t pack, const Pack<E>& values,
                                        const Segment<kPackSize<E>>& segment) {
  E* const to = tensor + pack * kPackSize<E>;
  if (segment.Whole(pack)) {
    StorePack(to, values);
  } else {
    StorePart(to, values, segment.From(pack), segment.To(pack));
  }
}

template <typename E>
__global__ void __launch_bounds__(kResidentThreads, 1)
    ResidentRunForwardKernel(ResidentCut cut, const E* x, Parameter scale, Parameter bias,
                             float epsilon, Activation activation, float* mean, float* rstd,
                             E* y) {
  constexpr int kSize = kPackSize<E>;
  extern __shared__ __align__(16) char shared[];
  const ResidentShared space(cut, shared, cut.steps);
  const Team team(cut, space.places);
  const RunPlace place(cut, team.rank());
  Pack<E>* const slots = space.Slots<E>();
  const int64_t elements = cut.n * cut.channels * cut.spatial;
  float shift = ToNumber(x[place.slab * cut.group_size * cut.spatial]);
  CopyParts parts(cut.steps);
  ForSegments<kSize>(cut, place, [&](const Segment<kSize>& segment, int item, int steps) {
    for (int step = 0; step < steps; ++step) {
      const int64_t pack = segment.first + step * cut.lanes;
      const int slot = item * steps + step;
      if (pack < segment.last) CopyPack(slots + slot * cut.threads, x, pack, elements);
      parts.Issued(slot);
    }
  });
  parts.AllIssued();

  Pair<float>* const warp_sums = reinterpret_cast<Pair<float>*>(space.scratch);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  GroupNumbers numbers;
  for (int round = 0;; ++round) {
    const ShiftedSums shifted = {shift, cut.share};
    Pair<float> sums = {0, 0};
    ForSegments<kSize>(cut, place, [&](const Segment<kSize>& segment, int item, int steps) {
      for (int step = 0; step < steps; ++step) {
        const int64_t pack = segment.first + step * cut.lanes;
        const int slot = item * steps + step;
        if (round == 0) parts.Wait(slot);
        if (pack >= segment.last) continue;
        const Pack<E> values = slots[slot * cut.threads];
        segment.ForElements(pack, [&](int i) { shifted.Add(ToNumber(values.values[i]), sums); });
      }
    });
    sums = WarpSum(sums);
    if (lane == 0) warp_sums[warp] = sums;
    __syncthreads();
    if (round == 0) team.Begin();
    if (warp == 0) {
      sums = lane < cut.threads / 32 ? warp_sums[lane] : Pair<float>{0, 0};
      team.Put(round, 0, WarpSum(sums));
    }
    team.Exchange();
    // All threads come to the same result.
    const bool good = FinishGroup(team.Total(round, 0), shifted, epsilon, &numbers);
    if (good || round == 1) break;
    shift = numbers.mean_high;
  }
  if (place.rank == 0 && threadIdx.x == 0) {
    mean[place.slab] = numbers.mean_high;
    rstd[place.slab] = numbers.rstd;
  }
  ForSegments<kSize>(cut, place, [&](const Segment<kSize>& segment, int item, int steps) {
    if (segment.first >= segment.last) return;
    const int64_t channel = place.group * cut.group_size + segment.channel;
    const float slope = numbers.rstd * scale.LoadOne(place.n, channel, 1.0f);
    const float offset = bias.LoadOne(place.n, channel, 0.0f) - numbers.mean_low * slope;
#pragma unroll 2
    for (int step = 0; step < steps; ++step) {
      const int64_t pack = segment.first + step * cut.lanes;
      if (pack >= segment.last) break;
      float z[kSize];
      ToNumbers(slots[(item * steps + step) * cut.threads], z);
#pragma unroll
      for (int i = 0; i < kSize; ++i) z[i] = (z[i] - numbers.mean_high) * slope + offset;
      ActivateAll(activation, z);
      StoreOf(y, pack, ToPack<E>(z), segment);
    }
  });
}

// Adds up the segments' sums, [items][owners]: by channel into the row of dscale's and dbias's
// partial sums, and times scale, by the first warp, for the team.
__device__ __forceinline__ void ReduceSegments(const ResidentCut& cut, const RunPlace& place,
                                               const Parameter& scale, float rstd,
                                               const Pair<float>* segments,
                                               Pair<float>* channel_rows, const Team& team) {
  const int count = cut.items * place.owners, first = place.rank * count;
  const int size = static_cast<int>(cut.group_size);
  const int64_t first_channel = place.group * cut.group_size;
  const auto channel_sum = [&](int channel) {
    const int from = max(channel * cut.segments, first);
    const int to = min((channel + 1) * cut.segments, first + count);
    Pair<float> sum = {0, 0};
    for (int index = from; index < to; ++index) {
      sum.first += segments[index - first].first;
      sum.second += segments[index - first].second;
    }
    sum.second *= rstd;
    return sum;
  };
  if (channel_rows != nullptr) {
    Pair<float>* const row =
        channel_rows + (place.n * cut.team + place.rank) * cut.channels + first_channel;
    for (int channel = threadIdx.x; channel < size; channel += cut.threads) {
      row[channel] = channel_sum(channel);
    }
  }
  if (threadIdx.x >= 32) return;
  Pair<float> sums = {0, 0};
  for (int index = threadIdx.x; index < count; index += 32) {
    const int channel = (first + index) / cut.segments;
    if (channel >= size) break;
    const float factor = scale.LoadOne(place.n, first_channel + channel, 1.0f);
    sums.first += factor * segments[index].first;
    sums.second += factor * (segments[index].second * rstd);
  }
  __syncwarp();
  team.Put(0, 0, WarpSum(sums));
}

template <typename E>
__global__ void __launch_bounds__(kResidentThreads, 1)
    ResidentRunBackwardKernel(ResidentCut cut, BackwardInputs<E> in, Pair<float>* channel_rows,
                              E* dx) {
  constexpr int kSize = kPackSize<E>;
  extern __shared__ __align__(16) char shared[];
  const ResidentShared space(cut, shared, 2 * cut.steps);
  const Team team(cut, space.places);
  const RunPlace place(cut, team.rank());
  Pack<E>* const slots = space.Slots<E>();
  const int64_t elements = cut.n * cut.channels * cut.spatial;
  CopyParts parts(cut.steps);
  ForSegments<kSize>(cut, place, [&](const Segment<kSize>& segment, int item, int steps) {
    for (int step = 0; step < steps; ++step) {
      const int64_t pack = segment.first + step * cut.lanes;
      const int slot = item * steps + step;
      if (pack < segment.last) {
        CopyPack(slots + 2 * slot * cut.threads, in.x, pack, elements);
        CopyPack(slots + (2 * slot + 1) * cut.threads, in.dy, pack, elements);
      }
      parts.Issued(slot);
    }
  });
  parts.AllIssued();

  const float centre = in.mean[place.slab], rstd = in.rstd[place.slab];
  // x becomes x - mean, dy becomes dz.
  const auto differentiate = [&](int slot, float slope, float bias, float(&deviation)[kSize],
                                 float(&dz)[kSize]) {
    ToNumbers(slots[2 * slot * cut.threads], deviation);
    ToNumbers(slots[(2 * slot + 1) * cut.threads], dz);
    float z[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      deviation[i] -= centre;
      z[i] = deviation[i] * slope + bias;
    }
    ActivateBackwardAll(in.activation, z, dz);
  };
  const auto numbers_of = [&](const Segment<kSize>& segment, float* slope, float* bias) {
    const int64_t channel = place.group * cut.group_size + segment.channel;
    *slope = *bias = 0;
    if (segment.channel == cut.group_size) return;
    *slope = rstd * in.scale.LoadOne(place.n, channel, 1.0f);
    *bias = in.bias.LoadOne(place.n, channel, 0.0f);
  };

  Pair<float>* const segments = reinterpret_cast<Pair<float>*>(space.scratch);
  ForSegments<kSize>(cut, place, [&](const Segment<kSize>& segment, int item, int steps) {
    float slope, bias;
    numbers_of(segment, &slope, &bias);
    Pair<float> sums = {0, 0};
    for (int step = 0; step < steps; ++step) {
      const int64_t pack = segment.first + step * cut.lanes;
      const int slot = item * steps + step;
      parts.Wait(slot);
      if (pack >= segment.last) continue;
      float deviation[kSize], dz[kSize];
      differentiate(slot, slope, bias, deviation, dz);
      segment.ForElements(pack, [&](int i) {
        sums.first += dz[i];
        sums.second = fmaf(dz[i], deviation[i], sums.second);
      });
    }
    sums = WarpSum(sums, cut.lanes);
    if (place.lane == 0) segments[item * place.owners + place.owner] = sums;
  });
  __syncthreads();
  team.Begin();
  ReduceSegments(cut, place, in.scale, rstd, segments, channel_rows, team);
  team.Exchange();
  const Pair<float> total = team.Total(0, 0);
  const float constant = rstd * (total.first * cut.share);
  const float linear = rstd * (total.second * cut.share) * rstd;
  ForSegments<kSize>(cut, place, [&](const Segment<kSize>& segment, int item, int steps) {
    float slope, bias;
    numbers_of(segment, &slope, &bias);
#pragma unroll 2
    for (int step = 0; step < steps; ++step) {
      const int64_t pack = segment.first + step * cut.lanes;
      if (pack >= segment.last) break;
      float deviation[kSize], dz[kSize];
      differentiate(item * steps + step, slope, bias, deviation, dz);
#pragma unroll
      for (int i = 0; i < kSize; ++i) dz[i] = slope * dz[i] - constant - deviation[i] * linear;
      StoreOf(dx, pack, ToPack<E>(dz), segment);
    }
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
