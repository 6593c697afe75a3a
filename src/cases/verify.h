// SPDX-License-Identifier: Apache-2.0
//
// Every kernel against the reference on every test case it accepts. Behind `quantfuse verify` and the tests.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cases/case.h"

namespace quantfuse::cases {

// A row of qf_kernels().
struct KernelRow {
  std::string op, kernel, target;
  bool is_available = false;
  std::string reason;  // why it is not
  bool is_cuda() const { return target.rfind("sm_", 0) == 0; }
  bool is_reference() const { return kernel == op + "_ref"; }
  // Packed weights are alike for all CPU targets of a vector length.
  std::string family() const { return target.substr(0, target.find("_bf16")); }
};
std::vector<KernelRow> list_kernels();
bool has_cuda_device();

// The kernels that accept a made (or described) case, and the one that would run.
struct Verdicts {
  std::string chosen;  // "" if none accepts
  std::vector<std::string> accepting;
};
Verdicts verdicts_on(Case& c);

struct Failure {
  std::string case_name, reason;
};

struct KernelReport {
  KernelRow row;
  int num_cases = 0;  // the operation has
  int num_accepted = 0;
  int num_passed = 0;
  std::vector<Failure> failures;
};

// Whoever wants to follow.
struct Observer {
  std::function<void(const Case&)> on_case;  // about to begin
  std::function<void(const KernelRow&, const Case&, const std::string& wrong)> on_result;
};

// Part `index` (from 0) of the cases, of `count` that are alike: every count-th.
struct CasePart {
  int index = 0, count = 1;
  bool is_whole() const { return count == 1; }
};

using WantsKernel = std::function<bool(const KernelRow&)>;

// Runs all cases of `op`, or a part of them, on `device`, by the kernels of that device that are wanted; only
// these are reported. Each kernel runs twice on separate copies of the same data, and must give the same
// bits.
std::vector<KernelReport> verify_operation(const std::string& op, qf_device device, const WantsKernel& wants,
                                           uint64_t seed, const Observer& observer = {}, CasePart part = {});

}  // namespace quantfuse::cases
