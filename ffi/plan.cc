// The checks and figures that every platform's plan shares.
#include "plan.h"

#include <map>
#include <mutex>
#include <string>
#include <tuple>

namespace jax_gn {
namespace {

// Plans that are remembered at once; a process that has met more shapes starts anew.
constexpr size_t kMostRemembered = 4096;

// All that MakePlan looks at, in an order.
auto Key(const Problem& p, Platform platform, const DeviceLimits& device, Family preference) {
  return std::tuple(p.op, p.sums_only, p.dtype, p.layout, p.activation, p.scale, p.bias,
                    p.scale_dtype, p.bias_dtype, p.addend, p.addend_dtype, p.n, p.spatial,
                    p.channels, p.groups, platform, preference, device.capability,
                    device.multiprocessors, device.shared_memory_per_block, device.l2_bytes);
}

}  // namespace

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

Status RememberedPlan(const Problem& problem, Platform platform, const DeviceLimits& device,
                      Family preference, Plan* plan) {
  using Plans = std::map<decltype(Key(problem, platform, device, preference)), Plan>;
  static auto& mutex = *new std::mutex;  // never destroyed: XLA's threads may outlive main
  static auto& plans = *new Plans;
  const auto key = Key(problem, platform, device, preference);
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (const auto found = plans.find(key); found != plans.end()) {
      *plan = found->second;
      return Status();
    }
  }
  JAX_GN_TRY(MakePlan(problem, platform, device, preference, plan));
  const std::lock_guard<std::mutex> lock(mutex);
  if (plans.size() >= kMostRemembered) plans.clear();
  plans.emplace(key, *plan);
  return Status();
}

}  // namespace jax_gn
