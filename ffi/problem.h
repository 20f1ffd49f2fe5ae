// What one call is: sizes, types and options, as decoded from XLA's buffers or given to the
// planner.
//
// Names are those of the Python package and the documentation: a sample n has `spatial` positions
// times `channels`, cut into `groups` of `group_size` consecutive channels.
#ifndef JAX_GN_PROBLEM_H_
#define JAX_GN_PROBLEM_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace jax_gn {

enum class Op { kForward, kBackward };
enum class DType { kFloat32, kFloat16, kBFloat16, kFloat64 };
enum class Layout { kChannelsLast, kChannelsFirst };
enum class Activation { kNone, kSilu, kRelu, kGelu, kLeakyRelu };
enum class Platform { kCpu, kCuda };
// The shape of scale, bias or addend: absent, [C], or [N, C].
enum class Param { kAbsent, kPerChannel, kPerSample };

// The names under which enums cross to Python and into the HLO, in the enums' order.
inline constexpr std::string_view kOpNames[] = {"forward", "backward"};
inline constexpr std::string_view kDTypeNames[] = {"float32", "float16", "bfloat16", "float64"};
inline constexpr std::string_view kLayoutNames[] = {"channels_last", "channels_first"};
inline constexpr std::string_view kActivationNames[] = {"none", "silu", "relu", "gelu",
                                                        "leaky_relu"};
inline constexpr std::string_view kPlatformNames[] = {"cpu", "cuda"};
inline constexpr std::string_view kParamNames[] = {"absent", "per_channel", "per_sample"};

// The enum value whose name is `name`, if there is one.
template <typename Enum, size_t kCount>
std::optional<Enum> FromName(const std::string_view (&names)[kCount], std::string_view name) {
  for (size_t i = 0; i < kCount; ++i) {
    if (names[i] == name) return static_cast<Enum>(i);
  }
  return std::nullopt;
}

constexpr int64_t SizeOf(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

// Sums, mean and rstd: float64 for float64, float32 for all else.
constexpr DType AccumulatorOf(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

struct Problem {
  Op op = Op::kForward;
  // Only what the reading pass of `op` sums up, for callers who add other devices' sums: forward
  // mean and variance of x, backward the sums of dz and dz * xhat per sample and channel.
  bool sums_only = false;
  DType dtype = DType::kFloat32;  // of x, y, dy, dx
  Layout layout = Layout::kChannelsLast;
  Activation activation = Activation::kNone;
  Param scale = Param::kAbsent;
  Param bias = Param::kAbsent;
  DType scale_dtype = DType::kFloat32;
  DType bias_dtype = DType::kFloat32;
  Param addend = Param::kAbsent;  // what is added to x before all else
  DType addend_dtype = DType::kFloat32;
  int64_t n = 0;
  int64_t spatial = 0;
  int64_t channels = 0;
  int64_t groups = 0;

  bool has_addend() const { return addend != Param::kAbsent; }
  int64_t group_size() const { return channels / groups; }
  // Elements that share one mean: M of the formulas.
  int64_t group_elements() const { return spatial * group_size(); }
  int64_t elements() const { return n * spatial * channels; }
  DType accumulator() const { return AccumulatorOf(dtype); }
  // How dscale and dbias are asked for: as their parameters are, but sums as they come.
  Param dscale() const { return sums_only ? Param::kPerSample : scale; }
  Param dbias() const { return sums_only ? Param::kPerSample : bias; }
  DType dscale_dtype() const { return sums_only ? accumulator() : scale_dtype; }
  DType dbias_dtype() const { return sums_only ? accumulator() : bias_dtype; }
};

// Elements of a scale, bias or addend of that shape.
inline int64_t ParamElements(const Problem& problem, Param param) {
  return param == Param::kAbsent       ? 0
         : param == Param::kPerChannel ? problem.channels
                                       : problem.n * problem.channels;
}

struct ForwardArgs {
  const void* x;       // [N, *spatial, C] or [N, C, *spatial], dtype
  const void* scale;   // scale_dtype, nullptr if absent
  const void* bias;    // bias_dtype, nullptr if absent
  const void* addend;  // addend_dtype, nullptr if absent
  double epsilon;
  void* y;          // as x; nullptr with sums_only
  void* mean;       // [N, G], accumulator
  void* rstd;       // [N, G], accumulator; nullptr with sums_only
  void* workspace;  // at least the plan's workspace_bytes, arbitrary contents, 16-byte aligned
  // With sums_only, else nullptr; both [N, G], accumulator:
  void* mean_low = nullptr;  // what the mean's rounding left
  void* variance = nullptr;
};

struct BackwardArgs {
  const void* dy;      // as x
  const void* x;       // [N, *spatial, C] or [N, C, *spatial], dtype
  const void* scale;   // scale_dtype, nullptr if absent
  const void* bias;    // bias_dtype, nullptr if absent; read only with an activation
  const void* addend;  // addend_dtype, nullptr if absent
  const void* mean;    // [N, G], accumulator
  const void* rstd;    // [N, G], accumulator
  void* dx;            // as x; nullptr with sums_only
  // With sums_only Σ dz * xhat and Σ dz, both [N, C], accumulator; else:
  void* dscale;     // as scale, nullptr if absent
  void* dbias;      // as bias, nullptr if absent
  void* workspace;  // at least the plan's workspace_bytes, arbitrary contents, 16-byte aligned
};

}  // namespace jax_gn

#endif  // JAX_GN_PROBLEM_H_
