// Many callers of the CPU loops on one thread pool, for ThreadSanitizer (tools/sanitize.sh tsan).
// JAX's own pool and Python report races of their own; here is nothing but our code and this file.
//
//   cpu_threads          all families, layouts and types from several threads; results must agree
//   cpu_threads plant    a race of its own, which the sanitizer must find
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu/backend.h"
#include "plan.h"

namespace jax_gn {
namespace {

constexpr int kPoolThreads = 3, kCallers = 3, kRepeats = 3;

class Pool final : public cpu::Executor {
 public:
  Pool() {
    for (int i = 0; i < kPoolThreads; ++i) threads_.emplace_back([this] { Work(); });
  }
  ~Pool() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ending_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  int num_threads() const override { return kPoolThreads; }
  void Schedule(std::function<void()> task) override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    wake_.notify_one();
  }

 private:
  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return ending_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  bool ending_ = false;
  std::vector<std::thread> threads_;
};

using Bytes = std::vector<double>;  // 8-byte aligned memory

Bytes Memory(int64_t bytes) { return Bytes(bytes / 8 + 2, -1.0); }

// Small numbers in any of the types: the same bit patterns a little above 1 in float32 or float64.
Bytes Input(int64_t bytes) {
  Bytes memory = Memory(bytes);
  auto* words = reinterpret_cast<uint32_t*>(memory.data());
  for (int64_t i = 0; i < bytes / 4; ++i) words[i] = 0x3f803f80u + (i * 2654435761u >> 26);
  return memory;
}

// The results of both passes, one after the other; empty where the family can't serve the problem.
std::vector<Bytes> Step(Problem problem, Family family, cpu::Executor& executor) {
  const int64_t tensor = problem.elements() * SizeOf(problem.dtype);
  const int64_t statistic = problem.n * problem.groups * SizeOf(problem.accumulator());
  const int64_t parameter = problem.channels * SizeOf(problem.scale_dtype);
  const Bytes x = Input(tensor), dy = Input(tensor), scale = Input(parameter), bias = scale;
  const Bytes addend = scale;
  Bytes y = Memory(tensor), dx = y, mean = Memory(statistic), rstd = mean;
  Bytes dscale = Memory(parameter), dbias = dscale;
  Plan plan;
  problem.op = Op::kForward;
  if (!MakePlan(problem, Platform::kCpu, DeviceLimits(), family, &plan).ok()) return {};
  Bytes workspace = Memory(plan.workspace_bytes);
  ForwardArgs forward{x.data(), scale.data(), bias.data(), addend.data(),   1e-6,
                      y.data(), mean.data(),  rstd.data(), workspace.data()};
  if (!cpu::RunForward(problem, plan, forward, executor).ok()) return {};
  problem.op = Op::kBackward;
  if (!MakePlan(problem, Platform::kCpu, DeviceLimits(), family, &plan).ok()) return {};
  Bytes scratch = Memory(plan.workspace_bytes);
  BackwardArgs backward{dy.data(),     x.data(),     scale.data(),  bias.data(),
                        addend.data(), mean.data(),  rstd.data(),   dx.data(),
                        dscale.data(), dbias.data(), scratch.data()};
  if (!cpu::RunBackward(problem, plan, backward, executor).ok()) return {};
  return {y, mean, rstd, dx, dscale, dbias};
}

bool Same(const std::vector<Bytes>& a, const std::vector<Bytes>& b) {
  if (a.size() != b.size() || a.empty()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::memcmp(a[i].data(), b[i].data(), a[i].size() * sizeof(double)) != 0) return false;
  }
  return true;
}

int Check() {
  Pool pool;
  int failures = 0, cases = 0;
  for (Family family : {Family::kBlocked, Family::kThreeStage}) {
    for (Layout layout : {Layout::kChannelsLast, Layout::kChannelsFirst}) {
      for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
        Problem problem;
        problem.dtype = problem.scale_dtype = problem.bias_dtype = problem.addend_dtype = dtype;
        problem.layout = layout;
        problem.activation = Activation::kSilu;
        problem.scale = problem.bias = problem.addend = Param::kPerChannel;
        problem.n = 3, problem.spatial = 700, problem.channels = 64, problem.groups = 8;
        const std::vector<Bytes> want = Step(problem, family, pool);
        std::vector<int> wrong(kCallers, 0);
        std::vector<std::thread> callers;
        for (int i = 0; i < kCallers; ++i) {
          callers.emplace_back([&, i] {
            for (int repeat = 0; repeat < kRepeats; ++repeat) {
              wrong[i] += !Same(Step(problem, family, pool), want);
            }
          });
        }
        for (std::thread& caller : callers) caller.join();
        for (int count : wrong) failures += count;
        ++cases;
      }
    }
  }
  std::printf("%d cases, %d callers, %d threads: %d wrong\n", cases, kCallers, kPoolThreads,
              failures);
  return failures != 0;
}

int Plant() {
  int shared = 0;
  std::thread other([&] { ++shared; });
  ++shared;
  other.join();
  return shared == 0;
}

}  // namespace
}  // namespace jax_gn

int main(int argc, char** argv) {
  return argc > 1 && std::strcmp(argv[1], "plant") == 0 ? jax_gn::Plant() : jax_gn::Check();
}
