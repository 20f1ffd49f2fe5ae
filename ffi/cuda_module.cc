// The Python module _cuda: the CUDA handlers of all targets.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <stdexcept>

#include "cuda/backend.h"
#include "handlers.h"
#include "plan.h"

namespace nb = nanobind;

namespace jax_gn {
namespace {

struct CudaBackend {
  using Context = cudaStream_t;
  static constexpr Platform kPlatform = Platform::kCuda;
  static Status Limits(DeviceLimits* limits) { return cuda::CurrentLimits(limits); }
  static Status Run(cudaStream_t stream, const Problem& problem, const Plan& plan,
                    const ForwardArgs& args) {
    return cuda::RunForward(problem, plan, args, stream);
  }
  static Status Run(cudaStream_t stream, const Problem& problem, const Plan& plan,
                    const BackwardArgs& args) {
    return cuda::RunBackward(problem, plan, args, stream);
  }
};

// Legal in CUDA graphs: a call only launches kernels on its stream.
XLA_FFI_DEFINE_HANDLER(kForward, Handlers<CudaBackend>::Forward,
                       JAX_GN_BIND_FORWARD(.Ctx<::xla::ffi::PlatformStream<cudaStream_t>>()),
                       {::xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kBackward, Handlers<CudaBackend>::Backward,
                       JAX_GN_BIND_BACKWARD(.Ctx<::xla::ffi::PlatformStream<cudaStream_t>>()),
                       {::xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kMoments, Handlers<CudaBackend>::Moments,
                       JAX_GN_BIND_MOMENTS(.Ctx<::xla::ffi::PlatformStream<cudaStream_t>>()),
                       {::xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kChannelSums, Handlers<CudaBackend>::ChannelSums,
                       JAX_GN_BIND_CHANNEL_SUMS(.Ctx<::xla::ffi::PlatformStream<cudaStream_t>>()),
                       {::xla::ffi::Traits::kCmdBufferCompatible});

nb::dict Registrations() {
  nb::dict handlers;
  handlers["forward"] = nb::capsule(reinterpret_cast<void*>(kForward));
  handlers["backward"] = nb::capsule(reinterpret_cast<void*>(kBackward));
  handlers["moments"] = nb::capsule(reinterpret_cast<void*>(kMoments));
  handlers["channel_sums"] = nb::capsule(reinterpret_cast<void*>(kChannelSums));
  return handlers;
}

nb::dict DeviceLimitsOf(int ordinal) {
  DeviceLimits limits;
  const Status status = cuda::LimitsOf(ordinal, &limits);
  if (!status.ok()) throw std::runtime_error(status.message());
  nb::dict out;
  out["capability"] = limits.capability;
  out["multiprocessors"] = limits.multiprocessors;
  out["shared_memory_per_block"] = limits.shared_memory_per_block;
  out["l2_bytes"] = limits.l2_bytes;
  return out;
}

NB_MODULE(_cuda, m) {
  m.doc() = "CUDA handlers of jax_gn's FFI targets.";
  m.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.attr("architectures") = cuda::CompiledArchitectures();
  m.def("registrations", &Registrations, "Target name (without version) -> handler capsule.");
  m.def("device_limits", &DeviceLimitsOf, nb::arg("ordinal"),
        "What plans depend on; raises RuntimeError with CUDA's own text.");
  m.def("runtime_version", &cuda::RuntimeVersion, "Of the CUDA runtime in the module: 13000.");
  m.def("driver_version", &cuda::DriverVersion, "The newest CUDA that the driver serves; or 0.");
}

}  // namespace
}  // namespace jax_gn
