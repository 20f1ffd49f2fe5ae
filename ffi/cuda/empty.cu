// The results of nothing. XLA's buffers start as garbage, so that an empty problem, too, writes all
// of them: FillKernel writes one number a thread, gradients are set to zero bytes.
#include <cmath>

#include "families.h"
#include "launch.h"

namespace jax_gn::cuda {
namespace {

template <typename T>
__global__ void __launch_bounds__(kThreads)
    FillKernel(int64_t count, T mean_value, T rstd_value, T* mean, T* rstd) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  mean[i] = mean_value;
  rstd[i] = rstd_value;
}

Status Zero(void* to, int64_t bytes, cudaStream_t stream) {
  if (bytes == 0) return Status();
  return ToStatus(cudaMemsetAsync(to, 0, bytes, stream), "cudaMemsetAsync", __FILE_NAME__,
                  __LINE__);
}

}  // namespace

Status LaunchEmptyForward(const Problem& problem, const ForwardArgs& args, cudaStream_t stream) {
  const int64_t count = problem.n * problem.groups;
  if (count == 0) return Status();
  if (problem.sums_only) {
    for (void* sums : {args.mean, args.mean_low, args.variance}) {
      JAX_GN_TRY(Zero(sums, count * SizeOf(problem.accumulator()), stream));
    }
    return Status();
  }
  return VisitElement(problem.accumulator(), [&](auto element) {
    using T = Accumulator<decltype(element)>;
    FillKernel<T><<<static_cast<unsigned>(CeilDiv(count, kThreads)), kThreads, 0, stream>>>(
        count, T(0), static_cast<T>(1 / std::sqrt(args.epsilon)), static_cast<T*>(args.mean),
        static_cast<T*>(args.rstd));
    return JAX_GN_LAUNCHED("FillKernel");
  });
}

Status LaunchEmptyBackward(const Problem& problem, const BackwardArgs& args, cudaStream_t stream) {
  JAX_GN_TRY(Zero(args.dscale,
                  ParamElements(problem, problem.dscale()) * SizeOf(problem.dscale_dtype()),
                  stream));
  return Zero(args.dbias, ParamElements(problem, problem.dbias()) * SizeOf(problem.dbias_dtype()),
              stream);
}

}  // namespace jax_gn::cuda
