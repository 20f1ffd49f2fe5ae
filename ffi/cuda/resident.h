// What the resident kernels share: asynchronous copies into shared memory, and the exchange of a
// team's group sums. resident_cut.h says who takes what.
//
// A team is a thread block cluster, or for what is larger the blocks of a cooperative launch: they
// run at once, on any GPU state, so that waiting for one another can't deadlock. The order of all
// sums is fixed.
#ifndef JAX_GN_CUDA_RESIDENT_H_
#define JAX_GN_CUDA_RESIDENT_H_

#include <cmath>

#include "backend.h"
#include "launch.h"
#include "resident_cut.h"
#include "sums.h"

namespace jax_gn::cuda {

// Asynchronous copies are waited for in so many parts, so that work begins with the first.
inline constexpr int kCopyParts = 4;

__device__ __forceinline__ unsigned SharedAddress(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// Asynchronous copies are of sm_80, clusters of sm_90; the planner sends older devices elsewhere.
__device__ __forceinline__ void CopyAsync(unsigned shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
#endif
}
__device__ __forceinline__ void CommitCopies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int kPending>
__device__ __forceinline__ void WaitCopies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

__device__ __forceinline__ void Prefetch(const void* global) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(global));
}

// Commits the copies of `steps` steps in parts, and waits for the parts in turn. A thread may have
// none in some steps.
class CopyParts {
 public:
  __device__ explicit CopyParts(int steps) : part_((steps + kCopyParts - 1) / kCopyParts) {
    StartIssuing();
  }

  // Before a slab's copies. The parts of the last one have all been waited for.
  __device__ __forceinline__ void StartIssuing() {
    next_ = part_;
    parts_ = 0;
  }
  // After each step's copies.
  __device__ __forceinline__ void Issued(int step) {
    if (step + 1 == next_) Commit();
  }
  // After those of all steps before `steps`.
  __device__ __forceinline__ void IssuedUpTo(int steps) {
    while (next_ <= steps) Commit();
  }
  __device__ __forceinline__ void AllIssued() {
    while (parts_ < kCopyParts) Commit();
    next_ = parts_ = 0;
  }
  // Waits for a step's copies; returns the first step whose copies may be outstanding yet. kLater:
  // copies of others committed since.
  template <int kLater = 0>
  __device__ __forceinline__ int Ready(int step) {
    WaitUpTo<kLater>(step + 1);
    return next_;
  }
  // For the copies of all steps before `steps`.
  template <int kLater = 0>
  __device__ __forceinline__ void WaitUpTo(int steps) {
    while (next_ < steps) {
      next_ += part_;
      switch (parts_++) {
        case 0:
          WaitCopies<kLater + 3>();
          break;
        case 1:
          WaitCopies<kLater + 2>();
          break;
        case 2:
          WaitCopies<kLater + 1>();
          break;
        default:
          WaitCopies<kLater>();
      }
    }
  }

 private:
  __device__ __forceinline__ void Commit() {
    CommitCopies();
    next_ += part_;
    ++parts_;
  }

  int part_, next_, parts_;  // steps of a part; the end of the part at hand, its number
};

__device__ __forceinline__ void ClusterArrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void ClusterWait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Writes to the same place in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ void StoreAtRank(const Pair<float>* place, int rank,
                                            const Pair<float>& pair) {
#if __CUDA_ARCH__ >= 900
  unsigned remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(remote)
               : "r"(SharedAddress(place)), "r"(rank));
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(remote), "f"(pair.first),
               "f"(pair.second)
               : "memory");
#endif
}

// Compiled with JAX_GN_STRESS (tools/gpu.sh stress), some blocks come late to an exchange and some
// leave it late, each time others.
__device__ __forceinline__ void MayBeLate() {
#if defined(JAX_GN_STRESS)
  const unsigned now = static_cast<unsigned>(clock64());
  const unsigned hash = (now ^ blockIdx.x * 2654435761u) * 2246822519u;
  if (hash >> 29 == 0) __nanosleep(hash >> 15 & 0x3fff);
#endif
}

