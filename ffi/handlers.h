// The handlers of all targets, once for all platforms: decode, plan, run. A platform's module
// gives its Backend, and binds them with what XLA hands its handlers besides the buffers.
#ifndef JAX_GN_HANDLERS_H_
#define JAX_GN_HANDLERS_H_

#include <string>
#include <string_view>

#include "decode.h"
#include "plan.h"

namespace jax_gn {

// What the workspace holds, counted as bytes or as numbers; of other types nothing. (XLA's own
// size_bytes() is undefined for a type that its header doesn't know: found by UBSan.)
inline int64_t WorkspaceBytes(Output& workspace) {
  switch (workspace->element_type()) {
    case ffi::U8:
    case ffi::S32:
    case ffi::F32:
    case ffi::F64:
      return static_cast<int64_t>(workspace->size_bytes());
    default:
      return 0;
  }
}

// The plan for the device that runs the call, which must fit in the workspace that came with it.
inline Status PlanWithin(Output& workspace, const Problem& problem, Platform platform,
                         const DeviceLimits& device, Family family, Plan* plan) {
  JAX_GN_TRY(RememberedPlan(problem, platform, device, family, plan));
  const int64_t got = WorkspaceBytes(workspace);
  if (got < plan->workspace_bytes) {
    return JAX_GN_ERROR(kInvalidArgument, "workspace too small: needed " +
                                              std::to_string(plan->workspace_bytes) +
                                              " bytes, got " + std::to_string(got));
  }
  return Status();
}

// The handlers of a platform, the same but for what XLA hands them besides the buffers. Backend:
//   using Context = …;
//   static constexpr Platform kPlatform;
//   static Status Limits(DeviceLimits*);           of the device that runs the call
//   static Status Run(Context&, const Problem&, const Plan&, const Args&);  ForwardArgs,
//   BackwardArgs
template <typename Backend>
class Handlers {
 public:
  static ffi::Error Forward(typename Backend::Context context, Buffer x, Buffer scale, Buffer bias,
                            Buffer addend, Output y, Output mean, Output rstd, Output workspace,
                            std::string_view layout, std::string_view activation,
                            std::string_view family, double epsilon) {
    return Handle<ForwardArgs>(
        context, workspace, layout, activation, family,
        [&](const Attributes& attributes, Problem* problem, ForwardArgs* args) {
          return DecodeForward(x, scale, bias, addend, y, mean, rstd, workspace, attributes,
                               epsilon, problem, args);
        });
  }

  static ffi::Error Backward(typename Backend::Context context, Buffer dy, Buffer x, Buffer scale,
                             Buffer bias, Buffer addend, Buffer mean, Buffer rstd, Output dx,
                             Output dscale, Output dbias, Output workspace, std::string_view layout,
                             std::string_view activation, std::string_view family) {
    return Handle<BackwardArgs>(
        context, workspace, layout, activation, family,
        [&](const Attributes& attributes, Problem* problem, BackwardArgs* args) {
          return DecodeBackward(dy, x, scale, bias, addend, mean, rstd, dx, dscale, dbias,
                                workspace, attributes, problem, args);
        });
  }

  static ffi::Error Moments(typename Backend::Context context, Buffer x, Buffer addend, Output mean,
                            Output mean_low, Output variance, Output workspace,
                            std::string_view layout, std::string_view family) {
    return Handle<ForwardArgs>(
        context, workspace, layout, "none", family,
        [&](const Attributes& attributes, Problem* problem, ForwardArgs* args) {
          return DecodeMoments(x, addend, mean, mean_low, variance, workspace, attributes, problem,
                               args);
        });
  }

  static ffi::Error ChannelSums(typename Backend::Context context, Buffer dy, Buffer x,
                                Buffer scale, Buffer bias, Buffer addend, Buffer mean, Buffer rstd,
                                Output dz, Output dz_xhat, Output workspace,
                                std::string_view layout, std::string_view activation,
                                std::string_view family) {
    return Handle<BackwardArgs>(
        context, workspace, layout, activation, family,
        [&](const Attributes& attributes, Problem* problem, BackwardArgs* args) {
          return DecodeChannelSums(dy, x, scale, bias, addend, mean, rstd, dz, dz_xhat, workspace,
                                   attributes, problem, args);
        });
  }

