// The CUDA backend as the module sees it: which device, and run a decoded call on a stream.
#ifndef JAX_GN_CUDA_BACKEND_H_
#define JAX_GN_CUDA_BACKEND_H_

#include <cuda_runtime.h>

#include <string>

#include "../plan.h"
#include "../problem.h"
#include "../status.h"

namespace jax_gn::cuda {

// Limits of a device, asked for once in the process.
Status LimitsOf(int ordinal, DeviceLimits* limits);
// Of the calling thread's current device.
Status CurrentLimits(DeviceLimits* limits);

// `plan` is MakePlan's for `problem`; the arguments are device pointers. Everything is put on
// `stream`: nothing is allocated, waited for or asked of the device.
Status RunForward(const Problem& problem, const Plan& plan, const ForwardArgs& args,
                  cudaStream_t stream);
Status RunBackward(const Problem& problem, const Plan& plan, const BackwardArgs& args,
                   cudaStream_t stream);

// Versions as CUDA counts them (13000 for 13.0); 0 for a driver that is not there.
int DriverVersion();
int RuntimeVersion();
// The compute capabilities that have machine code in this build: "75;90".
std::string CompiledArchitectures();

}  // namespace jax_gn::cuda

#endif  // JAX_GN_CUDA_BACKEND_H_
