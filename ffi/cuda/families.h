// The launchers of the kernel families. `plan` is MakeCudaPlan's for `problem`, which is not empty.
#ifndef JAX_GN_CUDA_FAMILIES_H_
#define JAX_GN_CUDA_FAMILIES_H_

#include <cuda_runtime.h>

#include "../plan.h"

namespace jax_gn::cuda {

Status LaunchThreeStageForward(const Problem& problem, const Plan& plan, const ForwardArgs& args,
                               cudaStream_t stream);
Status LaunchThreeStageBackward(const Problem& problem, const Plan& plan, const BackwardArgs& args,
                                cudaStream_t stream);

Status LaunchStreamingForward(const Problem& problem, const Plan& plan, const ForwardArgs& args,
                              cudaStream_t stream);
Status LaunchStreamingBackward(const Problem& problem, const Plan& plan, const BackwardArgs& args,
                               cudaStream_t stream);

// Buffers off the 16-byte borders, which XLA's never are, go to "streaming".
Status LaunchResidentForward(const Problem& problem, const Plan& plan, const ForwardArgs& args,
                             cudaStream_t stream);
Status LaunchResidentBackward(const Problem& problem, const Plan& plan, const BackwardArgs& args,
                              cudaStream_t stream);

// The results of nothing, where N or the spatial size is 0: mean = 0, rstd = 1/sqrt(epsilon),
// dscale = dbias = 0; sums_only: everything 0.
Status LaunchEmptyForward(const Problem& problem, const ForwardArgs& args, cudaStream_t stream);
Status LaunchEmptyBackward(const Problem& problem, const BackwardArgs& args, cudaStream_t stream);

}  // namespace jax_gn::cuda

#endif  // JAX_GN_CUDA_FAMILIES_H_
