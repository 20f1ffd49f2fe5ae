// A case on the device: its buffers, its runs, its checks.
#ifndef JAX_GN_TESTS_NATIVE_DEVICE_CASE_H_
#define JAX_GN_TESTS_NATIVE_DEVICE_CASE_H_

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cuda/backend.h"
#include "cuda/resident_cut.h"
#include "harness.h"

// The harness itself can't go on after a CUDA error.
#define HARNESS_CUDA(call)                                               \
  do {                                                                   \
    const cudaError_t harness_error = (call);                            \
    if (harness_error != cudaSuccess) {                                  \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, \
                   cudaGetErrorString(harness_error));                   \
      std::exit(2);                                                      \
    }                                                                    \
  } while (false)

namespace jax_gn::harness {

// How buffers are made. Sanitizers want them bare: memcheck sees what lies beyond an allocation,
// initcheck what nobody wrote.
struct BufferStyle {
  bool guards = true;
  bool poison = true;
};

// One allocation. All of its bytes are 0xff, a NaN in every type, until something is written.
class Buffer {
 public:
  Buffer(int64_t bytes, int64_t offset, const BufferStyle& style)
      : bytes_(bytes), style_(style), front_(offset + (style.guards ? kGuard : 0)) {
    total_ = front_ + bytes_ + (style.guards ? kGuard : 0);
    HARNESS_CUDA(cudaMalloc(&base_, total_ > 0 ? total_ : 1));
    if (style.poison) HARNESS_CUDA(cudaMemset(base_, 0xff, total_));
  }
  ~Buffer() { cudaFree(base_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const { return base_ + front_; }
  void Write(const std::vector<char>& from) {
    HARNESS_CUDA(cudaMemcpy(data(), from.data(), from.size(), cudaMemcpyHostToDevice));
  }
  void Poison() {
    if (style_.poison) HARNESS_CUDA(cudaMemset(data(), 0xff, bytes_));
  }
  std::vector<char> Read() const {
    std::vector<char> bytes(bytes_);
    HARNESS_CUDA(cudaMemcpy(bytes.data(), data(), bytes_, cudaMemcpyDeviceToHost));
    return bytes;
  }
  // Whether nothing was written outside the buffer.
  bool Intact() const {
    if (!style_.guards || !style_.poison) return true;
    std::vector<char> all(total_);
    HARNESS_CUDA(cudaMemcpy(all.data(), base_, total_, cudaMemcpyDeviceToHost));
    for (int64_t i = 0; i < total_; ++i) {
      const bool inside = i >= front_ && i < front_ + bytes_;
      if (!inside && all[i] != '\xff') return false;
    }
    return true;
  }

 private:
  static constexpr int64_t kGuard = 4096;
  int64_t bytes_, total_;
  BufferStyle style_;
  int64_t front_;
  char* base_ = nullptr;
};

// Replaces a resident plan by one with another cut, so that a sweep meets all kinds.
inline void ChooseCut(const Problem& problem, int which, Plan* plan) {
  if (plan->family != Family::kResident) return;
  std::vector<cuda::ResidentCut> cuts;
  cuda::ForResidentCuts(problem, DeviceLimits(),
                        [&](const cuda::ResidentCut& cut) { cuts.push_back(cut); });
  Plan chosen;
  const cuda::ResidentCut& cut = cuts[which % cuts.size()];
  // As if on a small GPU, too: then teams have many slabs each.
  DeviceLimits device;
  device.multiprocessors = which % 3 == 0 ? 132 : which % 3 == 1 ? 16 : 1;
  cuda::PlanResident(problem, cut, device, &chosen);
  const int64_t blocks = chosen.stages[0].grid;
  chosen.workspace_bytes =
      std::max(plan->workspace_bytes, cuda::ResidentSpaceOf(problem, cut, blocks).bytes());
  *plan = chosen;
}

class DeviceCase {
 public:
  DeviceCase(const Case& the_case, const Numbers& numbers, const BufferStyle& style)
      : forward_(the_case.problem),
        backward_(the_case.problem),
        moments_(the_case.problem),
        channel_sums_(the_case.problem),
        status_(MakePlans(the_case)) {
    const Problem& p = forward_;
    const auto make = [&](int64_t count, DType dtype, int64_t offset = 0) {
      buffers_.push_back(
          std::make_unique<Buffer>(count * SizeOf(dtype), offset * SizeOf(dtype), style));
      return buffers_.back().get();
    };
    const int64_t off = the_case.misaligned;
    x_ = make(p.elements(), p.dtype, off);
    dy_ = make(p.elements(), p.dtype, off);
    scale_ = make(ParamElements(p, p.scale), p.scale_dtype, off);
    bias_ = make(ParamElements(p, p.bias), p.bias_dtype, off);
    addend_ = make(ParamElements(p, p.addend), p.addend_dtype, off);
    // Off by another amount, where off at all: not every tensor is aligned like x.
    y_ = make(p.elements(), p.dtype, off == 0 ? 0 : off + 1);
    dx_ = make(p.elements(), p.dtype, off == 0 ? 0 : off + 1);
    mean_ = make(p.n * p.groups, p.accumulator(), off);
    rstd_ = make(p.n * p.groups, p.accumulator(), off);
    dscale_ = make(ParamElements(p, p.scale), p.scale_dtype, off);
    dbias_ = make(ParamElements(p, p.bias), p.bias_dtype, off);
    forward_space_ = make(forward_plan_.workspace_bytes / 4, DType::kFloat32);
    backward_space_ = make(backward_plan_.workspace_bytes / 4, DType::kFloat32);
    for (Buffer*& statistic : moments_results_)
      statistic = make(p.n * p.groups, p.accumulator(), off);
    for (Buffer*& sum : channel_results_) sum = make(p.n * p.channels, p.accumulator(), off);
    moments_space_ = make(moments_plan_.workspace_bytes / 4, DType::kFloat32);
    channel_space_ = make(channel_plan_.workspace_bytes / 4, DType::kFloat32);
    x_->Write(Encode(numbers.x, p.dtype));
    dy_->Write(Encode(numbers.dy, p.dtype));
    scale_->Write(Encode(numbers.scale, p.scale_dtype));
    bias_->Write(Encode(numbers.bias, p.bias_dtype));
    addend_->Write(Encode(numbers.addend, p.addend_dtype));
    const auto or_null = [](Param form, const Buffer* buffer) {
      return form == Param::kAbsent ? nullptr : buffer->data();
    };
    forward_args_ = {x_->data(),
                     or_null(p.scale, scale_),
                     or_null(p.bias, bias_),
                     or_null(p.addend, addend_),
                     the_case.epsilon,
                     y_->data(),
                     mean_->data(),
                     rstd_->data(),
                     forward_space_->data()};
    // Without an activation bias is not needed: then it is not there.
    const void* bias = p.activation == Activation::kNone ? nullptr : or_null(p.bias, bias_);
    backward_args_ = {dy_->data(),
                      x_->data(),
                      or_null(p.scale, scale_),
                      bias,
                      or_null(p.addend, addend_),
                      mean_->data(),
                      rstd_->data(),
                      dx_->data(),
                      or_null(p.scale, dscale_),
                      or_null(p.bias, dbias_),
                      backward_space_->data()};
    moments_args_ = {x_->data(),
                     nullptr,
                     nullptr,
                     or_null(p.addend, addend_),
                     0,
                     nullptr,
                     moments_results_[0]->data(),
                     nullptr,
                     moments_space_->data()};
    moments_args_.mean_low = moments_results_[1]->data();
    moments_args_.variance = moments_results_[2]->data();
    channel_args_ = backward_args_;
    channel_args_.dx = nullptr;
    channel_args_.dbias = channel_results_[0]->data();
    channel_args_.dscale = channel_results_[1]->data();
    channel_args_.workspace = channel_space_->data();
    HARNESS_CUDA(cudaDeviceSynchronize());
  }

  const Status& status() const { return status_; }

  Status Run(cudaStream_t stream) const {
    JAX_GN_TRY(cuda::RunForward(forward_, forward_plan_, forward_args_, stream));
    JAX_GN_TRY(cuda::RunBackward(backward_, backward_plan_, backward_args_, stream));
    JAX_GN_TRY(cuda::RunForward(moments_, moments_plan_, moments_args_, stream));
    return cuda::RunBackward(channel_sums_, channel_plan_, channel_args_, stream);
  }

  void Poison() {
    for (Buffer* buffer : Outputs()) buffer->Poison();
    for (Buffer* space : {forward_space_, backward_space_, moments_space_, channel_space_}) {
      space->Poison();
    }
    HARNESS_CUDA(cudaDeviceSynchronize());
  }

  // y, mean, rstd, dx, dscale, dbias; and of sums_only mean, mean_low, variance, dz, dz_xhat.
  std::vector<std::vector<char>> Read() const {
    std::vector<std::vector<char>> all;
    for (const Buffer* buffer : Outputs()) all.push_back(buffer->Read());
    return all;
  }

  std::string CheckGuards() const {
    for (size_t i = 0; i < buffers_.size(); ++i) {
      if (!buffers_[i]->Intact()) return "written outside buffer " + std::to_string(i);
    }
    return "";
  }

 private:
  Status MakePlans(const Case& the_case) {
    forward_.op = Op::kForward;
    backward_.op = Op::kBackward;
    const DeviceLimits limits;
    JAX_GN_TRY(MakePlan(forward_, Platform::kCuda, limits, the_case.family, &forward_plan_));
    if (the_case.cut >= 0) ChooseCut(forward_, the_case.cut, &forward_plan_);
    // The backward pass needs twice the room: it may be another family's.
    JAX_GN_TRY(MakePlan(backward_, Platform::kCuda, limits,
                        the_case.family == Family::kResident ? Family::kAuto : the_case.family,
                        &backward_plan_));
    if (the_case.cut >= 0) ChooseCut(backward_, the_case.cut, &backward_plan_);
    moments_.op = Op::kForward;
    channel_sums_.op = Op::kBackward;
    moments_.sums_only = channel_sums_.sums_only = true;
    const Family family =
        the_case.family == Family::kResident ? Family::kStreaming : the_case.family;
    JAX_GN_TRY(MakePlan(moments_, Platform::kCuda, limits, family, &moments_plan_));
    return MakePlan(channel_sums_, Platform::kCuda, limits, family, &channel_plan_);
  }
  std::vector<Buffer*> Outputs() const {
    std::vector<Buffer*> all = {y_, mean_, rstd_, dx_, dscale_, dbias_};
    all.insert(all.end(), std::begin(moments_results_), std::end(moments_results_));
    all.insert(all.end(), std::begin(channel_results_), std::end(channel_results_));
    return all;
  }

  Problem forward_, backward_, moments_, channel_sums_;
  Plan forward_plan_, backward_plan_, moments_plan_, channel_plan_;
  Status status_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  Buffer *x_, *dy_, *scale_, *bias_, *addend_, *y_, *dx_, *mean_, *rstd_, *dscale_, *dbias_;
  Buffer* moments_results_[3];  // mean, mean_low, variance
  Buffer* channel_results_[2];  // dz, dz_xhat
  Buffer *forward_space_, *backward_space_, *moments_space_, *channel_space_;
  ForwardArgs forward_args_, moments_args_;
  BackwardArgs backward_args_, channel_args_;
};

}  // namespace jax_gn::harness

#endif  // JAX_GN_TESTS_NATIVE_DEVICE_CASE_H_
