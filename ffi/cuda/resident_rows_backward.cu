// The backward pass of resident_rows.h.
#include "resident_rows.h"

namespace jax_gn::cuda {
namespace {

// What a thread of the backward pass knows of its channels.
template <typename E>
struct TileGradient {
  static constexpr int kSize = kPackSize<E>;
  // mean: without the addend, as it comes off x; slope: rstd * scale.
  float mean[kSize], slope[kSize], bias[kSize];

  __device__ TileGradient(const ResidentCut& cut, const Tile<kSize>& tile,
                          const PackGroups<kSize>& groups, const BackwardInputs<E>& in) {
    in.scale.Load(tile.n, tile.channel, kSize, 1.0f, slope);
    in.bias.Load(tile.n, tile.channel, kSize, 0.0f, bias);
    in.addend.Load(tile.n, tile.channel, kSize, 0.0f, mean);
    groups.ForEach([&](int i, int group) {
      const int64_t index = tile.n * cut.groups + tile.first_group + group;
      mean[i] = in.mean[index] - mean[i];
      slope[i] *= in.rstd[index];
    });
  }
  // x - mean and dz of a step, from x and dy.
  template <Activation kActivation>
  __device__ __forceinline__ void Differentiate(float (&deviation)[kSize],
                                                float (&dz)[kSize]) const {
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
template <typename E, typename AnyTeam>
__device__ __forceinline__ void TileSums(const ResidentCut& cut,
                                         const TilePlace<kPackSize<E>>& place,
                                         const Tile<kPackSize<E>>& tile,
                                         const ResidentShared& space, const AnyTeam& team,
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
  Pair<float>* const row = ChannelRow(cut, channel_rows, tile.n, place.rank, first_channel);
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
  team.Exchange(exchange);
  for (int group = threadIdx.x; group < cut.tile_groups; group += cut.threads) {
    const GroupGradient terms =
        GroupGradient::Of(team.Total(exchange, group), rstd[group], cut.share);
    space.numbers[group] = {terms.constant, terms.linear, 0, 0};
  }
  __syncthreads();
}

template <typename E, typename AnyTeam>
__global__ void __launch_bounds__(AnyTeam::kMostThreads, 2)
    ResidentTileBackwardKernel(ResidentCut cut, typename AnyTeam::Space team_space,
                               BackwardInputs<E> in, Pair<float>* channel_rows, E* dx) {
  constexpr int kSize = kPackSize<E>;
  extern __shared__ __align__(16) char shared[];
  constexpr int kRing = AnyTeam::kRing;
  const ResidentShared space(cut, shared, 2 * cut.placed());
  const AnyTeam team(cut, space, team_space);
  const TilePlace<kSize> place(cut, team.rank());
  const PackGroups<kSize> groups(cut, place.pack);
  Pack<E>* const slots = space.Slots<E>();
  CopyParts parts(cut.held);
  const SlabWalk walk(cut);
  Tile<kSize> tile(cut, place, walk.first);
  const auto slot = [&](int step) { return slots + 2 * StepPlace<kRing>(cut, step) * cut.threads; };
  const auto copy_from = [&](int step, int64_t at) {
    CopyAsync(SharedAddress(slot(step)), in.x + at);
    CopyAsync(SharedAddress(slot(step) + cut.threads), in.dy + at);
  };
  const auto copy = [&](int step) { copy_from(step, tile.offset + step * place.stride); };
  const auto take = [&](int step) { return InputPacks<E>{slot(step)[0], slot(step)[cut.threads]}; };
  AskForSlab<kRing>(place, &parts, copy);
  int exchange = 0;
  for (unsigned slab = walk.first; slab < walk.end; slab += walk.stride, ++exchange) {
    const TileGradient<E> gradient(cut, tile, groups, in);
    WithActivation(in.activation, [&](auto tag) {
      ChannelSums<E, kSize> sums;
      const auto add = [&](float (&deviation)[kSize], float (&dz)[kSize]) {
        gradient.template Differentiate<tag()>(deviation, dz);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          sums.part[i].first += dz[i];
          sums.part[i].second = fmaf(dz[i], deviation[i], sums.part[i].second);
        }
      };
      for (int step = 0; step < place.held; sums.EndPart()) {
        const int stop = min(place.held, parts.template Ready<kRing>(step));
#pragma unroll 1
        for (; step < stop; ++step) {
          float deviation[kSize], dz[kSize];
          ToNumbers(slots[2 * step * cut.threads], deviation);
          ToNumbers(slots[(2 * step + 1) * cut.threads], dz);
          add(deviation, dz);
          KeepGradient<E, tag()>(dz, slots + (2 * step + 1) * cut.threads);
        }
      }
      ForPassing<kRing>(place, false, copy, take, [&](const InputPacks<E>& packs, int) {
        float deviation[kSize], dz[kSize];
        ToNumbers(packs.x, deviation);
        ToNumbers(packs.dy, dz);
        add(deviation, dz);
        sums.EndPart();
      });
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        space.scratch[i * (cut.threads + 1) + threadIdx.x] = sums.Total()[i].first;
        space.scratch[(kSize + i) * (cut.threads + 1) + threadIdx.x] = sums.Total()[i].second;
      }
    });
    TileSums<E>(cut, place, tile, space, team, in, channel_rows, exchange);
    GroupGradient terms[kSize];
    groups.ForEach([&](int i, int group) {
      terms[i] = {space.numbers[group].mean_high, space.numbers[group].mean_low};
    });
    E* to = dx + tile.offset;
    const auto store = [&](float (&deviation)[kSize], float (&dz)[kSize], E* at) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) dz[i] = terms[i](gradient.slope[i], dz[i], deviation[i]);
      StorePack(at, ToPack<E>(dz));
    };
    if constexpr (kRing > 0) {
      WithActivation(in.activation, [&](auto tag) {
        ForPassing<kRing>(place, true, copy, take, [&](const InputPacks<E>& packs, int step) {
          float deviation[kSize], dz[kSize];
          ToNumbers(packs.x, deviation);
          ToNumbers(packs.dy, dz);
          gradient.template Differentiate<tag()>(deviation, dz);
          store(deviation, dz, to + step * place.stride);
        });
      });
    }
    const bool more = slab + walk.stride < walk.end;
    if (more) {
      tile = Tile<kSize>(cut, place, slab + walk.stride);
      const int64_t group = tile.n * cut.groups + tile.first_group + groups.first;
      Prefetch(in.mean + group);
      Prefetch(in.rstd + group);
    }
    parts.StartIssuing();
    int64_t from = tile.offset;
    WithActivationLeft<E>(in.activation, [&](auto tag) {
#pragma unroll 1
      for (int step = 0; step < place.held; ++step) {
        float deviation[kSize], dz[kSize];
        ToNumbers(slots[2 * step * cut.threads], deviation);
        ToNumbers(slots[(2 * step + 1) * cut.threads], dz);
        if (more) copy_from(step, from);
        parts.Issued(step);
        gradient.template Differentiate<tag()>(deviation, dz);
        store(deviation, dz, to);
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
Status LaunchResidentTileBackward(const Problem& problem, const ResidentCut& cut,
                                  const Stage& stage, const BackwardArgs& args,
                                  cudaStream_t stream) {
  return LaunchTiles<E>(ResidentTileBackwardKernel<E, Team>,
                        ResidentTileBackwardKernel<E, GridTeam>, "ResidentTileBackwardKernel",
                        problem, cut, stage, args, stream);
}

#define JAX_GN_INSTANTIATE(E)                                                                     \
  template Status LaunchResidentTileBackward<E>(const Problem&, const ResidentCut&, const Stage&, \
                                                const BackwardArgs&, cudaStream_t);
JAX_GN_FOR_RESIDENT_ELEMENTS(JAX_GN_INSTANTIATE)

}  // namespace jax_gn::cuda
