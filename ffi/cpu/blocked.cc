// The family "blocked": statistics and apply over pieces that the caches hold.
//
// Where a tile (some whole groups of a sample) fits a core's cache, a task takes it from start to
// end: x (and dy) come from memory once, y (or dx) goes there once. Samples smaller than a task
// share one. Otherwise the tile is cut in blocks, and the tasks of a tile follow one another
// (tasks.h): the apply tasks find it in the shared cache if that holds it, else x (and dy) are read
// from memory twice.
// With sums_only the statistics (sums) are all of the work, and results are written by the merge.
//
// Workspace, in doubles, only as far as needed:
//   forward, cut tiles:   Moments [N][tile][block][group], Affine [N][G]
//   backward, cut tiles:  sums [N][tile][range of positions][2][channel], slots [N][2][C],
//                         GradientAffine [N][G]
//   backward, whole ones: slots [range of samples][2][C]
// A slot holds the contributions of a sample, or of a range of them, to dbias and dscale.
#include <memory>
#include <new>

#include "call.h"
#include "families.h"
#include "merge.h"
#include "tasks.h"

namespace jax_gn::cpu {
namespace {

class Forward : private Pass<ForwardArgs> {
 public:
  Forward(const Problem& problem, const Plan& plan, const ForwardArgs& args, Executor& executor)
      : Pass(problem, plan, args, executor, WorkersFor(problem, plan, executor)),
        partials_(static_cast<Moments*>(args.workspace)),
        affine_(plan.blocks == 1 ? nullptr
                                 : reinterpret_cast<Affine*>(partials_ + problem.n * plan.blocks *
                                                                             problem.groups)) {}

  Status Run() {
    if (!scratch_.ok()) return ScratchPool::Exhausted();
    if (plan_.blocks == 1) {
      RunWholeTiles(problem_, plan_, workers_, executor_,
                    [&](int64_t, int64_t tile, int64_t first, int64_t end, int worker) {
                      for (int64_t n = first; n < end; ++n) Whole(n, tile, n == first, worker);
                    });
      return Status();
    }
    return RunCutTiles(
        problem_, plan_, workers_, executor_,
        [&](int64_t n, int64_t tile, int64_t i, int worker) { Statistics(n, tile, i, worker); },
        [&](int64_t n, int64_t tile, int worker) { Merge(n, tile, scratch_[worker]); },
        [&](int64_t n, int64_t tile, int64_t i, int worker) { Apply(n, tile, i, worker); });
  }

 private:
  // [block][group]
  Moments* Partials(const Block& whole) const {
    const int64_t first = whole.channel / problem_.group_size();
    return partials_ + (whole.n * problem_.groups + first) * plan_.blocks;
  }

  void Whole(int64_t n, int64_t tile_index, bool is_first, int worker) {
    const Scratch scratch = scratch_[worker];
    const Block block = cut_.WholeTile(n, tile_index);
    const Tile tile = cut_.TileOf(block);
    ReloadParameters(problem_, args_, loops_, block, is_first, scratch);
    loops_.moments(In(args_.x, block), problem_.has_addend(), tile, scratch, scratch.moments);
    if (problem_.sums_only) {
      StoreMoments(problem_, args_, FirstGroup(block), tile.groups(), scratch.moments);
      return;
    }
    for (int64_t g = 0; g < tile.groups(); ++g) {
      scratch.affine[g] = AffineOf(scratch.moments[g], problem_.group_elements(), args_.epsilon);
    }
    StoreAffine(problem_, args_, FirstGroup(block), tile.groups(), scratch.affine);
    loops_.coefficients(tile, scratch.affine, scratch);
    loops_.apply(In(args_.x, block), In(args_.y, block), tile, scratch);
  }

  void Statistics(int64_t n, int64_t tile_index, int64_t i, int worker) {
    const Block block = cut_.Piece(n, tile_index, i);
    const Tile tile = cut_.TileOf(block);
    Moments* out = Partials(cut_.WholeTile(n, tile_index)) + i * tile.groups();
    PieceMoments(problem_, args_, loops_, cut_, block, scratch_[worker], out);
  }

  void Merge(int64_t n, int64_t tile_index, const Scratch& scratch) {
    const Block whole = cut_.WholeTile(n, tile_index);
    const int64_t groups = cut_.TileOf(whole).groups();
    MergeMoments(
        Partials(whole), plan_.blocks, groups,
        [&](int64_t i) { return cut_.ElementsPerGroup(cut_.Piece(n, tile_index, i)); },
        scratch.moments);
    if (problem_.sums_only) {
      StoreMoments(problem_, args_, FirstGroup(whole), groups, scratch.moments);
      return;
    }
    Affine* affine = affine_ + FirstGroup(whole);
    for (int64_t g = 0; g < groups; ++g) {
      affine[g] = AffineOf(scratch.moments[g], problem_.group_elements(), args_.epsilon);
    }
    StoreAffine(problem_, args_, FirstGroup(whole), groups, affine);
  }

