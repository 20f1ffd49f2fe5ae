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
    at += (cut.places() * cut.tile_groups * sizeof(Pair<float>) + kPackBytes - 1) / kPackBytes *
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
  team.Exchange(exchange);
  return team.Total(exchange, 0);
}

// Where a block leaves its sums of a sample's channels, from `channel` on, for dscale and dbias.
__device__ __forceinline__ Pair<float>* ChannelRow(const ResidentCut& cut, Pair<float>* rows, int n,
                                                   int rank, int64_t channel) {
  return rows + (static_cast<int64_t>(n) * cut.team + rank) * cut.channels + channel;
}

// Which of its elements make the shift.
__device__ __forceinline__ int64_t ShiftElement(const ResidentCut& cut, int i) {
  return i * (cut.group_size * cut.spatial) / kShiftElements;
}

// The results of a group that is the whole slab, in all of its threads. at(i): its i-th number;
// sum(shifted, again) gives a thread's sums, `again` from data that has been waited for.
// `exchanges` counts the team's.
template <typename At, typename Sum>
__device__ __forceinline__ GroupNumbers GroupStatistics(const ResidentCut& cut, At at,
                                                        const ResidentShared& space,
                                                        const Team& team, float epsilon,
                                                        int* exchanges, Sum sum) {
  const float shift = ShiftOf([&](int i) { return at(ShiftElement(cut, i)); });
  ShiftedSums shifted = {shift, cut.share};
  for (bool again = false;; again = true) {
    const Pair<float> sums =
        SlabSum(cut, sum(shifted, again), reinterpret_cast<Pair<float>*>(space.scratch), team,
                (*exchanges)++);
    GroupNumbers numbers;
    if (FinishGroup(sums, shifted, epsilon, &numbers) || again) return numbers;
    shifted.shift = numbers.shift;
  }
}

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

// resident_packs_forward.cu, resident_packs_backward.cu
template <typename E>
Status LaunchResidentPackForward(const Problem&, const ResidentCut&, const Stage&,
                                 const ForwardArgs&, cudaStream_t);
template <typename E>
Status LaunchResidentPackBackward(const Problem&, const ResidentCut&, const Stage&,
                                  const BackwardArgs&, cudaStream_t);

}  // namespace jax_gn::cuda

#endif  // JAX_GN_CUDA_RESIDENT_KERNELS_H_
