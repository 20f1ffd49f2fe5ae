// The order of the blocked family's tasks.
//
// Whole tiles are independent of one another. A cut tile has `blocks` tasks of statistics, then
// `blocks` of apply, popped in that order; whoever finishes its last statistics merges the partial
// results and declares the tile ready, and its apply tasks wait for that. When one waits, all that
// it waits for were popped before, by threads that don't wait themselves before they are through:
// no deadlock, whatever the number of threads.
#ifndef JAX_GN_CPU_TASKS_H_
#define JAX_GN_CPU_TASKS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <thread>

#include "call.h"
#include "parallel.h"

namespace jax_gn::cpu {

// How far each of the cut tiles is.
class Progress {
 public:
  explicit Progress(int64_t tiles) : tiles_(new (std::nothrow) State[tiles]) {}

  bool ok() const { return tiles_ != nullptr; }
  // Whether the caller's was the last of `blocks` statistics tasks: it has to merge, then Publish.
  bool Finish(int64_t tile, int64_t blocks) {
    return tiles_[tile].finished.fetch_add(1, std::memory_order_acq_rel) == blocks - 1;
  }
  void Publish(int64_t tile) { tiles_[tile].ready.store(true, std::memory_order_release); }
  void Await(int64_t tile) const {
    while (!tiles_[tile].ready.load(std::memory_order_acquire)) std::this_thread::yield();
  }

 private:
  struct State {
    std::atomic<int64_t> finished{0};
    std::atomic<bool> ready{false};
  };
  std::unique_ptr<State[]> tiles_;
};

// Runs statistics(n, tile, block, worker), merge(n, tile, worker) and apply(n, tile, block, worker)
// over all cut tiles, in the order that the comment on top states; with sums_only without apply.
template <typename Statistics, typename Merge, typename Apply>
Status RunCutTiles(const Problem& problem, const Plan& plan, int workers, Executor& executor,
                   Statistics statistics, Merge merge, Apply apply) {
  const int64_t tiles = plan.tiles(problem), blocks = plan.blocks;
  Progress progress(problem.n * tiles);
  if (!progress.ok()) return ScratchPool::Exhausted();
  const int64_t steps = problem.sums_only ? blocks : 2 * blocks;
  ParallelFor(executor, workers, problem.n * tiles * steps, [&](int64_t task, int worker) {
    const int64_t unit = task / steps, n = unit / tiles, tile = unit % tiles;
    const int64_t step = task % steps;
    if (step < blocks) {
      statistics(n, tile, step, worker);
      if (!progress.Finish(unit, blocks)) return;
      merge(n, tile, worker);
      progress.Publish(unit);
    } else {
      progress.Await(unit);
      apply(n, tile, step - blocks, worker);
    }
  });
  return Status();
}

// Runs body(range, tile, first n, end n, worker) over all whole tiles.
template <typename Body>
void RunWholeTiles(const Problem& problem, const Plan& plan, int workers, Executor& executor,
                   Body body) {
  const int64_t tiles = plan.tiles(problem), ranges = SampleRanges(problem, plan);
  ParallelFor(executor, workers, tiles * ranges, [&](int64_t task, int worker) {
    const int64_t range = task / tiles;
    body(range, task % tiles, range * problem.n / ranges, (range + 1) * problem.n / ranges, worker);
  });
}

inline int WorkersFor(const Problem& problem, const Plan& plan, const Executor& executor) {
  const int64_t tasks = plan.blocks == 1 ? plan.tiles(problem) * SampleRanges(problem, plan)
                                         : problem.n * plan.tiles(problem) * plan.blocks;
  return Workers(executor, tasks, problem.elements() * SizeOf(problem.dtype));
}

// What every pass over tiles holds.
template <typename Args>
class Pass {
 protected:
  Pass(const Problem& problem, const Plan& plan, const Args& args, Executor& executor, int workers)
      : problem_(problem),
        plan_(plan),
        args_(args),
        executor_(executor),
        cut_(problem, plan),
        loops_(FindLoops(problem.dtype, problem.activation)),
        workers_(workers),
        scratch_(workers_, cut_.MaxColumns()) {}

  int64_t FirstGroup(const Block& block) const {
    return block.n * problem_.groups + block.channel / problem_.group_size();
  }
  // Where the block begins in a tensor.
  template <typename Pointer>
  Pointer In(Pointer tensor, const Block& block) const {
    return At(tensor, problem_.dtype, cut_.Offset(block));
  }

  const Problem& problem_;
  const Plan& plan_;
  const Args& args_;
  Executor& executor_;
  const Cut cut_;
  const Loops loops_;
  const int workers_;
  const ScratchPool scratch_;
};

}  // namespace jax_gn::cpu

#endif  // JAX_GN_CPU_TASKS_H_
