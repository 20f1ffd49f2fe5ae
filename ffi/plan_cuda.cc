// CUDA's plans: the stages of each family and their launch shapes.
//
// The cuts themselves are in cuda/cut.h. Both families serve every problem; "streaming" reads x
// (and dy) twice with as many blocks as fill the GPU, and is what serves unless asked otherwise.
#include <string>

#include "cuda/cut.h"
#include "cuda/three_stage.h"
#include "plan.h"

namespace jax_gn {
namespace {

using cuda::kThreads;

int64_t TensorBytes(const Problem& problem) { return problem.elements() * SizeOf(problem.dtype); }

Stage Streaming(std::string_view kernel, int64_t grid, int64_t shared_bytes = 0) {
  return {kernel, grid, kThreads, shared_bytes};
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
  if (combine) {
    plan->AddStage(Streaming(forward ? "combine_moments" : "combine_group_sums",
                             cuda::CombineBlocks(problem)));
  }
  plan->AddStage(Streaming(forward ? "row_apply" : "row_gradient", cut.blocks()));
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
    plan->AddStage(Streaming("run_apply", channels.blocks()));
  } else {
    plan->AddStage(Streaming("run_sums", channels.blocks()));
    plan->AddStage(Streaming("combine_channel_sums", cuda::CombineBlocks(problem)));
    plan->AddStage(Streaming("run_gradient", channels.blocks()));
  }
}

void PlanStreaming(const Problem& problem, Plan* plan) {
  plan->workspace_bytes = cuda::LayOut(problem).bytes;
  plan->bytes_moved = TensorBytes(problem) * (problem.op == Op::kForward ? 3 : 5);
  if (cuda::LayoutOf(problem) == Layout::kChannelsLast) {
    PlanRows(problem, plan);
  } else {
    PlanRuns(problem, plan);
  }
  for (const Param form : {Param::kPerChannel, Param::kPerSample}) {
    if (problem.op == Op::kForward || (problem.scale != form && problem.bias != form)) continue;
    plan->AddStage(Streaming("parameter_sums", cuda::ParameterBlocks(problem, form)));
  }
}

void PlanThreeStage(const Problem& problem, Plan* plan) {
  const int64_t groups = problem.n * problem.groups;
  plan->tile_channels = problem.group_size();
  plan->block_extent = problem.spatial;
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

Status MakeCudaPlan(const Problem& problem, const DeviceLimits&, Family preference, Plan* plan) {
  if (preference == Family::kBlocked) {
    return JAX_GN_ERROR(kUnimplemented,
                        "family 'blocked' has no CUDA code; use 'streaming' or 'three_stage'");
  }
  plan->family = preference == Family::kThreeStage ? Family::kThreeStage : Family::kStreaming;
  if (plan->family == Family::kThreeStage && problem.op == Op::kBackward) {
    plan->workspace_bytes = 2 * problem.n * problem.groups * SizeOf(problem.accumulator());
  }
  // Nothing to reduce: the launcher only writes the results of nothing.
  if (problem.n == 0 || problem.spatial == 0) return Status();
  if (plan->family == Family::kThreeStage) {
    PlanThreeStage(problem, plan);
  } else {
    PlanStreaming(problem, plan);
  }
  for (int i = 0; i < plan->num_stages; ++i) {
    if (plan->stages[i].grid > INT32_MAX) {
      return JAX_GN_ERROR(kUnimplemented,
                          "too large for one launch: " + std::to_string(plan->stages[i].grid) +
                              " blocks; split the batch");
    }
  }
  return Status();
}

}  // namespace jax_gn
