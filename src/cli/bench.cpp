// SPDX-License-Identifier: Apache-2.0
//
// `quantfuse bench`: case | kernel | us | GFLOP/s | GB/s | % roofline | x baseline
#include "bench.h"

#include <fmt/format.h>

#include "commands.h"
#include "library.h"

namespace quantfuse::cli {
namespace {

struct Job {
  Spec spec;
  std::string kernel;     // "": the selected one
  std::string op, label;  // for the table
};

std::vector<Job> jobs_of(const BenchOptions& options, qf_device device) {
  std::vector<Spec> specs;
  if (options.suite == "cpu") {
    specs = cpu_suite();
  } else if (options.suite == "h200") {
    specs = h200_suite();
  } else if (options.suite == "producers") {
    specs = producers_suite();
  } else if (options.suite == "products") {
    specs = products_suite();
  } else {
    ProblemOptions problem = options.problem;
    for (const int64_t m : options.m.empty() ? std::vector<int64_t>{1} : options.m) {
      problem.m = m;
      specs.push_back(spec_from_options(operation_name(options.op), problem));
    }
  }
  std::vector<Job> jobs;
  for (const Spec& spec : specs) {
    check_memory(spec);
    const cases::CasePtr c = case_from_spec(spec);
    const std::string label = c->op + " " + c->scheme + " " + c->name;
    if (!options.runs_all_kernels) {
      jobs.push_back({spec, options.kernel, c->op, label});
      continue;
    }
    for (const std::string& kernel : accepting_kernels(spec, device))
      jobs.push_back({spec, kernel, c->op, label});
  }
  return jobs;
}

std::vector<std::string> cells_of(const Row& row) {
  const auto number = [](double value) {
    return value >= 100  ? fmt::format("{:.0f}", value)
           : value >= 10 ? fmt::format("{:.1f}", value)
                         : fmt::format("{:.2f}", value);
  };
  const bool has_work = row.flops > 0;
  std::string compared;
  if (row.baseline) {
    compared = fmt::format("{:.2f}x {}", times_as_long(row.baseline->timing, row.timing), row.baseline->name);
  }
  if (row.plain) {
    const double cost = 100 * (times_as_long(row.timing, *row.plain) - 1);
    compared += fmt::format("{}epilogue {:+.1f}%", compared.empty() ? "" : "; ", cost);
  }
  if (row.timing.joules > 0) {
    compared += fmt::format("{}{} mJ", compared.empty() ? "" : "; ", number(row.timing.joules * 1e3));
  }
  return {row.label(),
          row.kernel,
          number(row.timing.us),
          has_work ? number(row.flops / row.timing.us / 1e3) : "",
          has_work ? number(row.bytes / row.timing.us / 1e3) : "",
          row.limit_us > 0 ? fmt::format("{:.0f}%", 100 * row.roofline()) : "",
          compared};
}

void print_machine(const Machine& machine) {
  if (machine.device.type == QF_CPU) {
    fmt::print(
        "{} threads; this machine reads {:.1f} GB/s and computes {:.0f} GFLOP/s in f32, {:.0f} GOP/s in int8",
        machine.threads, machine.cpu.read_gbps, machine.cpu.f32_gflops, machine.cpu.int8_gops);
    if (machine.cpu.bf16_gflops > 0) fmt::print(", {:.0f} GFLOP/s in bf16", machine.cpu.bf16_gflops);
  } else {
    fmt::print("{}; reads {:.0f} GB/s, copies {:.0f} GB/s", machine.device_name, machine.gpu.read_gbps,
               machine.gpu.copy_gbps);
    if (!machine.gpu.no_energy_reason.empty()) fmt::print("; no energy: {}", machine.gpu.no_energy_reason);
  }
  fmt::print("\n\n");
}

Table bench_table(const std::vector<Job>& jobs) {
  using Align = Table::Align;
  Table table({{"case", Align::left},
               {"kernel", Align::left},
               {"us", Align::right, 8},
               {"GFLOP/s", Align::right, 7},
               {"GB/s", Align::right, 6},
               {"% roofline", Align::right},
               {"x baseline", Align::left}});
  const Json kernels = library_kernels();
  for (const Job& job : jobs) {
    table.fit({job.label});
    for (const Json& kernel : kernels) {
      if (kernel["op"] == job.op && kernel["available"]) table.fit({"", kernel["kernel"].get<std::string>()});
    }
  }
  return table;
}

}  // namespace

int run_bench(const BenchOptions& options) {
  if (options.op.empty() == options.suite.empty())
    throw UsageError("bench: give an operation or --suite cpu|h200|producers|products");
  if (options.op == "checkpoint") return run_checkpoint_bench(options);
  JsonFile file(options.json_path);
  const qf_device device = options.suite == "h200" && options.problem.device == "cpu"
                               ? qf_device{QF_CUDA, 0}
                               : device_from_word(options.problem.device);
  if (options.threads > 0) qf_set_num_threads(options.threads);
  const std::vector<Job> jobs = jobs_of(options, device);
  const Machine machine = measure_machine(device, qf_get_num_threads());
  print_machine(machine);

  const Baselines baselines(machine.threads, machine.cache_bytes);
  const bool is_cpu = device.type == QF_CPU;
  const Table table = bench_table(jobs);
  table.print_titles();
  Json rows = Json::array();
  Progress progress(jobs.size());
  bool is_any_missing = false;
  const auto report = [&](const Row& row) {
    progress.clear();
    table.print_row(cells_of(row));
    rows.push_back(row_json(row));
  };
  for (const Job& job : jobs) {
    progress.step(job.label);
    try {
      report(measure_row(job.spec, machine,
                         {options.seconds, job.kernel, options.has_baselines && is_cpu ? &baselines : nullptr,
                          options.has_baselines && !is_cpu, options.has_energy}));
    } catch (const UsageError&) {
      throw;
    } catch (const std::runtime_error& e) {
      progress.clear();
      fmt::print(stderr, "quantfuse: {}: {}\n", job.label, e.what());
      is_any_missing = true;
    }
  }
  if (options.suite == "h200") {
    for (const Chain& chain : h200_chains()) report(measure_chain(chain, machine, options.seconds));
  }
  if (options.suite == "cpu") {
    for (const Row& row : measure_overheads(machine, options.seconds)) report(row);
  }
  progress.clear();
  file.write({{"header", header_json(machine)}, {"rows", rows}});
  return is_any_missing ? kCheckFailed : kSuccess;
}

}  // namespace quantfuse::cli
