// Sharing tasks between the calling thread and an executor's.
//
// Tasks are popped in order from one counter. The caller pops too, and returns when all are done,
// whether or not the helpers it scheduled have started: a pool with no free thread can't block it.
#ifndef JAX_GN_CPU_PARALLEL_H_
#define JAX_GN_CPU_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "backend.h"

namespace jax_gn::cpu {

// Below so many bytes of tensors, waking a helper takes longer than the work.
inline constexpr int64_t kAloneBytes = 64 << 10;

// How many threads are of use. The results don't depend on it.
inline int Workers(const Executor& executor, int64_t tasks, int64_t bytes) {
  if (bytes < kAloneBytes) return 1;
  return static_cast<int>(
      std::clamp<int64_t>(executor.num_threads(), 1, std::max<int64_t>(tasks, 1)));
}

// Runs body(task, worker) for 0 <= task < tasks, 0 <= worker < workers, no worker twice at a time.
inline void ParallelFor(Executor& executor, int workers, int64_t tasks,
                        std::function<void(int64_t, int)> body) {
  struct Share {
    std::function<void(int64_t, int)> body;
    int64_t tasks;
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
    std::atomic<int> workers{0};

    void Work() {
      int64_t task = next.fetch_add(1, std::memory_order_relaxed);
      if (task >= tasks) return;  // also a helper that starts after the call has returned
      const int worker = workers.fetch_add(1, std::memory_order_relaxed);
      while (task < tasks) {
        body(task, worker);
        done.fetch_add(1, std::memory_order_release);
        task = next.fetch_add(1, std::memory_order_relaxed);
      }
    }
  };
  auto share = std::make_shared<Share>();
  share->body = std::move(body);
  share->tasks = tasks;
  for (int i = 1; i < workers; ++i) executor.Schedule([share] { share->Work(); });
  share->Work();
  while (share->done.load(std::memory_order_acquire) < tasks) std::this_thread::yield();
}

}  // namespace jax_gn::cpu

#endif  // JAX_GN_CPU_PARALLEL_H_
