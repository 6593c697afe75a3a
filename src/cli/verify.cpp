// SPDX-License-Identifier: Apache-2.0
//
// quantfuse verify: every kernel against the reference. What is counted is a kernel on a case that it
// accepts; skipped are the kernels that cannot run on this machine.
#include "cases/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "commands.h"
#include "output.h"

namespace quantfuse::cli {
namespace {

using cases::KernelReport;
using cases::KernelRow;

constexpr size_t kShownFailures = 10;  // of one kernel; the JSON has all

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

// What to run: the operations, and for each kind of device whether it is wanted.
struct Plan {
  std::vector<std::string> ops;
  bool has_cpu = true, has_cuda = true;
};

Plan plan_from(const VerifyOptions& options) {
  Plan plan{cases::operations_with_cases(), options.device != "cuda", options.device != "cpu"};
  if (!options.op.empty()) {
    if (std::find(plan.ops.begin(), plan.ops.end(), options.op) == plan.ops.end()) {
      throw UsageError("there is no operation '" + options.op + "', expected one of: " + joined(plan.ops));
    }
    plan.ops = {options.op};
  }
  if (!options.device.empty() && options.device != "cpu" && options.device != "cuda") {
    throw UsageError("device is '" + options.device + "', expected cpu or cuda");
  }
  if (options.device == "cuda" && !cases::has_cuda_device()) throw UsageError("there is no CUDA device here");

  if (options.kernel.empty()) return plan;
  for (const KernelRow& row : cases::list_kernels()) {
    if (row.kernel != options.kernel) continue;
    const bool is_wanted = std::find(plan.ops.begin(), plan.ops.end(), row.op) != plan.ops.end() &&
                           (row.is_cuda() ? plan.has_cuda : plan.has_cpu);
    if (!is_wanted)
      throw UsageError("kernel '" + options.kernel + "' is not one of this operation and device");
    return {{row.op}, !row.is_cuda(), row.is_cuda()};
  }
  throw UsageError("there is no kernel '" + options.kernel + "'; 'quantfuse info' lists them");
}

// "2/16"
cases::CasePart part_from(const std::string& text) {
  int index = 0, count = 0, length = 0;
  const int found = std::sscanf(text.c_str(), "%d/%d%n", &index, &count, &length);
  if (found != 2 || static_cast<size_t>(length) != text.size() || index < 1 || index > count)
    throw UsageError("part is '" + text + "', expected I/N with I from 1 to N");
  return {index - 1, count};
}

void print_report(const KernelReport& report) {
  const std::string head = fmt::format("{:<16} {:<34} ", report.row.op, report.row.kernel);
  if (!report.row.is_available) {
    fmt::print("{}{}\n", head, styled(Style::dim, "skipped: " + report.row.reason));
    return;
  }
  if (report.num_accepted == 0 && report.failures.empty()) {
    fmt::print("{}{}\n", head, styled(Style::dim, "idle: a newer instruction set has all the work here"));
    return;
  }
  const bool is_good = report.failures.empty();
  fmt::print("{}{} {} passed, {} failed; accepts {} of {} cases\n", head,
             styled(is_good ? Style::good : Style::bad, is_good ? "ok    " : "FAILED"), report.num_passed,
             report.failures.size(), report.num_accepted, report.num_cases);
  for (size_t i = 0; i < std::min(report.failures.size(), kShownFailures); ++i) {
    fmt::print("    {}: {}\n", report.failures[i].case_name, report.failures[i].reason);
  }
  if (report.failures.size() > kShownFailures)
    fmt::print("    and {} more\n", report.failures.size() - kShownFailures);
}

Json report_json(const KernelReport& report) {
  Json failures = Json::array();
  for (const cases::Failure& failure : report.failures) {
    failures.push_back({{"case", failure.case_name}, {"reason", failure.reason}});
  }
  return {{"op", report.row.op},
          {"kernel", report.row.kernel},
          {"target", report.row.target},
          {"available", report.row.is_available},
          {"reason", report.row.reason},
          {"cases", report.num_cases},
          {"accepted", report.num_accepted},
          {"passed", report.num_passed},
          {"failed", report.failures.size()},
          {"failures", failures}};
}

}  // namespace

int run_verify(const VerifyOptions& options) {
  const Plan plan = plan_from(options);
  const cases::CasePart part = part_from(options.part);
  JsonFile file(options.json_path);
  Json rows = Json::array();
  size_t passed = 0, failed = 0, skipped = 0;

  for (const std::string& op : plan.ops) {
    for (const qf_device device : {qf_device{QF_CPU, 0}, qf_device{QF_CUDA, 0}}) {
      if (!(device.type == QF_CPU ? plan.has_cpu : plan.has_cuda)) continue;
      Progress progress(cases::test_cases(op, device).size() / part.count + 1);
      cases::Observer observer;
      observer.on_case = [&](const cases::Case& c) { progress.step(op + ": " + c.name); };
      if (options.verbose) {
        observer.on_result = [&](const KernelRow& row, const cases::Case& c, const std::string& wrong) {
          progress.clear();
          fmt::print("  {}: {}: {}\n", row.kernel, c.name, wrong.empty() ? "ok" : wrong);
        };
      }
      const auto reports = cases::verify_operation(
          op, device,
          [&](const KernelRow& row) { return options.kernel.empty() || row.kernel == options.kernel; },
          options.seed, observer, part);
      progress.clear();
      for (const KernelReport& report : reports) {
        print_report(report);
        rows.push_back(report_json(report));
        passed += static_cast<size_t>(report.num_passed);
        failed += report.failures.size();
        skipped += report.row.is_available ? 0 : 1;
      }
      std::fflush(stdout);
    }
  }
  file.write({{"passed", passed},
              {"failed", failed},
              {"skipped", skipped},
              {"seed", options.seed},
              {"kernels", rows}});
  fmt::print("{} passed, {} failed, {} skipped\n", passed, failed, skipped);
  return failed == 0 ? kSuccess : kCheckFailed;
}

}  // namespace quantfuse::cli
