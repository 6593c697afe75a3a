// SPDX-License-Identifier: Apache-2.0
//
// Every kernel of every list against the reference, on every case that it accepts. ctest runs this once per
// instruction set (QUANTFUSE_ISA), for the kernels of that set.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

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
    if (row.is_reference()) EXPECT_TRUE(row.is_available) << row.kernel;
    last_op = row.op, last_kernel = row.kernel;
  }
  expect_reference();
}

TEST(Registry, UnavailableKernelsSayWhy) {
  for (const KernelRow& row : list_kernels()) EXPECT_EQ(row.is_available, row.reason.empty()) << row.kernel;
}

}  // namespace
}  // namespace quantfuse::cases
