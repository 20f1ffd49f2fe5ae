// Channels last, resident: a team of blocks holds a tile of one sample, whole groups of channels by
// all positions, in shared memory. A thread owns one pack of channels (`tile_packs` threads stand
// side by side) and every (lines * team)-th position.
//
// Forward: copy x in; sums of each thread and group; over the block; over the team; write y.
// Backward: copy x and dy in; sums of each channel, which are also a row of dscale's and dbias's
// partial sums; of each group over the team; write dx.
// A team goes on to another slab: as soon as a thread has taken a pack out of its place for the
// writing, it asks for the next slab's, so that reading never stops.
#include "resident_kernels.h"

namespace jax_gn::cuda {
namespace {

// Where a thread stands in every slab.
template <int kSize>
struct TilePlace {
  int rank, pack, line, steps;
  int64_t first, stride;  // position of the first step; elements from one to the next

  __device__ TilePlace(const ResidentCut& cut, int rank) : rank(rank) {
    line = static_cast<int>(threadIdx.x / static_cast<unsigned>(cut.tile_packs));
    pack = static_cast<int>(threadIdx.x) - line * cut.tile_packs;
    // Neighbouring blocks take neighbouring positions; the last warp may have threads to spare.
    const int position = rank * cut.lines + line, apart = cut.lines * cut.team;
    const int spatial = static_cast<int>(cut.spatial);
    steps = position < spatial && line < cut.lines ? (spatial - position + apart - 1) / apart : 0;
    first = position;
    stride = apart * cut.channels;
  }
};

// A slab: a tile of a sample.
template <int kSize>
struct Tile {
  int64_t n, first_group, channel;  // channel: the first of the thread
  int64_t offset;                   // of its first position, in elements

