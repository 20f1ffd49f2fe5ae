// Kernels with a bug each, so that a clean sanitizer report means something: the same tool, on the
// same machine, has just found one.
#include "device_case.h"

namespace jax_gn::harness {
namespace {

constexpr int kThreads = 256;

__global__ void OutOfBoundsKernel(float* numbers) { numbers[threadIdx.x + 1] = 1; }

__global__ void UninitialisedKernel(const float* numbers, float* sum) {
  atomicAdd(sum, numbers[threadIdx.x]);
}

__global__ void RaceKernel(float* numbers) {
  __shared__ float shared[kThreads];
  shared[threadIdx.x] = static_cast<float>(threadIdx.x);
  // A barrier is missing here.
  numbers[threadIdx.x] = shared[(threadIdx.x + 33) % kThreads];
}

}  // namespace

int Plant(const std::string& bug) {
  float *numbers, *sum;
  HARNESS_CUDA(cudaMalloc(&numbers, kThreads * sizeof(float)));
  HARNESS_CUDA(cudaMalloc(&sum, sizeof(float)));
  HARNESS_CUDA(cudaMemset(sum, 0, sizeof(float)));
  if (bug == "out_of_bounds") {
    // Of `sum`, which ends in the middle of its 512 bytes: behind `numbers` another buffer begins.
    OutOfBoundsKernel<<<1, 1>>>(sum);
  } else if (bug == "uninitialised") {
    UninitialisedKernel<<<1, kThreads>>>(numbers, sum);
  } else if (bug == "race") {
    RaceKernel<<<1, kThreads>>>(numbers);
  } else {
    std::fprintf(stderr, "no such bug: %s\n", bug.c_str());
    return 1;
  }
  const cudaError_t error = cudaDeviceSynchronize();
  std::printf("planted %s: %s\n", bug.c_str(), cudaGetErrorString(error));
  return 0;
}

}  // namespace jax_gn::harness