// What x is normalised by: mean is mean_high + mean_low.
struct GroupNumbers {
  float mean_high, mean_low, rstd;
  float shift;  // of the sums that they come from
};

// How a block divides its shared memory, as ResidentSharedBytes counts.
struct ResidentShared {
  char* packs;            // [packs of a thread][threads]
  Pair<float>* places;    // the team's
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

// A pair of sums for each group of the slab, added up over the blocks of a team. Exchanges take
// turns at two sets of places: a block may be one exchange ahead of another.
class Team {
 public:
  static constexpr int kRing = 0;                    // every step is held
  static constexpr int kMostThreads = kTileThreads;  // channels last
  struct Space {};

  __device__ Team(const ResidentCut& cut, const ResidentShared& shared, Space = {})
      : places_(shared.places), size_(cut.team), groups_(cut.tile_groups) {
    rank_ = size_ == 1 ? 0 : static_cast<int>(blockIdx.x % static_cast<unsigned>(size_));
    if (size_ > 1) ClusterArrive();  // this block has begun: others may write to it
  }
  __device__ __forceinline__ int rank() const { return rank_; }

  // All threads, once, before the first Put.
  __device__ __forceinline__ void Begin() const {
    if (size_ > 1) ClusterWait();
  }
  // By all lanes of a warp, which hold the same pair.
  __device__ __forceinline__ void Put(int exchange, int group, const Pair<float>& pair) const {
    const int lane = threadIdx.x % 32;
    Pair<float>* const place = Place(exchange, rank_, group);
    if (size_ == 1) {
      if (lane == 0) *place = pair;
    } else if (lane < size_) {
      StoreAtRank(place, lane, pair);
    }
  }
  // All threads: after it, Total sees what all blocks have put.
  __device__ __forceinline__ void Exchange(int) const {
    MayBeLate();
    if (size_ == 1) {
      __syncthreads();
    } else {
      ClusterArrive();
      ClusterWait();
    }
    MayBeLate();
  }
  __device__ __forceinline__ Pair<float> Total(int exchange, int group) const {
    Pair<float> sum = {0, 0};
    for (int rank = 0; rank < size_; ++rank) {
      const Pair<float> pair = *Place(exchange, rank, group);
      sum.first += pair.first;
      sum.second += pair.second;
    }
    return sum;
  }

 private:
  __device__ __forceinline__ Pair<float>* Place(int exchange, int rank, int group) const {
    return places_ + ((exchange & 1) * size_ + rank) * groups_ + group;
  }

  Pair<float>* places_;  // [2][team][groups]
  int size_, groups_, rank_;
};

// The same for a team of any size, through global memory, from where every block adds up the same
// numbers in the same order. `arrivals`, 0 at first, counts the blocks that have put their sums.
class GridTeam {
 public:
  static constexpr int kRing = kRingSteps;  // some steps may be read twice
  static constexpr int kMostThreads = kGridThreads;
  struct Space {
    float2* places;      // [teams][2][team][groups]
    unsigned* arrivals;  // [teams]
  };

  __device__ GridTeam(const ResidentCut& cut, const ResidentShared& shared, const Space& space)
      : totals_(shared.places),
        shares_(reinterpret_cast<Pair<float>*>(shared.scratch)),
        size_(cut.team),
        groups_(cut.tile_groups) {
    const unsigned team = blockIdx.x / static_cast<unsigned>(size_);
    rank_ = static_cast<int>(blockIdx.x - team * size_);
    places_ = space.places + static_cast<int64_t>(team) * 2 * size_ * groups_;
    arrivals_ = space.arrivals + team;
  }
  __device__ __forceinline__ int rank() const { return rank_; }
  __device__ __forceinline__ void Begin() const {}

