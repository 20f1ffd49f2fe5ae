// What every launcher needs: errors as Status, launch shapes, parameters, all element types.
#ifndef JAX_GN_CUDA_LAUNCH_H_
#define JAX_GN_CUDA_LAUNCH_H_

#include <cuda_runtime.h>

#include <string>

#include "../plan.h"
#include "pack.h"

namespace jax_gn::cuda {

// A CUDA error as a Status with CUDA's own text; cudaSuccess is ok. Clears CUDA's memory of it, so
// that the process stays usable.
inline Status ToStatus(cudaError_t error, const char* what, const char* file, int line) {
  if (error == cudaSuccess) return Status();
  static_cast<void>(cudaGetLastError());  // or the next launch would be blamed for it
  const StatusCode code =
      error == cudaErrorMemoryAllocation ? StatusCode::kResourceExhausted
      : error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion
          ? StatusCode::kUnimplemented
          : StatusCode::kInternal;
  std::string text =
      std::string(what) + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error);
  if (code == StatusCode::kUnimplemented) {
    text += "; rebuild jax_gn with this GPU in JAX_GN_CUDA_ARCHITECTURES";
  }
  return ErrorAt(file, line, code, text);
}

// The status of the launch just made.
#define JAX_GN_LAUNCHED(kernel) \
  ::jax_gn::cuda::ToStatus(cudaGetLastError(), kernel, __FILE_NAME__, __LINE__)

#define JAX_GN_FOR_ALL_ELEMENTS(INSTANTIATE) \
  INSTANTIATE(float)                         \
  INSTANTIATE(::jax_gn::Half)                \
  INSTANTIATE(::jax_gn::BFloat16)            \
  INSTANTIATE(double)

inline dim3 Grid(const Stage& stage) { return dim3(static_cast<unsigned>(stage.grid)); }

// Args: ForwardArgs or BackwardArgs.
template <typename Args>
Parameter ScaleOf(const Problem& problem, const Args& args) {
  return Parameter(args.scale, problem.scale_dtype, problem.scale, problem.channels);
}
template <typename Args>
Parameter BiasOf(const Problem& problem, const Args& args) {
  return Parameter(args.bias, problem.bias_dtype, problem.bias, problem.channels);
}

template <typename Args>
Parameter AddendOf(const Problem& problem, const Args& args) {
  return Parameter(args.addend, problem.addend_dtype, problem.addend, problem.channels);
}

// What the forward kernels read.
template <typename E>
struct ForwardInputs {
  const E* x;  // [N, S, C] or [N, C, S]
  Parameter scale, bias, addend;
  Activation activation;

  ForwardInputs(const Problem& problem, const ForwardArgs& args)
      : x(static_cast<const E*>(args.x)),
        scale(ScaleOf(problem, args)),
        bias(BiasOf(problem, args)),
        addend(AddendOf(problem, args)),
        activation(problem.activation) {}
};

// What the backward kernels read.
template <typename E>
struct BackwardInputs {
  const E* dy;                 // as x
  const E* x;                  // [N, S, C] or [N, C, S]
  const Accumulator<E>* mean;  // [N, G]
  const Accumulator<E>* rstd;  // [N, G]
  Parameter scale, bias, addend;
  Activation activation;
  bool lone;  // a group is one element

  BackwardInputs(const Problem& problem, const BackwardArgs& args)
      : dy(static_cast<const E*>(args.dy)),
        x(static_cast<const E*>(args.x)),
        mean(static_cast<const Accumulator<E>*>(args.mean)),
        rstd(static_cast<const Accumulator<E>*>(args.rstd)),
        scale(ScaleOf(problem, args)),
        bias(BiasOf(problem, args)),
        addend(AddendOf(problem, args)),
        activation(problem.activation),
        lone(problem.group_elements() == 1 && !problem.sums_only) {}

  // An element that is its own mean has dx = 0: rstd = 0 says so exactly, where x and mean - addend
  // would only cancel up to rounding.
  __device__ __forceinline__ Accumulator<E> Rstd(int64_t group) const {
    return lone ? Accumulator<E>(0) : rstd[group];
  }
};

}  // namespace jax_gn::cuda

#endif  // JAX_GN_CUDA_LAUNCH_H_