  void Apply(int64_t n, int64_t tile_index, int64_t i, int worker) {
    const Scratch scratch = scratch_[worker];
    const Block block = cut_.Piece(n, tile_index, i);
    const Tile tile = cut_.TileOf(block);
    LoadParameters(problem_, args_, loops_, block, scratch);
    loops_.coefficients(tile, affine_ + FirstGroup(block), scratch);
    loops_.apply(In(args_.x, block), In(args_.y, block), tile, scratch);
  }

  Moments* const partials_;
  Affine* const affine_;
};

class Backward : private Pass<BackwardArgs> {
 public:
  Backward(const Problem& problem, const Plan& plan, const BackwardArgs& args, Executor& executor)
      : Pass(problem, plan, args, executor, WorkersFor(problem, plan, executor)),
        parts_(PositionBlocks(problem, plan)),
        whole_(plan.blocks == 1),
        slot_count_(whole_ ? SampleRanges(problem, plan) : problem.n) {}

  Status Run() {
    if (!scratch_.ok() || !PlaceSlots()) return ScratchPool::Exhausted();
    if (whole_) {
      RunWholeTiles(problem_, plan_, workers_, executor_,
                    [&](int64_t range, int64_t tile, int64_t first, int64_t end, int worker) {
                      Whole(range, tile, first, end, scratch_[worker]);
                    });
    } else {
      JAX_GN_TRY(RunCutTiles(
          problem_, plan_, workers_, executor_,
          [&](int64_t n, int64_t tile, int64_t i, int worker) { Sums(n, tile, i, worker); },
          [&](int64_t n, int64_t tile, int worker) { Merge(n, tile, scratch_[worker]); },
          [&](int64_t n, int64_t tile, int64_t i, int worker) { Apply(n, tile, i, worker); }));
    }
    SumOverSamples();
    return Status();
  }

 private:
  int64_t channels() const { return problem_.channels; }
  // [part][2][channel]
  double* Partials(const Block& whole) const {
    return static_cast<double*>(args_.workspace) +
           2 * parts_ * (whole.n * channels() + whole.channel);
  }

  bool PlaceSlots() {
    slots_ = static_cast<double*>(args_.workspace);
    if (!whole_) {
      slots_ += 2 * problem_.n * parts_ * channels();
      gradient_ = reinterpret_cast<GradientAffine*>(slots_ + 2 * problem_.n * channels());
    } else if (problem_.n < SamplesPerTask(problem_, plan_)) {
      // The workspace, linear in N, has no room for the slot of so few samples.
      lone_slot_.reset(new (std::nothrow) double[2 * channels()]);
      slots_ = lone_slot_.get();
    }
    return slots_ != nullptr || args_.workspace == nullptr;
  }

  // What both ways have in common before the sums.
  Affine* Prepare(const Block& block, const Tile& tile, const Scratch& scratch) {
    LoadAffine(problem_, args_, FirstGroup(block), tile.groups(), scratch.affine);
    loops_.coefficients(tile, scratch.affine, scratch);
    return scratch.affine;
  }

  void Whole(int64_t range, int64_t tile_index, int64_t first, int64_t end,
             const Scratch& scratch) {
    for (int64_t n = first; n < end; ++n) {
      const Block block = cut_.WholeTile(n, tile_index);
      const Tile tile = cut_.TileOf(block);
      ReloadParameters(problem_, args_, loops_, block, n == first, scratch);
      const Affine* affine = Prepare(block, tile, scratch);
      loops_.gradient_sums(In(args_.dy, block), In(args_.x, block), tile, scratch);
      loops_.finish_sums(tile, affine, problem_.group_elements(), scratch, scratch.gradient);
      Contribute(range, block, n == first, scratch);
      if (problem_.sums_only) continue;
      loops_.gradient_coefficients(tile, scratch.gradient, scratch);
      loops_.gradient_apply(In(args_.dy, block), In(args_.x, block), In(args_.dx, block), tile,
                            scratch);
    }
  }

  void Sums(int64_t n, int64_t tile_index, int64_t i, int worker) {
    const Scratch scratch = scratch_[worker];
    const Block whole = cut_.WholeTile(n, tile_index), block = cut_.Piece(n, tile_index, i);
    const Tile tile = cut_.TileOf(block);
    LoadParameters(problem_, args_, loops_, block, scratch);
    Prepare(block, tile, scratch);
    loops_.gradient_sums(In(args_.dy, block), In(args_.x, block), tile, scratch);
    double* out = Partials(whole) + 2 * cut_.PositionPart(block) * whole.channels +
                  (block.channel - whole.channel);
    for (int64_t c = 0; c < block.channels; ++c) {
      out[c] = scratch.first[c];
      out[whole.channels + c] = scratch.second[c];
    }
  }