  __device__ __forceinline__ void Put(int exchange, int group, const Pair<float>& pair) const {
    if (threadIdx.x % 32 == 0) {
      __stcg(Place(exchange, rank_, group), make_float2(pair.first, pair.second));
    }
  }
  __device__ __forceinline__ void Exchange(int exchange) const {
    __syncthreads();
    MayBeLate();
    if (threadIdx.x == 0) AwaitAll((static_cast<unsigned>(exchange) + 1) * size_);
    __syncthreads();
    MayBeLate();
    const int threads = static_cast<int>(blockDim.x);
    for (int first = 0; first < groups_; first += threads) {
      AddRanks(exchange, first, min(threads, groups_ - first));
    }
  }
  __device__ __forceinline__ Pair<float> Total(int, int group) const { return totals_[group]; }

 private:
  __device__ __forceinline__ float2* Place(int exchange, int rank, int group) const {
    return places_ + ((exchange & 1) * size_ + rank) * groups_ + group;
  }
  // The totals of some groups. The threads stand side by side at the groups, as the places lie, and
  // below each other at the ranks; the scratch holds the sum of each: nobody else needs it now.
  __device__ __forceinline__ void AddRanks(int exchange, int first, int groups) const {
    const int lines = min(32, static_cast<int>(blockDim.x) / groups), line = threadIdx.x / groups;
    const int group = threadIdx.x - line * groups;
    Pair<float> sum = {0, 0};
    if (line < lines) {
#pragma unroll 8
      for (int rank = line; rank < size_; rank += lines) {
        const float2 pair = __ldcg(Place(exchange, rank, first + group));
        sum.first += pair.x;
        sum.second += pair.y;
      }
    }
    shares_[threadIdx.x] = sum;
    __syncthreads();
    if (line == 0) {
#pragma unroll 8
      for (int i = 1; i < lines; ++i) {
        const Pair<float> share = shares_[i * groups + group];
        sum.first += share.first;
        sum.second += share.second;
      }
      totals_[first + group] = sum;
    }
    __syncthreads();
  }
  // By one thread between two barriers of its block: releases what the block's threads have put,
  // and acquires what those of all others have.
  __device__ __forceinline__ void AwaitAll(unsigned all) const {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrivals_) : "memory");
    unsigned arrived;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                   : "=r"(arrived)
                   : "l"(arrivals_)
                   : "memory");
    } while (arrived < all);
  }

  Pair<float>*totals_, *shares_;  // [groups], [threads]: in shared memory
  float2* places_;
  unsigned* arrivals_;
  int size_, groups_, rank_;
};

// The slabs of a team (or of a warp alone), one after the other.
struct SlabWalk {
  unsigned first, end, stride;

  __device__ explicit SlabWalk(const ResidentCut& cut) : end(static_cast<unsigned>(cut.slabs)) {
    const unsigned team = static_cast<unsigned>(cut.team);
    first = blockIdx.x / team;
    stride = gridDim.x / team;
    if (cut.solo()) {
      first = first * (blockDim.x / 32) + threadIdx.x / 32;
      stride *= blockDim.x / 32;
    }
  }
};

// f(i) for the elements [from, to) of a pack.
template <int kSize, typename F>
__device__ __forceinline__ void ForElements(int from, int to, F f) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if (from <= i && i < to) f(i);
  }
}

// Whether sums are taken in two levels, so that fewer roundings follow one another: float32
// elements feel them, and leave the registers for it.
template <typename E>
inline constexpr bool kTwoLevels = sizeof(E) == 4;

// Statistics are sums of deviations from a shift, divided by the number of elements as they are
// added (a sum of values could overflow), and of their squares. The variance is the difference of
// two numbers then: where it is so much smaller that float32 feels it (the shift was an outlier),
// the sums are taken again about the mean; the data is at hand.
//
// A single element is a worse shift than the mean of a few: at 3 deviations from the mean it costs
// 10 times the rounding errors. The mean of eight equal numbers is that number, exactly.
inline constexpr int kShiftElements = 8;
template <typename At>
__device__ __forceinline__ float ShiftOf(At at) {
  float parts[kShiftElements];
#pragma unroll
  for (int i = 0; i < kShiftElements; ++i) parts[i] = at(i) * (1.0f / kShiftElements);
#pragma unroll
  for (int half = kShiftElements / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) parts[i] += parts[i + half];
  }
  return parts[0];
}