  __device__ Tile(const ResidentCut& cut, const TilePlace<kSize>& place, unsigned slab) {
    const unsigned tiles = static_cast<unsigned>(cut.tiles), sample = slab / tiles;
    const int64_t tile = slab - sample * tiles;
    n = sample;
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

// Adds up the threads' sums of each group, a warp at a group, and puts them to the team.
// scratch: [slots][2][threads].
template <int kSize>
__device__ void ReduceTile(const ResidentCut& cut, const float* scratch, const Team& team,
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

// The groups' results in space.numbers, from the packs in `slots`; the team's first block stores
// them. `exchanges` counts the team's.
template <typename E>
__device__ __forceinline__ void TileStatistics(
    const ResidentCut& cut, const TilePlace<kPackSize<E>>& place, const Tile<kPackSize<E>>& tile,
    const PackGroups<kPackSize<E>>& groups, const ResidentShared& space, const Team& team,
    const E* x, const Pack<E>* slots, CopyParts* parts, float epsilon, float* mean, float* rstd,
    int* exchanges) {
  constexpr int kSize = kPackSize<E>;
  const E* const sample = x + tile.n * cut.spatial * cut.channels;
  float shift[kSize], first_element = 0;  // of the group
  groups.ForEach([&](int i, int group) {
    if (i == 0 || (groups.starts >> i & 1u)) {
      first_element = ToNumber(sample[(tile.first_group + group) * cut.group_size]);
    }
    shift[i] = first_element;
  });
  for (bool again = false;; again = true) {
    ChannelSums<E, kSize> sums;
    for (int step = 0; step < place.steps; sums.EndPart()) {
      const int stop = again ? min(place.steps, step + cut.steps / kCopyParts + 1)
                             : min(place.steps, parts->Ready(step));
#pragma unroll 2
      for (; step < stop; ++step) {
        float values[kSize];
        ToNumbers(slots[step * cut.threads], values);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          ShiftedSums{shift[i], cut.share}.Add(values[i], sums.part[i]);
        }
      }
    }
    groups.StoreSums(sums.Total(), space.scratch + threadIdx.x, cut.threads);
    __syncthreads();
    if (*exchanges == 0) team.Begin();
    ReduceTile<kSize>(cut, space.scratch, team, *exchanges);
    team.Exchange();
    bool good = true;
    for (int group = threadIdx.x; group < cut.tile_groups; group += cut.threads) {
      const int64_t index = tile.first_group + group;
      const float about =
          again ? space.numbers[group].mean_high : ToNumber(sample[index * cut.group_size]);
      GroupNumbers numbers;
      good =
          FinishGroup(team.Total(*exchanges, group), {about, cut.share}, epsilon, &numbers) && good;
      space.numbers[group] = numbers;
      if (place.rank == 0) {
        mean[tile.n * cut.groups + index] = numbers.mean_high;
        rstd[tile.n * cut.groups + index] = numbers.rstd;
      }
    }
    ++*exchanges;
    if (__syncthreads_and(good) || again) return;
    groups.ForEach([&](int i, int group) { shift[i] = space.numbers[group].mean_high; });
  }
}

template <typename E>
__global__ void __launch_bounds__(kTileThreads, 2)
    ResidentTileForwardKernel(ResidentCut cut, const E* x, Parameter scale, Parameter bias,
                              float epsilon, Activation activation, float* mean, float* rstd,
                              E* y) {
  constexpr int kSize = kPackSize<E>;
  extern __shared__ __align__(16) char shared[];
  const ResidentShared space(cut, shared, cut.steps);
  const Team team(cut, space.places);
  const TilePlace<kSize> place(cut, team.rank());
  const PackGroups<kSize> groups(cut, place.pack);
  Pack<E>* const slots = space.Slots<E>();
  CopyParts parts(cut.steps);
  const SlabWalk walk(cut);
  Tile<kSize> tile(cut, place, walk.first);
  for (int step = 0; step < place.steps; ++step) {
    CopyAsync(SharedAddress(slots + step * cut.threads), x + tile.offset + step * place.stride);
    parts.Issued(step);
  }
  parts.AllIssued();
  int exchanges = 0;
  for (unsigned slab = walk.first; slab < walk.end; slab += walk.stride) {
    TileStatistics<E>(cut, place, tile, groups, space, team, x, slots, &parts, epsilon, mean, rstd,
                      &exchanges);
    Normaliser normalisers[kSize];
    {
      float scales[kSize], biases[kSize];
      scale.Load(tile.n, tile.channel, kSize, 1.0f, scales);
      bias.Load(tile.n, tile.channel, kSize, 0.0f, biases);
      groups.ForEach([&](int i, int group) {
        normalisers[i] = Normaliser(space.numbers[group], scales[i], biases[i]);
      });
    }
    E* to = y + tile.offset;
    const bool more = slab + walk.stride < walk.end;
    if (more) {
      tile = Tile<kSize>(cut, place, slab + walk.stride);
      Prefetch(x + tile.n * cut.spatial * cut.channels + tile.channel);  // the shifts
    }
    const E* from = x + tile.offset;
    WithActivation(activation, [&](auto tag) {
#pragma unroll 2
      for (int step = 0; step < place.steps; ++step) {
        float z[kSize];
        ToNumbers(slots[step * cut.threads], z);
        if (more) CopyAsync(SharedAddress(slots + step * cut.threads), from);
        parts.Issued(step);
#pragma unroll
        for (int i = 0; i < kSize; ++i) z[i] = Activate<tag()>(normalisers[i](z[i]));
        StorePack(to, ToPack<E>(z));
        from += place.stride;
        to += place.stride;
      }
    });
    parts.AllIssued();
  }
}

// What a thread of the backward pass knows of its channels.
template <typename E>
struct TileGradient {
  static constexpr int kSize = kPackSize<E>;
  const Pack<E>* slots;  // this thread's: x's and dy's in turn
  int threads;
  float mean[kSize], slope[kSize], bias[kSize];  // slope: rstd * scale

  __device__ TileGradient(const ResidentCut& cut, const Tile<kSize>& tile,
                          const PackGroups<kSize>& groups, const BackwardInputs<E>& in,
                          const Pack<E>* slots)
      : slots(slots), threads(cut.threads) {
    in.scale.Load(tile.n, tile.channel, kSize, 1.0f, slope);
    in.bias.Load(tile.n, tile.channel, kSize, 0.0f, bias);
    groups.ForEach([&](int i, int group) {
      const int64_t index = tile.n * cut.groups + tile.first_group + group;
      mean[i] = in.mean[index];
      slope[i] *= in.rstd[index];
    });
  }
  // x - mean and dz of a step. `taken` is called when both are out of shared memory.
  template <Activation kActivation, typename Taken>
  __device__ __forceinline__ void Differentiate(int step, float (&deviation)[kSize],
                                                float (&dz)[kSize], Taken taken) const {
    ToNumbers(slots[2 * step * threads], deviation);
    ToNumbers(slots[(2 * step + 1) * threads], dz);
    taken();
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      deviation[i] -= mean[i];
      dz[i] = FastBackward<E, kActivation>(dz[i], deviation[i] * slope[i] + bias[i]);
    }
  }
};

// Adds up the threads' sums of each channel: scratch [2][kSize][threads + 1] -> channels
// [2][tile channels].
template <int kSize>
__device__ __forceinline__ void ReduceChannels(const ResidentCut& cut, const float* scratch,
                                               float* channels) {
  const int columns = cut.tile_packs * kSize;
  for (int unit = threadIdx.x; unit < 2 * columns; unit += cut.threads) {
    const int which = unit / columns, column = unit % columns;
    const float* from =
        scratch + (which * kSize + column % kSize) * (cut.threads + 1) + column / kSize;
    float sum = 0;
#pragma unroll 4
    for (int line = 0; line < cut.lines; ++line) sum += from[line * cut.tile_packs];
    channels[unit] = sum;
  }
}

// What dx subtracts, for each group in space.numbers: rstd * mean(scale dz), and as mean_low
// rstd^2 * mean(scale dz xhat), times x - mean; from the channels' sums in the scratch.
template <typename E>
__device__ __forceinline__ void TileSums(const ResidentCut& cut,
                                         const TilePlace<kPackSize<E>>& place,
                                         const Tile<kPackSize<E>>& tile,
                                         const ResidentShared& space, const Team& team,
                                         const BackwardInputs<E>& in, Pair<float>* channel_rows,
                                         int exchange) {
  constexpr int kSize = kPackSize<E>;
  const int columns = cut.tile_packs * kSize, size = static_cast<int>(cut.group_size);
  float* const channels = space.scratch + 2 * kSize * (cut.threads + 1);
  __syncthreads();
  ReduceChannels<kSize>(cut, space.scratch, channels);
  __syncthreads();
  if (exchange == 0) team.Begin();
  const float* const rstd = in.rstd + tile.n * cut.groups + tile.first_group;
  const int64_t first_channel = tile.first_group * size;
  Pair<float>* const row =
      channel_rows + (tile.n * cut.team + place.rank) * cut.channels + first_channel;
  for (int group = threadIdx.x / 32; group < cut.tile_groups; group += cut.threads / 32) {
    Pair<float> sums = {0, 0};
    for (int i = threadIdx.x % 32; i < size; i += 32) {
      const int column = group * size + i;
      const Pair<float> sum = {channels[column], channels[columns + column] * rstd[group]};
      const float factor = in.scale.LoadOne(tile.n, first_channel + column, 1.0f);
      sums.first += factor * sum.first;
      sums.second += factor * sum.second;
      if (channel_rows != nullptr) row[column] = sum;
    }
    team.Put(exchange, group, WarpSum(sums));
  }
  team.Exchange();
  for (int group = threadIdx.x; group < cut.tile_groups; group += cut.threads) {
    const Pair<float> sums = team.Total(exchange, group);
    space.numbers[group] = {rstd[group] * (sums.first * cut.share),
                            rstd[group] * (sums.second * cut.share) * rstd[group], 0, 0};
  }
  __syncthreads();
}

template <typename E>
__global__ void __launch_bounds__(kTileThreads, 2)
    ResidentTileBackwardKernel(ResidentCut cut, BackwardInputs<E> in, Pair<float>* channel_rows,
                               E* dx) {
  constexpr int kSize = kPackSize<E>;
  extern __shared__ __align__(16) char shared[];
  const ResidentShared space(cut, shared, 2 * cut.steps);
  const Team team(cut, space.places);
  const TilePlace<kSize> place(cut, team.rank());
  const PackGroups<kSize> groups(cut, place.pack);
  Pack<E>* const slots = space.Slots<E>();
  CopyParts parts(cut.steps);
  const auto copy = [&](int step, int64_t at) {
    CopyAsync(SharedAddress(slots + 2 * step * cut.threads), in.x + at);
    CopyAsync(SharedAddress(slots + (2 * step + 1) * cut.threads), in.dy + at);
  };
  const SlabWalk walk(cut);
  Tile<kSize> tile(cut, place, walk.first);
  for (int step = 0; step < place.steps; ++step) {
    copy(step, tile.offset + step * place.stride);
    parts.Issued(step);
  }
  parts.AllIssued();
  int exchange = 0;
  for (unsigned slab = walk.first; slab < walk.end; slab += walk.stride, ++exchange) {
    const TileGradient<E> gradient(cut, tile, groups, in, slots);
    WithActivation(in.activation, [&](auto tag) {
      ChannelSums<E, kSize> sums;
      for (int step = 0; step < place.steps; sums.EndPart()) {
        const int stop = min(place.steps, parts.Ready(step));
#pragma unroll 1
        for (; step < stop; ++step) {
          float deviation[kSize], dz[kSize];
          gradient.template Differentiate<tag()>(step, deviation, dz, [] {});
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            sums.part[i].first += dz[i];
            sums.part[i].second = fmaf(dz[i], deviation[i], sums.part[i].second);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        space.scratch[i * (cut.threads + 1) + threadIdx.x] = sums.Total()[i].first;
        space.scratch[(kSize + i) * (cut.threads + 1) + threadIdx.x] = sums.Total()[i].second;
      }
    });
    TileSums<E>(cut, place, tile, space, team, in, channel_rows, exchange);
    float constant[kSize], linear[kSize];
    groups.ForEach([&](int i, int group) {
      constant[i] = space.numbers[group].mean_high;
      linear[i] = space.numbers[group].mean_low;
    });
    E* to = dx + tile.offset;
    const bool more = slab + walk.stride < walk.end;
    if (more) {
      tile = Tile<kSize>(cut, place, slab + walk.stride);
      const int64_t group = tile.n * cut.groups + tile.first_group + groups.first;
      Prefetch(in.mean + group);
      Prefetch(in.rstd + group);
    }
    int64_t from = tile.offset;
    WithActivation(in.activation, [&](auto tag) {
#pragma unroll 1
      for (int step = 0; step < place.steps; ++step) {
        float deviation[kSize], dz[kSize];
        gradient.template Differentiate<tag()>(step, deviation, dz, [&] {
          if (more) copy(step, from);
          parts.Issued(step);
        });
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          dz[i] = gradient.slope[i] * dz[i] - constant[i] - deviation[i] * linear[i];
        }
        StorePack(to, ToPack<E>(dz));
        from += place.stride;
        to += place.stride;
      }
    });
    parts.AllIssued();
  }
}

}  // namespace

template <typename E>
Status LaunchResidentTileForward(const Problem& problem, const ResidentCut& cut, const Stage& stage,
                                 const ForwardArgs& args, cudaStream_t stream) {
  return LaunchResident(ResidentTileForwardKernel<E>, "ResidentTileForwardKernel", cut, stage,
                        stream, cut, static_cast<const E*>(args.x), ScaleOf(problem, args),
                        BiasOf(problem, args), static_cast<float>(args.epsilon), problem.activation,
                        static_cast<float*>(args.mean), static_cast<float*>(args.rstd),
                        static_cast<E*>(args.y));
}

template <typename E>
Status LaunchResidentTileBackward(const Problem& problem, const ResidentCut& cut,
                                  const Stage& stage, const BackwardArgs& args,
                                  cudaStream_t stream) {
  return LaunchResident(ResidentTileBackwardKernel<E>, "ResidentTileBackwardKernel", cut, stage,
                        stream, cut, BackwardInputs<E>(problem, args),
                        HasParam(problem) ? static_cast<Pair<float>*>(args.workspace) : nullptr,
                        static_cast<E*>(args.dx));
}

#define JAX_GN_INSTANTIATE(E)                                                                     \
  template Status LaunchResidentTileForward<E>(const Problem&, const ResidentCut&, const Stage&,  \
                                               const ForwardArgs&, cudaStream_t);                 \
  template Status LaunchResidentTileBackward<E>(const Problem&, const ResidentCut&, const Stage&, \
                                                const BackwardArgs&, cudaStream_t);
JAX_GN_FOR_RESIDENT_ELEMENTS(JAX_GN_INSTANTIATE)

}  // namespace jax_gn::cuda
