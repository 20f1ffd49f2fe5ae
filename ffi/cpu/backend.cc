// Picks the driver of a plan and the loops of this machine.
#include "backend.h"

#include "families.h"
#include "loops.h"

namespace jax_gn::cpu {
namespace {

enum class Isa { kBaseline, kAvx2, kAvx512 };

// x86-64-v3 and -v4, feature by feature: not every compiler knows the levels' names.
Isa DetectIsa() {
#if defined(JAX_GN_X86_DISPATCH)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi") &&
      __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("lzcnt")) {
    const bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl");
    return v4 ? Isa::kAvx512 : Isa::kAvx2;
  }
#endif
  return Isa::kBaseline;
}

Isa MachineIsa() {
  static const Isa isa = DetectIsa();
  return isa;
}

}  // namespace

const char* InstructionSet() {
  switch (MachineIsa()) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kBaseline:
      break;
  }
  return "baseline";
}

Loops FindLoops(DType dtype, Activation activation) {
#if defined(JAX_GN_X86_DISPATCH)
  if (MachineIsa() == Isa::kAvx512) return avx512::FindLoops(dtype, activation);
  if (MachineIsa() == Isa::kAvx2) return avx2::FindLoops(dtype, activation);
#endif
  return baseline::FindLoops(dtype, activation);
}

Status RunForward(const Problem& problem, const Plan& plan, const ForwardArgs& args,
                  Executor& executor) {
  return plan.family == Family::kThreeStage ? ThreeStageForward(problem, plan, args, executor)
                                            : BlockedForward(problem, plan, args, executor);
}

Status RunBackward(const Problem& problem, const Plan& plan, const BackwardArgs& args,
                   Executor& executor) {
  return plan.family == Family::kThreeStage ? ThreeStageBackward(problem, plan, args, executor)
                                            : BlockedBackward(problem, plan, args, executor);
}

}  // namespace jax_gn::cpu
