// What both families' drivers need around the loops: scratch memory, parameters, results.
#ifndef JAX_GN_CPU_CALL_H_
#define JAX_GN_CPU_CALL_H_

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "../element.h"
#include "backend.h"
#include "cut.h"
#include "loops.h"

namespace jax_gn::cpu {

// The address of element `offset` of a tensor or parameter.
inline const void* At(const void* base, DType dtype, int64_t offset) {
  return static_cast<const char*>(base) + offset * SizeOf(dtype);
}
inline void* At(void* base, DType dtype, int64_t offset) {
  return static_cast<char*>(base) + offset * SizeOf(dtype);
}

// to[first + i] = from[i].
inline void StoreNumbers(DType dtype, void* to, int64_t first, const double* from, int64_t count) {
  VisitElement(dtype, [&](auto element) {
    using E = decltype(element);
    E* out = static_cast<E*>(to) + first;
    for (int64_t i = 0; i < count; ++i) {
      out[i] = ToElement<E>(static_cast<Accumulator<E>>(from[i]));
    }
  });
}

inline double LoadNumber(DType dtype, const void* from, int64_t index) {
  return VisitElement(dtype, [&](auto element) {
    return static_cast<double>(ToNumber(static_cast<const decltype(element)*>(from)[index]));
  });
}

// One Scratch a worker, in one allocation.
class ScratchPool {
 public:
  ScratchPool(int workers, int64_t columns) : columns_(CeilDiv(columns, kAlign) * kAlign + kAlign) {
    const size_t bytes = static_cast<size_t>(workers) * columns_ * kBytesPerColumn;
    memory_.reset(static_cast<char*>(std::aligned_alloc(kAlign, bytes)));
  }

  bool ok() const { return memory_ != nullptr; }

  Scratch operator[](int worker) const {
    char* next = memory_.get() + worker * columns_ * kBytesPerColumn;
    const auto take = [&](int64_t bytes) {
      char* taken = next;
      next += columns_ * bytes;
      return static_cast<void*>(taken);
    };
    Scratch s;
    for (void** array : {&s.mean, &s.a, &s.b, &s.slope, &s.shift, &s.scale, &s.bias, &s.addend}) {
      *array = take(sizeof(double));
    }
    s.first = static_cast<double*>(take(sizeof(double)));
    s.second = static_cast<double*>(take(sizeof(double)));
    s.moments = static_cast<Moments*>(take(sizeof(Moments)));
    s.affine = static_cast<Affine*>(take(sizeof(Affine)));
    s.gradient = static_cast<GradientAffine*>(take(sizeof(GradientAffine)));
    return s;
  }

  static Status Exhausted() {
    return JAX_GN_ERROR(kResourceExhausted, "no memory for the CPU workers' scratch");
  }

