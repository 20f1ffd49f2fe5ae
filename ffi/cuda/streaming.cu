// The family "streaming": a reading pass that leaves partial sums in fixed places of the workspace,
// a small combining step, a writing pass; the stages follow one another on the stream as the plan
// lists them; with sums_only the first two steps are all. The kernels are in rows_*.cu (channels
// last), runs_*.cu (channels first), features.cu (no spatial axis: all passes in one), combine.cu.
#include "families.h"
#include "streaming.h"

namespace jax_gn::cuda {
namespace {

template <typename E>
Status Forward(const Problem& problem, const Plan& plan, const ForwardArgs& args,
               cudaStream_t stream) {
  const ForwardSpace<E> space(problem, args);
  const Stage* stage = plan.stages.data();
  const auto combine = [&] {
    return LaunchCombineMoments<Accumulator<E>>(problem, *stage++, space.parts, space.statistics,
                                                stream);
  };
  if (problem.spatial == 1 && CutRows(problem).warp_lanes > 0) {
    return LaunchFeatureForward<E>(problem, CutRows(problem), *stage++, args, stream);
  }
  if (GroupsAreRuns(problem)) {
    const RunCut cut = CutRuns(problem, problem.groups);
    JAX_GN_TRY(LaunchRunMoments<E>(problem, cut, *stage++, args, space, stream));
    if (cut.pieces > 1) JAX_GN_TRY(combine());
  } else {
    const RowCut cut = CutRows(problem);
    JAX_GN_TRY(LaunchRowMoments<E>(problem, cut, *stage++, args, space, stream));
    if (!cut.whole_groups()) JAX_GN_TRY(combine());
  }
  if (problem.sums_only) return Status();
  if (LayoutOf(problem) == Layout::kChannelsLast) {
    return LaunchRowApply<E>(problem, CutRowsToWrite(problem), *stage++, args, space, stream);
  }
  return LaunchRunApply<E>(problem, CutRunsToWrite(problem), *stage++, args, space, stream);
}

template <typename E>
Status Backward(const Problem& problem, const Plan& plan, const BackwardArgs& args,
                cudaStream_t stream) {
  const BackwardSpace<E> space(problem, args);
  const Stage* stage = plan.stages.data();
  const auto combine = [&] {
    return LaunchCombineSums<Accumulator<E>>(problem, *stage++, args, space.channel_rows,
                                             space.parts, space.means, stream);
  };
  if (LayoutOf(problem) == Layout::kChannelsLast) {
    const RowCut cut = CutRows(problem);
    if (cut.warp_lanes > 0) {
      JAX_GN_TRY(LaunchFeatureBackward<E>(problem, cut, *stage++, args, space, stream));
    } else {
      JAX_GN_TRY(LaunchRowSums<E>(problem, cut, *stage++, args, space, stream));
      if (!problem.sums_only) {
        if (!cut.whole_groups()) JAX_GN_TRY(combine());
        JAX_GN_TRY(
            LaunchRowGradient<E>(problem, CutRowsToWrite(problem), *stage++, args, space, stream));
      }
    }
  } else {
    const RunCut cut = CutRuns(problem, problem.channels);
    JAX_GN_TRY(LaunchRunSums<E>(problem, cut, *stage++, args, space, stream));
    if (!problem.sums_only) {
      JAX_GN_TRY(combine());
      JAX_GN_TRY(
          LaunchRunGradient<E>(problem, CutRunsToWrite(problem), *stage++, args, space, stream));
    }
  }
  for (const Param form : {Param::kPerChannel, Param::kPerSample}) {
    if (problem.dscale() != form && problem.dbias() != form) continue;
    JAX_GN_TRY(LaunchParameterSums<Accumulator<E>>(
        problem, *stage++, args, form, LayOut(problem).channel_rows, space.channel_rows, stream));
  }
  return Status();
}

}  // namespace

Status LaunchStreamingForward(const Problem& problem, const Plan& plan, const ForwardArgs& args,
                              cudaStream_t stream) {
  return VisitElement(problem.dtype, [&](auto element) {
    return Forward<decltype(element)>(problem, plan, args, stream);
  });
}

Status LaunchStreamingBackward(const Problem& problem, const Plan& plan, const BackwardArgs& args,
                               cudaStream_t stream) {
  return VisitElement(problem.dtype, [&](auto element) {
    return Backward<decltype(element)>(problem, plan, args, stream);
  });
}

}  // namespace jax_gn::cuda
