// How the loops walk: sums over rows that stay apart per column, and maps.
//
// A matrix of `rows` by `width` is walked a register of columns at a time. Channels last, a row is
// a spatial position and a column a channel, so that no sum ever crosses lanes; a run of one
// channel (channels first) is cut into short rows whose columns are added up at the end. Terms of
// up to kRowsPerSum rows are added in the accumulator type, all else in double. The last register
// of a row overlaps the one before it, so that a width that is no multiple of a register costs one
// more register and no scalar loop.
#ifndef JAX_GN_CPU_PASSES_H_
#define JAX_GN_CPU_PASSES_H_

#include "vector.h"

namespace jax_gn::cpu::JAX_GN_ISA {

// Per-column coefficients, or one value that all columns share.
template <typename T>
struct PerColumn {
  const T* values;
  JAX_GN_INLINE Vec<T> operator[](int64_t column) const { return Load(Full(), values + column); }
};
template <typename T>
struct Shared {
  Vec<T> value;
  explicit Shared(const T* p) : value(Broadcast(*p)) {}
  JAX_GN_INLINE Vec<T> operator[](int64_t) const { return value; }
};

inline constexpr int64_t kRowsPerSum = 16;

// sums[k][column] += Σ_row of the k-th of the registers to which term(lanes, row, column, acc)
// adds.
template <typename T, int kSums, typename Term>
JAX_GN_INLINE void SumRows(int64_t rows, int64_t width, double* const (&sums)[kSums], Term term) {
  constexpr int kStep = kLanes<T>;
  for (int64_t row = 0; row < rows; row += kRowsPerSum) {
    const int64_t end = rows - row < kRowsPerSum ? rows : row + kRowsPerSum;
    int64_t column = 0;
    // Two registers at a time hide the latency of the additions.
    for (; column + 2 * kStep <= width; column += 2 * kStep) {
      Vec<T> left[kSums] = {}, right[kSums] = {};
      for (int64_t r = row; r < end; ++r) {
        term(Full(), r, column, left);
        term(Full(), r, column + kStep, right);
      }
      for (int k = 0; k < kSums; ++k) AddTo(sums[k] + column, left[k]);
      for (int k = 0; k < kSums; ++k) AddTo(sums[k] + column + kStep, right[k]);
    }
    if (column + kStep <= width) {
      Vec<T> acc[kSums] = {};
      for (int64_t r = row; r < end; ++r) term(Full(), r, column, acc);
      for (int k = 0; k < kSums; ++k) AddTo(sums[k] + column, acc[k]);
      column += kStep;
    }
    if (column == width) continue;
    Vec<T> acc[kSums] = {};
    const int tail = static_cast<int>(width - column);
    const bool overlap = width >= kStep;
    for (int64_t r = row; r < end; ++r) {
      if (overlap) {
        term(Full(), r, width - kStep, acc);
      } else {
        term(Partial{tail}, r, column, acc);
      }
    }
    const int skipped = overlap ? kStep - tail : 0;  // lanes that were summed already
    for (int k = 0; k < kSums; ++k) {
      for (int i = 0; i < tail; ++i) sums[k][column + i] += acc[k][skipped + i];
    }
  }
}

// Σ over a run of `count` elements of one channel: term(lanes, 0, i, acc) for all of them.
template <typename T, int kSums, typename Term>
JAX_GN_INLINE void SumRun(int64_t count, double (&totals)[kSums], Term term) {
  constexpr int64_t kWidth = 2 * kLanes<T>;
  double columns[kSums][kWidth] = {};
  double* pointers[kSums];
  for (int k = 0; k < kSums; ++k) pointers[k] = columns[k];
  const int64_t rows = count / kWidth;
  const int64_t done = rows * kWidth;
  if (rows > 0) {
    SumRows<T, kSums>(rows, kWidth, pointers, [&](auto lanes, int64_t r, int64_t c, Vec<T>* acc) {
      term(lanes, r * kWidth + c, acc);
    });
  }
  if (done < count) {
    SumRows<T, kSums>(1, count - done, pointers, [&](auto lanes, int64_t, int64_t c, Vec<T>* acc) {
      term(lanes, done + c, acc);
    });
  }
  for (int k = 0; k < kSums; ++k) {
    for (int64_t step = kWidth / 2; step > 0; step /= 2) {
      for (int64_t i = 0; i < step; ++i) columns[k][i] += columns[k][i + step];
    }
    totals[k] = columns[k][0];
  }
}

// Σ values[i].
JAX_GN_INLINE double Sum(const double* values, int64_t count) {
  constexpr int kStep = kLanes<double>;
  DoubleV sums = {};
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) sums += Load(Full(), values + i);
  double total = 0;
  for (int k = 0; k < kStep; ++k) total += sums[k];
  for (; i < count; ++i) total += values[i];
  return total;
}

// Σ scale[i] * values[i], in double.
template <typename T>
JAX_GN_INLINE double Dot(const T* scale, const double* values, int64_t count) {
  constexpr int kStep = kLanes<double>;
  typedef T Narrow __attribute__((vector_size(kStep * sizeof(T))));
  DoubleV sums = {};
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    Narrow factors;
    __builtin_memcpy(&factors, scale + i, sizeof(factors));
    sums += __builtin_convertvector(factors, DoubleV) * Load(Full(), values + i);
  }
  double total = 0;
  for (int k = 0; k < kStep; ++k) total += sums[k];
  for (; i < count; ++i) total += scale[i] * values[i];
  return total;
}

// to[row * stride + column] = value(lanes, row, column) for all of the matrix; a register may come
// twice. `stream`: past the cache, where a row is aligned for it; then StreamFence().
template <typename T, typename E, typename Value>
JAX_GN_INLINE void MapRows(int64_t rows, int64_t width, E* to, int64_t stride, bool stream,
                           Value value) {
  constexpr int kStep = kLanes<T>;
  for (int64_t r = 0; r < rows; ++r) {
    E* const row = to + r * stride;
    int64_t column = 0;
    if (kHasStream && stream && reinterpret_cast<uintptr_t>(row) % (kStep * sizeof(E)) == 0) {
      for (; column + kStep <= width; column += kStep) {
        Stream(row + column, value(Full(), r, column));
      }
    } else {
      for (; column + kStep <= width; column += kStep) {
        Store(Full(), row + column, value(Full(), r, column));
      }
    }
    if (column == width) continue;
    if (width >= kStep) {
      Store(Full(), row + width - kStep, value(Full(), r, width - kStep));
    } else {
      const Partial rest{static_cast<int>(width - column)};
      Store(rest, row + column, value(rest, r, column));
    }
  }
}

}  // namespace jax_gn::cpu::JAX_GN_ISA

#endif  // JAX_GN_CPU_PASSES_H_