 private:
  // Cache lines, and room for a register beyond the last column.
  static constexpr int64_t kAlign = 64;
  static constexpr int64_t kBytesPerColumn =
      10 * sizeof(double) + sizeof(Moments) + sizeof(Affine) + sizeof(GradientAffine);
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  int64_t columns_;
  std::unique_ptr<char, Free> memory_;
};

// The first of a block's channels in a parameter.
inline int64_t FirstOf(const Problem& problem, Param param, const Block& block) {
  return block.channel + (param == Param::kPerSample ? block.n * problem.channels : 0);
}

// scratch.addend of a block. Args: ForwardArgs or BackwardArgs.
template <typename Args>
void LoadAddend(const Problem& problem, const Args& args, const Loops& loops, const Block& block,
                const Scratch& scratch) {
  loops.load_parameter(problem.addend_dtype, args.addend, FirstOf(problem, problem.addend, block),
                       block.channels, 0.0, scratch.addend);
}

// scratch.scale, bias and addend of a block.
template <typename Args>
void LoadParameters(const Problem& problem, const Args& args, const Loops& loops,
                    const Block& block, const Scratch& scratch) {
  loops.load_parameter(problem.scale_dtype, args.scale, FirstOf(problem, problem.scale, block),
                       block.channels, 1.0, scratch.scale);
  loops.load_parameter(problem.bias_dtype, args.bias, FirstOf(problem, problem.bias, block),
                       block.channels, 0.0, scratch.bias);
  LoadAddend(problem, args, loops, block, scratch);
}

// The same, where the scratch may hold them from the sample before.
template <typename Args>
void ReloadParameters(const Problem& problem, const Args& args, const Loops& loops,
                      const Block& block, bool is_first, const Scratch& scratch) {
  const auto per_sample = [](Param param) { return param == Param::kPerSample; };
  if (is_first || per_sample(problem.scale) || per_sample(problem.bias) ||
      per_sample(problem.addend)) {
    LoadParameters(problem, args, loops, block, scratch);
  }
}

// out[groups] of a part of a tile, of x + addend.
inline void PieceMoments(const Problem& problem, const ForwardArgs& args, const Loops& loops,
                         const Cut& cut, const Block& piece, const Scratch& scratch, Moments* out) {
  if (problem.has_addend()) LoadAddend(problem, args, loops, piece, scratch);
  loops.moments(At(args.x, problem.dtype, cut.Offset(piece)), problem.has_addend(),
                cut.TileOf(piece), scratch, out);
}

inline Affine AffineOf(const Moments& moments, int64_t elements, double epsilon) {
  const double m2 = moments.m2 < 0 ? 0 : moments.m2;  // NaN stays
  return {moments.mean, 1 / std::sqrt(m2 / static_cast<double>(elements) + epsilon)};
}

// The saved results mean and rstd, from index `first` on.
inline void StoreAffine(const Problem& problem, const ForwardArgs& args, int64_t first,
                        int64_t groups, const Affine* affine) {
  for (int64_t g = 0; g < groups; ++g) {
    StoreNumbers(problem.accumulator(), args.mean, first + g, &affine[g].mean, 1);
    StoreNumbers(problem.accumulator(), args.rstd, first + g, &affine[g].rstd, 1);
  }
}

// With sums_only: mean, what its rounding left, variance.
inline void StoreMoments(const Problem& problem, const ForwardArgs& args, int64_t first,
                         int64_t groups, const Moments* moments) {
  const DType dtype = problem.accumulator();
  for (int64_t g = 0; g < groups; ++g) {
    const double m2 = moments[g].m2 < 0 ? 0 : moments[g].m2;  // NaN stays
    const double variance = m2 / static_cast<double>(problem.group_elements());
    StoreNumbers(dtype, args.mean, first + g, &moments[g].mean, 1);
    const double low = moments[g].mean - LoadNumber(dtype, args.mean, first + g);
    StoreNumbers(dtype, args.mean_low, first + g, &low, 1);
    StoreNumbers(dtype, args.variance, first + g, &variance, 1);
  }
}

// A group of one element is its own mean, and dx = 0: rstd = 0 says so exactly, where the terms of
// dx would only cancel up to rounding.
inline void LoadAffine(const Problem& problem, const BackwardArgs& args, int64_t first,
                       int64_t groups, Affine* affine) {
  const bool lone = problem.group_elements() == 1 && !problem.sums_only;
  const auto load = [&](auto* mean, auto* rstd) {
    for (int64_t g = 0; g < groups; ++g) {
      affine[g] = {mean[first + g], lone ? 0 : rstd[first + g]};
    }
  };
  if (problem.accumulator() == DType::kFloat64) {
    load(static_cast<const double*>(args.mean), static_cast<const double*>(args.rstd));
  } else {
    load(static_cast<const float*>(args.mean), static_cast<const float*>(args.rstd));
  }
}

}  // namespace jax_gn::cpu

#endif  // JAX_GN_CPU_CALL_H_
