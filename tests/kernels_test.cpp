// SPDX-License-Identifier: Apache-2.0
//
// Every kernel of every list against the reference, on every case that it accepts. ctest runs this once per
// instruction set (QUANTFUSE_ISA), for the kernels of that set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "call.h"
#include "cases/verify.h"

namespace quantfuse::cases {
namespace {

class Kernels : public testing::TestWithParam<std::string> {};

std::string isa_in_force() {
  std::string info(qf_info(nullptr, 0) + 1, '\0');
  info.resize(qf_info(info.data(), info.size()));
  return nlohmann::json::parse(info).at("cpu").at("isa");
}

// Kernels of lesser sets have a run of their own. But X_first_Y prepare x, and leave the rest to the best
// kernel that there is, which is another one in every run.
bool is_of_this_run(const KernelRow& row) {
  static const std::string isa = isa_in_force();
  return row.is_cuda() || row.target == isa || row.kernel.find("_first_") != std::string::npos;
}

void expect_all_pass(const std::string& op, qf_device device) {
  int num_available = 0;
  for (const KernelReport& report : verify_operation(op, device, is_of_this_run, /*seed=*/1)) {
    if (!report.row.is_available) continue;
    ++num_available;
    // A kernel that accepts nothing is among the failures.
    for (const Failure& failure : report.failures) {
      ADD_FAILURE() << report.row.kernel << " on '" << failure.case_name << "': " << failure.reason;
    }
  }
  if (num_available == 0)
    GTEST_SKIP() << op
                 << " has no kernel of this instruction set, or no CUDA kernel that runs on this device";
}

TEST_P(Kernels, MatchTheReferenceOnTheCpu) { expect_all_pass(GetParam(), {QF_CPU, 0}); }

TEST_P(Kernels, MatchTheReferenceOnCuda) {
  if (!has_cuda_device()) GTEST_SKIP() << "there is no CUDA device here";
  expect_all_pass(GetParam(), {QF_CUDA, 0});
}

INSTANTIATE_TEST_SUITE_P(Operations, Kernels, testing::ValuesIn(operations_with_cases()),
                         [](const auto& info) { return info.param; });

// The lists, the C functions and the cases know the same operations.
TEST(Registry, EveryOperationHasCases) {
  const std::vector<std::string> ops = operations_with_cases();
  for (const KernelRow& row : list_kernels()) {
    EXPECT_NE(std::find(ops.begin(), ops.end(), row.op), ops.end())
        << row.kernel << " is of an operation without cases";
  }
  for (const std::string& op : ops) EXPECT_GT(test_cases(op, {QF_CPU, 0}).size(), 100u) << op;
}

TEST(Registry, EveryOperationEndsWithItsReference) {
  std::string last_op, last_kernel;
  auto expect_reference = [&] { EXPECT_EQ(last_kernel, last_op.empty() ? "" : last_op + "_ref"); };
  for (const KernelRow& row : list_kernels()) {
    if (row.op != last_op) expect_reference();
    EXPECT_TRUE(row.is_available || !row.is_reference()) << row.kernel;
    last_op = row.op, last_kernel = row.kernel;
  }
  expect_reference();
}

TEST(Registry, UnavailableKernelsSayWhy) {
  for (const KernelRow& row : list_kernels()) EXPECT_EQ(row.is_available, row.reason.empty()) << row.kernel;
}

// A layer with a weight in groups of 128, packed where there is a packed form, whose tensors begin as ones.
struct GroupsCall : Call<qf_linear_args> {
  static constexpr int64_t kColumns = 40, kSum = 256;

