// The checks and figures that every platform's plan shares.
#include "plan.h"

#include <string>

namespace jax_gn {

int64_t CompulsoryBytes(const Problem& problem) {
  const int64_t read = problem.op == Op::kForward ? 1 : 2;     // x  or  dy, x
  const int64_t tensors = read + (problem.sums_only ? 0 : 1);  // y  or  dx
  return tensors * problem.elements() * SizeOf(problem.dtype);
}

Status MakePlan(const Problem& problem, Platform platform, const DeviceLimits& device,
                Family preference, Plan* plan) {
  if (problem.n < 0 || problem.spatial < 0 || problem.channels < 1) {
    return JAX_GN_ERROR(kInvalidArgument, "sizes must be >= 0 and channels >= 1, got n " +
                                              std::to_string(problem.n) + ", spatial " +
                                              std::to_string(problem.spatial) + ", channels " +
                                              std::to_string(problem.channels));
  }
  if (problem.groups < 1 || problem.channels % problem.groups != 0) {
    return JAX_GN_ERROR(kInvalidArgument, "num_groups must be >= 1 and divide the channels, got " +
                                              std::to_string(problem.groups) + " groups, " +
                                              std::to_string(problem.channels) + " channels");
  }
  *plan = Plan();
  return platform == Platform::kCpu ? MakeCpuPlan(problem, preference, plan)
                                    : MakeCudaPlan(problem, device, preference, plan);
}

}  // namespace jax_gn
