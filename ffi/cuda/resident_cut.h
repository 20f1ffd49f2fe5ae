// How the resident kernels cut a problem: host arithmetic, from the problem alone.
//
// A slab is what shares statistics, or more of it: of one sample, a tile of channels (whole groups,
// channels last) or a group (channels first: as segments of channels, or as packs whatever their
// channel). A team of up to 16 blocks, one thread block cluster, holds a slab in its shared memory
// from the first read to the last write, so that each tensor crosses the memory bus once. A thread
// reads, waits for and works on packs of its own: `steps` of them, x's and in the backward pass
// dy's too.
//
// A slab may be larger than that, if channels first its channels are whole packs. Then all blocks
// that the device runs at once make one team, or a few ("grid teams"), which exchange their sums
// through global memory; each thread holds the first `held` of its steps. The others pass through a
// ring of places, and are read a second time, in the opposite order, much of them from the L2
// cache.
#ifndef JAX_GN_CUDA_RESIDENT_CUT_H_
#define JAX_GN_CUDA_RESIDENT_CUT_H_

#include <cstdint>
#include <numeric>

#include "../plan.h"
#include "cut.h"

namespace jax_gn::cuda {

inline constexpr int kMaxTeam = 16;    // blocks of a cluster on sm_90; more than 8 by its own leave
inline constexpr int kGridBlocks = 2;  // of a multiprocessor, where teams are larger than clusters
// Most threads of a block; twice as many fit a multiprocessor, by the registers that leaves them:
// channels last, where a thread keeps numbers for each channel of a pack, 96, else 64.
inline constexpr int kTileThreads = 320, kRunThreads = 512;
inline constexpr int kGridThreads = 256;  // of grid teams, which leaves each 128 registers
// Of the steps that a grid team's thread can't hold, so many are on their way at a time, in shared
// memory of their own: a power of two.
inline constexpr int kRingSteps = 4;
// Shared memory of a multiprocessor, and what each block costs beside its own: H200.
inline constexpr int64_t kSharedPerProcessor = 228 << 10, kSharedPerBlockExtra = 1 << 10;

struct ResidentCut {
  int64_t n, spatial, channels, groups, group_size;
  int team, threads, steps;
  int held;               // of the steps, those whose packs stay in shared memory
  int slab_threads;       // of a block's threads, those at one slab: all, or a warp alone
  int tile_packs, lines;  // channels last: threads side by side, threads below each other
  int tiles;              // channels last: of a sample
  int lanes, segments;    // channels first: threads at a segment, a power of two; of a channel
  int items, item_steps;  // channels first: segments that a thread visits in turn, packs in each
  int segment_packs;      // channels first: of a segment
  int step_channels, step_rest;  // channels first, packs: from one of a thread to the next
  int channel_lanes;       // channels first, packs: threads that add up a channel, a power of two
  int tile_groups, slots;  // groups of a tile; most groups that meet a pack
  int64_t slabs, shared_bytes;
  float share;  // 1 / elements of a group

