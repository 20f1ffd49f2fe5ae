// The drivers that backend.cc chooses from, by the plan's family.
#ifndef JAX_GN_CPU_FAMILIES_H_
#define JAX_GN_CPU_FAMILIES_H_

#include "backend.h"

namespace jax_gn::cpu {

Status BlockedForward(const Problem& problem, const Plan& plan, const ForwardArgs& args,
                      Executor& executor);
Status BlockedBackward(const Problem& problem, const Plan& plan, const BackwardArgs& args,
                       Executor& executor);
Status ThreeStageForward(const Problem& problem, const Plan& plan, const ForwardArgs& args,
                         Executor& executor);
Status ThreeStageBackward(const Problem& problem, const Plan& plan, const BackwardArgs& args,
                          Executor& executor);

}  // namespace jax_gn::cpu

#endif  // JAX_GN_CPU_FAMILIES_H_