 private:
  // decode(attributes, &problem, &args), plan for the device that runs the call, run.
  template <typename Args, typename Decode>
  static ffi::Error Handle(typename Backend::Context& context, Output& workspace,
                           std::string_view layout, std::string_view activation,
                           std::string_view family, Decode decode) {
    return ToFfiError([&]() -> Status {
      Attributes attributes;
      Problem problem;
      Args args;
      DeviceLimits limits;
      Plan plan;
      JAX_GN_TRY(DecodeAttributes(layout, activation, family, &attributes));
      JAX_GN_TRY(decode(attributes, &problem, &args));
      JAX_GN_TRY(Backend::Limits(&limits));
      JAX_GN_TRY(
          PlanWithin(workspace, problem, Backend::kPlatform, limits, attributes.family, &plan));
      return Backend::Run(context, problem, plan, args);
    }());
  }
};

}  // namespace jax_gn

// The bindings, once for both platforms; CONTEXT adds the platform's own context arguments.
#define JAX_GN_BIND_FORWARD(CONTEXT)                \
  ::xla::ffi::Ffi::Bind() CONTEXT                   \
      .Arg<::xla::ffi::AnyBuffer>() /* x */         \
      .Arg<::xla::ffi::AnyBuffer>() /* scale */     \
      .Arg<::xla::ffi::AnyBuffer>() /* bias */      \
      .Arg<::xla::ffi::AnyBuffer>() /* addend */    \
      .Ret<::xla::ffi::AnyBuffer>() /* y */         \
      .Ret<::xla::ffi::AnyBuffer>() /* mean */      \
      .Ret<::xla::ffi::AnyBuffer>() /* rstd */      \
      .Ret<::xla::ffi::AnyBuffer>() /* workspace */ \
      .Attr<std::string_view>("layout")             \
      .Attr<std::string_view>("activation")         \
      .Attr<std::string_view>("family")             \
      .Attr<double>("epsilon")

#define JAX_GN_BACKWARD_ARGUMENTS(CONTEXT)       \
  ::xla::ffi::Ffi::Bind() CONTEXT                \
      .Arg<::xla::ffi::AnyBuffer>() /* dy */     \
      .Arg<::xla::ffi::AnyBuffer>() /* x */      \
      .Arg<::xla::ffi::AnyBuffer>() /* scale */  \
      .Arg<::xla::ffi::AnyBuffer>() /* bias */   \
      .Arg<::xla::ffi::AnyBuffer>() /* addend */ \
      .Arg<::xla::ffi::AnyBuffer>() /* mean */   \
      .Arg<::xla::ffi::AnyBuffer>() /* rstd */

#define JAX_GN_BIND_BACKWARD(CONTEXT)               \
  JAX_GN_BACKWARD_ARGUMENTS(CONTEXT)                \
      .Ret<::xla::ffi::AnyBuffer>() /* dx */        \
      .Ret<::xla::ffi::AnyBuffer>() /* dscale */    \
      .Ret<::xla::ffi::AnyBuffer>() /* dbias */     \
      .Ret<::xla::ffi::AnyBuffer>() /* workspace */ \
      .Attr<std::string_view>("layout")             \
      .Attr<std::string_view>("activation")         \
      .Attr<std::string_view>("family")

#define JAX_GN_BIND_MOMENTS(CONTEXT)                \
  ::xla::ffi::Ffi::Bind() CONTEXT                   \
      .Arg<::xla::ffi::AnyBuffer>() /* x */         \
      .Arg<::xla::ffi::AnyBuffer>() /* addend */    \
      .Ret<::xla::ffi::AnyBuffer>() /* mean */      \
      .Ret<::xla::ffi::AnyBuffer>() /* mean_low */  \
      .Ret<::xla::ffi::AnyBuffer>() /* variance */  \
      .Ret<::xla::ffi::AnyBuffer>() /* workspace */ \
      .Attr<std::string_view>("layout")             \
      .Attr<std::string_view>("family")

#define JAX_GN_BIND_CHANNEL_SUMS(CONTEXT)           \
  JAX_GN_BACKWARD_ARGUMENTS(CONTEXT)                \
      .Ret<::xla::ffi::AnyBuffer>() /* dz */        \
      .Ret<::xla::ffi::AnyBuffer>() /* dz_xhat */   \
      .Ret<::xla::ffi::AnyBuffer>() /* workspace */ \
      .Attr<std::string_view>("layout")             \
      .Attr<std::string_view>("activation")         \
      .Attr<std::string_view>("family")

#endif  // JAX_GN_HANDLERS_H_
