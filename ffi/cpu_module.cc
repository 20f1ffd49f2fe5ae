// The Python module _cpu: the CPU handlers of all targets, and the planner for every platform.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include "cpu/backend.h"
#include "handlers.h"
#include "plan.h"

namespace nb = nanobind;

namespace jax_gn {
namespace {

class XlaExecutor final : public cpu::Executor {
 public:
  explicit XlaExecutor(ffi::ThreadPool& pool) : pool_(pool) {}
  int num_threads() const override { return static_cast<int>(pool_.num_threads()); }
  void Schedule(std::function<void()> task) override { pool_.Schedule(std::move(task)); }

 private:
  ffi::ThreadPool& pool_;
};

// Nothing to reduce: mean = 0, rstd = 1/sqrt(epsilon). XLA's buffers start as garbage, so an empty
// problem still writes every result.
void WriteEmpty(const Problem& problem, const ForwardArgs& args) {
  if (problem.sums_only) {
    const int64_t bytes = problem.n * problem.groups * SizeOf(problem.accumulator());
    for (void* sums : {args.mean, args.mean_low, args.variance}) {
      if (bytes > 0) std::memset(sums, 0, bytes);
    }
    return;
  }
  const double rstd = 1.0 / std::sqrt(args.epsilon);
  for (int64_t i = 0; i < problem.n * problem.groups; ++i) {
    if (problem.accumulator() == DType::kFloat64) {
      static_cast<double*>(args.mean)[i] = 0;
      static_cast<double*>(args.rstd)[i] = rstd;
    } else {
      static_cast<float*>(args.mean)[i] = 0;
      static_cast<float*>(args.rstd)[i] = static_cast<float>(rstd);
    }
  }
}

void WriteEmpty(const Problem& problem, const BackwardArgs& args) {
  const int64_t scale_bytes =
      ParamElements(problem, problem.dscale()) * SizeOf(problem.dscale_dtype());
  const int64_t bias_bytes =
      ParamElements(problem, problem.dbias()) * SizeOf(problem.dbias_dtype());
  if (scale_bytes > 0) std::memset(args.dscale, 0, scale_bytes);
  if (bias_bytes > 0) std::memset(args.dbias, 0, bias_bytes);
}

struct CpuBackend {
  using Context = ffi::ThreadPool;
  static constexpr Platform kPlatform = Platform::kCpu;
  static Status Limits(DeviceLimits*) { return Status(); }  // no CPU plan depends on them
  static Status Run(ffi::ThreadPool& pool, const Problem& problem, const Plan& plan,
                    const ForwardArgs& args) {
    return RunUnlessEmpty(pool, problem, plan, args, cpu::RunForward);
  }
  static Status Run(ffi::ThreadPool& pool, const Problem& problem, const Plan& plan,
                    const BackwardArgs& args) {
    return RunUnlessEmpty(pool, problem, plan, args, cpu::RunBackward);
  }

