// Which kernel family serves a problem, its launch shape and its workspace: host arithmetic only.
//
// The same functions answer Python (jax_gn.plan_forward, and the size of the workspace that a
// traced call asks XLA for) and the handlers (at run time, with the limits of the device they run
// on). So the tracing machine need not be the running one: `workspace_bytes` depends on the
// problem, the platform and the preference alone, never on the device, and everything else may.
#ifndef JAX_GN_PLAN_H_
#define JAX_GN_PLAN_H_

#include <array>
#include <cstdint>
#include <string_view>

#include "problem.h"
#include "status.h"

namespace jax_gn {

// kAuto is a preference only: no plan has it.
enum class Family { kAuto, kThreeStage, kBlocked, kStreaming, kResident };
inline constexpr std::string_view kFamilyNames[] = {"auto", "three_stage", "blocked", "streaming",
                                                    "resident"};

// The limits of a CUDA device that plans depend on. Defaults: an H200's.
struct DeviceLimits {
  int capability = 90;
  int multiprocessors = 132;
  int64_t shared_memory_per_block = 232448;
  int64_t l2_bytes = 62914560;
};

// One kernel launch (CUDA) or one parallel loop (CPU, where `grid` counts its tasks).
struct Stage {
  std::string_view kernel;
  int64_t grid = 0;
  int threads = 1;
  int64_t shared_bytes = 0;
};

struct Plan {
  static constexpr int kMaxStages = 5;

  Family family = Family::kThreeStage;
  int64_t workspace_bytes = 0;
  // Bytes of x, y, dy, dx that the stages read and write in device memory, if no cache helps.
  int64_t bytes_moved = 0;
  int num_stages = 0;
  std::array<Stage, kMaxStages> stages;

  // How a sample is cut: `tile_channels` consecutive channels (whole groups) by `block_extent`
  // spatial positions (channels first, where a block is a run of one group's memory: elements).
  // `blocks` of them cover the tile.
  int64_t tile_channels = 0;
  int64_t block_extent = 0;
  int64_t blocks = 1;
  // "resident": threads beside each other (of a tile's row, or of a channel's segment); 0 where
  // they take a group's packs in turn, whatever their channel.
  int64_t width = 0;
  int64_t block_slabs =
      1;  // "resident": slabs of a block; more than one: a warp has one for itself

  int64_t tiles(const Problem& problem) const {
    return (problem.channels + tile_channels - 1) / tile_channels;
  }
  void AddStage(Stage stage) { stages[num_stages++] = stage; }
};

// Bytes that any implementation must move: each tensor read or written once.
int64_t CompulsoryBytes(const Problem& problem);

// Fills `plan`. INVALID_ARGUMENT for what is no GroupNorm at all, UNIMPLEMENTED where the named
// family can't serve a valid problem.
Status MakePlan(const Problem& problem, Platform platform, const DeviceLimits& device,
                Family preference, Plan* plan);

// The same, from memory where it was asked before: choosing among hundreds of cuts takes 3 to 30 us
// of a host that may have a kernel to launch every 5. Any thread may call it.
Status RememberedPlan(const Problem& problem, Platform platform, const DeviceLimits& device,
                      Family preference, Plan* plan);

// The two halves of MakePlan, each in its own file; the problem is valid and not empty.
Status MakeCpuPlan(const Problem& problem, Family preference, Plan* plan);
Status MakeCudaPlan(const Problem& problem, const DeviceLimits& device, Family preference,
                    Plan* plan);

}  // namespace jax_gn

#endif  // JAX_GN_PLAN_H_
