// Merging the moments of the blocks of a tile, in the blocks' order.
#ifndef JAX_GN_CPU_MERGE_H_
#define JAX_GN_CPU_MERGE_H_

#include <cstdint>

#include "cut.h"
#include "loops.h"

namespace jax_gn::cpu {

// Chan's formula for many parts at once: the means' weighted mean, taken relative to the first one
// so that equal means stay exact, then M2 = Σ M2_i + Σ n_i (mean_i - mean)². `partials` is
// [blocks][groups]; block i holds weight(i) elements of each group.
template <typename Weight>
void MergeMoments(const Moments* partials, int64_t blocks, int64_t groups, Weight weight,
                  Moments* out) {
  double total = 0;
  for (int64_t i = 0; i < blocks; ++i) total += weight(i);
  for (int64_t g = 0; g < groups; ++g) out[g] = {0, 0};
  for (int64_t i = 0; i < blocks; ++i) {
    const double share = weight(i) / total;
    const Moments* part = partials + i * groups;
    for (int64_t g = 0; g < groups; ++g) out[g].mean += share * (part[g].mean - partials[g].mean);
  }
  for (int64_t g = 0; g < groups; ++g) out[g].mean += partials[g].mean;
  for (int64_t i = 0; i < blocks; ++i) {
    const double count = weight(i);
    const Moments* part = partials + i * groups;
    for (int64_t g = 0; g < groups; ++g) {
      const double apart = part[g].mean - out[g].mean;
      out[g].m2 += part[g].m2 + count * apart * apart;
    }
  }
}

}  // namespace jax_gn::cpu

#endif  // JAX_GN_CPU_MERGE_H_
