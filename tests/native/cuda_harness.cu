// The native harness: checks the CUDA launchers against a float64 reference and against themselves.
//
//   cuda_harness check [small] [bare] [unpoisoned]   the sweep: right numbers, intact guard bands
//   cuda_harness repeat                              20 runs, 2 streams, CUDA graphs: equal bits
//   cuda_harness plant out_of_bounds|uninitialised|race    a bug, for a sanitizer to find
//   cuda_harness time NAME:N:SPATIAL:CHANNELS:GROUPS:ACTIVATION ... [TYPE ...] [FAMILY ...]
//   cuda_harness ladder ... [width=W] [threads=T] [team=B] [grid]    and cuts of family "resident"
//   cuda_harness teams                               clusters of each size that run at once
//
// Exits with 1 if a check failed.
#include <algorithm>
#include <cmath>

#include "device_case.h"

namespace jax_gn::harness {
namespace {

using Bits = std::vector<std::vector<char>>;

std::string CheckOne(const Case& the_case, const BufferStyle& style) {
  const Problem& p = the_case.problem;
  const Numbers numbers = MakeNumbers(the_case);
  DeviceCase device(the_case, numbers, style);
  if (!device.status().ok()) return device.status().message();
  if (const Status run = device.Run(nullptr); !run.ok()) return run.message();
  const cudaError_t error = cudaDeviceSynchronize();
  if (error != cudaSuccess) return cudaGetErrorString(error);
  const Results want = Reference(the_case, numbers);
  const Bits got = device.Read();
  const double group = static_cast<double>(p.group_elements());
  const double channel = static_cast<double>(p.n * p.spatial);
  const struct {
    const char* name;
    const std::vector<double>& want;
    DType dtype;
    double length;
  } results[] = {{"y", want.y, p.dtype, group},
                 {"mean", want.mean, p.accumulator(), group},
                 {"rstd", want.rstd, p.accumulator(), group},
                 {"dx", want.dx, p.dtype, group},
                 {"dscale", want.dscale, p.scale_dtype, channel},
                 {"dbias", want.dbias, p.bias_dtype, channel},
                 {"moments' mean", want.mean, p.accumulator(), group},
                 {"mean_low", want.mean_low, p.accumulator(), group},
                 {"variance", want.variance, p.accumulator(), group},
                 {"dz", want.dz, p.accumulator(), channel},
                 {"dz_xhat", want.dz_xhat, p.accumulator(), channel}};
  // The mean is saved as a number of the accumulator's type: in deviations it is off by as much.
  double times = 1;
  for (double rstd : want.rstd) times = std::max(times, the_case.mean * rstd);
  for (size_t i = 0; i < got.size(); ++i) {
    const std::string wrong =
        Compare(results[i].name, Decode(got[i], results[i].dtype), results[i].want,
                results[i].dtype, p.accumulator(), results[i].length, times);
    if (!wrong.empty()) return wrong;
  }
  if (p.group_elements() == 1) {
    for (double value : Decode(got[3], p.dtype)) {
      if (value != 0) return "dx of a group of one element is not 0";
    }
  }
  return device.CheckGuards();
}

int Check(bool small, const BufferStyle& style) {
  int failures = 0;
  const std::vector<Case> cases = SweepCases(small);
  for (const Case& the_case : cases) {
    const std::string wrong = CheckOne(the_case, style);
    if (wrong.empty()) continue;
    std::printf("FAILED %s: %s\n", the_case.Name().c_str(), wrong.c_str());
    ++failures;
  }
  std::printf("check: %zu cases, %d failed\n", cases.size(), failures);
  return failures;
}

// Runs again, from poison, on that stream; the bits must be those.
std::string Again(DeviceCase& device, const Bits& want, cudaStream_t stream, const char* what) {
  device.Poison();
  if (const Status run = device.Run(stream); !run.ok()) return run.message();
  HARNESS_CUDA(cudaStreamSynchronize(stream));
  return device.Read() == want ? "" : std::string(what) + ": other bits";
}

// Captured: a launcher that allocated, waited or asked would fail. Then replayed twice.
std::string Replayed(DeviceCase& device, const Bits& want, cudaStream_t stream) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  HARNESS_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  const Status run = device.Run(stream);
  const cudaError_t captured = cudaStreamEndCapture(stream, &graph);
  if (!run.ok()) return "capture: " + run.message();
  if (captured != cudaSuccess) return std::string("capture: ") + cudaGetErrorString(captured);
  HARNESS_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  std::string wrong;
  for (int i = 0; i < 2 && wrong.empty(); ++i) {
    device.Poison();
    HARNESS_CUDA(cudaGraphLaunch(executable, stream));
    HARNESS_CUDA(cudaStreamSynchronize(stream));
    if (device.Read() != want) wrong = "graph: other bits";
  }
  HARNESS_CUDA(cudaGraphExecDestroy(executable));
  HARNESS_CUDA(cudaGraphDestroy(graph));
  return wrong;
}

// Both at once, many times over, each on its own stream.
std::string AtOnce(DeviceCase& a, const Bits& want_a, DeviceCase& b, const Bits& want_b,
                   cudaStream_t stream_a, cudaStream_t stream_b) {
  a.Poison();
  b.Poison();
  for (int i = 0; i < 10; ++i) {
    if (const Status run = a.Run(stream_a); !run.ok()) return run.message();
    if (const Status run = b.Run(stream_b); !run.ok()) return run.message();
  }
  HARNESS_CUDA(cudaDeviceSynchronize());
  return a.Read() == want_a && b.Read() == want_b ? "" : "two streams: other bits";
}

int Repeat() {
  cudaStream_t streams[2];
  for (cudaStream_t& stream : streams) {
    HARNESS_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  int failures = 0, count = 0;
  std::unique_ptr<DeviceCase> last;
  Bits last_bits;
  const std::vector<Case> cases = SweepCases(false);
  for (size_t i = 0; i < cases.size(); i += 3) {
    const Case& the_case = cases[i];
    if (the_case.problem.elements() == 0) continue;
    auto device = std::make_unique<DeviceCase>(the_case, MakeNumbers(the_case), BufferStyle());
    std::string wrong;
    if (const Status run = device->Run(streams[0]); !run.ok()) wrong = run.message();
    HARNESS_CUDA(cudaDeviceSynchronize());
    Bits bits = device->Read();
    for (int run = 1; run < 20 && wrong.empty(); ++run) {
      wrong = Again(*device, bits, streams[run % 2], "again");
    }
    if (wrong.empty()) wrong = Replayed(*device, bits, streams[0]);
    if (wrong.empty() && last != nullptr) {
      wrong = AtOnce(*device, bits, *last, last_bits, streams[0], streams[1]);
    }
    if (!wrong.empty()) {
      std::printf("FAILED %s: %s\n", the_case.Name().c_str(), wrong.c_str());
      ++failures;
    }
    ++count;
    last = std::move(device);
    last_bits = std::move(bits);
  }
  std::printf("repeat: %d cases (20 runs, graph, two streams), %d failed\n", count, failures);
  return failures;
}

}  // namespace
}  // namespace jax_gn::harness

int main(int argc, char** argv) {
  using namespace jax_gn::harness;
  const std::vector<std::string> words(argv + 1, argv + argc);
  const auto has = [&](const char* word) {
    for (const std::string& given : words) {
      if (given == word) return true;
    }
    return false;
  };
  if (has("check")) return Check(has("small"), {!has("bare"), !has("unpoisoned")}) != 0;
  if (has("repeat")) return Repeat() != 0;
  if (has("teams")) return Teams() != 0;
  if (words.size() == 2 && words[0] == "plant") return Plant(words[1]) != 0;
  if (words.size() > 1 && (words[0] == "time" || words[0] == "ladder")) {
    return Time({words.begin() + 1, words.end()}, words[0] == "ladder") != 0;
  }
  std::fprintf(stderr,
               "usage: cuda_harness check|repeat|plant|time|ladder|teams ...; see its source\n");
  return 2;
}
