// What the sweep runs over.
#include "cuda/resident_cut.h"
#include "harness.h"

namespace jax_gn::harness {
namespace {

struct Shape {
  int64_t n, spatial, channels, groups;
};

// Odd and even, one group and one channel a group, groups that no pack divides and that no tile
// holds, no positions and many, more samples than a grid's y has blocks, nothing at all.
constexpr Shape kShapes[] = {
    {2, 15, 24, 4},     {1, 1, 1, 1},      {3, 1, 6, 6},       {2, 35, 31, 31},
    {2, 21, 33, 11},    {3, 20, 37, 1},    {2, 15, 26, 2},     {2, 30, 3, 3},
    {2, 36, 1, 1},      {5, 1, 48, 6},     {2, 9, 20, 2},      {2, 1031, 8, 2},
    {1, 2, 4099, 1},    {1, 5003, 2, 2},   {67, 3, 8, 4},      {2, 49, 64, 8},
    {2, 5, 960, 32},    {1, 4, 5000, 2},   {2, 100, 1280, 32}, {1, 3000, 320, 32},
    {0, 4, 8, 2},       {2, 0, 8, 2},      {600, 1, 16, 4},    {515, 2, 17, 1},
    {70001, 1, 8, 2},   {2, 40000, 16, 2}, {1, 1, 9000, 3},    {1, 200000, 4, 1},
    {4, 49, 2048, 32},  {3, 2500, 12, 12}, {16, 7, 96, 96},    {2, 16384, 128, 32},
    {3, 256, 192, 32},  {2, 300, 64, 64},  {5, 196, 256, 32},  {2, 64, 480, 16},
    {1, 30000, 64, 16}, {1, 600000, 2, 1},
};
constexpr int64_t kSmall = 20000;  // elements

// Half without, as one way of cutting a problem knows none.
constexpr Param kAddends[] = {Param::kAbsent, Param::kPerChannel, Param::kAbsent,
                              Param::kPerSample};

constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};

}  // namespace

std::vector<Case> SweepCases(bool small) {
  std::vector<Case> cases;
  int turn = 0;
  for (const Shape& shape : kShapes) {
    for (DType dtype : kTypes) {
      for (Layout layout : {Layout::kChannelsLast, Layout::kChannelsFirst}) {
        // "resident" twice: it has the most ways to cut a problem.
        for (Family family :
             {Family::kResident, Family::kResident, Family::kStreaming, Family::kThreeStage}) {
          // The rest goes round, with periods that share no factor: all pairs come up.
          ++turn;
          Case c;
          Problem& p = c.problem;
          p.n = shape.n;
          p.spatial = shape.spatial;
          p.channels = shape.channels;
          p.groups = shape.groups;
          if (small && (p.elements() > kSmall || turn % 3 != 0)) continue;
          p.dtype = dtype;
          p.layout = layout;
          p.activation = static_cast<Activation>(turn % 5);
          p.scale = static_cast<Param>(turn % 3);
          p.bias = static_cast<Param>(turn / 3 % 3);
          p.addend = kAddends[turn / 9 % 4];
          p.scale_dtype = kTypes[turn / 5 % 4];
          p.bias_dtype = kTypes[turn / 7 % 4];
          p.addend_dtype = kTypes[turn / 11 % 4];
          c.misaligned = turn % 7 < 4 ? 0 : turn % 7 - 3;
          c.mean = turn % 11 == 0 ? 100 : 0.5;
          c.family = family;
          c.cut = family == Family::kResident ? turn * 7919 % 1000 : -1;
          Plan plan;
          if (family == Family::kResident &&
              !MakePlan(p, Platform::kCuda, DeviceLimits(), family, &plan).ok()) {
            continue;
          }
          cases.push_back(c);
        }
      }
    }
  }
  return cases;
}

std::string Case::Name() const {
  const Problem& p = problem;
  const auto name = [](const auto& names, auto value) {
    return std::string(names[static_cast<int>(value)]);
  };
  return name(kFamilyNames, family) + " " + name(kDTypeNames, p.dtype) + " " +
         name(kLayoutNames, p.layout) + " [" + std::to_string(p.n) + ", " +
         std::to_string(p.spatial) + ", " + std::to_string(p.channels) + "] / " +
         std::to_string(p.groups) + " " + name(kActivationNames, p.activation) + " scale " +
         name(kParamNames, p.scale) + " " + name(kDTypeNames, p.scale_dtype) + " bias " +
         name(kParamNames, p.bias) + " " + name(kDTypeNames, p.bias_dtype) + " addend " +
         name(kParamNames, p.addend) + " " + name(kDTypeNames, p.addend_dtype) + " +" +
         std::to_string(misaligned) + (cut < 0 ? "" : " cut " + std::to_string(cut));
}

}  // namespace jax_gn::harness
