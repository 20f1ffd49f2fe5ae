// The Python module _cuda: the CUDA handlers of both targets.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string_view>

#include "cuda/backend.h"
#include "decode.h"
#include "plan.h"

namespace nb = nanobind;

namespace jax_gn {
namespace {

// What is left once a call is decoded: plan for the device that runs it, then run.
template <typename Args>
Status Serve(cudaStream_t stream, const Problem& problem, const Args& args, Family family,
             Output& workspace,
             Status (*run)(const Problem&, const Plan&, const Args&, cudaStream_t)) {
  DeviceLimits limits;
  Plan plan;
  JAX_GN_TRY(cuda::CurrentLimits(&limits));
  JAX_GN_TRY(PlanWithin(workspace, problem, Platform::kCuda, limits, family, &plan));
  return run(problem, plan, args, stream);
}

Status Forward(cudaStream_t stream, const Buffer& x, const Buffer& scale, const Buffer& bias,
               Output& y, Output& mean, Output& rstd, Output& workspace, std::string_view layout,
               std::string_view activation, std::string_view family, double epsilon) {
  Attributes attributes;
  Problem problem;
  ForwardArgs args;
  JAX_GN_TRY(DecodeAttributes(layout, activation, family, &attributes));
  JAX_GN_TRY(DecodeForward(x, scale, bias, y, mean, rstd, workspace, attributes, epsilon, &problem,
                           &args));
  return Serve(stream, problem, args, attributes.family, workspace, cuda::RunForward);
}

Status Backward(cudaStream_t stream, const Buffer& dy, const Buffer& x, const Buffer& scale,
                const Buffer& bias, const Buffer& mean, const Buffer& rstd, Output& dx,
                Output& dscale, Output& dbias, Output& workspace, std::string_view layout,
                std::string_view activation, std::string_view family) {
  Attributes attributes;
  Problem problem;
  BackwardArgs args;
  JAX_GN_TRY(DecodeAttributes(layout, activation, family, &attributes));
  JAX_GN_TRY(DecodeBackward(dy, x, scale, bias, mean, rstd, dx, dscale, dbias, workspace,
                            attributes, &problem, &args));
  return Serve(stream, problem, args, attributes.family, workspace, cuda::RunBackward);
}

ffi::Error ForwardHandler(cudaStream_t stream, Buffer x, Buffer scale, Buffer bias, Output y,
                          Output mean, Output rstd, Output workspace, std::string_view layout,
                          std::string_view activation, std::string_view family, double epsilon) {
  return ToFfiError(Forward(stream, x, scale, bias, y, mean, rstd, workspace, layout, activation,
                            family, epsilon));
}

ffi::Error BackwardHandler(cudaStream_t stream, Buffer dy, Buffer x, Buffer scale, Buffer bias,
                           Buffer mean, Buffer rstd, Output dx, Output dscale, Output dbias,
                           Output workspace, std::string_view layout, std::string_view activation,
                           std::string_view family) {
  return ToFfiError(Backward(stream, dy, x, scale, bias, mean, rstd, dx, dscale, dbias, workspace,
                             layout, activation, family));
}

// Legal in CUDA graphs: a call only launches kernels on its stream.
XLA_FFI_DEFINE_HANDLER(kForward, ForwardHandler,
                       JAX_GN_BIND_FORWARD(.Ctx<::xla::ffi::PlatformStream<cudaStream_t>>()),
                       {::xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kBackward, BackwardHandler,
                       JAX_GN_BIND_BACKWARD(.Ctx<::xla::ffi::PlatformStream<cudaStream_t>>()),
                       {::xla::ffi::Traits::kCmdBufferCompatible});

nb::dict Registrations() {
  nb::dict handlers;
  handlers["forward"] = nb::capsule(reinterpret_cast<void*>(kForward));
  handlers["backward"] = nb::capsule(reinterpret_cast<void*>(kBackward));
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
