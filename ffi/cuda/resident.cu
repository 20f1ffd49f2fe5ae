// The family "resident": each tensor crosses the memory bus once, in one kernel, after which the
// partial sums of dscale and dbias are added up. The kernels are in resident_rows*.cu (channels
// last), and for channels first in resident_runs*.cu, resident_packs*.cu (short channels) and
// resident_spans*.cu (grid teams).
#include "families.h"
#include "resident_kernels.h"
#include "streaming.h"

namespace jax_gn::cuda {
namespace {

template <typename... Pointers>
bool Aligned(Pointers... pointers) {
  return (... && (reinterpret_cast<uintptr_t>(pointers) % kPackBytes == 0));
}

// visit(E()) for the family's element types.
template <typename Visitor>
Status VisitResident(DType dtype, Visitor&& visit) {
  switch (dtype) {
    case DType::kFloat32:
      return visit(float());
    case DType::kFloat16:
      return visit(Half());
    case DType::kBFloat16:
      return visit(BFloat16());
    case DType::kFloat64:
      break;
  }
  return JAX_GN_ERROR(kInternal, "family 'resident' was planned for float64");
}

Status StreamingPlan(const Problem& problem, Plan* plan) {
  return MakePlan(problem, Platform::kCuda, DeviceLimits(), Family::kStreaming, plan);
}

}  // namespace

Status LaunchResidentForward(const Problem& problem, const Plan& plan, const ForwardArgs& args,
                             cudaStream_t stream) {
  if (!Aligned(args.x, args.y)) {
    Plan streaming;
    JAX_GN_TRY(StreamingPlan(problem, &streaming));
    return LaunchStreamingForward(problem, streaming, args, stream);
  }
  const ResidentCut cut = CutOf(problem, plan);
  return VisitResident(problem.dtype, [&](auto element) {
    using E = decltype(element);
    const auto launch = cut.rows()    ? LaunchResidentTileForward<E>
                        : cut.packs() ? LaunchResidentPackForward<E>
                        : cut.spans() ? LaunchResidentSpanForward<E>
                                      : LaunchResidentRunForward<E>;
    return launch(problem, cut, plan.stages[0], args, stream);
  });
}

Status LaunchResidentBackward(const Problem& problem, const Plan& plan, const BackwardArgs& args,
                              cudaStream_t stream) {
  if (!Aligned(args.x, args.dy, args.dx)) {
    Plan streaming;
    JAX_GN_TRY(StreamingPlan(problem, &streaming));
    return LaunchStreamingBackward(problem, streaming, args, stream);
  }
  const ResidentCut cut = CutOf(problem, plan);
  const Stage* stage = plan.stages.data();
  JAX_GN_TRY(VisitResident(problem.dtype, [&](auto element) {
    using E = decltype(element);
    const auto launch = cut.rows()    ? LaunchResidentTileBackward<E>
                        : cut.packs() ? LaunchResidentPackBackward<E>
                        : cut.spans() ? LaunchResidentSpanBackward<E>
                                      : LaunchResidentRunBackward<E>;
    return launch(problem, cut, *stage++, args, stream);
  }));
  for (const Param form : {Param::kPerChannel, Param::kPerSample}) {
    if (problem.scale != form && problem.bias != form) continue;
    JAX_GN_TRY(LaunchParameterSums<float>(problem, *stage++, args, form, ResidentRows(problem, cut),
                                          static_cast<const Pair<float>*>(args.workspace), stream));
  }
  return Status();
}

}  // namespace jax_gn::cuda