struct ShiftedSums {
  float shift, share;  // share: 1 / elements

  __device__ __forceinline__ void Add(float value, Pair<float>& sums) const {
    const float deviation = value - shift;
    sums.first = fmaf(deviation, share, sums.first);
    sums.second = fmaf(deviation, deviation, sums.second);
  }
  // Elements [from, to) of a pack.
  template <typename E, int kSize>
  __device__ __forceinline__ void AddPack(const Pack<E, kSize>& pack, Pair<float>& sums,
                                          int from = 0, int to = kSize) const {
    float values[kSize];
    ToNumbers(pack, values);
    Pair<float> part = {0, 0};
    Pair<float>& into = kTwoLevels<E> ? part : sums;
    ForElements<kSize>(from, to, [&](int i) { Add(values[i], into); });
    if (kTwoLevels<E>) sums = {sums.first + part.first, sums.second + part.second};
  }
};
inline constexpr float kWorstShift = 16;  // squared, in standard deviations
inline constexpr float kInfinity = HUGE_VALF;

// The group's results from those sums. Returns whether the shift was good enough. In float32: the
// double's division and root would take longer than the exchange.
__device__ __forceinline__ bool FinishGroup(const Pair<float>& sums, const ShiftedSums& shifted,
                                            float epsilon, GroupNumbers* numbers) {
  float variance = sums.second * shifted.share;
  if (variance < kInfinity) variance = fmaf(-sums.first, sums.first, variance);
  const TwoSum<float> mean(shifted.shift, sums.first);
  numbers->mean_high = mean.sum;
  numbers->mean_low = mean.rest;
  numbers->rstd = InverseRoot((variance < 0 ? 0 : variance) + epsilon);  // NaN stays NaN
  numbers->shift = mean.sum;                                             // of another try
  return !(sums.first * sums.first > kWorstShift * variance);
}

// z of x, for one channel. The mean comes off first: a constant group gives bias exactly.
struct Normaliser {
  float centre, slope, offset;

  Normaliser() = default;
  __device__ __forceinline__ Normaliser(const GroupNumbers& numbers, float scale, float bias)
      : centre(numbers.mean_high),
        slope(numbers.rstd * scale),
        offset(bias - numbers.mean_low * slope) {}
  // z of x + addend, for no operation more.
  __device__ __forceinline__ void Add(float addend) {
    const Centre<float> middle(centre, 0, addend);
    centre = middle.value;
    offset -= middle.rest * slope;
  }
  __device__ __forceinline__ float operator()(float x) const {
    return (x - centre) * slope + offset;
  }
};

// Whether the backward pass keeps dz in dy's place, instead of computing the derivative of the
// activation twice. 16 bits would round it.
template <typename E>
inline constexpr bool kKeepsGradient = sizeof(E) == 4;
template <typename E, Activation kActivation, int kSize>
__device__ __forceinline__ void KeepGradient(const float (&dz)[kSize], Pack<E>* dy) {
  if constexpr (kKeepsGradient<E> && kActivation != Activation::kNone) *dy = ToPack<E>(dz);
}
// f(tag) with the activation that is left to differentiate when dx is written.
template <typename E, typename F>
__device__ __forceinline__ void WithActivationLeft(Activation activation, F f) {
  if constexpr (kKeepsGradient<E>) {
    f(ActivationTag<Activation::kNone>());
  } else {
    WithActivation(activation, f);
  }
}

// What dx subtracts from slope * dz, in a group: constant + (x - mean) * linear.
struct GroupGradient {
  float constant, linear;

