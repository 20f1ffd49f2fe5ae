// The launchers of the family "streaming", and the parts of the workspace that they hand on.
#ifndef JAX_GN_CUDA_STREAMING_H_
#define JAX_GN_CUDA_STREAMING_H_

#include "launch.h"
#include "sums.h"

namespace jax_gn::cuda {

template <typename E>
struct ForwardSpace {
  Moments* parts;  // of groups: channels last [N, pieces, places], channels first [N, G, pieces]
  Statistics<Accumulator<E>> statistics;

  ForwardSpace(const Problem& problem, const ForwardArgs& args) {
    using T = Accumulator<E>;
    const Workspace layout = LayOut(problem);
    char* const base = static_cast<char*>(args.workspace);
    parts = reinterpret_cast<Moments*>(base + layout.group_sums);
    T* const mean_low = problem.sums_only ? static_cast<T*>(args.mean_low)
                                          : reinterpret_cast<T*>(base + layout.results);
    statistics = {static_cast<T*>(args.mean), static_cast<T*>(args.rstd), mean_low, args.epsilon,
                  static_cast<T*>(args.variance)};
  }
};

template <typename E>
struct BackwardSpace {
  using Sums = Pair<Accumulator<E>>;
  Sums* channel_rows;  // [rows, C]: of dz and dz * xhat; channels first a row per (n, piece)
  Sums* parts;         // [N, pieces, places]: scaled, of groups; channels last only
  Sums* means;         // [N, G]: of the whole groups; nullptr: only the channels' are wanted

  BackwardSpace(const Problem& problem, const BackwardArgs& args) {
    const Workspace layout = LayOut(problem);
    char* const base = static_cast<char*>(args.workspace);
    channel_rows = reinterpret_cast<Sums*>(base);
    parts = reinterpret_cast<Sums*>(base + layout.group_sums);
    means = problem.sums_only ? nullptr : reinterpret_cast<Sums*>(base + layout.results);
  }
};

// rows_forward.cu, rows_backward.cu
template <typename E>
Status LaunchRowMoments(const Problem&, const RowCut&, const Stage&, const ForwardArgs&,
                        const ForwardSpace<E>&, cudaStream_t);
template <typename E>
Status LaunchRowApply(const Problem&, const RowCut&, const Stage&, const ForwardArgs&,
                      const ForwardSpace<E>&, cudaStream_t);
template <typename E>
Status LaunchRowSums(const Problem&, const RowCut&, const Stage&, const BackwardArgs&,
                     const BackwardSpace<E>&, cudaStream_t);
template <typename E>
Status LaunchRowGradient(const Problem&, const RowCut&, const Stage&, const BackwardArgs&,
                         const BackwardSpace<E>&, cudaStream_t);

// features.cu
template <typename E>
Status LaunchFeatureForward(const Problem&, const RowCut&, const Stage&, const ForwardArgs&,
                            cudaStream_t);
template <typename E>
Status LaunchFeatureBackward(const Problem&, const RowCut&, const Stage&, const BackwardArgs&,
                             const BackwardSpace<E>&, cudaStream_t);

// runs_forward.cu, runs_backward.cu
template <typename E>
Status LaunchRunMoments(const Problem&, const RunCut&, const Stage&, const ForwardArgs&,
                        const ForwardSpace<E>&, cudaStream_t);
template <typename E>
Status LaunchRunApply(const Problem&, const RunCut&, const Stage&, const ForwardArgs&,
                      const ForwardSpace<E>&, cudaStream_t);
template <typename E>
Status LaunchRunSums(const Problem&, const RunCut&, const Stage&, const BackwardArgs&,
                     const BackwardSpace<E>&, cudaStream_t);
template <typename E>
Status LaunchRunGradient(const Problem&, const RunCut&, const Stage&, const BackwardArgs&,
                         const BackwardSpace<E>&, cudaStream_t);

// combine.cu. T: the accumulator.
template <typename T>
Status LaunchCombineMoments(const Problem&, const Stage&, const Moments* parts,
                            const Statistics<T>&, cudaStream_t);
template <typename T>
Status LaunchCombineSums(const Problem&, const Stage&, const BackwardArgs&,
                         const Pair<T>* channel_rows, const Pair<T>* parts, Pair<T>* means,
                         cudaStream_t);
// channel_rows: [rows, C], the same number of rows for each sample or for blocks of samples.
template <typename T>
Status LaunchParameterSums(const Problem&, const Stage&, const BackwardArgs&, Param form,
                           int64_t rows, const Pair<T>* channel_rows, cudaStream_t);

}  // namespace jax_gn::cuda

#endif  // JAX_GN_CUDA_STREAMING_H_
