// SPDX-License-Identifier: Apache-2.0
#include "cases/verify.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace quantfuse::cases {
namespace {

std::string text_of(size_t (*function)(char*, size_t)) {
  std::string text(function(nullptr, 0) + 1, '\0');
  function(text.data(), text.size());
  text.pop_back();
  return text;
}

// "" or what is wrong with the kernel on this case, which is made with two sets.
std::string verify_kernel(Case& c, const std::string& kernel) {
  c.reset();
  for (int copy : {0, 1}) {
    if (c.run(kernel.c_str(), copy, nullptr) != QF_OK) return qf_last_error();
  }
  if (std::string wrong = c.check(); !wrong.empty()) return wrong;
  return c.outputs(0) == c.outputs(1) ? "" : "gave other bits when it ran again";
}

}  // namespace

std::vector<KernelRow> list_kernels() {
  std::vector<KernelRow> rows;
  for (const auto& k : nlohmann::json::parse(text_of(qf_kernels))) {
    rows.push_back({k.at("op"), k.at("kernel"), k.at("target"), k.at("available"), k.at("reason")});
  }
  return rows;
}

bool has_cuda_device() { return !nlohmann::json::parse(text_of(qf_info)).at("cuda").at("devices").empty(); }

Verdicts verdicts_on(Case& c) {
  const auto json = nlohmann::json::parse(c.explain(nullptr));
  Verdicts verdicts;
  if (!json.at("chosen").is_null()) verdicts.chosen = json.at("chosen");
  for (const auto& candidate : json.at("candidates")) {
    if (candidate.at("accepts")) verdicts.accepting.push_back(candidate.at("kernel"));
  }
  return verdicts;
}

std::vector<KernelReport> verify_operation(const std::string& op, qf_device device, const WantsKernel& wants,
                                           uint64_t seed, const Observer& observer, CasePart part) {
  std::vector<KernelReport> reports;
  for (const KernelRow& row : list_kernels()) {
    const bool is_of_call = row.op == op && row.is_cuda() == (device.type == QF_CUDA);
    if (is_of_call && wants(row)) reports.push_back({row, 0, 0, 0, {}});
  }
  const bool can_run =
      std::any_of(reports.begin(), reports.end(), [](const auto& r) { return r.row.is_available; });
  if (!can_run) return reports;

  std::vector<CasePtr> all = test_cases(op, device), cases;
  for (size_t i = part.index; i < all.size(); i += part.count) cases.push_back(std::move(all[i]));
  for (KernelReport& report : reports) report.num_cases = static_cast<int>(cases.size());
  for (CasePtr& c : cases) {
    if (observer.on_case) observer.on_case(*c);
    std::vector<std::string> accepting;
    std::string cannot_make;
    try {
      c->make(device, seed, 2);
      accepting = verdicts_on(*c).accepting;
    } catch (const std::exception& e) {
      cannot_make = std::string("could not be made: ") + e.what();
    }
    for (KernelReport& report : reports) {
      if (!report.row.is_available) continue;
      std::string wrong = cannot_make;
      if (wrong.empty()) {
        if (std::find(accepting.begin(), accepting.end(), report.row.kernel) == accepting.end()) continue;
        ++report.num_accepted;
        try {
          wrong = verify_kernel(*c, report.row.kernel);
        } catch (const std::exception& e) {
          wrong = e.what();
        }
      }
      if (observer.on_result) observer.on_result(report.row, *c, wrong);
      wrong.empty() ? void(++report.num_passed) : report.failures.push_back({c->name, wrong});
    }
    c.reset();  // its memory
  }
  // Kernels of the best target here, and the reference, must accept something. Those of an older target may
  // have nothing to do (a packed weight is of one target); they are the best where QUANTFUSE_ISA or
  // QUANTFUSE_MAX_SM says so.
  const auto best =
      std::find_if(reports.begin(), reports.end(), [](const auto& r) { return r.row.is_available; });
  for (KernelReport& report : reports) {
    const bool must_accept = part.is_whole() && report.row.is_available &&
                             (report.row.family() == best->row.family() || report.row.is_reference());
    if (must_accept && report.num_accepted == 0 && report.failures.empty()) {
      report.failures.push_back({"(none)", "accepts no case, so that nothing is known of it"});
    }
  }
  return reports;
}

}  // namespace quantfuse::cases
