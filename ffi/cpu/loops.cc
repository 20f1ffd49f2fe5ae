// The inner loops of the CPU backend, compiled once per instruction set (JAX_GN_ISA names it).
//
// A tile is a rectangle of one sample, small enough for the cache. moments() (moments.h) reads x
// twice, apply() reads x and writes y;
// gradient_sums() reads dy and x, gradient_apply() reads them and writes dx. Channels last, all of
// them go over rows of columns (passes.h), a column being a channel with its own coefficients in
// scratch; channels first, over one channel's run at a time, its coefficients in registers.
#include "loops.h"

#include "../activation.h"
#include "moments.h"
#include "passes.h"

namespace jax_gn::cpu::JAX_GN_ISA {
namespace {

// The coefficients of z = (x - mean) * a + b and of dx, from a place in scratch.
template <typename T, template <typename> class Coefficient>
struct Coefficients {
  explicit Coefficients(const Scratch& s, int64_t channel)
      : mean{static_cast<const T*>(s.mean) + channel},
        a{static_cast<const T*>(s.a) + channel},
        b{static_cast<const T*>(s.b) + channel} {}
  Coefficient<T> mean, a, b;
};
template <typename T, template <typename> class Coefficient>
struct GradientCoefficients : Coefficients<T, Coefficient> {
  explicit GradientCoefficients(const Scratch& s, int64_t channel)
      : Coefficients<T, Coefficient>(s, channel),
        slope{static_cast<const T*>(s.slope) + channel},
        shift{static_cast<const T*>(s.shift) + channel} {}
  Coefficient<T> slope, shift;
};

template <typename E, Activation kActivation>
void TileApply(const void* x, void* y, const Tile& tile, const Scratch& scratch) {
  using T = Accumulator<E>;
  const auto map = [&](int64_t offset, int64_t rows, int64_t width, const auto& k) {
    const E* from = static_cast<const E*>(x) + offset;
    E* to = static_cast<E*>(y) + offset;
    const int64_t stride = tile.stride * tile.fold;
    MapRows<T>(rows, width, to, stride, tile.stream, [&](auto lanes, int64_t r, int64_t c) {
      const Vec<T> z = (Load(lanes, from + r * stride + c) - k.mean[c]) * k.a[c] + k.b[c];
      return Activate<kActivation>(z);
    });
  };
  if (tile.layout == Layout::kChannelsLast) {
    const Coefficients<T, PerColumn> k(scratch, 0);
    ForEachPiece(tile,
                 [&](int64_t offset, int64_t rows, int64_t width) { map(offset, rows, width, k); });
  } else {
    for (int64_t c = 0; c < tile.channels; ++c) {
      map(c * tile.stride, 1, tile.positions, Coefficients<T, Shared>(scratch, c));
    }
  }
  if (tile.stream) StreamFence();
}

template <typename E, Activation kActivation>
void TileGradientSums(const void* dy, const void* x, const Tile& tile, const Scratch& scratch) {
  using T = Accumulator<E>;
  const auto add = [&](auto lanes, int64_t i, int64_t c, const auto& k, Vec<T>* acc) {
    const Vec<T> d = Load(lanes, static_cast<const E*>(x) + i) - k.mean[c];
    const Vec<T> z = d * k.a[c] + k.b[c];
    const Vec<T> dz =
        ActivationBackward<kActivation>(Load(lanes, static_cast<const E*>(dy) + i), z);
    acc[0] += dz;
    acc[1] += dz * d;
  };
  if (tile.layout == Layout::kChannelsLast) {
    const Coefficients<T, PerColumn> k(scratch, 0);
    const int64_t stride = tile.stride * tile.fold;
    for (int64_t i = 0; i < tile.columns(); ++i) scratch.first[i] = scratch.second[i] = 0;
    ForEachPiece(tile, [&](int64_t offset, int64_t rows, int64_t width) {
      SumRows<T, 2>(rows, width, {scratch.first, scratch.second},
                    [&](auto lanes, int64_t r, int64_t c, Vec<T>* acc) {
                      add(lanes, offset + r * stride + c, c, k, acc);
                    });
    });
    Unfold(tile, scratch.first);
    Unfold(tile, scratch.second);
  } else {
    for (int64_t c = 0; c < tile.channels; ++c) {
      const Coefficients<T, Shared> k(scratch, c);
      double sums[2];
      SumRun<T>(tile.positions, sums, [&](auto lanes, int64_t i, Vec<T>* acc) {
        add(lanes, c * tile.stride + i, 0, k, acc);
      });
      scratch.first[c] = sums[0];
      scratch.second[c] = sums[1];
    }
  }
}

template <typename E, Activation kActivation>
void TileGradientApply(const void* dy, const void* x, void* dx, const Tile& tile,
                       const Scratch& scratch) {
  using T = Accumulator<E>;
  const auto map = [&](int64_t offset, int64_t rows, int64_t width, const auto& k) {
    const E* dy_from = static_cast<const E*>(dy) + offset;
    const E* x_from = static_cast<const E*>(x) + offset;
    E* to = static_cast<E*>(dx) + offset;
    const int64_t stride = tile.stride * tile.fold;
    MapRows<T>(rows, width, to, stride, tile.stream, [&](auto lanes, int64_t r, int64_t c) {
      const int64_t i = r * stride + c;
      const Vec<T> a = k.a[c];
      const Vec<T> d = Load(lanes, x_from + i) - k.mean[c];
      const Vec<T> dz = ActivationBackward<kActivation>(Load(lanes, dy_from + i), d * a + k.b[c]);
      return dz * a + (d * k.slope[c] + k.shift[c]);
    });
  };
  if (tile.layout == Layout::kChannelsLast) {
    const GradientCoefficients<T, PerColumn> k(scratch, 0);
    ForEachPiece(tile,
                 [&](int64_t offset, int64_t rows, int64_t width) { map(offset, rows, width, k); });
  } else {
    for (int64_t c = 0; c < tile.channels; ++c) {
      map(c * tile.stride, 1, tile.positions, GradientCoefficients<T, Shared>(scratch, c));
    }
  }
  if (tile.stream) StreamFence();
}

template <typename T>
void LoadParameter(DType dtype, const void* from, int64_t first, int64_t count, double absent,
                   void* out) {
  T* to = static_cast<T*>(out);
  if (from == nullptr) {
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(absent);
    return;
  }
  VisitElement(dtype, [&](auto element) {
    const auto* values = static_cast<const decltype(element)*>(from) + first;
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(ToNumber(values[i]));
  });
}

// The mean is double: what its rounding to T loses goes into b, which costs nothing per element.
template <typename T>
void FillCoefficients(const Tile& tile, const Affine* affine, const Scratch& scratch) {
  T* const mean = static_cast<T*>(scratch.mean);
  T* const a = static_cast<T*>(scratch.a);
  T* const b = static_cast<T*>(scratch.b);
  const T* const scale = static_cast<const T*>(scratch.scale);
  const T* const bias = static_cast<const T*>(scratch.bias);
  const T* const addend = static_cast<const T*>(scratch.addend);
  for (int64_t g = 0; g < tile.groups(); ++g) {
    const T rstd = static_cast<T>(affine[g].rstd);
    const int64_t end = (g + 1) * tile.group_size;
    for (int64_t c = g * tile.group_size; c < end; ++c) {
      const double centre = affine[g].mean - addend[c];
      mean[c] = static_cast<T>(centre);
      a[c] = rstd * scale[c];
      b[c] = bias[c] - static_cast<T>(centre - mean[c]) * a[c];
    }
  }
  Fold(tile, mean);
  Fold(tile, a);
  Fold(tile, b);
}

template <typename T>
void FinishSums(const Tile& tile, const Affine* affine, int64_t elements, const Scratch& scratch,
                GradientAffine* out) {
  const T* const scale = static_cast<const T*>(scratch.scale);
  for (int64_t g = 0; g < tile.groups(); ++g) {
    const int64_t c0 = g * tile.group_size;
    const double rstd = affine[g].rstd;
    double* const a = scratch.first + c0;
    double* const b = scratch.second + c0;
    for (int64_t c = 0; c < tile.group_size; ++c) {
      // An infinite variance makes xhat zero, also where Σ dz (x - mean) overflowed.
      const bool overflowed = rstd == 0 && __builtin_fabs(b[c]) == __builtin_inf();
      b[c] = overflowed ? 0 : b[c] * rstd;
    }
    const double p = Dot(scale + c0, a, tile.group_size) / static_cast<double>(elements);
    const double q = Dot(scale + c0, b, tile.group_size) / static_cast<double>(elements);
    out[g] = {-rstd * rstd * q, -rstd * p};
  }
}

template <typename T>
void FillGradientCoefficients(const Tile& tile, const GradientAffine* gradient,
                              const Scratch& scratch) {
  T* const slope = static_cast<T*>(scratch.slope);
  T* const shift = static_cast<T*>(scratch.shift);
  for (int64_t g = 0; g < tile.groups(); ++g) {
    const int64_t end = (g + 1) * tile.group_size;
    for (int64_t c = g * tile.group_size; c < end; ++c) {
      slope[c] = static_cast<T>(gradient[g].slope);
      shift[c] = static_cast<T>(gradient[g].shift);
    }
  }
  Fold(tile, slope);
  Fold(tile, shift);
}

template <typename E, Activation kActivation>
Loops TableOf() {
  using T = Accumulator<E>;
  return {LoadParameter<T>,
          FillCoefficients<T>,
          FinishSums<T>,
          FillGradientCoefficients<T>,
          TileMoments<E>,
          TileApply<E, kActivation>,
          TileGradientSums<E, kActivation>,
          TileGradientApply<E, kActivation>};
}

}  // namespace

Loops FindLoops(DType dtype, Activation activation) {
  return VisitElement(dtype, [&](auto element) {
    using E = decltype(element);
    switch (activation) {
      case Activation::kSilu:
        return TableOf<E, Activation::kSilu>();
      case Activation::kRelu:
        return TableOf<E, Activation::kRelu>();
      case Activation::kGelu:
        return TableOf<E, Activation::kGelu>();
      case Activation::kLeakyRelu:
        return TableOf<E, Activation::kLeakyRelu>();
      case Activation::kNone:
        break;
    }
    return TableOf<E, Activation::kNone>();
  });
}

}  // namespace jax_gn::cpu::JAX_GN_ISA
