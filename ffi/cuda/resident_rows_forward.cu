// The forward pass of resident_rows.h.
#include "resident_rows.h"

namespace jax_gn::cuda {
namespace {

constexpr int kPartSteps = 4;  // of a thread, whose sums are added up before they join the others

// Adds up the threads' sums of each group, a warp at a group, and puts them to the team.
// scratch: [slots][2][threads].
template <int kSize, typename AnyTeam>
__device__ void ReduceTile(const ResidentCut& cut, const float* scratch, const AnyTeam& team,
                           int round) {
  const int lane = threadIdx.x % 32, size = static_cast<int>(cut.group_size);
  for (int group = threadIdx.x / 32; group < cut.tile_groups; group += cut.threads / 32) {
    const int begin = group * size, end = begin + size;
    // In its first pack the group comes after others, in the next ones it is the first.
    int pack = begin / kSize, slot = (begin % kSize + size - 1) / size;
    Pair<float> sums = {0, 0};
    for (; pack * kSize < end; ++pack, slot = 0) {
      const float* from = scratch + 2 * slot * cut.threads + pack;
      for (int line = lane; line < cut.lines; line += 32) {
        sums.first += from[line * cut.tile_packs];
        sums.second += from[line * cut.tile_packs + cut.threads];
      }
    }
    team.Put(round, group, WarpSum(sums));
  }
}

// The first element of a group of the tile, and how far from it those of its shift lie.
template <typename E>
__device__ __forceinline__ const E* FirstOfGroup(const ResidentCut& cut,
                                                 const Tile<kPackSize<E>>& tile, const E* x,
                                                 int group) {
  return x + tile.n * cut.spatial * cut.channels + (tile.first_group + group) * cut.group_size;
}
__device__ __forceinline__ int64_t ShiftPosition(const ResidentCut& cut, int i) {
  return i * cut.spatial / kShiftElements * cut.channels;
}

// The groups' results in space.numbers, from the packs in `slots`; the team's first block stores
// them. copy(step) asks for one that passes. `exchanges` counts the team's.
template <typename E, typename AnyTeam, typename Copy>
__device__ __forceinline__ void TileStatistics(
    const ResidentCut& cut, const TilePlace<kPackSize<E>>& place, const Tile<kPackSize<E>>& tile,
    const PackGroups<kPackSize<E>>& groups, const ResidentShared& space, const AnyTeam& team,
    const ForwardInputs<E>& in, const Pack<E>* slots, CopyParts* parts, Copy copy, float epsilon,
    float* mean, float* rstd, int* exchanges) {
  constexpr int kSize = kPackSize<E>;
  // Slower threads may still read the last slab's mean and rstd of it; the shift they don't.
  for (int group = threadIdx.x; group < cut.tile_groups; group += cut.threads) {
    const E* const first = FirstOfGroup(cut, tile, in.x, group);
    const int64_t channel = (tile.first_group + group) * cut.group_size;
    space.numbers[group].shift =
        ShiftOf([&](int i) { return ToNumber(first[ShiftPosition(cut, i)]); }) +
        in.addend.LoadOne(tile.n, channel, 0.0f);
  }
  for (bool again = false;; again = true) {
    __syncthreads();
    float shift[kSize], added[kSize];
    in.addend.Load(tile.n, tile.channel, kSize, 0.0f, added);
    groups.ForEach([&](int i, int group) { shift[i] = space.numbers[group].shift - added[i]; });
    ChannelSums<E, kSize> sums;
    const auto add = [&](const Pack<E>& pack) {
      float values[kSize];
      ToNumbers(pack, values);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        ShiftedSums{shift[i], cut.share}.Add(values[i], sums.part[i]);
      }
    };
    for (int step = 0; step < place.held; sums.EndPart()) {
      const int stop = again ? min(place.held, step + cut.held / kCopyParts + 1)
                             : min(place.held, parts->template Ready<AnyTeam::kRing>(step));
#pragma unroll 2
      for (; step < stop; ++step) add(slots[step * cut.threads]);
    }
    if (again) {  // what passes has gone by
      for (int step = place.held; step < place.steps; ++step) {
        add(LoadPack(in.x + tile.offset + step * place.stride));
        sums.EndPart();
      }
    } else {
      ForPassing<AnyTeam::kRing>(
          place, false, copy,
          [&](int step) { return slots[StepPlace<AnyTeam::kRing>(cut, step) * cut.threads]; },
          [&](const Pack<E>& pack, int step) {
            add(pack);
            if (step % kPartSteps == 0) sums.EndPart();
          });
      sums.EndPart();
    }
    groups.StoreSums(sums.Total(), space.scratch + threadIdx.x, cut.threads);
    __syncthreads();
    if (*exchanges == 0) team.Begin();
    ReduceTile<kSize>(cut, space.scratch, team, *exchanges);
    team.Exchange(*exchanges);
    bool good = true;
    for (int group = threadIdx.x; group < cut.tile_groups; group += cut.threads) {
      const int64_t index = tile.first_group + group;
      GroupNumbers numbers;
      good = FinishGroup(team.Total(*exchanges, group), {space.numbers[group].shift, cut.share},
                         epsilon, &numbers) &&
             good;
      space.numbers[group] = numbers;
      if (place.rank == 0) {
        mean[tile.n * cut.groups + index] = numbers.mean_high;
        rstd[tile.n * cut.groups + index] = numbers.rstd;
      }
    }
    ++*exchanges;
    if (__syncthreads_and(good) || again) return;
  }
}

// What makes y of a thread's channels.
template <typename E>
struct TileOutput {
  static constexpr int kSize = kPackSize<E>;
  Normaliser normalisers[kSize];

