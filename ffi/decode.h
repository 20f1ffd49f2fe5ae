// The border with XLA: its buffers and attributes become a Problem and arguments, or an error that
// says what was received and what is allowed. It, handlers.h and the modules alone see xla/ffi.
//
// One signature serves cpu and cuda. An attribute is only what no buffer tells:
//   forward:      x, scale, bias, addend                  -> y, mean, rstd, workspace
//   backward:     dy, x, scale, bias, addend, mean, rstd  -> dx, dscale, dbias, workspace
// and their sums alone, of a device's share of the positions:
//   moments:      x, addend                               -> mean, mean_low, variance, workspace
//   channel_sums: dy, x, scale, bias, addend, mean, rstd  -> dz, dz_xhat, workspace
// An absent scale, bias, addend, dscale or dbias is a buffer of shape [0] (channels are never 0).
// The number of groups is mean's second dimension. The gradient of addend is dx, summed.
#ifndef JAX_GN_DECODE_H_
#define JAX_GN_DECODE_H_

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>

#include "plan.h"
#include "problem.h"
#include "status.h"
#include "xla/ffi/api/ffi.h"

namespace jax_gn {

namespace ffi = ::xla::ffi;

using Buffer = ffi::AnyBuffer;
using Output = ffi::Result<ffi::AnyBuffer>;

inline ffi::Error ToFfiError(const Status& status) {
  switch (status.code()) {
    case StatusCode::kOk:
      return ffi::Error::Success();
    case StatusCode::kInvalidArgument:
      return ffi::Error(ffi::ErrorCode::kInvalidArgument, status.message());
    case StatusCode::kUnimplemented:
      return ffi::Error(ffi::ErrorCode::kUnimplemented, status.message());
    case StatusCode::kResourceExhausted:
      return ffi::Error(ffi::ErrorCode::kResourceExhausted, status.message());
    case StatusCode::kInternal:
      break;
  }
  return ffi::Error(ffi::ErrorCode::kInternal, status.message());
}

inline std::string ShapeText(const Buffer& buffer) {
  std::string text = "[";
  for (size_t i = 0; i < buffer.dimensions().size(); ++i) {
    text += (i ? ", " : "") + std::to_string(buffer.dimensions()[i]);
  }
  return text + "]";
}

inline bool SameShape(const Buffer& a, const Buffer& b) {
  const auto left = a.dimensions(), right = b.dimensions();
  if (left.size() != right.size()) return false;
  for (size_t i = 0; i < left.size(); ++i) {
    if (left[i] != right[i]) return false;
  }
  return true;
}

inline Status DecodeDType(const Buffer& buffer, const char* name, DType* dtype) {
  switch (buffer.element_type()) {
    case ffi::F32:
      *dtype = DType::kFloat32;
      return Status();
    case ffi::F16:
      *dtype = DType::kFloat16;
      return Status();
    case ffi::BF16:
      *dtype = DType::kBFloat16;
      return Status();
    case ffi::F64:
      *dtype = DType::kFloat64;
      return Status();
    default:
      return JAX_GN_ERROR(kInvalidArgument,
                          std::string(name) + " must be float32, float16, bfloat16 or float64");
  }
}

template <typename Enum, size_t kCount>
Status DecodeName(const std::string_view (&names)[kCount], std::string_view value,
                  const char* attribute, Enum* out) {
  const std::optional<Enum> found = FromName<Enum>(names, value);
  if (!found) {
    std::string text = std::string(attribute) + " is '" + std::string(value) + "', allowed:";
    for (std::string_view name : names) text += " '" + std::string(name) + "'";
    return JAX_GN_ERROR(kInvalidArgument, text);
  }
  *out = *found;
  return Status();
}

// The attributes that the targets share.
struct Attributes {
  Layout layout;
  Activation activation;
  Family family;
};

inline Status DecodeAttributes(std::string_view layout, std::string_view activation,
                               std::string_view family, Attributes* out) {
  JAX_GN_TRY(DecodeName(kLayoutNames, layout, "layout", &out->layout));
  JAX_GN_TRY(DecodeName(kActivationNames, activation, "activation", &out->activation));
  return DecodeName(kFamilyNames, family, "family", &out->family);
}

// The sizes that x and mean tell.
inline Status DecodeSizes(const Buffer& x, const Buffer& mean, const Attributes& attributes,
                          Problem* problem) {
  const auto dims = x.dimensions();
  const int64_t rank = dims.size();
  if (rank < 2 || rank > 8) {
    return JAX_GN_ERROR(kInvalidArgument, "x must have rank 2 to 8, got " + ShapeText(x));
  }
  // Beyond, products of sizes and byte counts would wrap around. Sizes of 0 count as 1.
  constexpr int64_t kMostElements = int64_t{1} << 50;
  int64_t elements = 1;
  for (const int64_t dim : dims) {
    const int64_t size = std::max<int64_t>(dim, 1);
    if (dim < 0 || elements > kMostElements / size) {
      return JAX_GN_ERROR(kInvalidArgument,
                          "x must have sizes >= 0 and at most 2**50 elements, got " + ShapeText(x));
    }
    elements *= size;
  }
  JAX_GN_TRY(DecodeDType(x, "x", &problem->dtype));
  problem->layout = attributes.layout;
  problem->activation = attributes.activation;
  const int64_t channel_axis = attributes.layout == Layout::kChannelsFirst ? 1 : rank - 1;
  problem->n = dims[0];
  problem->channels = dims[channel_axis];
  problem->spatial = 1;
  for (int64_t i = 1; i < rank; ++i) {
    if (i != channel_axis) problem->spatial *= dims[i];
  }
  if (mean.dimensions().size() != 2 || mean.dimensions()[0] != problem->n) {
    return JAX_GN_ERROR(kInvalidArgument, "mean must be [" + std::to_string(problem->n) +
                                              ", groups], got " + ShapeText(mean));
  }
  problem->groups = mean.dimensions()[1];
  return Status();
}

// Numbers of the accumulator's type, [N, columns].
inline Status CheckNumbers(const Buffer& buffer, const char* name, const Problem& problem,
                           int64_t columns) {
  DType dtype;
  JAX_GN_TRY(DecodeDType(buffer, name, &dtype));
  const auto dims = buffer.dimensions();
  if (dtype != problem.accumulator() || dims.size() != 2 || dims[0] != problem.n ||
      dims[1] != columns) {
    return JAX_GN_ERROR(kInvalidArgument,
                        std::string(name) + " must be [" + std::to_string(problem.n) + ", " +
                            std::to_string(columns) + "] in " +
                            std::string(kDTypeNames[static_cast<int>(problem.accumulator())]) +
                            ", got " + ShapeText(buffer));
  }
  return Status();
}

// mean, rstd and what goes with them: [N, G].
inline Status CheckStatistic(const Buffer& buffer, const char* name, const Problem& problem) {
  return CheckNumbers(buffer, name, problem, problem.groups);
}

// A tensor that must look like x.
inline Status CheckLikeX(const Buffer& buffer, const char* name, const Buffer& x) {
  if (buffer.element_type() != x.element_type() || !SameShape(buffer, x)) {
    return JAX_GN_ERROR(kInvalidArgument, std::string(name) + " must have x's shape " +
                                              ShapeText(x) + " and type, got " + ShapeText(buffer));
  }
  return Status();
}

// scale, bias, addend or gradients: [0], [C] or [N, C].
inline Status DecodeParam(const Buffer& buffer, const char* name, const Problem& problem,
                          Param* param, DType* dtype) {
  JAX_GN_TRY(DecodeDType(buffer, name, dtype));
  const auto dims = buffer.dimensions();
  if (dims.size() == 1 && dims[0] == 0) {
    *param = Param::kAbsent;
  } else if (dims.size() == 1 && dims[0] == problem.channels) {
    *param = Param::kPerChannel;
  } else if (dims.size() == 2 && dims[0] == problem.n && dims[1] == problem.channels) {
    *param = Param::kPerSample;
  } else {
    const std::string c = std::to_string(problem.channels);
    return JAX_GN_ERROR(kInvalidArgument, std::string(name) + " must be [0], [" + c + "] or [" +
                                              std::to_string(problem.n) + ", " + c + "], got " +
                                              ShapeText(buffer));
  }
  return Status();
}

// A gradient's buffer must have the form and type of its parameter.
inline Status CheckGradient(const Buffer& buffer, const char* name, const Problem& problem,
                            Param param, DType dtype) {
  Param got_param;
  DType got_dtype;
  JAX_GN_TRY(DecodeParam(buffer, name, problem, &got_param, &got_dtype));
  if (got_param != param || got_dtype != dtype) {
    return JAX_GN_ERROR(
        kInvalidArgument,
        std::string(name) + " must have its parameter's shape and type, got " + ShapeText(buffer));
  }
  return Status();
}

inline const void* DataOrNull(const Buffer& buffer, Param param) {
  return param == Param::kAbsent ? nullptr : buffer.untyped_data();
}

inline Status DecodeForward(const Buffer& x, const Buffer& scale, const Buffer& bias,
                            const Buffer& addend, Output& y, Output& mean, Output& rstd,
                            Output& workspace, const Attributes& attributes, double epsilon,
                            Problem* problem, ForwardArgs* args) {
  problem->op = Op::kForward;
  JAX_GN_TRY(DecodeSizes(x, *mean, attributes, problem));
  JAX_GN_TRY(CheckLikeX(*y, "y", x));
  JAX_GN_TRY(CheckStatistic(*mean, "mean", *problem));
  JAX_GN_TRY(CheckStatistic(*rstd, "rstd", *problem));
  JAX_GN_TRY(DecodeParam(scale, "scale", *problem, &problem->scale, &problem->scale_dtype));
  JAX_GN_TRY(DecodeParam(bias, "bias", *problem, &problem->bias, &problem->bias_dtype));
  JAX_GN_TRY(DecodeParam(addend, "addend", *problem, &problem->addend, &problem->addend_dtype));
  if (!(epsilon >= 0) || std::isinf(epsilon)) {
    return JAX_GN_ERROR(kInvalidArgument,
                        "epsilon must be finite and >= 0, got " + std::to_string(epsilon));
  }
  *args = {x.untyped_data(),
           DataOrNull(scale, problem->scale),
           DataOrNull(bias, problem->bias),
           DataOrNull(addend, problem->addend),
           epsilon,
           y->untyped_data(),
           mean->untyped_data(),
           rstd->untyped_data(),
           workspace->untyped_data()};
  return Status();
}

// bias is only read with an activation; without one it may be [0] while dbias is not.
inline Status DecodeBackward(const Buffer& dy, const Buffer& x, const Buffer& scale,
                             const Buffer& bias, const Buffer& addend, const Buffer& mean,
                             const Buffer& rstd, Output& dx, Output& dscale, Output& dbias,
                             Output& workspace, const Attributes& attributes, Problem* problem,
                             BackwardArgs* args) {
  problem->op = Op::kBackward;
  JAX_GN_TRY(DecodeSizes(x, mean, attributes, problem));
  JAX_GN_TRY(CheckLikeX(dy, "dy", x));
  JAX_GN_TRY(CheckLikeX(*dx, "dx", x));
  JAX_GN_TRY(CheckStatistic(mean, "mean", *problem));
  JAX_GN_TRY(CheckStatistic(rstd, "rstd", *problem));
  JAX_GN_TRY(DecodeParam(scale, "scale", *problem, &problem->scale, &problem->scale_dtype));
  JAX_GN_TRY(CheckGradient(*dscale, "dscale", *problem, problem->scale, problem->scale_dtype));
  JAX_GN_TRY(DecodeParam(*dbias, "dbias", *problem, &problem->bias, &problem->bias_dtype));
  JAX_GN_TRY(DecodeParam(addend, "addend", *problem, &problem->addend, &problem->addend_dtype));
  Param given_bias;
  DType given_dtype;
  JAX_GN_TRY(DecodeParam(bias, "bias", *problem, &given_bias, &given_dtype));
  const bool needed = problem->activation != Activation::kNone && problem->bias != Param::kAbsent;
  if ((given_bias != Param::kAbsent || needed) &&
      (given_bias != problem->bias || given_dtype != problem->bias_dtype)) {
    return JAX_GN_ERROR(kInvalidArgument,
                        "bias must have dbias's shape and type, got " + ShapeText(bias));
  }
  *args = {dy.untyped_data(),
           x.untyped_data(),
           DataOrNull(scale, problem->scale),
           DataOrNull(bias, given_bias),
           DataOrNull(addend, problem->addend),
           mean.untyped_data(),
           rstd.untyped_data(),
           dx->untyped_data(),
           problem->scale == Param::kAbsent ? nullptr : dscale->untyped_data(),
           problem->bias == Param::kAbsent ? nullptr : dbias->untyped_data(),
           workspace->untyped_data()};
  return Status();
}

inline Status DecodeMoments(const Buffer& x, const Buffer& addend, Output& mean, Output& mean_low,
                            Output& variance, Output& workspace, const Attributes& attributes,
                            Problem* problem, ForwardArgs* args) {
  problem->op = Op::kForward;
  problem->sums_only = true;
  JAX_GN_TRY(DecodeSizes(x, *mean, attributes, problem));
  JAX_GN_TRY(CheckStatistic(*mean, "mean", *problem));
  JAX_GN_TRY(CheckStatistic(*mean_low, "mean_low", *problem));
  JAX_GN_TRY(CheckStatistic(*variance, "variance", *problem));
  JAX_GN_TRY(DecodeParam(addend, "addend", *problem, &problem->addend, &problem->addend_dtype));
  *args = {x.untyped_data(),
           nullptr,
           nullptr,
           DataOrNull(addend, problem->addend),
           0,
           nullptr,
           mean->untyped_data(),
           nullptr,
           workspace->untyped_data()};
  args->mean_low = mean_low->untyped_data();
  args->variance = variance->untyped_data();
  return Status();
}

// scale and bias are only read with an activation; both may be [0] whatever the call is a part of.
inline Status DecodeChannelSums(const Buffer& dy, const Buffer& x, const Buffer& scale,
                                const Buffer& bias, const Buffer& addend, const Buffer& mean,
                                const Buffer& rstd, Output& dz, Output& dz_xhat, Output& workspace,
                                const Attributes& attributes, Problem* problem,
                                BackwardArgs* args) {
  problem->op = Op::kBackward;
  problem->sums_only = true;
  JAX_GN_TRY(DecodeSizes(x, mean, attributes, problem));
  JAX_GN_TRY(CheckLikeX(dy, "dy", x));
  JAX_GN_TRY(CheckStatistic(mean, "mean", *problem));
  JAX_GN_TRY(CheckStatistic(rstd, "rstd", *problem));
  JAX_GN_TRY(DecodeParam(scale, "scale", *problem, &problem->scale, &problem->scale_dtype));
  JAX_GN_TRY(DecodeParam(bias, "bias", *problem, &problem->bias, &problem->bias_dtype));
  JAX_GN_TRY(DecodeParam(addend, "addend", *problem, &problem->addend, &problem->addend_dtype));
  JAX_GN_TRY(CheckNumbers(*dz, "dz", *problem, problem->channels));
  JAX_GN_TRY(CheckNumbers(*dz_xhat, "dz_xhat", *problem, problem->channels));
  *args = {dy.untyped_data(),
           x.untyped_data(),
           DataOrNull(scale, problem->scale),
           DataOrNull(bias, problem->bias),
           DataOrNull(addend, problem->addend),
           mean.untyped_data(),
           rstd.untyped_data(),
           nullptr,
           dz_xhat->untyped_data(),
           dz->untyped_data(),
           workspace->untyped_data()};
  return Status();
}

}  // namespace jax_gn

#endif  // JAX_GN_DECODE_H_