  // total: the group's sums of scale * dz and of scale * dz * xhat.
  static __device__ __forceinline__ GroupGradient Of(const Pair<float>& total, float rstd,
                                                     float share) {
    return {rstd * (total.first * share), rstd * (total.second * share) * rstd};
  }
  __device__ __forceinline__ float operator()(float slope, float dz, float deviation) const {
    return slope * dz - constant - deviation * linear;
  }
};

// The sums of a thread's channels. Add to `part`, and call EndPart after a few positions.
template <typename E, int kSize>
struct ChannelSums {
  Pair<float> part[kSize] = {}, whole[kTwoLevels<E> ? kSize : 1] = {};

  __device__ __forceinline__ void EndPart() {
    if constexpr (kTwoLevels<E>) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        whole[i] = {whole[i].first + part[i].first, whole[i].second + part[i].second};
        part[i] = {0, 0};
      }
    }
  }
  __device__ __forceinline__ const Pair<float> (&Total() const)[kSize] {
    if constexpr (kTwoLevels<E>) {
      return whole;
    } else {
      return part;
    }
  }
};

// Launches `kernel` with teams as clusters; where they are larger, with all blocks at once.
template <typename... Parameters, typename... Arguments>
Status LaunchTeams(void (*kernel)(Parameters...), const char* name, const ResidentCut& cut,
                   const Stage& stage, cudaStream_t stream, Arguments... arguments) {
  const auto check = [name](cudaError_t error) {
    return ToStatus(error, name, __FILE_NAME__, __LINE__);
  };
  // Always the device's most: the attribute belongs to the kernel, and another thread may launch it
  // with more than this call needs.
  DeviceLimits limits;
  JAX_GN_TRY(CurrentLimits(&limits));
  JAX_GN_TRY(check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(limits.shared_memory_per_block))));
  cudaLaunchAttribute together = {};
  if (cut.grid_team()) {
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
  } else {
    together.id = cudaLaunchAttributeClusterDimension;
    together.val.clusterDim.x = static_cast<unsigned>(cut.team);
    together.val.clusterDim.y = together.val.clusterDim.z = 1;
    if (cut.team > 8) {
      JAX_GN_TRY(
          check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)));
    }
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = Grid(stage);
  config.blockDim = dim3(static_cast<unsigned>(stage.threads));
  config.dynamicSmemBytes = static_cast<size_t>(stage.shared_bytes);
  config.stream = stream;
  config.attrs = &together;
  config.numAttrs = cut.team > 1 ? 1 : 0;
  return check(cudaLaunchKernelEx(&config, kernel, arguments...));
}

// The family's forward kernels take the same arguments, and so do its backward kernels; those that
// serve both kinds of teams take the team's space besides.
template <typename E, typename Kernel, typename... Space>
Status LaunchResident(Kernel kernel, const char* name, const Problem& problem,
                      const ResidentCut& cut, const Stage& stage, const ForwardArgs& args,
                      cudaStream_t stream, const Space&... space) {
  return LaunchTeams(kernel, name, cut, stage, stream, cut, space...,
                     ForwardInputs<E>(problem, args), static_cast<float>(args.epsilon),
                     static_cast<float*>(args.mean), static_cast<float*>(args.rstd),
                     static_cast<E*>(args.y));
}
template <typename E, typename Kernel, typename... Space>
Status LaunchResident(Kernel kernel, const char* name, const Problem& problem,
                      const ResidentCut& cut, const Stage& stage, const BackwardArgs& args,
                      cudaStream_t stream, const Space&... space) {
  return LaunchTeams(kernel, name, cut, stage, stream, cut, space...,
                     BackwardInputs<E>(problem, args),
                     HasParam(problem) ? static_cast<Pair<float>*>(args.workspace) : nullptr,
                     static_cast<E*>(args.dx));
}

}  // namespace jax_gn::cuda

#endif  // JAX_GN_CUDA_RESIDENT_H_
