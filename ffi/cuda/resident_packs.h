// Channels first, resident, with short channels: a team of blocks holds a group of one sample in
// shared memory as the one run of packs that it is, each thread every `threads`-th of its block's;
// or a warp does, which waits for no other.
// Channels begin anywhere in it, at most one within a pack: a thread knows the channel of its pack,
// and how many elements are left of it, by addition alone, and finds scale and bias in a table. So
// neither the ends of channels nor their number cost anything, unlike in resident_runs.h, which
// needs no table and no sums of single packs. An addend is left to that too.
//
// Forward: copy x in; sums of each thread; over the block; over the team; write y.
// Backward: copy x and dy in; sums of each pack, one pair for each of its channels; over each
// channel, a row of dscale's and dbias's partial sums; over the block; over the team; write dx.
// A block (or warp) serves one slab: others on the multiprocessor fill its waits.
#ifndef JAX_GN_CUDA_RESIDENT_PACKS_H_
#define JAX_GN_CUDA_RESIDENT_PACKS_H_

#include "resident_kernels.h"

namespace jax_gn::cuda {

// All threads at the slab have come here.
__device__ __forceinline__ void SyncSlab(const ResidentCut& cut) {
  if (cut.solo()) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// Where a pack begins: its channel in the group, and the elements from there to the channel's end.
struct ChannelCursor {
  int channel, left;

  // To the thread's next pack.
  __device__ __forceinline__ void Advance(const ResidentCut& cut) {
    channel += cut.step_channels;
    left -= cut.step_rest;
    if (left <= 0) {
      ++channel;
      left += static_cast<int>(cut.spatial);
    }
  }
};

// What a thread takes: `steps` packs, the first at element `offset` of the tensor.
template <int kSize>
struct PackPlace {
  int rank, steps, slab, n, first_channel;
  int thread, of_block;  // of the threads at the slab; which of the block's slabs
  bool valid;
  int64_t offset;
  ChannelCursor begin;

  __device__ PackPlace(const ResidentCut& cut, int rank) : rank(rank) {
    const unsigned index = SlabWalk(cut).first;
    thread = static_cast<int>(cut.solo() ? threadIdx.x % 32 : threadIdx.x);
    of_block = static_cast<int>(cut.solo() ? threadIdx.x / 32 : 0);
    valid = index < cut.slabs;
    const unsigned sample = index / static_cast<unsigned>(cut.groups);
    slab = static_cast<int>(index);
    n = static_cast<int>(sample);
    first_channel = static_cast<int>(index - sample * static_cast<unsigned>(cut.groups)) *
                    static_cast<int>(cut.group_size);
    const int elements = static_cast<int>(cut.group_size * cut.spatial);
    const int first = FirstPack(cut) + thread, packs = elements / kSize;
    const int apart = cut.slab_threads;
    steps = first < packs ? min(cut.steps, (packs - first + apart - 1) / apart) : 0;
    offset = static_cast<int64_t>(slab) * elements + first * kSize;
    begin.channel = first * kSize / static_cast<int>(cut.spatial);
    begin.left = (begin.channel + 1) * static_cast<int>(cut.spatial) - first * kSize;
  }
  // The block's first pack of the group.
  __device__ __forceinline__ int FirstPack(const ResidentCut& cut) const {
    return rank * cut.steps * cut.slab_threads;
  }
};

// What the kernels keep in the scratch, as ResidentSharedBytes counts it.
struct PackScratch {
  Pair<float>*warp_sums, *table, *pack_sums;  // the last of the backward pass alone

  // kMeet: channels that may meet in a pack.
  template <int kMeet, int kSize>
  static __device__ __forceinline__ PackScratch Of(const ResidentCut& cut,
                                                   const ResidentShared& space,
                                                   const PackPlace<kSize>& place) {
    const int rows = static_cast<int>(cut.group_size) + 1, packs = cut.steps * cut.slab_threads;
    PackScratch scratch;
    scratch.warp_sums = reinterpret_cast<Pair<float>*>(space.scratch);
    Pair<float>* const own =
        scratch.warp_sums + kRunThreads / 32 + place.of_block * (rows + kMeet * packs);
    scratch.table = own;
    scratch.pack_sums = own + rows;
    return scratch;
  }
};

// scale and bias of the group's channels. One more row, as the last pack looks one channel on.
template <int kSize>
__device__ __forceinline__ void FillTable(const ResidentCut& cut, const PackPlace<kSize>& place,
                                          const Parameter& scale, const Parameter& bias,
                                          Pair<float>* table) {
  const int channels = static_cast<int>(cut.group_size);
  for (int channel = place.thread; channel <= channels; channel += cut.slab_threads) {
    const int64_t at = place.first_channel + min(channel, channels - 1);
    table[channel] = {scale.LoadOne(place.n, at, 1.0f), bias.LoadOne(place.n, at, 0.0f)};
  }
}

// The numbers of both channels of a pack, made of the table's rows by make(scale, bias); Of(i)
// those of its i-th element. kTogether elements, of kSize, surely share a channel: fewer choices.
template <int kSize, int kTogether, typename Numbers>
struct PackChannels {
  static constexpr bool kSplit = kTogether < kSize;
  Numbers first, second;
  int left;

  template <typename Make>
  __device__ __forceinline__ PackChannels(const Pair<float>* table, const ChannelCursor& at,
                                          Make make)
      : left(at.left) {
    const Pair<float>* row = table + at.channel;
    first = make(row[0].first, row[0].second);
    if constexpr (kSplit) second = make(row[1].first, row[1].second);
  }
  __device__ __forceinline__ bool InFirst(int i) const {
    const int begin = i / kTogether * kTogether;
    return begin == 0 || begin < left;
  }
  __device__ __forceinline__ Numbers Of(int i) const {
    if constexpr (kSplit) {
      return InFirst(i) ? first : second;
    } else {
      return first;
    }
  }
};

// f(constant): the most elements of a pack that surely share a channel, of the numbers that kernels
// are made for.
template <typename E, typename F>
Status WithTogether(const Problem& problem, F f) {
  constexpr int kSize = kPackSize<E>;
  if (problem.spatial % kSize == 0) return f(std::integral_constant<int, kSize>());
  if (problem.spatial % (kSize / 2) == 0) return f(std::integral_constant<int, kSize / 2>());
  return f(std::integral_constant<int, 1>());
}

}  // namespace jax_gn::cuda

#endif  // JAX_GN_CUDA_RESIDENT_PACKS_H_
