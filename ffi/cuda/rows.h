// The mapping that all channels-last kernels share: which thread stands where, and the walks.
//
// A thread owns one pack of channels for the whole kernel. `tile_packs` threads side by side span
// the tile; below each other, `sample_rows` of them share a sample's piece, each taking every
// sample_rows-th row; and `batch` samples lie below each other in the block at a time.
#ifndef JAX_GN_CUDA_ROWS_H_
#define JAX_GN_CUDA_ROWS_H_

#include "pack.h"
#include "sums.h"

namespace jax_gn::cuda {

template <typename E>
inline constexpr int kRowPack = kPackSize<E> < kMaxRowPack ? kPackSize<E> : kMaxRowPack;

// What a block takes. Divisions are slow, hence once here, and of 32 bits where they suffice.
struct RowBlock {
  int tile, piece, sample_block;
  int64_t first_sample, end_sample;
  int64_t first_row, first_channel, first_group;
  int rows, columns, groups;   // groups: that meet the tile
  int thread_rows, more_rows;  // rows of each thread; the first more_rows threads have one more

  __device__ RowBlock(const RowCut& cut, unsigned block) {
    const unsigned tiles = static_cast<unsigned>(cut.tiles);
    const unsigned pieces = static_cast<unsigned>(cut.pieces);
    tile = static_cast<int>(block % tiles);
    piece = static_cast<int>(block / tiles % pieces);
    sample_block = static_cast<int>(block / tiles / pieces);
    first_sample = sample_block * cut.samples;
    end_sample = min(first_sample + cut.samples, cut.n);
    first_row = piece * cut.extent;
    rows = static_cast<int>(min(cut.extent, cut.spatial - first_row));
    thread_rows = rows / cut.sample_rows;
    more_rows = rows % cut.sample_rows;
    first_channel = static_cast<int64_t>(tile) * cut.tile;
    columns = static_cast<int>(min(static_cast<int64_t>(cut.tile), cut.channels - first_channel));
    first_group = first_channel / cut.group_size;
    groups = static_cast<int>((first_channel + columns - 1) / cut.group_size - first_group) + 1;
  }

  // Rows that the `row`-th of a sample's threads takes.
  __device__ __forceinline__ int RowsOf(int row) const {
    return thread_rows + (row < more_rows ? 1 : 0);
  }
};

// What a thread takes of it.
struct RowThread {
  int pack, line, slot, row;  // line: below each other; slot: which of the batch's samples
  int64_t channel;            // first of the pack
  int channels;               // of the pack that exist; 0: an idle thread
  int rows;

  template <int kSize>
  static __device__ RowThread Here(const RowCut& cut, const RowBlock& block) {
    RowThread t;
    t.pack = threadIdx.x % cut.tile_packs;
    t.line = threadIdx.x / cut.tile_packs;
    t.slot = t.line / cut.sample_rows;
    t.row = t.line % cut.sample_rows;
    t.channel = block.first_channel + t.pack * kSize;
    t.channels = t.slot >= cut.batch ? 0 : min(kSize, max(0, block.columns - t.pack * kSize));
    t.rows = block.RowsOf(t.row);
    return t;
  }

  __device__ __forceinline__ int64_t Offset(const RowCut& cut, const RowBlock& block,
                                            int64_t n) const {
    return (n * cut.spatial + block.first_row + row) * cut.channels + channel;
  }
};

// Whether packs can be loaded and stored whole.
template <int kSize, typename E>
__device__ __forceinline__ bool WholePacks(const RowCut& cut, const E* tensor) {
  return cut.channels % kSize == 0 && Phase(tensor) % kSize == 0;
}

// Packs of up to kRows rows of a thread, all loads before the first use.
template <int kRows, int kSize, typename E>
__device__ __forceinline__ void LoadRows(const E* from, int64_t stride, int rows, int channels,
                                         bool whole, Pack<E, kSize> (&packs)[kRows]) {
  if (whole) {
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (u < rows) packs[u] = LoadPack<E, kSize>(from + u * stride);
    }
    return;
  }
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    if (u < rows) packs[u] = LoadPart<E, kSize>(from + u * stride, 0, channels);
  }
}