  __device__ __forceinline__ TileOutput(const Tile<kSize>& tile, const PackGroups<kSize>& groups,
                                        const GroupNumbers* numbers, const ForwardInputs<E>& in) {
    float scales[kSize], biases[kSize];
    in.scale.Load(tile.n, tile.channel, kSize, 1.0f, scales);
    in.bias.Load(tile.n, tile.channel, kSize, 0.0f, biases);
    groups.ForEach([&](int i, int group) {
      normalisers[i] = Normaliser(numbers[group], scales[i], biases[i]);
    });
    if (in.addend.data == nullptr) return;
    in.addend.Load(tile.n, tile.channel, kSize, 0.0f, scales);
#pragma unroll
    for (int i = 0; i < kSize; ++i) normalisers[i].Add(scales[i]);
  }
  template <Activation kActivation>
  __device__ __forceinline__ void Store(float (&z)[kSize], E* to) const {
#pragma unroll
    for (int i = 0; i < kSize; ++i) z[i] = Activate<kActivation>(normalisers[i](z[i]));
    StorePack(to, ToPack<E>(z));
  }
};

template <typename E, typename AnyTeam>
__global__ void __launch_bounds__(AnyTeam::kMostThreads, 2)
    ResidentTileForwardKernel(ResidentCut cut, typename AnyTeam::Space team_space,
                              ForwardInputs<E> in, float epsilon, float* mean, float* rstd, E* y) {
  constexpr int kSize = kPackSize<E>;
  extern __shared__ __align__(16) char shared[];
  constexpr int kRing = AnyTeam::kRing;
  const ResidentShared space(cut, shared, cut.placed());
  const AnyTeam team(cut, space, team_space);
  const TilePlace<kSize> place(cut, team.rank());
  const PackGroups<kSize> groups(cut, place.pack);
  Pack<E>* const slots = space.Slots<E>();
  CopyParts parts(cut.held);
  const SlabWalk walk(cut);
  Tile<kSize> tile(cut, place, walk.first);
  const auto slot = [&](int step) { return slots + StepPlace<kRing>(cut, step) * cut.threads; };
  const auto copy = [&](int step) {
    CopyAsync(SharedAddress(slot(step)), in.x + tile.offset + step * place.stride);
  };
  AskForSlab<kRing>(place, &parts, copy);
  int exchanges = 0;
  for (unsigned slab = walk.first; slab < walk.end; slab += walk.stride) {
    TileStatistics<E>(cut, place, tile, groups, space, team, in, slots, &parts, copy, epsilon, mean,
                      rstd, &exchanges);
    const TileOutput<E> output(tile, groups, space.numbers, in);
    E* to = y + tile.offset;
    if constexpr (kRing > 0) {
      WithActivation(in.activation, [&](auto tag) {
        ForPassing<kRing>(
            place, true, copy, [&](int step) { return *slot(step); },
            [&](const Pack<E>& pack, int step) {
              float z[kSize];
              ToNumbers(pack, z);
              output.template Store<tag()>(z, to + step * place.stride);
            });
      });
    }
    const bool more = slab + walk.stride < walk.end;
    if (more) {
      tile = Tile<kSize>(cut, place, slab + walk.stride);
      for (int i = threadIdx.x; i < kShiftElements * cut.tile_groups; i += cut.threads) {
        Prefetch(FirstOfGroup(cut, tile, in.x, i / kShiftElements) +
                 ShiftPosition(cut, i % kShiftElements));
      }
    }
    parts.StartIssuing();
    const E* from = in.x + tile.offset;
    WithActivation(in.activation, [&](auto tag) {
#pragma unroll 2
      for (int step = 0; step < place.held; ++step) {
        float z[kSize];
        ToNumbers(slots[step * cut.threads], z);
        if (more) CopyAsync(SharedAddress(slots + step * cut.threads), from);
        parts.Issued(step);
        output.template Store<tag()>(z, to);
        from += place.stride;
        to += place.stride;
      }
    });
    parts.AllIssued();
    if (more) FillRing<kRing>(place, copy);
  }
}

}  // namespace

template <typename E>
Status LaunchResidentTileForward(const Problem& problem, const ResidentCut& cut, const Stage& stage,
                                 const ForwardArgs& args, cudaStream_t stream) {
  return LaunchTiles<E>(ResidentTileForwardKernel<E, Team>, ResidentTileForwardKernel<E, GridTeam>,
                        "ResidentTileForwardKernel", problem, cut, stage, args, stream);
}

#define JAX_GN_INSTANTIATE(E)                                                                    \
  template Status LaunchResidentTileForward<E>(const Problem&, const ResidentCut&, const Stage&, \
                                               const ForwardArgs&, cudaStream_t);
JAX_GN_FOR_RESIDENT_ELEMENTS(JAX_GN_INSTANTIATE)

}  // namespace jax_gn::cuda
