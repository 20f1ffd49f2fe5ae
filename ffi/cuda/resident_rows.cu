// Channels last, resident: a team of blocks holds a tile of one sample, whole groups of channels by
// all positions, in shared memory. A thread owns one pack of channels (`tile_packs` threads stand
// side by side) and every (lines * team)-th position.
//
// Forward: copy x in; sums of each thread and group; over the block; over the team; write y.
// Backward: copy x and dy in; sums of each channel, which are also a row of dscale's and dbias's
// partial sums; of each group over the team; write dx.
#include "resident_kernels.h"

namespace jax_gn::cuda {
namespace {

// Where a thread stands.
template <int kSize>
struct TilePlace {
  int rank, pack, line, steps;
  int64_t n, first_group, channel;
  int64_t offset, stride;  // of the first position, from one to the next, in elements

  __device__ explicit TilePlace(const ResidentCut& cut, int rank) : rank(rank) {
    const unsigned slab = blockIdx.x / static_cast<unsigned>(cut.team);
    const unsigned tiles = static_cast<unsigned>(cut.tiles);
    n = slab / tiles;
    const unsigned tile = slab - static_cast<unsigned>(n) * tiles;
    line = static_cast<int>(threadIdx.x / static_cast<unsigned>(cut.tile_packs));
    pack = static_cast<int>(threadIdx.x) - line * cut.tile_packs;
    first_group = static_cast<int64_t>(tile) * cut.tile_groups;
    channel = (static_cast<int64_t>(tile) * cut.tile_packs + pack) * kSize;
    // Neighbouring blocks take neighbouring positions.
    const int first = rank * cut.lines + line, apart = cut.lines * cut.team;
    const int spatial = static_cast<int>(cut.spatial);
    // The last warp may have threads to spare.
    steps = first < spatial && line < cut.lines ? (spatial - first + apart - 1) / apart : 0;
    offset = (n * cut.spatial + first) * cut.channels + channel;
    stride = apart * cut.channels;
  }
};

// The groups that meet a thread's pack: their number within the tile, channel by channel.
template <int kSize>
struct PackGroups {
  int first;              // of the tile's groups
  unsigned starts = 0;    // bit i: channel i begins another group than channel i - 1

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
  const E* const sample = x + place.n * cut.spatial * cut.channels;

  float shift[kSize], first_element = 0;  // of the group
  groups.ForEach([&](int i, int group) {
    if (i == 0 || (groups.starts >> i & 1u)) {
      first_element = ToNumber(sample[(place.first_group + group) * cut.group_size]);
    }
    shift[i] = first_element;
  });
  CopyParts parts(cut.steps);
  {
    const E* from = x + place.offset;
    unsigned to = SharedAddress(slots);
    for (int step = 0; step < place.steps; ++step) {
      CopyAsync(to, from);
      from += place.stride;
      to += cut.threads * kPackBytes;
      parts.Issued(step);
    }
    parts.AllIssued();
  }

  for (int round = 0;; ++round) {
    Pair<float> sums[kSize] = {};
    for (int step = 0; step < place.steps;) {
      const int stop = round == 0 ? min(place.steps, parts.Ready(step)) : place.steps;
#pragma unroll 2
      for (; step < stop; ++step) {
        float values[kSize];
        ToNumbers(slots[step * cut.threads], values);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          ShiftedSums{shift[i], cut.share}.Add(values[i], sums[i]);
        }
      }
    }
    float* to = space.scratch + threadIdx.x;
    Pair<float> sum = sums[0];
#pragma unroll
    for (int i = 1; i <= kSize; ++i) {
      if (i == kSize || (groups.starts >> i & 1u)) {
        to[0] = sum.first;
        to[cut.threads] = sum.second;
        to += 2 * cut.threads;
        sum = {0, 0};
      }
      if (i < kSize) {
        sum.first += sums[i].first;
        sum.second += sums[i].second;
      }
    }
    __syncthreads();
    if (round == 0) team.Begin();
    ReduceTile<kSize>(cut, space.scratch, team, round);
    team.Exchange();
    bool good = true;
    for (int group = threadIdx.x; group < cut.tile_groups; group += cut.threads) {
      const int64_t index = place.first_group + group;
      const float about = round == 0 ? ToNumber(sample[index * cut.group_size])
                                     : space.numbers[group].mean_high;
      GroupNumbers numbers;
      good = FinishGroup(team.Total(round, group), {about, cut.share}, epsilon, &numbers) && good;
      space.numbers[group] = numbers;
      if (place.rank == 0) {
        mean[place.n * cut.groups + index] = numbers.mean_high;
        rstd[place.n * cut.groups + index] = numbers.rstd;
      }
    }
    if (__syncthreads_and(good) || round == 1) break;
    groups.ForEach([&](int i, int group) { shift[i] = space.numbers[group].mean_high; });
  }

  Normaliser<E> normalisers[kSize];
  {
    float scales[kSize], biases[kSize];
    scale.Load(place.n, place.channel, kSize, 1.0f, scales);
    bias.Load(place.n, place.channel, kSize, 0.0f, biases);
    groups.ForEach([&](int i, int group) {
      normalisers[i] = Normaliser<E>(space.numbers[group], scales[i], biases[i]);
    });
  }
  WithActivation(activation, [&](auto tag) {
    E* to = y + place.offset;
#pragma unroll 2
    for (int step = 0; step < place.steps; ++step, to += place.stride) {
      float z[kSize];
      ToNumbers(slots[step * cut.threads], z);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        z[i] = Activate<tag()>(normalisers[i](z[i]));
      }
      StorePack(to, ToPack<E>(z));
    }
  });
}