  void Merge(int64_t n, int64_t tile_index, const Scratch& scratch) {
    const Block whole = cut_.WholeTile(n, tile_index);
    const Tile tile = cut_.TileOf(whole);
    const double* partials = Partials(whole);
    for (int64_t c = 0; c < whole.channels; ++c) scratch.first[c] = scratch.second[c] = 0;
    for (int64_t part = 0; part < parts_; ++part, partials += 2 * whole.channels) {
      for (int64_t c = 0; c < whole.channels; ++c) scratch.first[c] += partials[c];
      for (int64_t c = 0; c < whole.channels; ++c)
        scratch.second[c] += partials[whole.channels + c];
    }
    LoadParameters(problem_, args_, loops_, whole, scratch);
    LoadAffine(problem_, args_, FirstGroup(whole), tile.groups(), scratch.affine);
    loops_.finish_sums(tile, scratch.affine, problem_.group_elements(), scratch,
                       gradient_ + FirstGroup(whole));
    Contribute(n, whole, true, scratch);
  }

  void Apply(int64_t n, int64_t tile_index, int64_t i, int worker) {
    const Scratch scratch = scratch_[worker];
    const Block block = cut_.Piece(n, tile_index, i);
    const Tile tile = cut_.TileOf(block);
    LoadParameters(problem_, args_, loops_, block, scratch);
    Prepare(block, tile, scratch);
    loops_.gradient_coefficients(tile, gradient_ + FirstGroup(block), scratch);
    loops_.gradient_apply(In(args_.dy, block), In(args_.x, block), In(args_.dx, block), tile,
                          scratch);
  }

  // Takes a tile's finished sums to where dscale and dbias are made of them.
  void Contribute(int64_t slot, const Block& block, bool is_first, const Scratch& scratch) {
    const auto contribute = [&](Param param, DType dtype, void* result, const double* sums,
                                int64_t offset) {
      if (result == nullptr) return;
      if (param == Param::kPerSample) {
        StoreNumbers(dtype, result, block.n * channels() + block.channel, sums, block.channels);
        return;
      }
      double* to = slots_ + 2 * slot * channels() + offset + block.channel;
      if (is_first) {
        for (int64_t c = 0; c < block.channels; ++c) to[c] = sums[c];
      } else {
        for (int64_t c = 0; c < block.channels; ++c) to[c] += sums[c];
      }
    };
    contribute(problem_.dbias(), problem_.dbias_dtype(), args_.dbias, scratch.first, 0);
    contribute(problem_.dscale(), problem_.dscale_dtype(), args_.dscale, scratch.second,
               channels());
  }

  void SumOverSamples() {
    const int64_t tasks = CeilDiv(channels(), kChannelsPerSum);
    const auto sum = [&](Param param, DType dtype, void* result, int64_t offset) {
      if (result == nullptr || param != Param::kPerChannel) return;
      const int64_t bytes = slot_count_ * channels() * static_cast<int64_t>(sizeof(double));
      ParallelFor(executor_, Workers(executor_, tasks, bytes), tasks, [&](int64_t task, int) {
        const int64_t first = task * kChannelsPerSum;
        const int64_t count = std::min(kChannelsPerSum, channels() - first);
        double totals[kChannelsPerSum] = {};
        for (int64_t slot = 0; slot < slot_count_; ++slot) {
          const double* from = slots_ + 2 * slot * channels() + offset + first;
          for (int64_t c = 0; c < count; ++c) totals[c] += from[c];
        }
        StoreNumbers(dtype, result, first, totals, count);
      });
    };
    sum(problem_.dbias(), problem_.dbias_dtype(), args_.dbias, 0);
    sum(problem_.dscale(), problem_.dscale_dtype(), args_.dscale, channels());
  }

  const int64_t parts_;
  const bool whole_;
  const int64_t slot_count_;
  std::unique_ptr<double[]> lone_slot_;
  double* slots_ = nullptr;
  GradientAffine* gradient_ = nullptr;
};

}  // namespace

Status BlockedForward(const Problem& problem, const Plan& plan, const ForwardArgs& args,
                      Executor& executor) {
  return Forward(problem, plan, args, executor).Run();
}

Status BlockedBackward(const Problem& problem, const Plan& plan, const BackwardArgs& args,
                       Executor& executor) {
  return Backward(problem, plan, args, executor).Run();
}

}  // namespace jax_gn::cpu
