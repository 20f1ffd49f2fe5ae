// Channels last, resident: a team of blocks holds a tile of one sample, whole groups of channels by
// all positions, in shared memory. A thread owns one pack of channels (`tile_packs` threads stand
// side by side) and every (lines * team)-th position.
//
// Forward: copy x in; sums of each thread and group; over the block; over the team; write y.
// Backward: copy x and dy in; sums of each channel, which are also a row of dscale's and dbias's
// partial sums; of each group over the team; write dx.
// A team goes on to another slab: as soon as a thread has taken a pack out of its place for the
// writing, it asks for the next slab's, so that reading never stops.
// Of a grid team's slab the steps from `held` on pass, through a ring of places: they are read when
// the held ones have been, and again before those, the last one first.
#ifndef JAX_GN_CUDA_RESIDENT_ROWS_H_
#define JAX_GN_CUDA_RESIDENT_ROWS_H_

#include "resident_kernels.h"

namespace jax_gn::cuda {

// Where a thread stands in every slab.
template <int kSize>
struct TilePlace {
  int rank, pack, line, steps, held;
  int first;       // position of the first step
  int64_t stride;  // elements from one to the next

  __device__ TilePlace(const ResidentCut& cut, int rank) : rank(rank) {
    line = static_cast<int>(threadIdx.x / static_cast<unsigned>(cut.tile_packs));
    pack = static_cast<int>(threadIdx.x) - line * cut.tile_packs;
    // Neighbouring blocks take neighbouring positions; the last warp may have threads to spare.
    const int position = rank * cut.lines + line, apart = cut.lines * cut.team;
    const int spatial = static_cast<int>(cut.spatial);
    steps = position < spatial && line < cut.lines ? (spatial - position + apart - 1) / apart : 0;
    held = min(steps, cut.held);
    first = position;
    stride = apart * cut.channels;
  }
};

// A slab: a tile of a sample.
template <int kSize>
struct Tile {
  int n, first_group, channel;  // channel: the first of the thread
  int64_t offset;               // of its first position, in elements

  __device__ Tile(const ResidentCut& cut, const TilePlace<kSize>& place, unsigned slab) {
    const unsigned tiles = static_cast<unsigned>(cut.tiles), sample = slab / tiles;
    const int tile = static_cast<int>(slab - sample * tiles);
    n = static_cast<int>(sample);
    first_group = tile * cut.tile_groups;
    channel = (tile * cut.tile_packs + place.pack) * kSize;
    offset = (n * cut.spatial + place.first) * cut.channels + channel;
  }
};

// The groups that meet a thread's pack: their number within the tile, channel by channel.
template <int kSize>
struct PackGroups {
  int first;            // of the tile's groups
  unsigned starts = 0;  // bit i: channel i begins another group than channel i - 1

  __device__ PackGroups(const ResidentCut& cut, int pack) {
    const unsigned size = static_cast<unsigned>(cut.group_size);
    const unsigned channel = static_cast<unsigned>(pack * kSize);
    first = static_cast<int>(channel / size);
    unsigned next = (first + 1) * size - channel;
#pragma unroll
    for (unsigned i = 1; i < kSize; ++i) {
      if (i == next) {
        starts |= 1u << i;
        next += size;
      }
    }
  }
  // Adds up the channels of each group, and stores the sums [slots][2] `apart` apart.
  __device__ __forceinline__ void StoreSums(const Pair<float> (&sums)[kSize], float* to,
                                            int apart) const {
    Pair<float> sum = sums[0];
#pragma unroll
    for (int i = 1; i <= kSize; ++i) {
      if (i == kSize || (starts >> i & 1u)) {
        to[0] = sum.first;
        to[apart] = sum.second;
        to += 2 * apart;
        sum = {0, 0};
      }
      if (i < kSize) {
        sum.first += sums[i].first;
        sum.second += sums[i].second;
      }
    }
  }
  // f(i, group) for each channel of the pack.
  template <typename F>
  __device__ __forceinline__ void ForEach(F f) const {
    int group = first;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (starts >> i & 1u) ++group;
      f(i, group);
    }
  }
};

// A pass by clusters or by grid teams, whichever the cut has.
template <typename E, typename ClusterKernel, typename GridKernel, typename Args>
Status LaunchTiles(ClusterKernel by_clusters, GridKernel by_grid_teams, const char* name,
                   const Problem& problem, const ResidentCut& cut, const Stage& stage,
                   const Args& args, cudaStream_t stream) {
  if (cut.grid_team()) {
    return LaunchGridTeams<E>(by_grid_teams, name, problem, cut, stage, args, stream);
  }
  return LaunchResident<E>(by_clusters, name, problem, cut, stage, args, stream, Team::Space());
}

}  // namespace jax_gn::cuda

#endif  // JAX_GN_CUDA_RESIDENT_ROWS_H_
