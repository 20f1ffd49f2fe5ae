// How the streaming kernels cut a problem, and where their sums lie in the workspace: host
// arithmetic that the planner and the launchers share, from the problem alone.
//
// Nothing depends on the device, so that the workspace fits wherever the call runs and the bits
// are the same there. A sample's y and dx don't depend on its batch either: only how many samples
// share a partial sum of dscale and dbias depends on N. (The resident kernels' cuts do depend on
// N.)
#ifndef JAX_GN_CUDA_CUT_H_
#define JAX_GN_CUDA_CUT_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../element.h"
#include "../problem.h"

namespace jax_gn::cuda {

inline constexpr int kThreads = 256;   // of every kernel
inline constexpr int kPackBytes = 16;  // one memory access
// Channels of a thread, channels last, where it keeps up to 6 numbers for each. H200: 8 leave room
// for half as many threads, and the backward pass takes up to a third longer.
inline constexpr int kMaxRowPack = 4;
inline constexpr int kMaxTilePacks =
    64;  // 1 KiB of a row: a tile's memory accesses are whole lines
// What a block reads: more of larger samples, but no more than their number of blocks grows.
// H200: less leaves the blocks busy with their reductions, more leaves a single sample too few.
inline constexpr int64_t kMinPieceBytes = 16 << 10;
inline constexpr int64_t kMaxPieceBytes = 256 << 10;
inline constexpr double kPieceBytesPerPiece = 512;
// What a block of a writing pass reads at most: it leaves no sums, and smaller blocks end together.
// H200: 2 to 4 % less time than with the reading pass's pieces where those are of kMaxPieceBytes.
inline constexpr int64_t kWritingPieceBytes = 64 << 10;
// Small samples share a block until it reads that much.
inline constexpr int64_t kSharedBlockBytes = 32 << 10;
// Blocks of the backward pass, more than that go over several samples: bounds the partial sums of
// dscale and dbias.
inline constexpr int64_t kBackwardBlocks = 2048;

JAX_GN_HOST_DEVICE constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t AlignUp(int64_t a, int64_t multiple) { return CeilDiv(a, multiple) * multiple; }

// The largest power of two <= a, and <= 2^30.
constexpr int PowerOfTwoBelow(int64_t a) {
  int power = 1;
  while (power < 1 << 30 && power <= a / 2) power *= 2;
  return power;
}

// With one position the layouts are the same memory; the channels are the longer runs then.
inline Layout LayoutOf(const Problem& problem) {
  return problem.spatial == 1 ? Layout::kChannelsLast : problem.layout;
}

// Bytes that the reading pass takes per element.
inline int64_t ReadBytes(const Problem& problem) {
  return SizeOf(problem.dtype) * (problem.op == Op::kForward ? 1 : 2);
}

inline int64_t PieceBytes(const Problem& problem) {
  const int64_t sample_bytes = problem.spatial * problem.channels * ReadBytes(problem);
  const double even = std::sqrt(kPieceBytesPerPiece * static_cast<double>(sample_bytes));
  return std::clamp(static_cast<int64_t>(even), kMinPieceBytes, kMaxPieceBytes);
}

// Channels last: a sample is a matrix, a row per position. A block takes a tile of the columns
// (which may cut groups) and a piece of the rows, of `samples` samples one batch after the other.
struct RowCut {
  int64_t n, spatial, channels, groups, group_size;
  int64_t tiles, pieces;     // of a sample
  int64_t extent;            // rows of a piece
  int64_t samples;           // of a block
  int tile;                  // columns, a multiple of a pack
  int tile_packs;            // threads beside each other
  int sample_rows;           // threads below each other, that share a sample
  int batch;                 // samples at a time: one for each `sample_rows` of the threads
  int tile_groups;           // at most so many groups meet a tile
  int lanes, channel_lanes;  // threads that add up a group, a channel
  int warp_lanes;            // a group is one row of so many threads of a warp; 0: it is not

