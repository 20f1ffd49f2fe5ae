// The CPU's plans: how a sample is cut for the caches, by its shape alone. Nothing here depends on
// the machine or its threads, so that neither does a bit of the results.
#include <algorithm>
#include <string>

#include "cpu/cut.h"
#include "plan.h"

namespace jax_gn {
namespace {

using cpu::CeilDiv;

// Of what is read twice, three quarters of a core's L2 (512 KiB on Zen 3, 1 to 2 MiB elsewhere).
constexpr int64_t kTileBytes = 384 << 10;
// Of x: the forward's statistics read a block twice.
constexpr int64_t kBlockBytes = 256 << 10;
// A row of a tile that is narrower than the sample. With rows of 128 bytes, a sample that is read
// twice at full width is faster (Zen 3, backward: by 15 to 40 %).
constexpr int64_t kMinRowBytes = 256;
// Coefficients and sums of a tile (40 bytes a column) must leave room for the tile.
constexpr int64_t kMaxTileChannels = 4096;

struct Shape {
  Layout layout;
  int64_t spatial, channels, groups, group_size;
  int64_t element_bytes;  // of x
  int64_t cached_bytes;   // of an element of all tensors that are read twice
};

Shape ShapeOf(const Problem& problem) {
  const int64_t tensors = problem.op == Op::kForward ? 1 : 2;
  return {cpu::LayoutOf(problem),
          std::max<int64_t>(1, problem.spatial),
          problem.channels,
          problem.groups,
          problem.group_size(),
          SizeOf(problem.dtype),
          tensors * SizeOf(problem.dtype)};
}

// Tiles of at most `most` groups, as even as can be.
int64_t EvenTile(const Shape& shape, int64_t most) {
  const int64_t fit = std::clamp<int64_t>(most, 1, shape.groups);
  return CeilDiv(shape.groups, CeilDiv(shape.groups, fit)) * shape.group_size;
}

// Cuts `size` units of `unit_bytes` in even blocks of about kBlockBytes.
int64_t EvenExtent(int64_t size, int64_t unit_bytes) {
  const int64_t fit = std::max<int64_t>(1, kBlockBytes / unit_bytes);
  return CeilDiv(size, CeilDiv(size, fit));
}

// Cuts the tile in blocks; plan->tile_channels is set.
void CutInBlocks(const Shape& shape, Plan* plan) {
  if (shape.layout == Layout::kChannelsLast) {
    plan->block_extent = EvenExtent(shape.spatial, plan->tile_channels * shape.element_bytes);
    plan->blocks = CeilDiv(shape.spatial, plan->block_extent);
    return;
  }
  const int64_t channel_bytes = shape.spatial * shape.element_bytes;
  if (channel_bytes <= kBlockBytes) {
    const int64_t channels = EvenExtent(shape.group_size, channel_bytes);
    plan->block_extent = channels * shape.spatial;
    plan->blocks = CeilDiv(shape.group_size, channels);
  } else {
    plan->block_extent = EvenExtent(shape.spatial, shape.element_bytes);
    plan->blocks = shape.group_size * CeilDiv(shape.spatial, plan->block_extent);
  }
}

void CutForCaches(const Shape& shape, Plan* plan) {
  const int64_t group_bytes = shape.spatial * shape.group_size * shape.cached_bytes;
  const int64_t fit = kTileBytes / group_bytes;  // groups
  const bool last = shape.layout == Layout::kChannelsLast;
  const int64_t row_bytes = shape.group_size * shape.element_bytes;
  const int64_t narrowest = last ? std::min(shape.groups, CeilDiv(kMinRowBytes, row_bytes)) : 1;
  const int64_t widest = std::max<int64_t>(1, kMaxTileChannels / shape.group_size);
  if (fit >= narrowest) {
    plan->tile_channels = EvenTile(shape, std::min(fit, widest));
    plan->block_extent = last ? shape.spatial : shape.spatial * plan->tile_channels;
    plan->blocks = 1;
  } else {
    plan->tile_channels = last ? EvenTile(shape, widest) : shape.group_size;
    CutInBlocks(shape, plan);
  }
}

bool SumsOverSamples(const Problem& problem) {
  return problem.op == Op::kBackward &&
         (problem.dscale() == Param::kPerChannel || problem.dbias() == Param::kPerChannel);
}

// blocked.cc lays it out.
int64_t BlockedWorkspace(const Problem& problem, const Plan& plan) {
  constexpr int64_t kPair = 2 * sizeof(double);
  const int64_t channels = problem.channels, groups = problem.groups;
  if (plan.blocks > 1) {
    return problem.n * kPair *
           (problem.op == Op::kForward
                ? (plan.blocks + 1) * groups
                : (cpu::PositionBlocks(problem, plan) + 1) * channels + groups);
  }
  if (!SumsOverSamples(problem)) return 0;
  return problem.n * kPair * CeilDiv(channels, cpu::SamplesPerTask(problem, plan));
}

void DescribeBlocked(const Problem& problem, Plan* plan) {
  const bool forward = problem.op == Op::kForward;
  const int64_t tensors = forward ? 2 : 3;
  const int64_t bytes = problem.elements() * SizeOf(problem.dtype);
  const int64_t tiles = plan->tiles(problem);
  if (problem.sums_only) {
    plan->AddStage({forward ? "statistics" : "sums", plan->blocks == 1
                                                         ? tiles * cpu::SampleRanges(problem, *plan)
                                                         : problem.n * tiles * plan->blocks});
    plan->bytes_moved = CompulsoryBytes(problem);
    return;
  }
  if (plan->blocks == 1) {
    plan->AddStage(
        {forward ? "statistics_apply" : "sums_apply", tiles * cpu::SampleRanges(problem, *plan)});
    plan->bytes_moved = tensors * bytes;
  } else {
    const int64_t tasks = problem.n * tiles * plan->blocks;
    plan->AddStage({forward ? "statistics" : "sums", tasks});
    plan->AddStage({"apply", tasks});
    plan->bytes_moved = (forward ? 3 : 5) * bytes;
  }
  if (SumsOverSamples(problem)) {
    plan->AddStage({"channel_sums", CeilDiv(problem.channels, cpu::kChannelsPerSum)});
  }
}

void DescribeThreeStage(const Problem& problem, Plan* plan) {
  const int64_t bytes = problem.elements() * SizeOf(problem.dtype);
  const int64_t tasks = problem.n * problem.groups;
  if (problem.sums_only) {
    plan->AddStage({problem.op == Op::kForward ? "statistics" : "channel_sums", tasks});
    plan->bytes_moved = CompulsoryBytes(problem);
    return;
  }
  if (problem.op == Op::kForward) {
    plan->AddStage({"statistics_apply", tasks});
    plan->bytes_moved = 3 * bytes;
    return;
  }
  plan->AddStage({"group_sums", tasks});
  plan->AddStage({"apply", tasks});
  plan->bytes_moved = 5 * bytes;
  if (problem.scale != Param::kAbsent || problem.bias != Param::kAbsent) {
    plan->AddStage({"channel_sums", problem.groups});
    plan->bytes_moved = 7 * bytes;
  }
}

}  // namespace

Status MakeCpuPlan(const Problem& problem, Family preference, Plan* plan) {
  const Shape shape = ShapeOf(problem);
  switch (preference) {
    case Family::kAuto:
    case Family::kBlocked:
      plan->family = Family::kBlocked;
      CutForCaches(shape, plan);
      plan->workspace_bytes = BlockedWorkspace(problem, *plan);
      DescribeBlocked(problem, plan);
      return Status();
    case Family::kThreeStage:
      plan->family = Family::kThreeStage;
      plan->tile_channels = shape.group_size;
      CutInBlocks(shape, plan);
      if (problem.op == Op::kBackward && !problem.sums_only) {
        plan->workspace_bytes = 2 * problem.n * problem.groups * SizeOf(problem.accumulator());
      }
      DescribeThreeStage(problem, plan);
      return Status();
    default:
      return JAX_GN_ERROR(kUnimplemented,
                          "family '" + std::string(kFamilyNames[static_cast<int>(preference)]) +
                              "' has no CPU code; use 'blocked' or 'three_stage'");
  }
}

}  // namespace jax_gn