 private:
  template <typename Args>
  static Status RunUnlessEmpty(ffi::ThreadPool& pool, const Problem& problem, const Plan& plan,
                               const Args& args,
                               Status (*run)(const Problem&, const Plan&, const Args&,
                                             cpu::Executor&)) {
    if (problem.n == 0 || problem.spatial == 0) {
      WriteEmpty(problem, args);
      return Status();
    }
    XlaExecutor executor(pool);
    return run(problem, plan, args, executor);
  }
};

XLA_FFI_DEFINE_HANDLER(kForward, Handlers<CpuBackend>::Forward,
                       JAX_GN_BIND_FORWARD(.Ctx<::xla::ffi::ThreadPool>()));
XLA_FFI_DEFINE_HANDLER(kBackward, Handlers<CpuBackend>::Backward,
                       JAX_GN_BIND_BACKWARD(.Ctx<::xla::ffi::ThreadPool>()));
XLA_FFI_DEFINE_HANDLER(kMoments, Handlers<CpuBackend>::Moments,
                       JAX_GN_BIND_MOMENTS(.Ctx<::xla::ffi::ThreadPool>()));
XLA_FFI_DEFINE_HANDLER(kChannelSums, Handlers<CpuBackend>::ChannelSums,
                       JAX_GN_BIND_CHANNEL_SUMS(.Ctx<::xla::ffi::ThreadPool>()));

nb::dict Registrations() {
  nb::dict handlers;
  handlers["forward"] = nb::capsule(reinterpret_cast<void*>(kForward));
  handlers["backward"] = nb::capsule(reinterpret_cast<void*>(kBackward));
  handlers["moments"] = nb::capsule(reinterpret_cast<void*>(kMoments));
  handlers["channel_sums"] = nb::capsule(reinterpret_cast<void*>(kChannelSums));
  return handlers;
}

// An enum by its name; a name unknown here is a bug of the Python side, hence no story.
template <typename Enum, size_t kCount>
Enum Named(const std::string_view (&names)[kCount], std::string_view name) {
  const std::optional<Enum> found = FromName<Enum>(names, name);
  if (!found) throw nb::value_error(("unknown name: " + std::string(name)).c_str());
  return *found;
}

nb::dict PlanToDict(const Problem& problem, const Plan& plan) {
  nb::list kernels, grid, threads, shared;
  for (int i = 0; i < plan.num_stages; ++i) {
    kernels.append(std::string(plan.stages[i].kernel));
    grid.append(plan.stages[i].grid);
    threads.append(plan.stages[i].threads);
    shared.append(plan.stages[i].shared_bytes);
  }
  nb::dict out;
  out["family"] = std::string(kFamilyNames[static_cast<int>(plan.family)]);
  out["kernels"] = nb::tuple(kernels);
  out["grid"] = nb::tuple(grid);
  out["threads"] = nb::tuple(threads);
  out["shared_bytes"] = nb::tuple(shared);
  out["workspace_bytes"] = plan.workspace_bytes;
  out["bytes_moved"] = plan.bytes_moved;
  out["bytes_compulsory"] = CompulsoryBytes(problem);
  return out;
}

// Raises ValueError for an invalid problem and NotImplementedError for an unserved one.
nb::dict PlanFor(std::string_view op, bool sums_only, std::string_view dtype,
                 std::string_view layout, std::string_view activation, std::string_view scale,
                 std::string_view bias, std::string_view addend, std::string_view scale_dtype,
                 std::string_view bias_dtype, std::string_view addend_dtype, int64_t n,
                 int64_t spatial, int64_t channels, int64_t groups, std::string_view platform,
                 int capability, int multiprocessors, int64_t shared_memory_per_block,
                 int64_t l2_bytes, std::string_view preference) {
  Problem problem;
  problem.op = Named<Op>(kOpNames, op);
  problem.sums_only = sums_only;
  problem.dtype = Named<DType>(kDTypeNames, dtype);
  problem.layout = Named<Layout>(kLayoutNames, layout);
  problem.activation = Named<Activation>(kActivationNames, activation);
  problem.scale = Named<Param>(kParamNames, scale);
  problem.bias = Named<Param>(kParamNames, bias);
  problem.addend = Named<Param>(kParamNames, addend);
  problem.scale_dtype = Named<DType>(kDTypeNames, scale_dtype);
  problem.bias_dtype = Named<DType>(kDTypeNames, bias_dtype);
  problem.addend_dtype = Named<DType>(kDTypeNames, addend_dtype);
  problem.n = n;
  problem.spatial = spatial;
  problem.channels = channels;
  problem.groups = groups;
  const DeviceLimits device{capability, multiprocessors, shared_memory_per_block, l2_bytes};
  Plan plan;
  const Status status = MakePlan(problem, Named<Platform>(kPlatformNames, platform), device,
                                 Named<Family>(kFamilyNames, preference), &plan);
  if (status.code() == StatusCode::kUnimplemented) {
    PyErr_SetString(PyExc_NotImplementedError, status.message().c_str());
    throw nb::python_error();
  }
  if (!status.ok()) throw nb::value_error(status.message().c_str());
  return PlanToDict(problem, plan);
}

NB_MODULE(_cpu, m) {
  m.doc() = "CPU handlers of jax_gn's FFI targets, and the planner for every platform.";
  m.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.attr("families") = [] {
    nb::list names;
    for (std::string_view name : kFamilyNames) names.append(std::string(name));
    return nb::tuple(names);
  }();
  m.def("registrations", &Registrations, "Target name (without version) -> handler capsule.");
  m.def(
      "instruction_set", [] { return std::string(cpu::InstructionSet()); },
      "The instruction set that the CPU loops use on this machine.");
  m.def("plan", &PlanFor, nb::kw_only(), nb::arg("op"), nb::arg("sums_only") = false,
        nb::arg("dtype"), nb::arg("layout"), nb::arg("activation"), nb::arg("scale"),
        nb::arg("bias"), nb::arg("addend"), nb::arg("scale_dtype"), nb::arg("bias_dtype"),
        nb::arg("addend_dtype"), nb::arg("n"), nb::arg("spatial"), nb::arg("channels"),
        nb::arg("groups"), nb::arg("platform"), nb::arg("capability"), nb::arg("multiprocessors"),
        nb::arg("shared_memory_per_block"), nb::arg("l2_bytes"), nb::arg("preference"),
        "The plan of a problem, as a dict.");
}

}  // namespace
}  // namespace jax_gn