  GroupsCall(qf_format format, int64_t m) : Call(qf_linear, qf_linear_workspace) {
    const bool is_8bit = format == QF_INT8;
    args.weight.format = format, args.weight.block = {1, 128};
    args.weight.n = kColumns, args.weight.k = kSum;
    input("x", args.x, kBf16, {m, kSum});
    input("codes", args.weight.codes, is_8bit ? kI8 : kU8, {kColumns, is_8bit ? kSum : kSum / 2});
    input("scale", args.weight.scale, kF32, {kColumns, 2});
    output("y", args.y, kBf16, {m, kColumns});
  }
  void set_x(const std::function<float(int64_t)>& value) {
    operand("x").fill<uint16_t>(
        [&](int64_t i) { return static_cast<uint16_t>(bits_of(value(i % kSum)) >> 16); });
  }
  void expect(float expected) {
    uint64_t bytes = 0;
    if (qf_weight_packed_bytes(&args.weight, {QF_CPU, 0}, &bytes) == QF_OK) {
      input("packed", args.weight.packed, kU8, {static_cast<int64_t>(bytes)});
      ASSERT_EQ(qf_weight_pack(&args.weight, nullptr), QF_OK) << qf_last_error();
    }
    ASSERT_EQ(run(), QF_OK) << qf_last_error();
    for (int64_t i = 0; i < args.y->shape[0] * kColumns; ++i) {
      const float y = float_of(uint32_t{operand("y").at<uint16_t>(i)} << 16);
      ASSERT_NEAR(y, expected, 0.01f * std::abs(expected)) << "row " << i / kColumns;
    }
  }
  static uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
  }
  static float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  }
};

// A scale may be as small or as large as float32 goes, if the result is an ordinary number.
TEST(Linear, TakesScalesOfAnySize) {
  struct Weight {
    qf_format format;
    uint8_t codes;
    float number;
    bool has_zero = true;
  };
  const auto expect = [](qf_format format, uint8_t codes, float scale, float x, int64_t m, qf_format act,
                         float y) {
    GroupsCall call(format, m);
    if (act != QF_FORMAT_NONE) call.args.act_format = act, call.args.act_group = 64;
    call.operand("codes").fill<uint8_t>([&](int64_t) { return codes; });
    call.operand("scale").fill<float>([&](int64_t) { return scale; });
    call.set_x([&](int64_t) { return x; });
    call.expect(y);
  };
  for (const Weight& w : {Weight{QF_INT8, 127, 127},
                          {QF_INT4, 0x77, 7},
                          {QF_FP4_E2M1, 0x77, 6},
                          {QF_IQ4_NL, 0xff, 113, false}}) {
    const float sum = GroupsCall::kSum * w.number;
    for (const int64_t m : {1, 3, 20}) {
      SCOPED_TRACE("format " + std::to_string(w.format) + ", m " + std::to_string(m));
      expect(w.format, w.codes, 0x1p-128f, 0.249f, m, QF_FORMAT_NONE, sum * 0.249f * 0x1p-128f);
      expect(w.format, w.codes, 0x1p100f, 0x1p-90f, m, QF_FORMAT_NONE, sum * 0x1p10f);
      if (w.has_zero) {
        expect(w.format, 0, 0x1p119f, 0x1p30f, m, QF_FORMAT_NONE, 0);
        expect(w.format, 0, 0x1p127f, 0x1p30f, m, QF_INT8, 0);
      }
    }
  }
}

// Groups in the order of the columns, but not of 128 of them each: what x has of large numbers in one run of
// 128 columns must not cost precision in another.
TEST(Linear, TakesGroupsThatEndAnywhere) {
  for (const int64_t m : {1, 3, 20}) {
    GroupsCall call(QF_INT8, m);
    call.input("g_idx", call.args.weight.g_idx, kI32, {GroupsCall::kSum}).fill<int32_t>([](int64_t i) {
      return i < 40 ? 0 : 1;
    });
    call.operand("codes").fill<int8_t>([](int64_t i) {
      const int64_t k = i % GroupsCall::kSum;
      return static_cast<int8_t>(k >= 40 && k < 128 ? 1 : 0);
    });
    call.set_x([](int64_t k) { return k < 128 ? 0x1.06p-10f : 1000.0f; });
    call.expect(88 * 0x1.06p-10f);
  }
}

}  // namespace
}  // namespace quantfuse::cases
