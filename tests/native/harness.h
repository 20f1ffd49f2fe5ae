// The native harness calls the CUDA launchers with buffers of its own, which XLA's can't be: each
// its own allocation with guard bands, outputs and workspace full of NaN.
#ifndef JAX_GN_TESTS_NATIVE_HARNESS_H_
#define JAX_GN_TESTS_NATIVE_HARNESS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "plan.h"
#include "problem.h"

namespace jax_gn::harness {

// One GroupNorm, forward and backward, as a whole and with sums_only.
struct Case {
  Problem problem;  // op: whichever is being run
  Family family = Family::kStreaming;
  double epsilon = 1e-5;
  double mean = 0.5, spread = 1.0;
  int cut = -1;        // family "resident": which of the cuts there are; -1: the planner's
  int misaligned = 0;  // elements by which every tensor is off a 16-byte border

  std::string Name() const;
};

// The sweep. `small`: few and small ones, for sanitizers, which are a hundred times slower.
std::vector<Case> SweepCases(bool small);

// Numbers that the storage types hold exactly, and what a call must make of them, in double.
struct Numbers {
  std::vector<double> x, dy, scale, bias, addend;
};
struct Results {
  std::vector<double> y, mean, rstd, dx, dscale, dbias;
  std::vector<double> mean_low, variance, dz, dz_xhat;  // of the calls with sums_only
};
Numbers MakeNumbers(const Case& the_case);
Results Reference(const Case& the_case, const Numbers& numbers);

// Storage <-> double.
std::vector<char> Encode(const std::vector<double>& values, DType dtype);
std::vector<double> Decode(const std::vector<char>& bytes, DType dtype);

// "" or what is wrong: `got` against `want`, within rounding of sums of `length` terms, that many
// times larger where the mean is large.
std::string Compare(const std::string& name, const std::vector<double>& got,
                    const std::vector<double>& want, DType dtype, DType accumulator, double length,
                    double times);

// Modes of the program; they return the number of failures.
int Plant(const std::string& bug);
int Teams();
int Time(const std::vector<std::string>& arguments, bool ladder);

}  // namespace jax_gn::harness

#endif  // JAX_GN_TESTS_NATIVE_HARNESS_H_
