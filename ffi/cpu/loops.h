// The inner loops' interface: one table of functions per element type and activation, made once per
// instruction set (loops.cc), called by the two families' drivers.
#ifndef JAX_GN_CPU_LOOPS_H_
#define JAX_GN_CPU_LOOPS_H_

#include <cstdint>

#include "../problem.h"

namespace jax_gn::cpu {

// Mean and sum of squared deviations from it, of a stated number of elements.
struct Moments {
  double mean;
  double m2;
};

// What normalises a group.
struct Affine {
  double mean;
  double rstd;
};

// dx = rstd * scale * dz + slope * (x - mean) + shift.
struct GradientAffine {
  double slope;
  double shift;
};

// A rectangle of one sample as the loops see it: `channels` consecutive channels, whole groups of
// them or a part of one group, by `positions` spatial positions.
struct Tile {
  Layout layout;  // channels last also where there is one position: the memory is the same
  int64_t channels;
  int64_t group_size;  // divides channels
  int64_t positions;
  int64_t stride;  // elements from a position (channels first: a channel) to the next
  // Channels last: so many positions are taken as one row of fold * channels columns, so that a few
  // or an odd number of channels still fill registers.
  int64_t fold;
  bool stream;  // the result is too large to stay in any cache

  int64_t groups() const { return channels / group_size; }
  int64_t columns() const { return channels * fold; }
};

// A worker's arrays, one entry per column; T* where void*, T being the accumulator type.
struct Scratch {
  void* mean;  // less the addend, as it comes off x
  void* a;     // rstd * scale: z = (x - mean) * a + b
  void* b;
  void* slope;  // of GradientAffine
  void* shift;
  void* scale;       // [channels], as loaded; the value that stands for an absent one otherwise
  void* bias;        // [channels]
  void* addend;      // [channels], 0 for an absent one
  double* first;     // sums; gradient_sums leaves Σ dz in the first [channels]
  double* second;    // and here Σ dz (x - mean)
  Moments* moments;  // [groups]
  Affine* affine;    // [groups]
  GradientAffine* gradient;  // [groups]
};

struct Loops {
  // Copies `count` values from element `first` on to `out`; fills with `absent` if `from` is null.
  void (*load_parameter)(DType dtype, const void* from, int64_t first, int64_t count, double absent,
                         void* out);
  // scratch.mean, a, b from affine[groups], scratch.scale, bias and addend.
  void (*coefficients)(const Tile& tile, const Affine* affine, const Scratch& scratch);
  // Once a tile's sums are complete: scratch.second *= rstd, and out[groups] from it, scratch.first
  // and scratch.scale, each group having `elements`.
  void (*finish_sums)(const Tile& tile, const Affine* affine, int64_t elements,
                      const Scratch& scratch, GradientAffine* out);
  // scratch.slope and shift from gradient[groups].
  void (*gradient_coefficients)(const Tile& tile, const GradientAffine* gradient,
                                const Scratch& scratch);
  // out[groups], of x, or of x + scratch.addend; x is small enough to be read twice from cache.
  void (*moments)(const void* x, bool add, const Tile& tile, const Scratch& scratch, Moments* out);
  void (*apply)(const void* x, void* y, const Tile& tile, const Scratch& scratch);
  // scratch.first = Σ dz and scratch.second = Σ dz (x - mean), per channel.
  void (*gradient_sums)(const void* dy, const void* x, const Tile& tile, const Scratch& scratch);
  void (*gradient_apply)(const void* dy, const void* x, void* dx, const Tile& tile,
                         const Scratch& scratch);
};

// One per instruction set; of those that are linked, backend.cc picks what the machine has.
namespace baseline {
Loops FindLoops(DType dtype, Activation activation);
}
namespace avx2 {
Loops FindLoops(DType dtype, Activation activation);
}
namespace avx512 {
Loops FindLoops(DType dtype, Activation activation);
}

// Those of this machine.
Loops FindLoops(DType dtype, Activation activation);

}  // namespace jax_gn::cpu

#endif  // JAX_GN_CPU_LOOPS_H_