// What a thread of the backward pass knows of its channels.
template <typename E>
struct TileGradient {
  static constexpr int kSize = kPackSize<E>;
  const Pack<E>* slots;  // this thread's: x's and dy's in turn
  int threads;
  float mean[kSize], slope[kSize], bias[kSize];  // slope: rstd * scale

  __device__ TileGradient(const ResidentCut& cut, const TilePlace<kSize>& place,
                          const PackGroups<kSize>& groups, const BackwardInputs<E>& in,
                          const Pack<E>* slots)
      : slots(slots), threads(cut.threads) {
    in.scale.Load(place.n, place.channel, kSize, 1.0f, slope);
    in.bias.Load(place.n, place.channel, kSize, 0.0f, bias);
    groups.ForEach([&](int i, int group) {
      const int64_t index = place.n * cut.groups + place.first_group + group;
      mean[i] = in.mean[index];
      slope[i] *= in.rstd[index];
    });
  }
  // x - mean and dz of a step.
  template <Activation kActivation>
  __device__ __forceinline__ void Differentiate(int step, float (&deviation)[kSize],
                                                float (&dz)[kSize]) const {
    ToNumbers(slots[2 * step * threads], deviation);
    ToNumbers(slots[(2 * step + 1) * threads], dz);
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
  {
    const E *from_x = in.x + place.offset, *from_dy = in.dy + place.offset;
    unsigned to = SharedAddress(slots);
    for (int step = 0; step < place.steps; ++step) {
      CopyAsync(to, from_x);
      CopyAsync(to + cut.threads * kPackBytes, from_dy);
      from_x += place.stride;
      from_dy += place.stride;
      to += 2 * cut.threads * kPackBytes;
      parts.Issued(step);
    }
    parts.AllIssued();
  }

  const TileGradient<E> gradient(cut, place, groups, in, slots);
  WithActivation(in.activation, [&](auto tag) {
    Pair<float> sums[kSize] = {};
    for (int step = 0; step < place.steps;) {
      const int stop = min(place.steps, parts.Ready(step));
#pragma unroll 1
      for (; step < stop; ++step) {
        float deviation[kSize], dz[kSize];
        gradient.template Differentiate<tag()>(step, deviation, dz);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          sums[i].first += dz[i];
          sums[i].second = fmaf(dz[i], deviation[i], sums[i].second);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      space.scratch[i * (cut.threads + 1) + threadIdx.x] = sums[i].first;
      space.scratch[(kSize + i) * (cut.threads + 1) + threadIdx.x] = sums[i].second;
    }
  });
  __syncthreads();
  const int columns = cut.tile_packs * kSize, size = static_cast<int>(cut.group_size);
  float* const channels = space.scratch + 2 * kSize * (cut.threads + 1);
  ReduceChannels<kSize>(cut, space.scratch, channels);
  __syncthreads();
  team.Begin();
  const int64_t first_channel = place.first_group * size;
  for (int group = threadIdx.x / 32; group < cut.tile_groups; group += cut.threads / 32) {
    const float group_rstd = in.rstd[place.n * cut.groups + place.first_group + group];
    Pair<float> sums = {0, 0};
    for (int i = threadIdx.x % 32; i < size; i += 32) {
      const int column = group * size + i;
      const Pair<float> sum = {channels[column], channels[columns + column] * group_rstd};
      const float factor = in.scale.LoadOne(place.n, first_channel + column, 1.0f);
      sums.first += factor * sum.first;
      sums.second += factor * sum.second;
      if (channel_rows != nullptr) {
        channel_rows[(place.n * cut.team + place.rank) * cut.channels + first_channel + column] =
            sum;
      }
    }
    team.Put(0, group, WarpSum(sums));
  }
  team.Exchange();
  for (int group = threadIdx.x; group < cut.tile_groups; group += cut.threads) {
    const Pair<float> sums = team.Total(0, group);
    const float group_rstd = in.rstd[place.n * cut.groups + place.first_group + group];
    // What dx subtracts: rstd * mean(scale dz), and rstd^2 * mean(scale dz xhat) times x - mean.
    space.numbers[group] = {group_rstd * (sums.first * cut.share),
                            group_rstd * (sums.second * cut.share) * group_rstd, 0, 0};
  }
  __syncthreads();
  float constant[kSize], linear[kSize];
  groups.ForEach([&](int i, int group) {
    constant[i] = space.numbers[group].mean_high;
    linear[i] = space.numbers[group].mean_low;
  });
  WithActivation(in.activation, [&](auto tag) {
    E* to = dx + place.offset;
#pragma unroll 2
    for (int step = 0; step < place.steps; ++step, to += place.stride) {
      float deviation[kSize], dz[kSize];
      gradient.template Differentiate<tag()>(step, deviation, dz);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        dz[i] = gradient.slope[i] * dz[i] - constant[i] - deviation[i] * linear[i];
      }
      StorePack(to, ToPack<E>(dz));
    }
  });
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
  return LaunchResident(
      ResidentTileBackwardKernel<E>, "ResidentTileBackwardKernel", cut, stage, stream, cut,
      BackwardInputs<E>(problem, args),
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