  constexpr int64_t sample_blocks() const { return CeilDiv(n, samples); }
  constexpr int64_t blocks() const { return sample_blocks() * pieces * tiles; }
  // Tile t and group g share columns at most once in the order of (g, t): g + t names the place.
  JAX_GN_HOST_DEVICE constexpr int64_t places() const { return groups + tiles; }
  // Nothing but the block itself knows anything about its groups.
  constexpr bool whole_groups() const {
    return pieces == 1 && (tiles == 1 || tile % group_size == 0);
  }
};

// The cut with so many channels a thread.
inline RowCut CutRowsIn(const Problem& problem, int64_t pack) {
  RowCut cut = {};
  cut.n = problem.n;
  cut.spatial = problem.spatial;
  cut.channels = problem.channels;
  cut.groups = problem.groups;
  cut.group_size = problem.group_size();
  const int64_t packs = CeilDiv(problem.channels, pack);
  cut.tile_packs = static_cast<int>(std::min<int64_t>(packs, kMaxTilePacks));
  if (packs > kMaxTilePacks) {
    // Even tiles of whole 128-byte lines.
    cut.tile_packs = static_cast<int>(AlignUp(CeilDiv(packs, CeilDiv(packs, kMaxTilePacks)), 8));
  }
  cut.tiles = CeilDiv(packs, cut.tile_packs);
  cut.tile = static_cast<int>(cut.tile_packs * pack);
  const int rows = kThreads / cut.tile_packs;
  cut.sample_rows = static_cast<int>(std::min<int64_t>(rows, problem.spatial));
  cut.batch = rows / cut.sample_rows;

  const int64_t row_bytes = cut.tile * ReadBytes(problem);
  const int64_t fit = std::max<int64_t>(cut.sample_rows, PieceBytes(problem) / row_bytes);
  cut.pieces = CeilDiv(problem.spatial, fit);
  cut.extent = CeilDiv(problem.spatial, cut.pieces);
  cut.pieces = CeilDiv(problem.spatial, cut.extent);
  cut.samples = cut.batch;
  if (cut.pieces == 1) {
    const int64_t batch_bytes = cut.batch * problem.spatial * row_bytes;
    cut.samples *= std::max<int64_t>(1, kSharedBlockBytes / batch_bytes);
  }
  if (problem.op == Op::kBackward) {
    const int64_t most = CeilDiv(problem.n * cut.pieces * cut.tiles, kBackwardBlocks);
    cut.samples = std::max(cut.samples, AlignUp(most, cut.batch));
  }

  const int64_t width = std::min<int64_t>(cut.tile, problem.channels);
  const int64_t edges = width % cut.group_size == 0 ? 0 : 1;  // tiles that start inside a group
  cut.tile_groups = static_cast<int>(std::min(cut.groups, CeilDiv(width, cut.group_size) + edges));
  cut.lanes = std::min(32, PowerOfTwoBelow(kThreads / (cut.batch * cut.tile_groups)));
  const int64_t group_packs = cut.group_size / pack;
  // features.cu does all of a pass at once; it knows no addend, of which there are as many as x.
  const bool warp_groups = !problem.sums_only && problem.spatial == 1 && !problem.has_addend() &&
                           cut.group_size % pack == 0 &&
                           group_packs == PowerOfTwoBelow(group_packs) && group_packs <= 32 &&
                           cut.tile_packs % group_packs == 0;
  cut.warp_lanes = warp_groups ? static_cast<int>(group_packs) : 0;
  cut.channel_lanes = std::min(32, PowerOfTwoBelow(kThreads / width));
  return cut;
}

inline RowCut CutRows(const Problem& problem) {
  const int64_t pack = kPackBytes / SizeOf(problem.dtype);
  if (problem.spatial == 1) {
    // features.cu keeps fewer numbers for each channel.
    const RowCut cut = CutRowsIn(problem, pack);
    if (cut.warp_lanes > 0) return cut;
  }
  return CutRowsIn(problem, std::min<int64_t>(pack, kMaxRowPack));
}

// 16-bit gradients have more to compute for each byte: twice as much for a block.
inline int64_t WritingPieceBytes(const Problem& problem) {
  return kWritingPieceBytes * (problem.op == Op::kBackward && SizeOf(problem.dtype) == 2 ? 2 : 1);
}

// The same for the pass that writes: pieces of a size of its own.
inline RowCut CutRowsToWrite(const Problem& problem) {
  RowCut cut = CutRows(problem);
  const int64_t row_bytes = cut.tile * ReadBytes(problem);
  const int64_t fit = std::max<int64_t>(cut.sample_rows, WritingPieceBytes(problem) / row_bytes);
  if (cut.extent <= fit) return cut;
  cut.extent = CeilDiv(problem.spatial, CeilDiv(problem.spatial, fit));
  cut.pieces = CeilDiv(problem.spatial, cut.extent);
  cut.samples = cut.batch;
  return cut;
}

// Channels first: memory is a sequence of runs, each of a group (its statistics) or of a channel
// (all else). `lanes` threads take a piece of a run: up to a warp's, or the whole block.
struct RunCut {
  int64_t n, runs;         // samples, runs of a sample
  int64_t length, extent;  // elements of a run, of a piece
  int64_t pieces;          // of a run
  int lanes;

