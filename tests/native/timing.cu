// Kernel times. A CUDA graph of many calls, over buffers that take turns so that none finds its
// data in the L2 cache (together more than 320 MB), is replayed; the median of the replays divided
// by the calls is a call's time, launch gaps between its kernels included. Beside each: a plain
// copy kernel that moves as many bytes as the call must (each tensor once), the same way.
#include <algorithm>
#include <sstream>
#include <utility>

#include "cuda/resident_cut.h"
#include "device_case.h"
#include "element.h"

namespace jax_gn::harness {
namespace {

constexpr int64_t kWorkingSet = 320 << 20;
constexpr int kReplays = 7;
constexpr float kReplayMs = 5;

template <typename E>
__global__ void FillKernel(E* to, int64_t count) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += stride) {
    const uint32_t hash = static_cast<uint32_t>(i * 2654435761u) >> 8;
    to[i] = ToElement<E>(static_cast<Accumulator<E>>(hash * 0x1p-23f - 0.8f));
  }
}

__global__ void CopyKernel(const uint4* from, uint4* to, int64_t count) {
  // Four loads in flight a thread.
  const int64_t first = blockIdx.x * static_cast<int64_t>(4 * blockDim.x) + threadIdx.x;
  uint4 packs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (first + i * blockDim.x < count) packs[i] = __ldg(from + first + i * blockDim.x);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (first + i * blockDim.x < count) __stcs(to + first + i * blockDim.x, packs[i]);
  }
}

class Memory {
 public:
  explicit Memory(int64_t bytes) { HARNESS_CUDA(cudaMalloc(&base_, bytes)); }
  ~Memory() { cudaFree(base_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* at(int64_t offset) const { return base_ + offset; }

 private:
  char* base_ = nullptr;
};

// Seconds of a call; call(i, stream) puts the i-th on the stream.
template <typename Call>
double Seconds(Call call) {
  cudaStream_t stream;
  cudaEvent_t begin, end;
  HARNESS_CUDA(cudaStreamCreate(&stream));
  HARNESS_CUDA(cudaEventCreate(&begin));
  HARNESS_CUDA(cudaEventCreate(&end));
  const auto replay = [&](int calls, int replays) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    HARNESS_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < calls; ++i) call(i, stream);
    HARNESS_CUDA(cudaStreamEndCapture(stream, &graph));
    HARNESS_CUDA(cudaGraphInstantiate(&executable, graph, 0));
    std::vector<float> times;
    for (int i = 0; i <= replays; ++i) {  // the first is a warm-up
      float ms;
      HARNESS_CUDA(cudaEventRecord(begin, stream));
      HARNESS_CUDA(cudaGraphLaunch(executable, stream));
      HARNESS_CUDA(cudaEventRecord(end, stream));
      HARNESS_CUDA(cudaEventSynchronize(end));
      HARNESS_CUDA(cudaEventElapsedTime(&ms, begin, end));
      if (i > 0) times.push_back(ms);
    }
    HARNESS_CUDA(cudaGraphExecDestroy(executable));
    HARNESS_CUDA(cudaGraphDestroy(graph));
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2] / calls;
  };
  const float once = replay(2, 1);
  const int calls = std::clamp(static_cast<int>(kReplayMs / once), 4, 400);
  const double ms = replay(calls, once > 20 ? 1 : kReplays);
  HARNESS_CUDA(cudaStreamDestroy(stream));
  HARNESS_CUDA(cudaEventDestroy(begin));
  HARNESS_CUDA(cudaEventDestroy(end));
  return ms * 1e-3;
}

int64_t Rounded(int64_t bytes) { return (bytes + 255) / 256 * 256; }

double TimeCopy(int64_t bytes) {
  const int64_t half = Rounded(bytes / 2);
  const int64_t sets = std::max<int64_t>(2, kWorkingSet / (2 * half) + 1);
  const Memory memory(2 * half * sets);
  HARNESS_CUDA(cudaMemset(memory.at(0), 0, 2 * half * sets));
  const int64_t count = half / 16;
  return Seconds([&](int i, cudaStream_t stream) {
    char* set = memory.at(i % sets * 2 * half);
    CopyKernel<<<static_cast<unsigned>((count + 1023) / 1024), 256, 0, stream>>>(
        reinterpret_cast<const uint4*>(set), reinterpret_cast<uint4*>(set + half), count);
  });
}

