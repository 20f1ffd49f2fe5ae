// Devices, and the way from a call to its family's launcher.
#include <array>
#include <mutex>

#include "backend.h"
#include "families.h"
#include "launch.h"

#define JAX_GN_CUDA_TRY(call) \
  JAX_GN_TRY(::jax_gn::cuda::ToStatus((call), #call, __FILE_NAME__, __LINE__))

namespace jax_gn::cuda {
namespace {

constexpr int kMaxDevices = 64;

Status AskLimits(int ordinal, DeviceLimits* limits) {
  const auto ask = [ordinal](cudaDeviceAttr attribute, int* value) {
    return cudaDeviceGetAttribute(value, attribute, ordinal);
  };
  int major = 0, minor = 0, multiprocessors = 0, shared = 0, l2 = 0;
  JAX_GN_CUDA_TRY(ask(cudaDevAttrComputeCapabilityMajor, &major));
  JAX_GN_CUDA_TRY(ask(cudaDevAttrComputeCapabilityMinor, &minor));
  JAX_GN_CUDA_TRY(ask(cudaDevAttrMultiProcessorCount, &multiprocessors));
  JAX_GN_CUDA_TRY(ask(cudaDevAttrMaxSharedMemoryPerBlockOptin, &shared));
  JAX_GN_CUDA_TRY(ask(cudaDevAttrL2CacheSize, &l2));
  *limits = {major * 10 + minor, multiprocessors, shared, l2};
  return Status();
}

bool IsEmpty(const Problem& problem) { return problem.n == 0 || problem.spatial == 0; }

}  // namespace

Status LimitsOf(int ordinal, DeviceLimits* limits) {
  // Limits don't change while the process runs; a device beyond the cache is asked each time.
  static std::array<DeviceLimits, kMaxDevices> cache;
  static std::array<bool, kMaxDevices> known = {};
  static std::mutex mutex;
  if (ordinal < 0 || ordinal >= kMaxDevices) return AskLimits(ordinal, limits);
  const std::lock_guard<std::mutex> lock(mutex);
  if (!known[ordinal]) {
    JAX_GN_TRY(AskLimits(ordinal, &cache[ordinal]));
    known[ordinal] = true;
  }
  *limits = cache[ordinal];
  return Status();
}

Status CurrentLimits(DeviceLimits* limits) {
  int ordinal = 0;
  JAX_GN_CUDA_TRY(cudaGetDevice(&ordinal));
  return LimitsOf(ordinal, limits);
}

Status RunForward(const Problem& problem, const Plan& plan, const ForwardArgs& args,
                  cudaStream_t stream) {
  if (IsEmpty(problem)) return LaunchEmptyForward(problem, args, stream);
  switch (plan.family) {
    case Family::kThreeStage:
      return LaunchThreeStageForward(problem, plan, args, stream);
    case Family::kResident:
      return LaunchResidentForward(problem, plan, args, stream);
    default:
      return LaunchStreamingForward(problem, plan, args, stream);
  }
}

Status RunBackward(const Problem& problem, const Plan& plan, const BackwardArgs& args,
                   cudaStream_t stream) {
  if (IsEmpty(problem)) return LaunchEmptyBackward(problem, args, stream);
  switch (plan.family) {
    case Family::kThreeStage:
      return LaunchThreeStageBackward(problem, plan, args, stream);
    case Family::kResident:
      return LaunchResidentBackward(problem, plan, args, stream);
    default:
      return LaunchStreamingBackward(problem, plan, args, stream);
  }
}

int DriverVersion() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

int RuntimeVersion() {
  int version = 0;
  return cudaRuntimeGetVersion(&version) == cudaSuccess ? version : 0;
}

std::string CompiledArchitectures() {
  // nvcc's list is 900,750 for sm_90 and sm_75.
  constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};
  std::string text;
  for (const int architecture : kArchitectures) {
    text += (text.empty() ? "" : ";") + std::to_string(architecture / 10);
  }
  return text;
}

}  // namespace jax_gn::cuda
