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
#ifndef JAX_GN_CUDA_RESIDENT_RUNS_H_
#define JAX_GN_CUDA_RESIDENT_RUNS_H_

#include "resident_kernels.h"

namespace jax_gn::cuda {

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
  int phase, slab, n, first_channel;
  int64_t origin;

  __device__ Run(const ResidentCut& cut, unsigned index) : slab(static_cast<int>(index)) {
    const unsigned groups = static_cast<unsigned>(cut.groups), sample = index / groups;
    n = static_cast<int>(sample);
    first_channel = static_cast<int>(index - sample * groups) * static_cast<int>(cut.group_size);
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

// A parameter's number for a segment's channel; a thread may have none.
template <int kSize>
__device__ __forceinline__ float OfChannel(const Run<kSize>& run, const Segment<kSize>& segment,
                                           const Parameter& parameter, float fallback) {
  if (segment.count == 0) return fallback;
  return parameter.LoadOne(run.n, run.first_channel + segment.channel, fallback);
}

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

}  // namespace jax_gn::cuda

#endif  // JAX_GN_CUDA_RESIDENT_RUNS_H_
