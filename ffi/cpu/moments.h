// The moments of a tile, exact in two passes: its sum, then squared deviations from its own mean.
//
// x is shifted by its group's first element before it is summed: a constant group has exactly that
// mean, and a large mean costs no digits. Channels last, sums stay apart per column until the rows
// are done; a group that is one run of memory is summed as a run. An addend shifts its channel: it
// costs no addition an element, and what rounding the shift leaves is added to the sums.
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

// A group of channels, each a run, that have their own addends.
template <typename E, typename T = Accumulator<E>>
Moments ChannelRunMoments(const E* x, const T* addend, const Tile& tile) {
  const double count = static_cast<double>(tile.positions);
  Moments whole = {0, 0};  // Chan's formula, one channel more at a time
  for (int64_t c = 0; c < tile.group_size; ++c) {
    const Moments run = RunMoments(x + c * tile.stride, tile.positions);
    const double apart = run.mean + addend[c] - whole.mean;
    const double share = 1 / static_cast<double>(c + 1);
    whole.mean += apart * share;
    whole.m2 += run.m2 + (c == 0 ? 0 : apart * apart * count * c * share);
  }
  return whole;
}

template <typename E>
void ColumnMoments(const E* x, bool add, const Tile& tile, const Scratch& scratch, Moments* out) {
  using T = Accumulator<E>;
  T* const center = static_cast<T*>(scratch.mean);
  const T* const addend = static_cast<const T*>(scratch.addend);
  const double count = static_cast<double>(tile.positions * tile.group_size);
  const auto added = [&](int64_t c) { return add ? static_cast<double>(addend[c]) : 0.0; };
  // From out's means, about which x + addend is summed: what comes off x.
  const auto fill_center = [&] {
    for (int64_t c = 0; c < tile.channels; ++c) {
      center[c] = static_cast<T>(out[c / tile.group_size].mean - added(c));
    }
    Fold(tile, center);
  };
  // How far that is from what should have come off.
  const auto missed = [&](int64_t c) {
    return add ? center[c] + added(c) - out[c / tile.group_size].mean : 0.0;
  };
  for (int64_t g = 0; g < tile.groups(); ++g) {
    const int64_t c0 = g * tile.group_size;
    out[g].mean = ToNumber(x[c0]) + added(c0);
  }
  fill_center();
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
  if (add) {
    for (int64_t c = 0; c < tile.channels; ++c) scratch.first[c] += tile.positions * missed(c);
  }
  for (int64_t g = 0; g < tile.groups(); ++g) {
    const double sum = Sum(scratch.first + g * tile.group_size, tile.group_size);
    out[g].mean = static_cast<T>(out[g].mean + sum / count);
  }
  fill_center();
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
  if (add) {
    for (int64_t c = 0; c < tile.channels; ++c) {
      const double off = missed(c), whole = tile.positions * off;
      scratch.second[c] += off * (2 * scratch.first[c] + whole);
      scratch.first[c] += whole;
    }
  }
  for (int64_t g = 0; g < tile.groups(); ++g) {
    const int64_t c0 = g * tile.group_size;
    out[g] = MomentsAround(out[g].mean, Sum(scratch.first + c0, tile.group_size),
                           Sum(scratch.second + c0, tile.group_size), count);
  }
}

template <typename E>
void TileMoments(const void* x, bool add, const Tile& tile, const Scratch& scratch, Moments* out) {
  const E* from = static_cast<const E*>(x);
  if (tile.layout == Layout::kChannelsLast && (add || tile.positions > 1)) {
    ColumnMoments(from, add, tile, scratch, out);
    return;
  }
  // Each group's elements are one run: no part of a channel comes with another channel.
  const int64_t count = tile.group_size * tile.positions;
  const int64_t pitch =
      tile.layout == Layout::kChannelsLast ? tile.group_size : tile.group_size * tile.stride;
  const auto* const addend = static_cast<const Accumulator<E>*>(scratch.addend);
  for (int64_t g = 0; g < tile.groups(); ++g) {
    out[g] = add ? ChannelRunMoments(from + g * pitch, addend + g * tile.group_size, tile)
                 : RunMoments(from + g * pitch, count);
  }
}

}  // namespace
}  // namespace jax_gn::cpu::JAX_GN_ISA

#endif  // JAX_GN_CPU_MOMENTS_H_
