// The launch shapes of the family "three_stage", for the planner.
#ifndef JAX_GN_CUDA_THREE_STAGE_H_
#define JAX_GN_CUDA_THREE_STAGE_H_

#include "cut.h"

namespace jax_gn::cuda {

// Neighbouring threads of stage 3 take neighbouring addresses: channels, or positions of one.
inline int64_t ChannelSumColumns(const Problem& problem) {
  return problem.layout == Layout::kChannelsLast ? 32 : 1;
}

// Blocks of stage 3 for the parameters of that form.
inline int64_t ChannelSumBlocks(const Problem& problem, Param form) {
  return (form == Param::kPerSample ? problem.n : 1) *
         CeilDiv(problem.channels, ChannelSumColumns(problem));
}

}  // namespace jax_gn::cuda

#endif  // JAX_GN_CUDA_THREE_STAGE_H_
