// Where the pieces of a problem lie, as its plan cuts them.
//
// A sample is cut in tiles of whole groups, a tile in blocks. Channels last, a block is the tile's
// channels by `block_extent` positions. Channels first, `block_extent` counts elements of a tile of
// one group: a block is some whole channels, or a part of one channel.
#ifndef JAX_GN_CPU_CUT_H_
#define JAX_GN_CPU_CUT_H_

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "../plan.h"
#include "loops.h"

namespace jax_gn::cpu {

// Channels that one task of the sums over samples takes.
inline constexpr int64_t kChannelsPerSum = 64;

// Results of that size are written past the caches, where rows are whole cache lines or so long
// that it doesn't matter: a line that is written in two parts goes to memory twice (Zen 3, forward,
// channels first, rows of 196 bytes: 2.8 times as slow).
inline constexpr int64_t kStreamBytes = 8 << 20;
inline constexpr int64_t kLongRowBytes = 2048;

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// With one position the layouts are the same memory; the channels are the longer runs then.
inline Layout LayoutOf(const Problem& problem) {
  return problem.spatial == 1 ? Layout::kChannelsLast : problem.layout;
}

// Samples of one task where a tile is one block: small samples share a task.
inline int64_t SamplesPerTask(const Problem& problem, const Plan& plan) {
  constexpr int64_t kTaskBytes = 512 << 10;
  const int64_t tile_bytes = problem.spatial * plan.tile_channels * SizeOf(problem.dtype);
  return std::max<int64_t>(1, kTaskBytes / std::max<int64_t>(1, tile_bytes));
}

// Ranges that N is cut in for those tasks: no shorter than SamplesPerTask, except for a lone one.
inline int64_t SampleRanges(const Problem& problem, const Plan& plan) {
  return std::max<int64_t>(1, problem.n / SamplesPerTask(problem, plan));
}

// Parts that the positions of a tile are cut in.
inline int64_t PositionBlocks(const Problem& problem, const Plan& plan) {
  if (LayoutOf(problem) == Layout::kChannelsLast) return plan.blocks;
  return std::max<int64_t>(1, CeilDiv(problem.spatial, plan.block_extent));
}

// A rectangle of sample n.
struct Block {
  int64_t n;
  int64_t channel, channels;
  int64_t position, positions;
};

class Cut {
 public:
  Cut(const Problem& problem, const Plan& plan)
      : problem_(problem), plan_(plan), layout_(LayoutOf(problem)) {}

  int64_t tiles() const { return plan_.tiles(problem_); }

  Block WholeTile(int64_t n, int64_t tile) const {
    const int64_t channel = tile * plan_.tile_channels;
    const int64_t channels = std::min(plan_.tile_channels, problem_.channels - channel);
    return {n, channel, channels, 0, problem_.spatial};
  }

  // Block `i` of a tile. The blocks of one range of positions differ in channels only.
  Block Piece(int64_t n, int64_t tile, int64_t i) const {
    Block block = WholeTile(n, tile);
    if (plan_.blocks == 1) return block;
    const int64_t extent = plan_.block_extent;
    if (layout_ == Layout::kChannelsLast) {
      block.position = i * extent;
      block.positions = std::min(extent, problem_.spatial - block.position);
    } else if (extent >= problem_.spatial) {
      const int64_t step = extent / problem_.spatial;
      const int64_t end = block.channel + block.channels;
      block.channel += i * step;
      block.channels = std::min(step, end - block.channel);
    } else {
      const int64_t parts = CeilDiv(problem_.spatial, extent);
      block.channel += i / parts;
      block.channels = 1;
      block.position = (i % parts) * extent;
      block.positions = std::min(extent, problem_.spatial - block.position);
    }
    return block;
  }

  // Which range of positions a block of a cut tile is of.
  int64_t PositionPart(const Block& block) const {
    return block.positions == problem_.spatial ? 0 : block.position / plan_.block_extent;
  }

  // Elements from the tensor's start to the block's.
  int64_t Offset(const Block& block) const {
    return layout_ == Layout::kChannelsLast
               ? (block.n * problem_.spatial + block.position) * problem_.channels + block.channel
               : (block.n * problem_.channels + block.channel) * problem_.spatial + block.position;
  }

  // How many elements of a group the block has.
  int64_t ElementsPerGroup(const Block& block) const {
    return block.positions * std::min(problem_.group_size(), block.channels);
  }

  Tile TileOf(const Block& block) const {
    Tile tile;
    tile.layout = layout_;
    tile.channels = block.channels;
    tile.group_size = std::min(problem_.group_size(), block.channels);
    tile.positions = block.positions;
    tile.stride = layout_ == Layout::kChannelsLast ? problem_.channels : problem_.spatial;
    tile.fold = Fold(block);
    tile.stream = Streams(tile);
    return tile;
  }

  // The most columns that any tile has.
  int64_t MaxColumns() const {
    return plan_.tile_channels * Fold({0, 0, plan_.tile_channels, 0, problem_.spatial});
  }

 private:
  bool Streams(const Tile& tile) const {
    constexpr int64_t kLine = 64;
    const int64_t size = SizeOf(problem_.dtype);
    const int64_t row = size * (layout_ == Layout::kChannelsLast ? tile.columns() : tile.positions);
    return problem_.elements() * size >= kStreamBytes && (row % kLine == 0 || row >= kLongRowBytes);
  }

  // Rows of less than 128 channels are folded to at least that, and to whole registers.
  int64_t Fold(const Block& block) const {
    constexpr int64_t kColumns = 128, kRegister = 16;
    if (layout_ != Layout::kChannelsLast || block.channels >= kColumns ||
        block.channels < problem_.channels) {
      return 1;
    }
    const int64_t unit = kRegister / std::gcd(block.channels, kRegister);
    const int64_t fold = CeilDiv(CeilDiv(kColumns, block.channels), unit) * unit;
    return std::min(fold, block.positions);
  }

  const Problem& problem_;
  const Plan& plan_;
  const Layout layout_;
};

}  // namespace jax_gn::cpu

#endif  // JAX_GN_CPU_CUT_H_
