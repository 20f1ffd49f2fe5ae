// Channels first, resident, for what is larger than a cluster's shared memory: a grid team works on
// a group of one sample. Each of its blocks takes a span of one channel, a contiguous piece that
// begins with a pack, so that scale, bias and addend are one number and the sums of its channel are
// the block's. Steps are held or pass as in resident_rows.h.
//
// Forward: copy x in; sums of each thread; over the block; over the team; write y.
// Backward: copy x and dy in; sums of each thread; over the block, which are also a row of dscale's
// and dbias's partial sums; over the team; write dx.
// A team goes on to the next slab, asking for its packs as places become free.
#ifndef JAX_GN_CUDA_RESIDENT_SPANS_H_
#define JAX_GN_CUDA_RESIDENT_SPANS_H_

#include "resident_kernels.h"

namespace jax_gn::cuda {

// Where a thread stands in every slab.
template <int kSize>
struct SpanPlace {
  int rank, channel, segment;  // channel: of the group
  int steps, held, stride;     // stride: elements from a step to the next
  int64_t offset;              // of the first one, in elements from the slab's first

  __device__ SpanPlace(const ResidentCut& cut, int rank) : rank(rank) {
    channel = rank / cut.segments;
    segment = rank - channel * cut.segments;
    const int thread = static_cast<int>(threadIdx.x), first = segment * cut.segment_packs;
    const int packs = min(cut.segment_packs, static_cast<int>(cut.spatial) / kSize - first);
    steps = thread < packs ? (packs - thread + cut.threads - 1) / cut.threads : 0;
    held = min(steps, cut.held);
    stride = cut.threads * kSize;
    offset = channel * cut.spatial + (first + thread) * static_cast<int64_t>(kSize);
  }
};

// A slab: a group of a sample.
struct Span {
  int slab, n;
  int64_t channel, offset;  // of the thread: its channel of all, its first element of the tensor

  template <int kSize>
  __device__ Span(const ResidentCut& cut, const SpanPlace<kSize>& place, unsigned index)
      : slab(static_cast<int>(index)) {
    const unsigned groups = static_cast<unsigned>(cut.groups), sample = index / groups;
    n = static_cast<int>(sample);
    channel = (index - sample * groups) * cut.group_size + place.channel;
    offset = index * (cut.group_size * cut.spatial) + place.offset;
  }
};

}  // namespace jax_gn::cuda

#endif  // JAX_GN_CUDA_RESIDENT_SPANS_H_
