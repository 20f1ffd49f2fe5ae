// The family "three_stage": the plain scheme, a task per sample and group, nothing kept in cache.
//
// Forward: one loop whose task reads its group for the statistics, then again to write y; no
// workspace. Backward: stage 1 reads dy and x for the two sums of a group, kept as the slope and
// shift that they give dx: 2 * N * G numbers, all of the workspace; stage 2 reads them again and
// writes dx; stage 3 reads them once more for dscale and dbias, a task per group going over the
// samples in order. With sums_only the first reading is all, a task per sample and group. Within a
// task the blocks of its group follow one another, so that nothing
// depends on the number of threads.
#include <memory>
#include <new>

#include "call.h"
#include "families.h"
#include "merge.h"
#include "parallel.h"
#include "tasks.h"

namespace jax_gn::cpu {
namespace {

int WorkersFor(const Problem& problem, const Executor& executor) {
  return Workers(executor, problem.n * problem.groups, problem.elements() * SizeOf(problem.dtype));
}

class Backward : private Pass<BackwardArgs> {
 public:
  Backward(const Problem& problem, const Plan& plan, const BackwardArgs& args, Executor& executor)
      : Pass(problem, plan, args, executor, WorkersFor(problem, executor)),
        totals_(workers_, problem.group_size()) {}

  Status Run() {
    if (!scratch_.ok() || !totals_.ok()) return ScratchPool::Exhausted();
    const int64_t groups = problem_.groups;
    if (problem_.sums_only) {
      ParallelFor(executor_, workers_, problem_.n * groups, [&](int64_t task, int worker) {
        ChannelSums(task % groups, task / groups, task / groups + 1, worker);
      });
      return Status();
    }
    ParallelFor(executor_, workers_, problem_.n * groups,
                [&](int64_t task, int worker) { GroupSums(task / groups, task % groups, worker); });
    ParallelFor(executor_, workers_, problem_.n * groups, [&](int64_t task, int worker) {
      Apply(task / groups, task % groups, scratch_[worker]);
    });
    if (args_.dscale != nullptr || args_.dbias != nullptr) {
      ParallelFor(executor_, std::min<int64_t>(workers_, groups), groups,
                  [&](int64_t group, int worker) { ChannelSums(group, 0, problem_.n, worker); });
    }
    return Status();
  }

 private:
  void Prepare(const Block& block, const Tile& tile, const Scratch& scratch) {
    LoadParameters(problem_, args_, loops_, block, scratch);
    LoadAffine(problem_, args_, FirstGroup(block), 1, scratch.affine);
    loops_.coefficients(tile, scratch.affine, scratch);
  }

  // totals.first = Σ dz and totals.second = Σ dz xhat of the group's channels.
  GradientAffine TileSums(int64_t n, int64_t group, const Scratch& scratch, const Scratch& totals) {
    const Block whole = cut_.WholeTile(n, group);
    for (int64_t c = 0; c < whole.channels; ++c) totals.first[c] = totals.second[c] = 0;
    for (int64_t i = 0; i < plan_.blocks; ++i) {
      const Block block = cut_.Piece(n, group, i);
      const Tile tile = cut_.TileOf(block);
      Prepare(block, tile, scratch);
      loops_.gradient_sums(In(args_.dy, block), In(args_.x, block), tile, scratch);
      const int64_t offset = block.channel - whole.channel;
      for (int64_t c = 0; c < block.channels; ++c) {
        totals.first[offset + c] += scratch.first[c];
        totals.second[offset + c] += scratch.second[c];
      }
    }
    LoadParameters(problem_, args_, loops_, whole, totals);
    GradientAffine gradient;
    loops_.finish_sums(cut_.TileOf(whole), scratch.affine, problem_.group_elements(), totals,
                       &gradient);
    return gradient;
  }

  void GroupSums(int64_t n, int64_t group, int worker) {
    const GradientAffine gradient = TileSums(n, group, scratch_[worker], totals_[worker]);
    const double pair[] = {gradient.slope, gradient.shift};
    StoreNumbers(problem_.accumulator(), args_.workspace, 2 * (n * problem_.groups + group), pair,
                 2);
  }