  JAX_GN_HOST_DEVICE constexpr bool rows() const { return tile_packs > 0; }
  JAX_GN_HOST_DEVICE constexpr bool packs() const { return channel_lanes > 0; }
  JAX_GN_HOST_DEVICE constexpr bool spans() const { return grid_team() && !rows(); }
  JAX_GN_HOST_DEVICE constexpr bool solo() const { return slab_threads < threads; }
  JAX_GN_HOST_DEVICE constexpr bool grid_team() const { return team > kMaxTeam; }
  // Steps of a thread that have a place in shared memory.
  JAX_GN_HOST_DEVICE constexpr int placed() const { return held + (grid_team() ? kRingSteps : 0); }
  // Pairs of sums of each group that the exchange keeps in shared memory.
  JAX_GN_HOST_DEVICE constexpr int places() const { return grid_team() ? 1 : 2 * team; }
  constexpr bool valid() const { return threads > 0; }
};

inline int64_t ResidentPack(const Problem& problem) { return kPackBytes / SizeOf(problem.dtype); }

// Channels first: whether two channels meet in a pack, where the group begins with one.
inline bool ChannelsShare(const Problem& problem) {
  return problem.spatial % ResidentPack(problem) != 0;
}

// Bytes that the block's packs take, and what it needs beside them (ResidentShared lays it out).
inline int64_t ResidentSharedBytes(const Problem& problem, const ResidentCut& cut) {
  const bool forward = problem.op == Op::kForward;
  const int64_t packs = static_cast<int64_t>(cut.placed()) * cut.threads * (forward ? 1 : 2);
  const int64_t exchange = static_cast<int64_t>(cut.places()) * cut.tile_groups * 8;
  const int64_t results = AlignUp(cut.tile_groups * 16, kPackBytes);
  int64_t scratch;
  if (cut.packs()) {
    // Sums of the warps; for each slab the table of scale and bias and, backward, sums of each
    // pack.
    const int64_t meet = forward ? 0 : ChannelsShare(problem) ? 2 : 1;
    const int64_t slabs = cut.threads / cut.slab_threads;
    scratch =
        (kRunThreads / 32 + slabs * (cut.group_size + 1) + meet * cut.steps * cut.threads) * 8;
  } else if (cut.spans()) {
    scratch = cut.threads * 8;
  } else if (!cut.rows()) {
    scratch = (kRunThreads / 32 + (forward ? 0 : cut.items * (cut.threads / cut.lanes))) * 8;
  } else if (forward) {
    scratch = 2 * static_cast<int64_t>(cut.slots) * cut.threads * 4;
  } else {
    const int64_t pack = ResidentPack(problem);
    scratch = 2 * pack * (cut.threads + 1) * 4 + 2 * cut.tile_packs * pack * 4;
  }
  return packs * kPackBytes + AlignUp(exchange, kPackBytes) + results +
         AlignUp(scratch, kPackBytes);
}

// Steps whose packs fit, where kGridBlocks blocks share a multiprocessor.
inline int HeldSteps(const Problem& problem, ResidentCut cut) {
  cut.held = 0;
  const int64_t room = kSharedPerProcessor / kGridBlocks - kSharedPerBlockExtra;
  const int64_t rest = room - ResidentSharedBytes(problem, cut);
  const int64_t step =
      static_cast<int64_t>(cut.threads) * kPackBytes * (problem.op == Op::kForward ? 1 : 2);
  return static_cast<int>(std::clamp<int64_t>(rest / step, 0, cut.steps));
}

// Blocks of a multiprocessor, by their shared memory and threads.
inline int64_t ResidentBlocks(const ResidentCut& cut) {
  return std::min<int64_t>(kSharedPerProcessor / (cut.shared_bytes + kSharedPerBlockExtra),
                           2 * (cut.rows() ? kTileThreads : kRunThreads) / cut.threads);
}

inline ResidentCut ResidentBase(const Problem& problem, int team) {
  ResidentCut cut = {};
  cut.n = problem.n;
  cut.spatial = problem.spatial;
  cut.channels = problem.channels;
  cut.groups = problem.groups;
  cut.group_size = problem.group_size();
  cut.team = team;
  cut.share = static_cast<float>(1.0 / static_cast<double>(problem.group_elements()));
  return cut;
}

// Channels last: a tile of `tile_packs`, `threads` a block, as many lines of them as that makes.
// Not valid() if the problem can't be cut so.
inline ResidentCut CutTiles(const Problem& problem, int64_t tile_packs, int threads, int team) {
  const int64_t pack = ResidentPack(problem);
  const int64_t tile = tile_packs * pack;
  ResidentCut cut = ResidentBase(problem, team);
  if (problem.channels % tile != 0 || tile % cut.group_size != 0) return {};
  if (tile_packs > threads) return {};
  cut.tile_packs = static_cast<int>(tile_packs);
  cut.lines = threads / cut.tile_packs;
  cut.tiles = static_cast<int>(problem.channels / tile);
  cut.threads = cut.slab_threads = threads;
  cut.held = cut.steps =
      static_cast<int>(CeilDiv(problem.spatial, static_cast<int64_t>(cut.lines) * team));
  cut.tile_groups = static_cast<int>(tile / cut.group_size);
  cut.slabs = problem.n * cut.tiles;
  cut.slots = static_cast<int>(cut.group_size % pack == 0   ? 1
                               : pack % cut.group_size == 0 ? pack / cut.group_size
                                                            : (pack - 2) / cut.group_size + 2);
  if (cut.grid_team()) cut.held = HeldSteps(problem, cut);
  cut.shared_bytes = ResidentSharedBytes(problem, cut);
  return cut;
}

// Channels first: `warps` a block, `lanes` threads at a segment of a channel. `solo`: each warp
// takes a slab of its own, and no block waits for its other warps.
inline ResidentCut CutSegments(const Problem& problem, int lanes, int warps, int team, bool solo) {
  const int64_t pack = ResidentPack(problem);
  ResidentCut cut = ResidentBase(problem, team);
  // Packs that a channel meets, wherever it begins.
  const int64_t packs =
      problem.spatial % pack == 0 ? problem.spatial / pack : CeilDiv(problem.spatial - 1, pack) + 1;
  cut.threads = warps * 32;
  cut.slab_threads = solo ? 32 : cut.threads;
  cut.lanes = lanes;
  const int64_t owners = static_cast<int64_t>(team) * cut.slab_threads / lanes;
  const int64_t segments = std::clamp<int64_t>(owners / cut.group_size, 1, CeilDiv(packs, lanes));
  cut.segments = static_cast<int>(segments);
  cut.segment_packs = static_cast<int>(CeilDiv(packs, segments));
  cut.items = static_cast<int>(CeilDiv(cut.group_size * segments, owners));
  cut.item_steps = static_cast<int>(CeilDiv(cut.segment_packs, lanes));
  cut.held = cut.steps = cut.items * cut.item_steps;
  cut.tile_groups = 1;
  cut.slabs = problem.n * problem.groups;
  cut.shared_bytes = ResidentSharedBytes(problem, cut);
  return cut;
}

// Channels first, a group as packs: it must begin with one, and none may meet three channels. The
// sums of x know no channel, hence no addend. `solo` as in CutSegments.
inline ResidentCut CutPacks(const Problem& problem, int threads, int team, bool solo) {
  const int64_t pack = ResidentPack(problem), elements = problem.group_elements();
  ResidentCut cut = ResidentBase(problem, team);
  if (elements % pack != 0 || problem.spatial < pack) return {};
  if (problem.has_addend()) return {};
  cut.threads = threads;
  const int64_t at_slab = cut.slab_threads = solo ? 32 : threads;
  cut.held = cut.steps = static_cast<int>(CeilDiv(elements / pack, at_slab * team));
  cut.step_channels = static_cast<int>(at_slab * pack / problem.spatial);
  cut.step_rest = static_cast<int>(at_slab * pack % problem.spatial);
  cut.channel_lanes = std::min(32, PowerOfTwoBelow(std::max<int64_t>(1, at_slab / cut.group_size)));
  cut.tile_groups = 1;
  cut.slabs = problem.n * problem.groups;
  cut.shared_bytes = ResidentSharedBytes(problem, cut);
  return cut;
}

// Channels first, beyond the clusters: `segments` blocks of a grid team share a channel, each works
// on one alone. Channels must be whole packs.
inline ResidentCut CutSpans(const Problem& problem, int threads, int64_t segments) {
  const int64_t pack = ResidentPack(problem), team = segments * problem.group_size();
  if (problem.spatial % pack != 0 || team <= kMaxTeam || team > INT32_MAX) return {};
  ResidentCut cut = ResidentBase(problem, static_cast<int>(team));
  cut.threads = cut.slab_threads = threads;
  cut.segments = static_cast<int>(segments);
  cut.segment_packs = static_cast<int>(CeilDiv(problem.spatial / pack, segments));
  cut.held = cut.steps = static_cast<int>(CeilDiv(cut.segment_packs, threads));
  cut.tile_groups = 1;
  cut.slabs = problem.n * problem.groups;
  cut.held = HeldSteps(problem, cut);
  cut.shared_bytes = ResidentSharedBytes(problem, cut);
  return cut;
}

// The cut that a plan of the family names.
inline ResidentCut CutOf(const Problem& problem, const Plan& plan) {
  const int width = static_cast<int>(plan.width), team = static_cast<int>(plan.blocks);
  const int threads = plan.stages[0].threads;
  if (problem.layout == Layout::kChannelsLast) return CutTiles(problem, width, threads, team);
  if (team > kMaxTeam) return CutSpans(problem, threads, team / problem.group_size());
  const bool solo = plan.block_slabs > 1;
  if (width == 0) return CutPacks(problem, threads, team, solo);
  return CutSegments(problem, width, threads / 32, team, solo);
}

// Rows of dscale's and dbias's partial sums.
inline int64_t ResidentRows(const Problem& problem, const ResidentCut& cut) {
  if (problem.op == Op::kForward || !HasParam(problem)) return 0;
  return problem.n * (cut.spans() ? cut.segments : cut.team);
}

// Blocks of grid teams that a device surely runs at once: they wait for one another.
inline int64_t GridTeamBlocks(const ResidentCut& cut, const DeviceLimits& device) {
  const int64_t shared = device.shared_memory_per_block + kSharedPerBlockExtra;
  const int64_t blocks = shared / (cut.shared_bytes + kSharedPerBlockExtra);
  return std::min<int64_t>(blocks, kGridBlocks) * device.multiprocessors;
}

inline bool Fits(const ResidentCut& cut, const DeviceLimits& device) {
  if (cut.grid_team() && GridTeamBlocks(cut, device) < cut.team) return false;
  const bool clusters = cut.team > 1 && !cut.grid_team();
  return cut.shared_bytes <= device.shared_memory_per_block && device.capability >= 80 &&
         (!clusters || device.capability >= 90) && cut.slabs <= INT32_MAX &&
         cut.channels <= INT32_MAX;
}

// What a launch of so many blocks needs in the workspace, in bytes, one after the other: sums of
// channels, sums that grid teams exchange, and a counter for each team.
struct ResidentSpace {
  int64_t channel_rows = 0, places = 0, arrivals = 0;

