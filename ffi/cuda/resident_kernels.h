// The launchers of the family "resident", and the sums that its kernels share.
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

// The sums of all threads of a slab: over the warp, the block, the team.
template <typename AnyTeam>
__device__ __forceinline__ Pair<float> SlabSum(const ResidentCut& cut, Pair<float> sums,
                                               Pair<float>* warp_sums, const AnyTeam& team,
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

// x's and dy's packs of a step.
template <typename E>
struct InputPacks {
  Pack<E> x, dy;
};

// Which of a thread's places a step has: the held ones their own, the others take turns.
template <int kRing>
__device__ __forceinline__ int StepPlace(const ResidentCut& cut, int step) {
  if (kRing == 0 || step < cut.held) return step;
  return cut.held + ((step - cut.held) & (kRing - 1));
}

// Asks for the first of the steps that pass, copy(step), of place.held .. place.steps - 1. A commit
// for each place of the ring.
template <int kRing, typename Place, typename Copy>
__device__ __forceinline__ void FillRing(const Place& place, Copy copy) {
#pragma unroll
  for (int i = 0; i < kRing; ++i) {
    if (place.held + i < place.steps) copy(place.held + i);
    CommitCopies();
  }
}

// Asks for a thread's first slab.
template <int kRing, typename Place, typename Copy>
__device__ __forceinline__ void AskForSlab(const Place& place, CopyParts* parts, Copy copy) {
  for (int step = 0; step < place.held; ++step) {
    copy(step);
    parts->Issued(step);
  }
  parts->AllIssued();
  FillRing<kRing>(place, copy);
}

// f(take(step), step) for the steps that pass; as soon as one has been taken out of its place, the
// next one for that place is asked for. Backwards, the last steps first, it begins with what the
// ring still holds of another walk.
template <int kRing, typename Place, typename Copy, typename Take, typename F>
__device__ __forceinline__ void ForPassing(const Place& place, bool backwards, Copy copy, Take take,
                                           F f) {
  if constexpr (kRing > 0) {
    const int first = backwards ? place.steps - 1 : place.held, apart = backwards ? -1 : 1;
#pragma unroll 2
    for (int i = 0; i < place.steps - place.held; ++i) {
      const int step = first + apart * i, next = step + apart * kRing;
      WaitCopies<kRing - 1>();
      const auto packs = take(step);
      if (place.held <= next && next < place.steps) copy(next);
      CommitCopies();
      f(packs, step);
    }
  }
}

// Where a block leaves its sums of a sample's channels, from `channel` on, for dscale and dbias.
__device__ __forceinline__ Pair<float>* ChannelRow(const ResidentCut& cut, Pair<float>* rows, int n,
                                                   int rank, int64_t channel) {
  return rows + (static_cast<int64_t>(n) * cut.team + rank) * cut.channels + channel;
}

// A pass by grid teams. They exchange their sums in the workspace, behind the sums of channels, and
// count from 0.
template <typename E, typename Kernel, typename Args>
Status LaunchGridTeams(Kernel kernel, const char* name, const Problem& problem,
                       const ResidentCut& cut, const Stage& stage, const Args& args,
                       cudaStream_t stream) {
  const ResidentSpace sizes = ResidentSpaceOf(problem, cut, stage.grid);
  char* const places = static_cast<char*>(args.workspace) + sizes.channel_rows;
  const GridTeam::Space space = {reinterpret_cast<float2*>(places),
                                 reinterpret_cast<unsigned*>(places + sizes.places)};
  JAX_GN_TRY(ToStatus(cudaMemsetAsync(space.arrivals, 0, sizes.arrivals, stream),
                      "counters of grid teams", __FILE_NAME__, __LINE__));
  return LaunchResident<E>(kernel, name, problem, cut, stage, args, stream, space);
}

// Which of its elements make the shift.
__device__ __forceinline__ int64_t ShiftElement(const ResidentCut& cut, int i) {
  return i * (cut.group_size * cut.spatial) / kShiftElements;
}

// The results of a group that is the whole slab, in all of its threads. at(i): its i-th number;
// sum(shifted, again) gives a thread's sums, `again` from data that has been waited for.
// `exchanges` counts the team's.
template <typename AnyTeam, typename At, typename Sum>
__device__ __forceinline__ GroupNumbers GroupStatistics(const ResidentCut& cut, At at,
                                                        const ResidentShared& space,
                                                        const AnyTeam& team, float epsilon,
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

// resident_spans_forward.cu, resident_spans_backward.cu
template <typename E>
Status LaunchResidentSpanForward(const Problem&, const ResidentCut&, const Stage&,
                                 const ForwardArgs&, cudaStream_t);
template <typename E>
Status LaunchResidentSpanBackward(const Problem&, const ResidentCut&, const Stage&,
                                  const BackwardArgs&, cudaStream_t);

}  // namespace jax_gn::cuda

#endif  // JAX_GN_CUDA_RESIDENT_KERNELS_H_