  JAX_GN_HOST_DEVICE constexpr int64_t items() const { return n * runs * pieces; }
  constexpr int64_t blocks() const { return CeilDiv(items(), kThreads / lanes); }
};

inline RunCut CutRuns(const Problem& problem, int64_t runs, int64_t piece_bytes) {
  RunCut cut = {};
  cut.n = problem.n;
  cut.runs = runs;
  cut.length = problem.spatial * problem.channels / runs;
  const int64_t pack = kPackBytes / SizeOf(problem.dtype);
  const int64_t fit = piece_bytes / ReadBytes(problem);
  cut.pieces = CeilDiv(cut.length, fit);
  // Whole 128-byte lines, where the run begins with one.
  cut.extent = std::min(cut.length, AlignUp(CeilDiv(cut.length, cut.pieces), 8 * pack));
  cut.pieces = CeilDiv(cut.length, cut.extent);
  const int64_t packs = CeilDiv(cut.extent, pack);
  cut.lanes = packs >= 2 * kThreads ? kThreads : std::min(32, PowerOfTwoBelow(packs / 4));
  return cut;
}

inline RunCut CutRuns(const Problem& problem, int64_t runs) {
  return CutRuns(problem, runs, PieceBytes(problem));
}
inline RunCut CutRunsToWrite(const Problem& problem) {
  return CutRuns(problem, problem.channels,
                 std::min(PieceBytes(problem), WritingPieceBytes(problem)));
}

// Whether the statistics are taken over runs: with one position a group is a run in both layouts,
// but not one channel after the other, if each has its own addend.
inline bool GroupsAreRuns(const Problem& problem) {
  if (problem.op != Op::kForward) return false;
  return problem.spatial == 1 ? !problem.has_addend() : problem.layout == Layout::kChannelsFirst;
}

inline bool HasPerSample(const Problem& problem) {
  return problem.dscale() == Param::kPerSample || problem.dbias() == Param::kPerSample;
}

inline bool HasParam(const Problem& problem) {
  return problem.dscale() != Param::kAbsent || problem.dbias() != Param::kAbsent;
}

// Mean and sum of squared deviations of some elements.
struct Moments {
  double mean, m2;
};

// Places in the workspace, in bytes, in the order of the fields. T: the accumulator.
struct Workspace {
  int64_t channel_rows = 0;  // of the sums of dbias and dscale
  int64_t group_sums = 0;    // forward: Moments[], backward: T[][2]; of parts of groups
  int64_t results = 0;       // forward: T[N, G], mean's low part; backward: T[N, G, 2]
  int64_t bytes = 0;
};

inline Workspace LayOut(const Problem& problem) {
  const int64_t size = SizeOf(problem.accumulator());
  const bool last = LayoutOf(problem) == Layout::kChannelsLast;
  const bool forward = problem.op == Op::kForward;
  int64_t parts = 0;  // of groups
  Workspace space;
  if (last && !GroupsAreRuns(problem)) {
    const RowCut cut = CutRows(problem);
    if (!cut.whole_groups()) parts = problem.n * cut.pieces * cut.places();
    space.channel_rows =
        HasPerSample(problem) ? problem.n * cut.pieces : cut.sample_blocks() * cut.pieces;
  } else {
    const RunCut cut = CutRuns(problem, forward ? problem.groups : problem.channels);
    if (forward && cut.pieces > 1) parts = cut.items();
    space.channel_rows = problem.n * cut.pieces;
  }
  // Channels first, dx needs the sums of the channels even where dscale and dbias are not wanted.
  if (forward || (last && !HasParam(problem))) space.channel_rows = 0;
  space.group_sums = AlignUp(space.channel_rows * problem.channels * 2 * size, kPackBytes);
  // The channels' alone: sums_only asks for no more, and features.cu keeps its groups to itself.
  if ((problem.sums_only && !forward) || (last && CutRows(problem).warp_lanes > 0)) {
    space.bytes = space.group_sums;
    return space;
  }
  space.results =
      space.group_sums + AlignUp(parts * (forward ? sizeof(Moments) : 2 * size), kPackBytes);
  space.bytes = space.results;
  if (!problem.sums_only) space.bytes += problem.n * problem.groups * size * (forward ? 1 : 2);
  return space;
}

// Shared memory of the channels-last reading pass: what the threads exchange (rows.h), for each
// channel of a pack and thread a mean and an m2, or two times two sums.
inline int64_t RowSharedBytes(const Problem& problem) {
  const int64_t size = SizeOf(problem.accumulator());
  const RowCut cut = CutRows(problem);
  const int64_t numbers = cut.tile / cut.tile_packs * (kThreads + 1);
  return numbers *
         (problem.op == Op::kForward ? static_cast<int64_t>(sizeof(double)) + size : 4 * size);
}

// Threads that add up the parts of one group, and blocks for all groups.
inline int CombineLanes(const Problem& problem) {
  int64_t parts;  // of a group
  if (LayoutOf(problem) == Layout::kChannelsLast && !GroupsAreRuns(problem)) {
    const RowCut cut = CutRows(problem);
    parts = cut.pieces * (CeilDiv(cut.group_size, cut.tile) + 1);
  } else if (problem.op == Op::kForward) {
    parts = CutRuns(problem, problem.groups).pieces;
  } else {
    parts = CutRuns(problem, problem.channels).pieces * problem.group_size();
  }
  return parts >= 128 ? kThreads : std::min(32, PowerOfTwoBelow(parts));
}
inline int64_t CombineBlocks(const Problem& problem) {
  return CeilDiv(problem.n * problem.groups, kThreads / CombineLanes(problem));
}

// The sums over rows that end in dscale and dbias. Per channel all rows make one result, per sample
// those of the sample.
struct ParameterCut {
  int64_t results;  // 1 or N
  int64_t rows;     // of one result
  int columns;      // channels of a block; its other threads share their rows
};

inline ParameterCut CutParameters(const Problem& problem, Param form, int64_t rows) {
  const bool per_sample = form == Param::kPerSample;
  ParameterCut cut = {per_sample ? problem.n : 1, per_sample ? rows / problem.n : rows, 0};
  cut.columns = kThreads / std::min(32, PowerOfTwoBelow(cut.rows));
  return cut;
}
inline int64_t ParameterBlocks(const Problem& problem, Param form, int64_t rows) {
  const ParameterCut cut = CutParameters(problem, form, rows);
  return cut.results * CeilDiv(problem.channels, cut.columns);
}

}  // namespace jax_gn::cuda

#endif  // JAX_GN_CUDA_CUT_H_
