// The CPU backend's front door: what cpu_module.cc calls, and what it has to offer.
#ifndef JAX_GN_CPU_BACKEND_H_
#define JAX_GN_CPU_BACKEND_H_

#include <functional>

#include "../plan.h"
#include "../problem.h"
#include "../status.h"

namespace jax_gn::cpu {

// Where work can be put besides the calling thread: XLA's own pool, or a test's.
class Executor {
 public:
  virtual ~Executor() = default;
  virtual int num_threads() const = 0;
  // Runs `task` later on some thread, maybe only after the call that scheduled it has returned.
  virtual void Schedule(std::function<void()> task) = 0;
};

// The instruction set that the loops use on this machine: "baseline", "avx2" or "avx512".
const char* InstructionSet();

// Both return when every result is written. The problem is valid and not empty (N, spatial > 0).
Status RunForward(const Problem& problem, const Plan& plan, const ForwardArgs& args,
                  Executor& executor);
Status RunBackward(const Problem& problem, const Plan& plan, const BackwardArgs& args,
                   Executor& executor);

}  // namespace jax_gn::cpu

#endif  // JAX_GN_CPU_BACKEND_H_