template <typename E, int kSize>
__device__ __forceinline__ void StoreRow(E* to, const Pack<E, kSize>& pack, int channels,
                                         bool whole) {
  if (whole) {
    StorePack(to, pack);
  } else {
    StorePart(to, pack, 0, channels);
  }
}

// Calls step(offset, rows) for a thread's rows, kRows at a time: `rows` is a constant but at the
// end, so that full steps carry no conditions.
template <int kRows, typename Step>
__device__ __forceinline__ void WalkRows(int64_t offset, int64_t stride, int rows, Step step) {
  int row = 0;
  for (; row + kRows <= rows; row += kRows) {
    step(offset, kRows);
    offset += kRows * stride;
  }
  if (row < rows) step(offset, rows - row);
}

// f(i, group) for the channels of a thread's pack.
template <int kSize, typename F>
__device__ __forceinline__ void ForGroups(const RowCut& cut, int64_t channel, int channels, F f) {
  int64_t group = channel / cut.group_size;
  int64_t next = (group + 1) * cut.group_size;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if (channel + i == next) {
      ++group;
      next += cut.group_size;
    }
    if (i < channels) f(i, group);
  }
}

// One number (or pair) a thread and channel in shared memory. The channels of a pack lie in rows of
// their own, so that neither side of the exchange meets bank conflicts.
template <typename T, int kSize>
struct Exchange {
  T* numbers;  // [kSize][kThreads + 1]

  static constexpr int kBytes = kSize * (kThreads + 1) * sizeof(T);

  __device__ __forceinline__ T& Mine(int i) const {
    return numbers[i * (kThreads + 1) + threadIdx.x];
  }
  __device__ __forceinline__ const T& At(const RowCut& cut, int line, int column) const {
    return numbers[column % kSize * (kThreads + 1) + line * cut.tile_packs + column / kSize];
  }
};

// Visits a rectangle of the exchange, `lanes` neighbouring threads taking turns:
// visit(line, column) for lines first_line .. + lines - 1, columns first_column .. + columns - 1.
template <typename Visit>
__device__ __forceinline__ void VisitRectangle(int first_line, int lines, int first_column,
                                               int columns, int lane, int lanes, Visit visit) {
  const int lane_lines = lanes / columns, lane_columns = lanes % columns;
  int line = lane / columns, column = lane % columns;
  while (line < lines) {
    visit(first_line + line, first_column + column);
    line += lane_lines;
    column += lane_columns;
    if (column >= columns) {
      column -= columns;
      ++line;
    }
  }
}

// One group of one sample, as far as it lies in a block.
struct RowUnit {
  int64_t n, group;
  int slot;
  int first_column, columns;  // 0 columns: nothing
  int64_t place;              // of its part among the workspace's
};

// Calls f(unit) for all groups of the batch that starts at sample `first`, cut.lanes neighbouring
// threads at each: all threads call f equally often.
template <typename F>
__device__ __forceinline__ void ForUnits(const RowCut& cut, const RowBlock& block, int64_t first,
                                         F f) {
  const int units = block.groups * cut.batch;
  for (int base = 0; base < units; base += kThreads / cut.lanes) {
    const int index = base + threadIdx.x / cut.lanes;
    RowUnit unit = {};
    unit.slot = index / block.groups;
    unit.n = first + unit.slot;
    unit.group = block.first_group + index % block.groups;
    if (index < units && unit.n < block.end_sample) {
      const int64_t begin = unit.group * cut.group_size - block.first_channel;
      const int64_t end = min(begin + cut.group_size, static_cast<int64_t>(block.columns));
      unit.first_column = static_cast<int>(max(begin, static_cast<int64_t>(0)));
      unit.columns = static_cast<int>(end) - unit.first_column;
      unit.place = (unit.n * cut.pieces + block.piece) * cut.places() + unit.group + block.tile;
    }
    f(unit);
  }
}

}  // namespace jax_gn::cuda

#endif  // JAX_GN_CUDA_ROWS_H_