void TimeOne(const std::string& name, const Problem& p, const Plan& plan, const char* label,
             double copy_seconds) {
  const int64_t tensor = Rounded(p.elements() * SizeOf(p.dtype));
  const int64_t statistic = Rounded(p.n * p.groups * SizeOf(p.accumulator()));
  const int64_t parameter = Rounded(p.channels * SizeOf(p.scale_dtype));
  const int64_t tensors = p.op == Op::kForward ? 2 : 3;
  const int64_t set_bytes =
      tensors * tensor + 2 * statistic + 4 * parameter + Rounded(plan.workspace_bytes);
  const int64_t sets = std::max<int64_t>(2, kWorkingSet / (tensors * tensor) + 1);
  const Memory memory(set_bytes * sets);
  // Any finite numbers will do: times don't depend on them.
  VisitElement(p.dtype, [&](auto element) {
    using E = decltype(element);
    FillKernel<E><<<4096, 256>>>(reinterpret_cast<E*>(memory.at(0)),
                                 set_bytes * sets / static_cast<int64_t>(sizeof(E)));
  });
  HARNESS_CUDA(cudaDeviceSynchronize());
  std::string error;
  const double seconds = Seconds([&](int i, cudaStream_t stream) {
    char* at = memory.at(i % sets * set_bytes);
    const auto take = [&at](int64_t bytes) {
      char* const here = at;
      at += bytes;
      return here;
    };
    char *x = take(tensor), *y = take(tensor), *mean = take(statistic), *rstd = take(statistic);
    char *scale = take(parameter), *bias = take(parameter), *dscale = take(parameter);
    char *dbias = take(parameter), *dy = tensors == 3 ? take(tensor) : nullptr;
    const Status status =
        p.op == Op::kForward
            ? cuda::RunForward(p, plan, {x, scale, bias, nullptr, 1e-5, y, mean, rstd, at}, stream)
            : cuda::RunBackward(
                  p, plan, {dy, x, scale, bias, nullptr, mean, rstd, y, dscale, dbias, at}, stream);
    if (!status.ok()) error = status.message();
  });
  const double bytes = static_cast<double>(CompulsoryBytes(p));
  std::printf(
      "{\"problem\": \"%s\", \"op\": \"%s\", \"dtype\": \"%s\", \"layout\": \"%s\", \"family\": "
      "\"%s\", \"plan\": \"%s\", \"us\": %.2f, \"copy_us\": %.2f, \"gb_per_s\": %.0f, "
      "\"ratio_to_copy\": %.3f%s}\n",
      name.c_str(), kOpNames[static_cast<int>(p.op)].data(),
      kDTypeNames[static_cast<int>(p.dtype)].data(),
      kLayoutNames[static_cast<int>(p.layout)].data(),
      kFamilyNames[static_cast<int>(plan.family)].data(), label, seconds * 1e6, copy_seconds * 1e6,
      bytes / seconds * 1e-9, seconds / copy_seconds,
      error.empty() ? "" : (", \"error\": \"" + error + "\"").c_str());
  std::fflush(stdout);
}

std::string Label(const Problem& p, const Plan& plan) {
  if (plan.family != Family::kResident) return "";
  const cuda::ResidentCut cut = cuda::CutOf(p, plan);
  return "width " + std::to_string(plan.width) + " threads " + std::to_string(cut.threads) +
         (cut.solo() ? " solo" : "") + " team " + std::to_string(cut.team) + " steps " +
         std::to_string(cut.steps) + " held " + std::to_string(cut.held) + " blocks " +
         std::to_string(cuda::ResidentBlocks(cut));
}

constexpr size_t kLadder = 13;  // cuts of a problem, of each kind, that are timed

// Which cuts a person asked for; 0: any.
struct CutFilter {
  int width = 0, threads = 0, team = 0;
  bool grid = false;  // grid teams alone

  bool any() const { return width == 0 && threads == 0 && team == 0 && !grid; }
  bool operator()(const cuda::ResidentCut& cut) const {
    const int cut_width = cut.rows() ? cut.tile_packs : cut.lanes;
    return (width == 0 || width == cut_width) && (threads == 0 || threads == cut.threads) &&
           (team == 0 || team == cut.team) && (!grid || cut.grid_team());
  }
  // From "team=7" or "grid"; false where the argument says something else.
  bool Take(const std::string& argument) {
    if (argument == "grid") return grid = true;
    for (const auto& [name, value] : {std::pair("width=", &width), std::pair("threads=", &threads),
                                      std::pair("team=", &team)}) {
      if (argument.rfind(name, 0) != 0) continue;
      *value = std::stoi(argument.substr(std::string(name).size()));
      return true;
    }
    return false;
  }
};

