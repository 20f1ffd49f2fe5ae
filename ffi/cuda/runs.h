// The mapping that all channels-first kernels share: memory is a sequence of runs, of one group
// (its statistics) or of one channel (all else), and `lanes` neighbouring threads take a piece of
// one. They walk the 16-byte packs that cover the piece; at its two ends a pack may reach beyond it
// (a run may begin anywhere), and only the elements within count.
#ifndef JAX_GN_CUDA_RUNS_H_
#define JAX_GN_CUDA_RUNS_H_

#include "pack.h"
#include "sums.h"

namespace jax_gn::cuda {

// What `lanes` threads take; all threads of a block have one, maybe empty.
struct RunPiece {
  bool valid;
  int64_t run, piece;  // run: of all samples
  int64_t begin, end;  // elements of the tensor
  int lane;

  __device__ RunPiece(const RunCut& cut, int64_t block) {
    const int64_t item = block * (kThreads / cut.lanes) + threadIdx.x / cut.lanes;
    valid = item < cut.items();
    run = item / cut.pieces;
    piece = item % cut.pieces;
    begin = run * cut.length + piece * cut.extent;
    end = valid ? begin + min(cut.extent, cut.length - piece * cut.extent) : begin;
    lane = threadIdx.x % cut.lanes;
  }
};

// A tensor as packs; `phase` says where packs begin, which is x's 16-byte boundaries.
template <typename E>
struct RunPacks {
  E* tensor;
  bool aligned;

  __device__ RunPacks(E* tensor, int phase) : tensor(tensor), aligned(Phase(tensor) == phase) {}

  // The pack at element `at`.
  __device__ __forceinline__ auto Load(int64_t at) const {
    using Element = std::remove_const_t<E>;
    if (aligned) return LoadPack<Element>(tensor + at);
    return cuda::LoadPart<Element>(tensor + at, 0, kPackSize<Element>);
  }
  __device__ __forceinline__ void Store(int64_t at, const Pack<E>& pack) const {
    if (aligned) {
      StorePack(tensor + at, pack);
    } else {
      cuda::StorePart(tensor + at, pack, 0, kPackSize<E>);
    }
  }
  // As far as it lies in [begin, end); a load gives zeros elsewhere.
  __device__ __forceinline__ auto LoadPart(int64_t at, int64_t begin, int64_t end) const {
    using Element = std::remove_const_t<E>;
    return cuda::LoadPart<Element>(tensor + at, First(at, begin),
                                   Last<kPackSize<Element>>(at, end));
  }
  __device__ __forceinline__ void StorePart(int64_t at, int64_t begin, int64_t end,
                                            const Pack<E>& pack) const {
    cuda::StorePart(tensor + at, pack, First(at, begin), Last<kPackSize<E>>(at, end));
  }

  // The elements of a pack that count.
  static __device__ __forceinline__ int First(int64_t at, int64_t begin) {
    return at < begin ? static_cast<int>(begin - at) : 0;
  }
  template <int kSize>
  static __device__ __forceinline__ int Last(int64_t at, int64_t end) {
    return at + kSize > end ? static_cast<int>(end - at) : kSize;
  }
};

// Walks a thread's packs of a piece: full(at) for kPacks packs that lie `stride` apart and within
// the piece, so that their loads can be in flight together; part(at) for a single one elsewhere.
template <int kSize, int kPacks, typename Full, typename Part>
__device__ __forceinline__ void WalkRun(const RunCut& cut, const RunPiece& piece, int phase,
                                        Full full, Part part) {
  // A thread without a piece must not even look at the pack in which it would begin.
  if (!piece.valid) return;
  const int64_t stride = static_cast<int64_t>(cut.lanes) * kSize;
  const int64_t first = (piece.begin + phase) / kSize * kSize - phase;
  int64_t at = first + piece.lane * kSize;
  while (at < piece.end) {
    if (at >= piece.begin && at + (kPacks - 1) * stride + kSize <= piece.end) {
      full(at, stride);
      at += kPacks * stride;
    } else {
      part(at);
      at += stride;
    }
  }
}

}  // namespace jax_gn::cuda

#endif  // JAX_GN_CUDA_RUNS_H_