  void Apply(int64_t n, int64_t group, const Scratch& scratch) {
    const int64_t first = 2 * (n * problem_.groups + group);
    const GradientAffine gradient = {
        LoadNumber(problem_.accumulator(), args_.workspace, first),
        LoadNumber(problem_.accumulator(), args_.workspace, first + 1)};
    for (int64_t i = 0; i < plan_.blocks; ++i) {
      const Block block = cut_.Piece(n, group, i);
      const Tile tile = cut_.TileOf(block);
      Prepare(block, tile, scratch);
      loops_.gradient_coefficients(tile, &gradient, scratch);
      loops_.gradient_apply(In(args_.dy, block), In(args_.x, block), In(args_.dx, block), tile,
                            scratch);
    }
  }

  // Of a group's channels, over the samples first .. end - 1.
  void ChannelSums(int64_t group, int64_t first, int64_t end, int worker) {
    const Scratch totals = totals_[worker];
    const int64_t size = problem_.group_size(), channel = group * size;
    // The place of the moments, two doubles a channel, which a backward pass does not need.
    double* const dbias = reinterpret_cast<double*>(totals.moments);
    double* const dscale = dbias + size;
    for (int64_t c = 0; c < size; ++c) dbias[c] = dscale[c] = 0;
    const auto store = [&](Param param, Param stored, DType dtype, void* out, int64_t first,
                           const double* sums) {
      if (out != nullptr && param == stored) StoreNumbers(dtype, out, first, sums, size);
    };
    const auto store_both = [&](Param stored, int64_t first, const double* a, const double* b) {
      store(problem_.dbias(), stored, problem_.dbias_dtype(), args_.dbias, first, a);
      store(problem_.dscale(), stored, problem_.dscale_dtype(), args_.dscale, first, b);
    };
    for (int64_t n = first; n < end; ++n) {
      TileSums(n, group, scratch_[worker], totals);
      store_both(Param::kPerSample, n * problem_.channels + channel, totals.first, totals.second);
      for (int64_t c = 0; c < size; ++c) dbias[c] += totals.first[c];
      for (int64_t c = 0; c < size; ++c) dscale[c] += totals.second[c];
    }
    store_both(Param::kPerChannel, channel, dbias, dscale);
  }

  const ScratchPool totals_;
};

}  // namespace

Status ThreeStageForward(const Problem& problem, const Plan& plan, const ForwardArgs& args,
                         Executor& executor) {
  const Cut cut(problem, plan);
  const Loops loops = FindLoops(problem.dtype, problem.activation);
  const int workers = WorkersFor(problem, executor);
  const ScratchPool pool(workers, std::max(cut.MaxColumns(), plan.blocks));
  if (!pool.ok()) return ScratchPool::Exhausted();
  const int64_t groups = problem.groups;
  ParallelFor(executor, workers, problem.n * groups, [&](int64_t task, int worker) {
    const Scratch scratch = pool[worker];
    const auto piece = [&](int64_t i) { return cut.Piece(task / groups, task % groups, i); };
    const auto at = [&](auto* base, const Block& block) {
      return At(base, problem.dtype, cut.Offset(block));
    };
    for (int64_t i = 0; i < plan.blocks; ++i) {
      PieceMoments(problem, args, loops, cut, piece(i), scratch, scratch.moments + i);
    }
    Moments moments;
    MergeMoments(
        scratch.moments, plan.blocks, 1, [&](int64_t i) { return cut.ElementsPerGroup(piece(i)); },
        &moments);
    if (problem.sums_only) {
      StoreMoments(problem, args, task, 1, &moments);
      return;
    }
    const Affine affine = AffineOf(moments, problem.group_elements(), args.epsilon);
    StoreAffine(problem, args, task, 1, &affine);
    for (int64_t i = 0; i < plan.blocks; ++i) {
      const Block block = piece(i);
      const Tile tile = cut.TileOf(block);
      LoadParameters(problem, args, loops, block, scratch);
      loops.coefficients(tile, &affine, scratch);
      loops.apply(at(args.x, block), at(args.y, block), tile, scratch);
    }
  });
  return Status();
}

Status ThreeStageBackward(const Problem& problem, const Plan& plan, const BackwardArgs& args,
                          Executor& executor) {
  return Backward(problem, plan, args, executor).Run();
}

}  // namespace jax_gn::cpu