  int64_t bytes() const { return channel_rows + places + arrivals; }
};
inline ResidentSpace ResidentSpaceOf(const Problem& problem, const ResidentCut& cut,
                                     int64_t blocks) {
  ResidentSpace space;
  const int64_t row = problem.channels * 2 * SizeOf(problem.accumulator());
  space.channel_rows = AlignUp(ResidentRows(problem, cut) * row, kPackBytes);
  if (!cut.grid_team()) return space;
  space.places = AlignUp(2 * blocks * cut.tile_groups * 8, kPackBytes);
  space.arrivals = AlignUp(4 * (blocks / cut.team), kPackBytes);
  return space;
}

// Calls visit(cut) for the cuts worth a look, in a fixed order: none if the problem doesn't fit.
template <typename Visit>
void ForResidentCuts(const Problem& problem, const DeviceLimits& device, Visit visit) {
  const int64_t pack = ResidentPack(problem);
  if (problem.dtype == DType::kFloat64 || problem.spatial < 2) return;
  if (problem.group_elements() > INT32_MAX / 2) return;  // no chip holds it, no int counts it
  const auto offer = [&](const ResidentCut& cut) {
    if (cut.valid() && Fits(cut, device)) visit(cut);
  };
  if (problem.layout == Layout::kChannelsFirst) {
    for (int team = 1; team <= kMaxTeam; team *= 2) {
      for (int threads = 64; threads <= kRunThreads; threads += 32) {
        offer(CutPacks(problem, threads, team, false));
      }
    }
    for (int threads : {128, 256}) offer(CutPacks(problem, threads, 1, true));
    for (int lanes = 8; lanes <= 32; lanes *= 2) {
      for (int warps : {4, 8}) offer(CutSegments(problem, lanes, warps, 1, true));
      for (int team = 1; team <= kMaxTeam; team *= 2) {
        for (int warps = 4; warps <= kRunThreads / 32; ++warps) {
          offer(CutSegments(problem, lanes, warps, team, false));
        }
      }
    }
    for (int threads : {kGridThreads, kRunThreads}) {
      for (int teams = 1; teams <= 13; ++teams) {
        const int64_t team = kGridBlocks * device.multiprocessors / teams;
        offer(CutSpans(problem, threads, team / problem.group_size()));
      }
    }
    return;
  }
  // Whole groups, whole 32-byte sectors.
  const int64_t least = std::lcm(std::lcm(problem.group_size(), pack), 32 / SizeOf(problem.dtype));
  if (problem.channels % pack != 0) return;
  const int64_t most = std::min(problem.channels, kTileThreads * pack);
  // Teams of 3, 5, 7, ... fill the device in fewer rounds: forward, sd15_unet_64 takes 40 us with 7
  // blocks, 44 with 8 (H200, bfloat16). Backward, and channels first, they lost by up to a third.
  const bool any_team = problem.op == Op::kForward;
  const auto next = [any_team](int team) { return any_team ? team + 1 : 2 * team; };
  for (int64_t tile = least; tile <= most; tile += least) {
    const int64_t tile_packs = tile / pack;
    if (problem.channels % tile != 0) continue;
    if (tile_packs * kPackBytes < 128 && tile < problem.channels) continue;
    for (int threads = 128; threads <= kTileThreads; threads += 32) {
      for (int team = 1; team <= kMaxTeam; team = next(team)) {
        offer(CutTiles(problem, tile_packs, threads, team));
      }
    }
    // Fewer threads hold as much but wait longer: H200, sd15_unet_64, bfloat16, 50 us by 192, 45 by
    // 256.
    for (int teams : {1, 2, 3, 4, 6, 8, 12}) {
      const int team = kGridBlocks * device.multiprocessors / teams;
      if (team > kMaxTeam) offer(CutTiles(problem, tile_packs, kGridThreads, team));
    }
  }
}

// Teams that a device runs at once, by the blocks that share a multiprocessor and those of a team.
// Clusters must not cross the borders of the GPU's clusters of multiprocessors: on an H200, which
// says so itself (`cuda_harness teams`), 132 of them hold 7 teams of 16 but also 17 of 6. Other
// devices are taken for its like.
inline int64_t ResidentTeams(const ResidentCut& cut, const DeviceLimits& device) {
  constexpr int kMostCounted = 4;
  constexpr int kTeams[kMostCounted][kMaxTeam] = {
      {132, 66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7, 7},
      {264, 132, 79, 62, 47, 39, 32, 30, 23, 21, 16, 16, 14, 14, 14, 14},
      {396, 198, 124, 92, 69, 62, 47, 45, 37, 30, 28, 28, 23, 21, 21, 21},
      {528, 264, 163, 124, 94, 79, 69, 62, 51, 44, 37, 37, 30, 30, 28, 28}};
  if (cut.grid_team()) {
    // A larger device runs no more: the workspace, which is the same for all, has no room for them.
    const int64_t at_once =
        std::min(GridTeamBlocks(cut, device), GridTeamBlocks(cut, DeviceLimits()));
    return std::max<int64_t>(1, at_once / cut.team);
  }
  const int64_t blocks = ResidentBlocks(cut);
  const int64_t counted = std::min<int64_t>(blocks, kMostCounted);
  const int64_t h200 = kTeams[counted - 1][cut.team - 1] * blocks / counted;
  return std::max<int64_t>(1, h200 * device.multiprocessors / DeviceLimits().multiprocessors);
}

// Slabs that each place on the device serves, one after the other.
inline int64_t ResidentRounds(const ResidentCut& cut, const DeviceLimits& device) {
  const int64_t at_once = ResidentTeams(cut, device) * (cut.threads / cut.slab_threads);
  return CeilDiv(cut.slabs, at_once);
}

// Whether a team goes on to the next slab itself, reading ahead, rather than leaving it to a new
// one. H200: where few blocks share a multiprocessor it takes 2 to 8 % less time, else up to 6 %
// more, as blocks that begin at different times fill each other's waits. A group that begins inside
// a pack can't take the place of another.
inline bool TeamsGoOn(const Problem& problem, const ResidentCut& cut) {
  const int64_t blocks = ResidentBlocks(cut);
  if (cut.grid_team()) return true;
  if (cut.rows()) return blocks <= 2;
  if (cut.packs()) return false;
  return problem.op == Op::kForward && (blocks == 2 || blocks == 3) &&
         problem.group_elements() % ResidentPack(problem) == 0;
}

// The plan with that cut (plan_cuda.cc). ForResidentCuts names the cuts there are, for harness and
// planner.
void PlanResident(const Problem& problem, const ResidentCut& cut, const DeviceLimits& device,
                  Plan* plan);

}  // namespace jax_gn::cuda

#endif  // JAX_GN_CUDA_RESIDENT_CUT_H_
