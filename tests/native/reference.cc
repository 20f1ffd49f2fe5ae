// The definition in double, one loop after the other, and the conversions of numbers.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "element.h"
#include "harness.h"

namespace jax_gn::harness {
namespace {

constexpr double kPi = 3.14159265358979323846;

double Activated(Activation activation, double z) {
  const double c = std::sqrt(2 / kPi);
  switch (activation) {
    case Activation::kSilu:
      return z / (1 + std::exp(-z));
    case Activation::kRelu:
      return std::max(z, 0.0);
    case Activation::kGelu:
      return 0.5 * z * (1 + std::tanh(c * (z + 0.044715 * z * z * z)));
    case Activation::kLeakyRelu:
      return z >= 0 ? z : 0.01 * z;
    case Activation::kNone:
      break;
  }
  return z;
}

double Slope(Activation activation, double z) {
  const double c = std::sqrt(2 / kPi);
  switch (activation) {
    case Activation::kSilu: {
      const double s = 1 / (1 + std::exp(-z));
      return s * (1 + z * (1 - s));
    }
    case Activation::kRelu:
      return z > 0 ? 1 : 0;
    case Activation::kGelu: {
      const double t = std::tanh(c * (z + 0.044715 * z * z * z));
      return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * c * (1 + 3 * 0.044715 * z * z);
    }
    case Activation::kLeakyRelu:
      return z >= 0 ? 1 : 0.01;
    case Activation::kNone:
      break;
  }
  return 1;
}

// Where (n, s, c) lies in x, and (n, c) in a parameter.
int64_t At(const Problem& p, int64_t n, int64_t s, int64_t c) {
  return p.layout == Layout::kChannelsLast ? (n * p.spatial + s) * p.channels + c
                                           : (n * p.channels + c) * p.spatial + s;
}
double Param1(const std::vector<double>& values, Param form, const Problem& p, int64_t n, int64_t c,
              double absent) {
  if (form == Param::kAbsent) return absent;
  return values[form == Param::kPerSample ? n * p.channels + c : c];
}

template <typename F>
void ForGroup(const Problem& p, int64_t g, F f) {
  for (int64_t c = g * p.group_size(); c < (g + 1) * p.group_size(); ++c) {
    for (int64_t s = 0; s < p.spatial; ++s) f(s, c);
  }
}

std::vector<double> Draw(int64_t count, double mean, double spread, DType dtype,
                         std::mt19937_64& engine) {
  std::normal_distribution<double> normal(mean, spread);
  std::vector<double> values(count);
  for (double& value : values) value = normal(engine);
  return Decode(Encode(values, dtype), dtype);
}

// x + addend.
double X(const Problem& p, const Numbers& numbers, int64_t n, int64_t s, int64_t c) {
  return numbers.x[At(p, n, s, c)] + Param1(numbers.addend, p.addend, p, n, c, 0);
}

void ReferenceGroup(const Case& the_case, const Numbers& numbers, int64_t n, int64_t g,
                    Results* out) {
  const Problem& p = the_case.problem;
  const double count = static_cast<double>(p.group_elements());
  double mean = 0, variance = 0, sum_p = 0, sum_q = 0;
  ForGroup(p, g, [&](int64_t s, int64_t c) { mean += X(p, numbers, n, s, c) / count; });
  ForGroup(p, g, [&](int64_t s, int64_t c) {
    const double d = X(p, numbers, n, s, c) - mean;
    variance += d * d / count;
  });
  const double rstd = 1 / std::sqrt(variance + the_case.epsilon);
  out->mean[n * p.groups + g] = mean;
  out->rstd[n * p.groups + g] = rstd;
  out->variance[n * p.groups + g] = variance;
  const auto z = [&](int64_t s, int64_t c, double* scale) {
    *scale = Param1(numbers.scale, p.scale, p, n, c, 1);
    return (X(p, numbers, n, s, c) - mean) * rstd * *scale +
           Param1(numbers.bias, p.bias, p, n, c, 0);
  };
  ForGroup(p, g, [&](int64_t s, int64_t c) {
    double scale;
    const int64_t i = At(p, n, s, c);
    const double at = z(s, c, &scale);
    out->y[i] = Activated(p.activation, at);
    const double dz = numbers.dy[i] * Slope(p.activation, at);
    const double d = X(p, numbers, n, s, c) - mean;
    sum_p += scale * dz / count;
    sum_q += scale * dz * d / count;
    const int64_t row = n * p.channels + c;
    if (p.scale != Param::kAbsent)
      out->dscale[p.scale == Param::kPerSample ? row : c] += dz * d * rstd;
    if (p.bias != Param::kAbsent) out->dbias[p.bias == Param::kPerSample ? row : c] += dz;
    out->dz[row] += dz;
    out->dz_xhat[row] += dz * d * rstd;
  });
  ForGroup(p, g, [&](int64_t s, int64_t c) {
    double scale;
    const int64_t i = At(p, n, s, c);
    const double dz = numbers.dy[i] * Slope(p.activation, z(s, c, &scale));
    const double d = X(p, numbers, n, s, c) - mean;
    out->dx[i] = rstd * (scale * dz - sum_p - d * rstd * rstd * sum_q);
  });
}

}  // namespace

Results Reference(const Case& the_case, const Numbers& numbers) {
  const Problem& p = the_case.problem;
  Results out;
  out.y.resize(p.elements());
  out.dx.resize(p.elements());
  out.mean.resize(p.n * p.groups);
  out.rstd.assign(p.n * p.groups, 1 / std::sqrt(the_case.epsilon));
  out.dscale.resize(ParamElements(p, p.scale));
  out.dbias.resize(ParamElements(p, p.bias));
  out.mean_low.resize(p.n * p.groups);  // what rounding left, and near 0
  out.variance.resize(p.n * p.groups);
  out.dz.resize(p.n * p.channels);
  out.dz_xhat.resize(p.n * p.channels);
  if (p.spatial == 0) return out;
  for (int64_t n = 0; n < p.n; ++n) {
    for (int64_t g = 0; g < p.groups; ++g) ReferenceGroup(the_case, numbers, n, g, &out);
  }
  return out;
}

Numbers MakeNumbers(const Case& the_case) {
  const Problem& p = the_case.problem;
  std::mt19937_64 engine(12345 + p.elements());
  Numbers numbers;
  numbers.x = Draw(p.elements(), the_case.mean, the_case.spread, p.dtype, engine);
  numbers.dy = Draw(p.elements(), 0.1, 1, p.dtype, engine);
  numbers.scale = Draw(ParamElements(p, p.scale), 1, 0.3, p.scale_dtype, engine);
  numbers.bias = Draw(ParamElements(p, p.bias), 0.1, 0.3, p.bias_dtype, engine);
  numbers.addend = Draw(ParamElements(p, p.addend), 0, 1, p.addend_dtype, engine);
  if (p.activation != Activation::kRelu && p.activation != Activation::kLeakyRelu) return numbers;
  // At the kink of relu rounding decides between two derivatives: no gradient there. y tells where
  // that is, but for relu's zeros.
  Case probe = the_case;
  probe.problem.activation = Activation::kNone;
  const Results linear = Reference(probe, numbers);
  for (int64_t i = 0; i < p.elements(); ++i) {
    if (std::abs(linear.y[i]) < 1e-3) numbers.dy[i] = 0;
  }
  return numbers;
}

std::vector<char> Encode(const std::vector<double>& values, DType dtype) {
  std::vector<char> bytes(values.size() * SizeOf(dtype));
  VisitElement(dtype, [&](auto element) {
    using E = decltype(element);
    for (size_t i = 0; i < values.size(); ++i) {
      const E e = ToElement<E>(static_cast<Accumulator<E>>(values[i]));
      std::memcpy(bytes.data() + i * sizeof(E), &e, sizeof(E));
    }
  });
  return bytes;
}

std::vector<double> Decode(const std::vector<char>& bytes, DType dtype) {
  std::vector<double> values(bytes.size() / SizeOf(dtype));
  VisitElement(dtype, [&](auto element) {
    using E = decltype(element);
    for (size_t i = 0; i < values.size(); ++i) {
      E e;
      std::memcpy(&e, bytes.data() + i * sizeof(E), sizeof(E));
      values[i] = ToNumber(e);
    }
  });
  return values;
}

std::string Compare(const std::string& name, const std::vector<double>& got,
                    const std::vector<double>& want, DType dtype, DType accumulator, double length,
                    double times) {
  constexpr double kEpsilons[] = {0x1p-23, 0x1p-10, 0x1p-7, 0x1p-52};
  // Subnormal numbers round to these; float32's and bfloat16's may be flushed to zero.
  constexpr double kSmallest[] = {0x1p-126, 0x1p-24, 0x1p-126, 0x1p-1022};
  double largest = 0;
  for (double value : want) largest = std::max(largest, std::abs(value));
  // A fence against wrong results; how right the right ones are is tests/numerics.py's matter.
  const double rounding = kEpsilons[static_cast<int>(dtype)];
  const double summing = times * (32 + 4 * std::sqrt(length)) *
                         kEpsilons[static_cast<int>(accumulator)] * (1 + largest);
  if (got.size() != want.size()) return name + ": size";
  for (size_t i = 0; i < got.size(); ++i) {
    const double allowed =
        rounding * std::abs(want[i]) + kSmallest[static_cast<int>(dtype)] + summing;
    if (!(std::abs(got[i] - want[i]) <= allowed)) {
      return name + "[" + std::to_string(i) + "] = " + std::to_string(got[i]) + " instead of " +
             std::to_string(want[i]) + ", allowed " + std::to_string(allowed);
    }
  }
  return "";
}

}  // namespace jax_gn::harness
