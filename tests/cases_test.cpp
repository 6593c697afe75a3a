// SPDX-License-Identifier: Apache-2.0
//
// The judges themselves: a case that finds nothing wrong must be able to find something wrong.
#include <gtest/gtest.h>

#include <cmath>

#include "cases/bounds.h"
#include "cases/compare.h"
#include "cases/tensor.h"

namespace quantfuse::cases {
namespace {

TEST(Cases, NoticeResultsThatAreNotThere) {
  for (const std::string& op : operations_with_cases()) {
    for (CasePtr& c : test_cases(op, {QF_CPU, 0})) {
      const bool has_no_output = c->m == 0 || c->n == 0 || (op == "linear_backward" && c->k == 0);
      const bool may_stay_as_it_is = c->name.find("residual_in_y") != std::string::npos;
      if (has_no_output || may_stay_as_it_is) continue;
      c->make({QF_CPU, 0}, 1, 1);
      EXPECT_NE(c->check(), "") << op << ": " << c->name << " passes although nothing has run";
      c.reset();
    }
  }
}

TEST(Cases, OfOneSeedAreTheSameAndOfAnotherAreNot) {
  for (const std::string& op : operations_with_cases()) {
    const CasePtr c = std::move(test_cases(op, {QF_CPU, 0}).back());
    auto results = [&](uint64_t seed) {
      c->make({QF_CPU, 0}, seed, 1);
      EXPECT_EQ(c->run(nullptr, 0, nullptr), QF_OK) << qf_last_error();
      return c->outputs(0);
    };
    EXPECT_EQ(results(3), results(3)) << op << ": " << c->name;
  }
}

class GuardBands : public testing::Test {
 protected:
  void SetUp() override {
    y_.place({QF_CPU, 0}, 1);
    x_.place({QF_CPU, 0}, 1);
    ASSERT_EQ(y_.fetch() + x_.fetch(), "");
  }
  // Element i of the memory that a tensor begins at, whether it is the tensor's own or not.
  static float& at(Tensor& tensor, int64_t i) {
    const qf_tensor& v = *tensor.view(0);
    return reinterpret_cast<float*>(static_cast<char*>(v.data) + v.byte_offset)[i];
  }
  Tensor y_{"y", Role::output, kF32, {3, 5}, 2};
  Tensor x_{"x", Role::input, kF32, {3, 5}};
};

TEST_F(GuardBands, LetTheTensorItselfBeWritten) {
  at(y_, 0) = at(y_, 4) = at(y_, 7) = at(y_, 2 * 7 + 4) = 1.0f;
  EXPECT_EQ(y_.fetch(), "");
}
TEST_F(GuardBands, SeeAWriteBehind) {
  at(y_, 2 * 7 + 5) = 1.0f;
  EXPECT_EQ(y_.fetch(), "wrote outside y");
}
TEST_F(GuardBands, SeeAWriteBefore) {
  at(x_, -1) = 1.0f;
  EXPECT_EQ(x_.fetch(), "wrote outside x");
}
TEST_F(GuardBands, SeeAWriteBetweenRows) {
  at(y_, 5) = 1.0f;
  EXPECT_EQ(y_.fetch(), "wrote between the rows of y");
}
TEST_F(GuardBands, SeeAWriteToAnInput) {
  at(x_, 3) = 1.0f;
  EXPECT_EQ(x_.fetch(), "wrote to its input x");
}

// One output [1, 1] of a type, with a value that a kernel is supposed to have written.
std::string judge(qf_dtype dtype, double written, double expected, double bound) {
  Tensor y("y", Role::output, dtype, {1, 1});
  y.initial().set(0, 0, written);
  y.place({QF_CPU, 0}, 1);
  EXPECT_EQ(y.fetch(), "");
  return compare_floats(y, {{expected}, {bound}});
}

TEST(Comparison, OfFloatsIsRoundingWithinTheBound) {
  EXPECT_EQ(judge(kF32, 1.0, 1.0, 0), "");
  EXPECT_NE(judge(kF32, 1.0 + 0x1p-23, 1.0, 0x1p-25), "");
  EXPECT_EQ(judge(kF32, 1.0 + 0x1p-23, 1.0, 0x1p-23), "");
  // 1 + 2^-8 lies halfway between two bf16 numbers: it rounds to 1, and anything above to 1 + 2^-7.
  EXPECT_EQ(judge(kBf16, 1.0, 1.0 + 0x1p-8, 0), "");
  EXPECT_NE(judge(kBf16, 1.0 + 0x1p-7, 1.0 + 0x1p-8, 0), "");
  EXPECT_EQ(judge(kBf16, 1.0 + 0x1p-7, 1.0 + 0x1p-8, 0x1p-20), "");
  EXPECT_EQ(judge(kF16, INFINITY, 65520.0, 0), "");
  EXPECT_NE(judge(kF16, INFINITY, 65504.0, 1), "");
  EXPECT_NE(judge(kF32, NAN, 1.0, 1e30), "");
  EXPECT_EQ(judge(kF32, NAN, NAN, 0), "");
  EXPECT_NE(judge(kF32, 1.0, NAN, 0), "");
}

TEST(Comparison, OfCodesAllowsANeighbourOnlyAtItsBoundary) {
  Tensor y("y", Role::output, kI8, {1, 2}), scale("out_scale", Role::input, kF32, {1});
  scale.initial().set(0, 0, 0.5);
  y.initial().set(0, 0, 3);
  y.initial().set(0, 1, -128);
  y.place({QF_CPU, 0}, 1);
  scale.place({QF_CPU, 0}, 1);
  ASSERT_EQ(y.fetch() + scale.fetch(), "");
  const Output out = {QF_INT8, QF_SCALE_STATIC, 0, &y, &scale};
  EXPECT_EQ(compare_output(out, {{1.5, -1000.0}, {0, 0}}), "");
  EXPECT_NE(compare_output(out, {{1.2, -1000.0}, {0.01, 0}}), "");   // 2.4 is code 2 by far
  EXPECT_EQ(compare_output(out, {{1.24, -1000.0}, {0.02, 0}}), "");  // 2.48 may as well have been 2.51
  EXPECT_NE(compare_output(out, {{1.5, -60.0}, {0, 0}}), "");
}

TEST(Comparison, OfDynamicScalesFollowsTheLargest) {
  Tensor y("y", Role::output, kI8, {1, 2}), scale("out_scale", Role::output, kF32, {1, 1});
  auto judge_scale = [&](double written) {
    y.initial().set(0, 0, 127);
    y.initial().set(0, 1, 0);
    scale.initial().set(0, 0, written);
    y.place({QF_CPU, 0}, 1);
    scale.place({QF_CPU, 0}, 1);
    EXPECT_EQ(y.fetch() + scale.fetch(), "");
    return compare_output({QF_INT8, QF_SCALE_DYNAMIC, 0, &y, &scale}, {{254.0, 0.0}, {1e-4, 1e-4}});
  };
  EXPECT_EQ(judge_scale(2.0), "");
  EXPECT_EQ(judge_scale(2.0 + 0x1p-22), "");
  EXPECT_NE(judge_scale(2.001), "");
}

TEST(Bounds, GrowWithTheRootOfLongSums) {
  EXPECT_DOUBLE_EQ(sum_bound(4, 1.0), 22 * 0x1p-24 + 4 * 0x1p-126);
  EXPECT_LT(sum_bound(40000, 1.0), 822 * 0x1p-24);
}

TEST(Bounds, CoverTheSlopeOfEveryActivation) {
  for (const qf_activation activation : {QF_IDENTITY, QF_RELU, QF_GELU, QF_GELU_TANH, QF_SILU}) {
    for (double x = -8; x < 8; x += 1e-3) {
      const double slope = (activate(activation, x + 1e-6) - activate(activation, x)) / 1e-6;
      EXPECT_LE(std::abs(slope), kLargestSlope) << activation << " at " << x;
    }
  }
}

}  // namespace
}  // namespace quantfuse::cases
