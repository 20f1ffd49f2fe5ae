// CUDA's plans: the stages of each family and their launch shapes.
//
// The cuts themselves are in cuda/cut.h and cuda/resident_cut.h. "resident" serves what fits on the
// chip, channels last also what fits in part; "streaming", which reads x (and dy) twice, and
// "three_stage" serve every problem.
#include <algorithm>
#include <cmath>
#include <string>

#include "cuda/cut.h"
#include "cuda/resident_cut.h"
#include "cuda/three_stage.h"
#include "plan.h"

namespace jax_gn {
namespace {

using cuda::kThreads;

int64_t TensorBytes(const Problem& problem) { return problem.elements() * SizeOf(problem.dtype); }

Stage Streaming(std::string_view kernel, int64_t grid, int64_t shared_bytes = 0) {
  return {kernel, grid, kThreads, shared_bytes};
}

void AddParameterSums(const Problem& problem, int64_t rows, Plan* plan) {
  for (const Param form : {Param::kPerChannel, Param::kPerSample}) {
    if (problem.op == Op::kForward || (problem.dscale() != form && problem.dbias() != form)) {
      continue;
    }
    plan->AddStage(Streaming("parameter_sums", cuda::ParameterBlocks(problem, form, rows)));
  }
}

void PlanRows(const Problem& problem, Plan* plan) {
  const cuda::RowCut cut = cuda::CutRows(problem);
  const bool forward = problem.op == Op::kForward;
  plan->tile_channels = cut.tile;
  plan->block_extent = cut.extent;
  plan->blocks = cut.pieces;
  if (cut.warp_lanes > 0) {
    plan->AddStage(Streaming(forward ? "feature_forward" : "feature_backward", cut.blocks(),
                             forward ? 0 : cuda::RowSharedBytes(problem)));
    plan->bytes_moved = CompulsoryBytes(problem);
    return;
  }
  bool combine = !cut.whole_groups();
  if (cuda::GroupsAreRuns(problem)) {
    const cuda::RunCut statistics = cuda::CutRuns(problem, problem.groups);
    combine = statistics.pieces > 1;
    plan->AddStage(Streaming("run_moments", statistics.blocks()));
  } else {
    plan->AddStage(Streaming(forward ? "row_moments" : "row_sums", cut.blocks(),
                             cuda::RowSharedBytes(problem)));
  }
  if (combine && (forward || !problem.sums_only)) {
    plan->AddStage(Streaming(forward ? "combine_moments" : "combine_group_sums",
                             cuda::CombineBlocks(problem)));
  }
  if (problem.sums_only) return;
  plan->AddStage(
      Streaming(forward ? "row_apply" : "row_gradient", cuda::CutRowsToWrite(problem).blocks()));
}

void PlanRuns(const Problem& problem, Plan* plan) {
  const bool forward = problem.op == Op::kForward;
  const cuda::RunCut statistics = cuda::CutRuns(problem, problem.groups);
  const cuda::RunCut channels = cuda::CutRuns(problem, problem.channels);
  plan->tile_channels = 1;
  plan->block_extent = channels.extent;
  plan->blocks = channels.pieces;
  if (forward) {
    plan->AddStage(Streaming("run_moments", statistics.blocks()));
    if (statistics.pieces > 1) {
      plan->AddStage(Streaming("combine_moments", cuda::CombineBlocks(problem)));
    }
    if (problem.sums_only) return;
    plan->AddStage(Streaming("run_apply", cuda::CutRunsToWrite(problem).blocks()));
  } else {
    plan->AddStage(Streaming("run_sums", channels.blocks()));
    if (problem.sums_only) return;
    plan->AddStage(Streaming("combine_channel_sums", cuda::CombineBlocks(problem)));
    plan->AddStage(Streaming("run_gradient", cuda::CutRunsToWrite(problem).blocks()));
  }
}

void PlanStreaming(const Problem& problem, Plan* plan) {
  plan->bytes_moved = problem.sums_only
                          ? CompulsoryBytes(problem)
                          : TensorBytes(problem) * (problem.op == Op::kForward ? 3 : 5);
  if (cuda::LayoutOf(problem) == Layout::kChannelsLast) {
    PlanRows(problem, plan);
  } else {
    PlanRuns(problem, plan);
  }
  AddParameterSums(problem, cuda::LayOut(problem).channel_rows, plan);
}

// Bytes of x and dy that are read a second time.
int64_t PassingBytes(const Problem& problem, const cuda::ResidentCut& cut) {
  const int64_t tensors = problem.op == Op::kForward ? 1 : 2;
  const int again = std::max(0, cut.steps - cut.placed());  // the ring still has its last ones
  const double share = static_cast<double>(again) / cut.steps;
  return static_cast<int64_t>(share * static_cast<double>(tensors * TensorBytes(problem)));
}

// What the choice of a cut adds to the time, in us on an H200: a round's latencies, which grow with
// the packs that a thread works through, and the work on all packs, those without data included.
// Fitted to 2400 timings of both types, layouts and passes, and 2000 more of channels first; on
// average over the problems of shapes.json the cut it chooses takes 2 to 4 % longer than the best
// one timed (docs/kernels.md).
double ResidentCost(const Problem& problem, const cuda::ResidentCut& cut) {
  const bool forward = problem.op == Op::kForward;
  const DeviceLimits h200;
  const double rounds = static_cast<double>(cuda::ResidentRounds(cut, h200));
  const double packs = static_cast<double>(cut.slabs) * cut.team * cut.slab_threads * cut.steps;
  const double blocks = static_cast<double>(cut.slabs) * cut.team;
  const double processors = std::min<double>(blocks, static_cast<double>(h200.multiprocessors));
  const double per_processor = packs / (32 * 4 * 1000.0 * processors);
  double round = forward ? 3.5 + 0.07 * cut.steps : 4.8 + 0.12 * cut.steps;
  double pack = forward ? (cut.rows() ? 40 : 20) : (cut.rows() ? 130 : 70);
  if (cut.packs()) {
    round = forward ? 2.2 + 0.05 * cut.steps : 4.8 + 0.1 * cut.steps;
    // Two channels in a pack cost more, backward less than the ends of channels do elsewhere.
    if (forward) pack = cuda::ChannelsShare(problem) ? 36 : 28;
  }
  if (cut.team > 1) round += forward ? 0.3 : 0.2;
  if (cut.team > 8 && (forward || cut.packs())) round += 0.5;
  // Pairs find room on all multiprocessors, larger clusters don't: where there is but one round, it
  // shows (sd15_unet_64_b2: 13.8 us by pairs, 15.8 by fours).
  if (!cut.rows() && cut.team > 2 && rounds == 1) round += 0.8;
  if (cut.solo() && (forward || !cut.packs())) round += 1.5;
  return rounds * round + per_processor * pack;
}

// The time of grid teams, in us on an H200: a round's latencies and exchange; each step's copies in
// and out at the memory's speed; and for steps that pass, a second reading, but of the last ones,
// which the L2 cache still has. Fitted to 2,257 timings, of the best ones of which it is off by 5 %
// (channels last) and 3 % (first); the cut of least time takes 0.5 % longer than the best one
// timed.
double GridTeamTime(const Problem& problem, const cuda::ResidentCut& cut) {
  const bool forward = problem.op == Op::kForward, paired = SizeOf(problem.dtype) == 2;
  const double rounds = static_cast<double>(cuda::ResidentRounds(cut, DeviceLimits()));
  const double latency = cut.spans() ? 4 : !paired ? 5.5 : forward ? 7 : 9;
  const double exchange = cut.team * (cut.spans() ? 0.01 : 0.002 * cut.tile_groups);
  const double size = cut.threads / 256.0;  // of a step
  // Spans by 512 threads have more on its way, by 256 they hold more: vae_512_128, float32,
  // forward, 320 us against 328, nnunet_in_128 329 against 364; but with silu in 16 bits 199
  // against 192.
  const bool light = forward && (!paired || problem.activation == Activation::kNone ||
                                 problem.activation == Activation::kRelu ||
                                 problem.activation == Activation::kLeakyRelu);
  const double misfit = cut.spans() && light != (size > 1) ? 1.06 : 1;
  const double cached = cut.spans() || !forward ? 8 : 12;
  const double again = std::max(0.0, size * std::max(0, cut.steps - cut.placed()) - cached);
  const double steps =
      forward ? 0.54 * size * cut.steps + 0.27 * again : 0.8 * size * cut.steps + 0.45 * again;
  // Tiles of 128 bytes a row are slower than wider ones.
  const double narrow = cut.rows() && cut.tile_packs * cuda::kPackBytes < 256 ? 1.03 : 1;
  return 4 + rounds * narrow * (latency + exchange + misfit * steps);
}

int64_t SpaceBytes(const Problem& problem, const cuda::ResidentCut& cut,
                   const DeviceLimits& device) {
  const int64_t blocks = cuda::ResidentTeams(cut, device) * cut.team;
  return cuda::ResidentSpaceOf(problem, cut, blocks).bytes();
}

// The time of the copy, and of "streaming".
double CopyTime(const Problem& problem) {
  return static_cast<double>(CompulsoryBytes(problem)) / 4e6;
}
double StreamingTime(const Problem& problem) {
  const bool slower = SizeOf(problem.dtype) == 2 && problem.layout == Layout::kChannelsLast;
  return problem.op == Op::kForward ? 15 + (slower ? 1.75 : 1.5) * CopyTime(problem)
                                    : 25 + (slower ? 2.1 : 1.6) * CopyTime(problem);
}

// Whether the cut beats "streaming". H200: not channels first where clusters of 16 wait for one
// another with too little else to do on their multiprocessors: 265 us against 226 (vae_512_128,
// bfloat16), backward 244 against 218 (sdxl_unet_128, float32).
bool Worthwhile(const Problem& problem, const cuda::ResidentCut& cut) {
  if (cut.grid_team()) return GridTeamTime(problem, cut) < StreamingTime(problem);
  const int few = problem.op == Op::kForward ? 1 : 2;
  return cut.rows() || cut.team < cuda::kMaxTeam || cuda::ResidentBlocks(cut) > few;
}

// Whether the grid teams beat the clusters, where both may serve. H200: where large clusters'
// blocks are alone on their multiprocessors (sd15_unet_64_skip, float32, forward, 188 us against
// 226), and in the backward pass channels last in 16 bits already where either holds (edm_in64_64,
// 92 against 101; sd15_unet_64, 70 against 76), unless one round does.
bool PreferGridTeams(const Problem& problem, const cuda::ResidentCut& grid,
                     const cuda::ResidentCut& cluster) {
  if (!grid.valid() || !cluster.valid()) return grid.valid();
  if (!Worthwhile(problem, grid)) return false;
  if (!Worthwhile(problem, cluster)) return true;
  const bool large = cluster.team >= 8, alone = cuda::ResidentBlocks(cluster) == 1;
  if (large && alone) return true;
  return problem.op == Op::kBackward && SizeOf(problem.dtype) == 2 && cluster.rows() &&
         (alone || cluster.team > 8) && cuda::ResidentRounds(cluster, DeviceLimits()) > 1;
}

// The best cut for that workspace, not valid() if the problem doesn't fit.
cuda::ResidentCut BestResident(const Problem& problem, const DeviceLimits& device,
                               int64_t workspace) {
  cuda::ResidentCut best[2] = {};  // of clusters and of grid teams
  double best_cost[2] = {1e30, 1e30};
  cuda::ForResidentCuts(problem, device, [&](const cuda::ResidentCut& cut) {
    if (SpaceBytes(problem, cut, device) > workspace) return;
    const bool grid = cut.grid_team();
    const double cost = grid ? GridTeamTime(problem, cut) : ResidentCost(problem, cut);
    if (cost >= best_cost[grid]) return;
    best_cost[grid] = cost;
    best[grid] = cut;
  });
  const auto& [cluster, grid] = best;
  return PreferGridTeams(problem, grid, cluster) ? grid : cluster;
}

// The cut for that device: an H200's if it fits there, else one that the same workspace serves.
cuda::ResidentCut ChooseResident(const Problem& problem, const DeviceLimits& device) {
  const DeviceLimits h200;
  const cuda::ResidentCut cut = BestResident(problem, h200, INT64_MAX);
  if (!cut.valid() || cuda::Fits(cut, device)) return cut;
  return BestResident(problem, device, SpaceBytes(problem, cut, h200));
}

// What the family needs, on any device.
int64_t ResidentWorkspace(const Problem& problem) {
  const cuda::ResidentCut cut = ChooseResident(problem, DeviceLimits());
  return cut.valid() ? SpaceBytes(problem, cut, DeviceLimits()) : 0;
}

Status CheckGrids(const Plan& plan) {
  for (int i = 0; i < plan.num_stages; ++i) {
    if (plan.stages[i].grid > INT32_MAX) {
      return JAX_GN_ERROR(kUnimplemented,
                          "too large for one launch: " + std::to_string(plan.stages[i].grid) +
                              " blocks; split the batch");
    }
  }
  return Status();
}

void PlanThreeStage(const Problem& problem, Plan* plan) {
  const int64_t groups = problem.n * problem.groups;
  plan->tile_channels = problem.group_size();
  plan->block_extent = problem.spatial;
  if (problem.sums_only) {
    const bool forward = problem.op == Op::kForward;
    plan->AddStage({forward ? "group_statistics" : "channel_sums",
                    forward ? groups : cuda::ChannelSumBlocks(problem, Param::kPerSample),
                    kThreads});
    plan->bytes_moved = forward ? 2 * TensorBytes(problem) : CompulsoryBytes(problem);
    return;
  }
  if (problem.op == Op::kForward) {
    plan->AddStage({"group_statistics_apply", groups, kThreads});
    plan->bytes_moved = 4 * TensorBytes(problem);
    return;
  }
  plan->AddStage({"group_sums", groups, kThreads});
  plan->AddStage({"group_gradient", groups, kThreads});
  plan->bytes_moved = 5 * TensorBytes(problem);
  for (const Param form : {Param::kPerChannel, Param::kPerSample}) {
    if (problem.scale != form && problem.bias != form) continue;
    plan->AddStage({"channel_sums", cuda::ChannelSumBlocks(problem, form), kThreads});
    plan->bytes_moved += 2 * TensorBytes(problem);
  }
}

}  // namespace

namespace cuda {

void PlanResident(const Problem& problem, const ResidentCut& cut, const DeviceLimits& device,
                  Plan* plan) {
  const bool forward = problem.op == Op::kForward;
  plan->family = Family::kResident;
  plan->bytes_moved = CompulsoryBytes(problem) + PassingBytes(problem, cut);
  plan->blocks = cut.team;
  plan->block_slabs = cut.threads / cut.slab_threads;
  const int64_t rounds = TeamsGoOn(problem, cut) ? ResidentRounds(cut, device) : 1;
  const int64_t blocks = CeilDiv(cut.slabs, rounds * plan->block_slabs) * cut.team;
  if (cut.rows()) {
    plan->width = cut.tile_packs;
    plan->tile_channels = cut.tile_packs * ResidentPack(problem);
    plan->block_extent = CeilDiv(problem.spatial, cut.team);
    plan->AddStage({forward ? "resident_tile_forward" : "resident_tile_backward", blocks,
                    cut.threads, cut.shared_bytes});
  } else {
    plan->width = cut.lanes;
    plan->tile_channels = cut.group_size;
    plan->block_extent = CeilDiv(problem.group_elements(), cut.team);
    const std::string_view kernels[3][2] = {{"resident_run_forward", "resident_run_backward"},
                                            {"resident_pack_forward", "resident_pack_backward"},
                                            {"resident_span_forward", "resident_span_backward"}};
    const int kind = cut.packs() ? 1 : cut.spans() ? 2 : 0;
    plan->AddStage({kernels[kind][forward ? 0 : 1], blocks, cut.threads, cut.shared_bytes});
  }
  AddParameterSums(problem, ResidentRows(problem, cut), plan);
}

}  // namespace cuda

Status MakeCudaPlan(const Problem& problem, const DeviceLimits& device, Family preference,
                    Plan* plan) {
  if (preference == Family::kBlocked) {
    return JAX_GN_ERROR(kUnimplemented,
                        "family 'blocked' has no CUDA code; use 'resident', "
                        "'streaming' or 'three_stage'");
  }
  if (problem.sums_only) {
    if (preference == Family::kResident) {
      return JAX_GN_ERROR(kUnimplemented,
                          "family 'resident' has no sums alone; use 'streaming' or 'three_stage'");
    }
    if (preference == Family::kAuto) preference = Family::kStreaming;
  }
  const bool empty = problem.n == 0 || problem.spatial == 0;  // the launcher writes the results
  if (preference == Family::kThreeStage) {
    plan->family = Family::kThreeStage;
    if (problem.op == Op::kBackward && !problem.sums_only) {
      plan->workspace_bytes = 2 * problem.n * problem.groups * SizeOf(problem.accumulator());
    }
    if (!empty) PlanThreeStage(problem, plan);
    return CheckGrids(*plan);
  }
  cuda::ResidentCut cut = {};
  const bool may_reside = preference != Family::kStreaming;
  if (may_reside && !empty) cut = ChooseResident(problem, device);
  if (preference == Family::kAuto && !Worthwhile(problem, cut)) cut = {};
  if (preference == Family::kResident && !cut.valid()) {
    return JAX_GN_ERROR(
        kUnimplemented,
        "family 'resident' has no room for this problem (channels first: a group in "
        "the shared memory of 16 blocks; channels last: whole groups and sectors of "
        "32 bytes; not float64; sm_80 or newer); use 'streaming' or 'three_stage'");
  }
  plan->family = Family::kStreaming;
  if (empty) return Status();
  if (cut.valid()) {
    cuda::PlanResident(problem, cut, device, plan);
  } else {
    PlanStreaming(problem, plan);
  }
  plan->workspace_bytes = cuda::LayOut(problem).bytes;
  if (may_reside) {
    plan->workspace_bytes = std::max(plan->workspace_bytes, ResidentWorkspace(problem));
  }
  // The workspace is an H200's, the number of teams this device's.
  if (cut.valid() && SpaceBytes(problem, cut, device) > plan->workspace_bytes) {
    return JAX_GN_ERROR(kInternal, "a plan for this device needs more workspace than it gets");
  }
  return CheckGrids(*plan);
}

}  // namespace jax_gn
