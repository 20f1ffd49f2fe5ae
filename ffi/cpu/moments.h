// The moments of a tile, exact in two passes: its sum, then squared deviations from its own mean.
//
// x is shifted by its group's first element before it is summed: a constant group has exactly that
// mean, and a large mean costs no digits. Channels last, sums stay apart per column until the rows
// are done; a group that is one run of memory is summed as a run.
#ifndef JAX_GN_CPU_MOMENTS_H_
#define JAX_GN_CPU_MOMENTS_H_

#include "loops.h"
#include "passes.h"

namespace jax_gn::cpu::JAX_GN_ISA {
namespace {

// Calls piece(offset, rows, width) for the rows of a channels-last tile: folded ones, then the
// positions that are too few for another.
template <typename Piece>
JAX_GN_INLINE void ForEachPiece(const Tile& tile, Piece piece) {
  const int64_t rows = tile.positions / tile.fold;
  const int64_t rest = tile.positions % tile.fold;
  if (rows > 0) piece(int64_t{0}, rows, tile.columns());
  if (rest > 0) piece(rows * tile.fold * tile.stride, int64_t{1}, rest * tile.channels);
}

// sums[columns] of a folded tile -> sums[channels].
void Unfold(const Tile& tile, double* sums) {
  for (int64_t i = 1; i < tile.fold; ++i) {
    const double* other = sums + i * tile.channels;
    for (int64_t c = 0; c < tile.channels; ++c) sums[c] += other[c];
  }
}

// values[channels] -> values[columns].
template <typename T>
void Fold(const Tile& tile, T* values) {
  for (int64_t i = tile.channels; i < tile.columns(); ++i) values[i] = values[i - tile.channels];
}

// From the sums of (x - mean) and its square: the mean that rounding missed, and no inf - inf.
Moments MomentsAround(double mean, double deviation, double squares, double count) {
  const double missed = deviation / count;
  const bool finite = squares < __builtin_inf();
  return {mean + missed, finite ? squares - deviation * missed : squares};
}

template <typename E>
Moments RunMoments(const E* x, int64_t count) {
  using T = Accumulator<E>;
  const T origin = ToNumber(x[0]);
  double sum[1];
  SumRun<T>(count, sum,
            [&](auto lanes, int64_t i, Vec<T>* acc) { acc[0] += Load(lanes, x + i) - origin; });
  const T mean = static_cast<T>(origin + sum[0] / count);
  double sums[2];
  SumRun<T>(count, sums, [&](auto lanes, int64_t i, Vec<T>* acc) {
    const Vec<T> d = Load(lanes, x + i) - mean;
    acc[0] += d;
    acc[1] += d * d;
  });
  return MomentsAround(mean, sums[0], sums[1], count);
}

template <typename E>
void ColumnMoments(const E* x, const Tile& tile, const Scratch& scratch, Moments* out) {
  using T = Accumulator<E>;
  T* const center = static_cast<T*>(scratch.mean);
  const double count = static_cast<double>(tile.positions * tile.group_size);
  for (int64_t c = 0; c < tile.channels; ++c) {
    center[c] = ToNumber(x[c - c % tile.group_size]);
  }
  Fold(tile, center);
  const PerColumn<T> centers{center};
  for (int64_t i = 0; i < tile.columns(); ++i) scratch.first[i] = 0;
  ForEachPiece(tile, [&](int64_t offset, int64_t rows, int64_t width) {
    const E* from = x + offset;
    const int64_t stride = tile.stride * tile.fold;
    SumRows<T, 1>(rows, width, {scratch.first}, [&](auto lanes, int64_t r, int64_t c, Vec<T>* acc) {
      acc[0] += Load(lanes, from + r * stride + c) - centers[c];
    });
  });
  Unfold(tile, scratch.first);
  for (int64_t g = 0; g < tile.groups(); ++g) {
    const int64_t c0 = g * tile.group_size;
    const T mean = static_cast<T>(center[c0] + Sum(scratch.first + c0, tile.group_size) / count);
    for (int64_t c = c0; c < c0 + tile.group_size; ++c) center[c] = mean;
  }
  Fold(tile, center);
  for (int64_t i = 0; i < tile.columns(); ++i) scratch.first[i] = scratch.second[i] = 0;
  ForEachPiece(tile, [&](int64_t offset, int64_t rows, int64_t width) {
    const E* from = x + offset;
    const int64_t stride = tile.stride * tile.fold;
    SumRows<T, 2>(rows, width, {scratch.first, scratch.second},
                  [&](auto lanes, int64_t r, int64_t c, Vec<T>* acc) {
                    const Vec<T> d = Load(lanes, from + r * stride + c) - centers[c];
                    acc[0] += d;
                    acc[1] += d * d;
                  });
  });
  Unfold(tile, scratch.first);
  Unfold(tile, scratch.second);
  for (int64_t g = 0; g < tile.groups(); ++g) {
    const int64_t c0 = g * tile.group_size;
    out[g] = MomentsAround(center[c0], Sum(scratch.first + c0, tile.group_size),
                           Sum(scratch.second + c0, tile.group_size), count);
  }
}

template <typename E>
void TileMoments(const void* x, const Tile& tile, const Scratch& scratch, Moments* out) {
  const E* from = static_cast<const E*>(x);
  if (tile.layout == Layout::kChannelsLast && tile.positions > 1) {
    ColumnMoments(from, tile, scratch, out);
    return;
  }
  // Each group's elements are one run: no part of a channel comes with another channel.
  const int64_t count = tile.group_size * tile.positions;
  const int64_t pitch =
      tile.layout == Layout::kChannelsLast ? tile.group_size : tile.group_size * tile.stride;
  for (int64_t g = 0; g < tile.groups(); ++g) out[g] = RunMoments(from + g * pitch, count);
}

}  // namespace
}  // namespace jax_gn::cpu::JAX_GN_ISA

#endif  // JAX_GN_CPU_MOMENTS_H_
