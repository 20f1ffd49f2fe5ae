// The launchers of the family "resident", and how its kernels divide their shared memory.
#ifndef JAX_GN_CUDA_RESIDENT_KERNELS_H_
#define JAX_GN_CUDA_RESIDENT_KERNELS_H_

#include "resident.h"

namespace jax_gn::cuda {

// The element types of the family: float64, with twice the sums in twice the room, is left to
// "streaming".
#define JAX_GN_FOR_RESIDENT_ELEMENTS(INSTANTIATE) \
  INSTANTIATE(float)                              \
  INSTANTIATE(::jax_gn::Half)                     \
  INSTANTIATE(::jax_gn::BFloat16)

// As ResidentSharedBytes counts.
struct ResidentShared {
  char* packs;            // [packs of a thread][threads]
  Pair<float>* places;    // Team's
  GroupNumbers* numbers;  // [tile_groups]
  float* scratch;

  __device__ ResidentShared(const ResidentCut& cut, char* shared, int packs_of_thread)
      : packs(shared) {
    char* at = shared + static_cast<int64_t>(packs_of_thread) * cut.threads * kPackBytes;
    places = reinterpret_cast<Pair<float>*>(at);
    at += (2 * cut.team * cut.tile_groups * sizeof(Pair<float>) + kPackBytes - 1) / kPackBytes *
          kPackBytes;
    numbers = reinterpret_cast<GroupNumbers*>(at);
    scratch = reinterpret_cast<float*>(at + cut.tile_groups * sizeof(GroupNumbers));
  }
  // This thread's first; the next one is cut.threads further.
  template <typename E>
  __device__ __forceinline__ Pack<E>* Slots() const {
    return reinterpret_cast<Pack<E>*>(packs) + threadIdx.x;
  }
};

// resident_rows_forward.cu, resident_rows_backward.cu
template <typename E>
Status LaunchResidentTileForward(const Problem&, const ResidentCut&, const Stage&,
                                 const ForwardArgs&, cudaStream_t);
template <typename E>
Status LaunchResidentTileBackward(const Problem&, const ResidentCut&, const Stage&,
                                  const BackwardArgs&, cudaStream_t);

// resident_runs_forward.cu, resident_runs_backward.cu
template <typename E>
Status LaunchResidentRunForward(const Problem&, const ResidentCut&, const Stage&,
                                const ForwardArgs&, cudaStream_t);
template <typename E>
Status LaunchResidentRunBackward(const Problem&, const ResidentCut&, const Stage&,
                                 const BackwardArgs&, cudaStream_t);

}  // namespace jax_gn::cuda

#endif  // JAX_GN_CUDA_RESIDENT_KERNELS_H_