// The cuts of the family "resident" that were asked for; by default some that leave little room
// unused, evenly chosen.
void TimeCuts(const std::string& name, const Problem& p, const CutFilter& wanted,
              double copy_seconds) {
  const auto room = [](const cuda::ResidentCut& cut) {
    return static_cast<double>(cut.slabs) * cut.team * cut.slab_threads * cut.steps;
  };
  std::vector<cuda::ResidentCut> cuts, tight[2];
  double least = 1e30;
  cuda::ForResidentCuts(p, DeviceLimits(), [&](const cuda::ResidentCut& cut) {
    if (!wanted(cut)) return;
    cuts.push_back(cut);
    least = std::min(least, room(cut));
  });
  for (const cuda::ResidentCut& cut : cuts) {
    if (!wanted.any() || room(cut) <= 1.15 * least) tight[cut.packs()].push_back(cut);
  }
  for (const std::vector<cuda::ResidentCut>& kind : tight) {
    const size_t apart = wanted.any() ? std::max<size_t>(1, kind.size() / kLadder) : 1;
    for (size_t i = 0; i < kind.size(); i += apart) {
      Plan plan;
      cuda::PlanResident(p, kind[i], DeviceLimits(), &plan);
      plan.workspace_bytes = cuda::ResidentSpaceOf(p, kind[i], plan.stages[0].grid).bytes() + 16;
      TimeOne(name, p, plan, Label(p, plan).c_str(), copy_seconds);
    }
  }
}

__global__ void TeamKernel() {}

}  // namespace

int Teams() {
  HARNESS_CUDA(cudaFuncSetAttribute(TeamKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  HARNESS_CUDA(cudaFuncSetAttribute(TeamKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(DeviceLimits().shared_memory_per_block)));
  for (int blocks = 1; blocks <= 4; ++blocks) {
    for (int team = 1; team <= cuda::kMaxTeam; ++team) {
      cudaLaunchConfig_t config = {};
      config.gridDim = dim3(static_cast<unsigned>(64 * team));
      config.blockDim = dim3(128);
      config.dynamicSmemBytes = cuda::kSharedPerProcessor / blocks - cuda::kSharedPerBlockExtra;
      cudaLaunchAttribute cluster = {};
      cluster.id = cudaLaunchAttributeClusterDimension;
      cluster.val.clusterDim.x = static_cast<unsigned>(team);
      cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
      config.attrs = &cluster;
      config.numAttrs = 1;
      int teams = 0;
      const cudaError_t error = cudaOccupancyMaxActiveClusters(&teams, TeamKernel, &config);
      std::printf("{\"blocks\": %d, \"team\": %d, \"teams\": %d, \"error\": \"%s\"}\n", blocks,
                  team, teams, cudaGetErrorName(error));
      static_cast<void>(cudaGetLastError());
    }
  }
  return 0;
}

int Time(const std::vector<std::string>& arguments, bool ladder) {
  std::vector<DType> dtypes;
  std::vector<Family> families;
  std::vector<Layout> layouts;
  CutFilter wanted;
  for (const std::string& argument : arguments) {
    if (const auto dtype = FromName<DType>(kDTypeNames, argument)) dtypes.push_back(*dtype);
    if (const auto family = FromName<Family>(kFamilyNames, argument)) families.push_back(*family);
    if (const auto layout = FromName<Layout>(kLayoutNames, argument)) layouts.push_back(*layout);
    wanted.Take(argument);
  }
  if (dtypes.empty()) dtypes = {DType::kBFloat16, DType::kFloat32};
  if (layouts.empty()) layouts = {Layout::kChannelsLast, Layout::kChannelsFirst};
  if (families.empty()) families = {Family::kAuto, Family::kStreaming, Family::kThreeStage};
  for (const std::string& argument : arguments) {
    if (argument.find(':') == std::string::npos) continue;
    std::vector<std::string> words;
    std::istringstream stream(argument);
    for (std::string word; std::getline(stream, word, ':');) words.push_back(word);
    if (words.size() != 6) {
      std::fprintf(stderr, "NAME:N:SPATIAL:CHANNELS:GROUPS:ACTIVATION, not %s\n", argument.c_str());
      return 1;
    }
    Problem p;
    p.n = std::stoll(words[1]);
    p.spatial = std::stoll(words[2]);
    p.channels = std::stoll(words[3]);
    p.groups = std::stoll(words[4]);
    p.activation = FromName<Activation>(kActivationNames, words[5]).value_or(Activation::kNone);
    p.scale = p.bias = Param::kPerChannel;
    for (DType dtype : dtypes) {
      p.dtype = p.scale_dtype = p.bias_dtype = dtype;
      for (Op op : {Op::kForward, Op::kBackward}) {
        p.op = op;
        const double copy_seconds = TimeCopy(CompulsoryBytes(p));
        for (Layout layout : layouts) {
          p.layout = layout;
          if (ladder) TimeCuts(words[0], p, wanted, copy_seconds);
          for (Family family : families) {
            Plan plan;
            if (!MakePlan(p, Platform::kCuda, DeviceLimits(), family, &plan).ok()) continue;
            if (family == Family::kAuto && plan.family == Family::kStreaming) continue;
            TimeOne(words[0], p, plan, Label(p, plan).c_str(), copy_seconds);
          }
        }
      }
    }
  }
  return 0;
}

}  // namespace jax_gn::harness
