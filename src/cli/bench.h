// SPDX-License-Identifier: Apache-2.0
//
// The parts of `quantfuse bench`: the machine and its limits, one row of results, the suites.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "baselines.h"
#include "commands.h"
#include "limits.h"
#include "measure.h"
#include "output.h"
#include "problem.h"

namespace quantfuse::cli {

// Where a bench runs, and what it could do there at most.
struct Machine {
  qf_device device = {QF_CPU, 0};
  std::string device_name;  // "cpu", "cuda:0 NVIDIA H200"
  int threads = 1;
  double cache_bytes = 0;  // the last cache before memory: L3, or the GPU's L2
  CpuLimits cpu;
  std::optional<MemoryRead> memory;  // of the CPU
  GpuLimits gpu;

  double read_gbps() const { return device.type == QF_CPU ? cpu.read_gbps : gpu.read_gbps; }
};
Machine measure_machine(qf_device device, int threads);
Json header_json(const Machine&);  // machine, compiler, versions, commit, limits

// One line of the table and one object of "rows".
struct Row {
  std::string op, name, scheme, kernel, device;
  int64_t m = 0, n = 0, k = 0;
  Timing timing;
  double flops = 0, bytes = 0;
  double limit_us = 0;         // the least that the machine could take; 0: not known
  std::optional<Timing> read;  // of as many bytes, in turns with the row, where that is its limit
  int copies = 1;
  std::optional<BaselineTiming> baseline;  // the quickest of those that do the same work
  std::vector<BaselineTiming> baselines;   // all that were measured
  std::optional<Timing> plain;             // of the same product without its bias, activation and residual

  double roofline() const { return read ? times_as_long(*read, timing) : limit_us / timing.us; }
  std::string label() const { return op + " " + scheme + (scheme.empty() ? "" : " ") + name; }
};
Json row_json(const Row&);

struct RowOptions {
  double seconds = 0.3;
  std::string kernel;                    // "": the selected one
  const Baselines* baselines = nullptr;  // of the CPU; null: none
  bool has_gpu_baselines = false;
  bool has_energy = true;  // where the GPU counts it
};
// Throws std::runtime_error with the library's words where no kernel accepts or the run fails.
Row measure_row(const Spec&, const Machine&, const RowOptions&);
void check_memory(const Spec&);  // throws UsageError where the problem is larger than the machine
// The kernel that runs: the forced one or, where that is "", the library's choice. Throws as measure_row
// does.
std::string selected_kernel(const Spec&, qf_device, const std::string& forced);
std::vector<std::string> accepting_kernels(const Spec&, qf_device);

// Calls that follow each other, on a GPU.
struct Chain {
  std::string name;
  std::vector<Spec> specs;
};
Row measure_chain(const Chain&, const Machine&, double seconds);

// The weight 4096 x 4096 in every scheme, the layers of Llama-3-8B, the producers of 8-bit activations.
std::vector<Spec> cpu_suite();
// The layers of Llama 7B, 8B and 70B at seven sizes of a batch; the producers of 8-bit activations.
std::vector<Spec> h200_suite();
std::vector<Spec> producers_suite();
// Products of 8-bit codes.
std::vector<Spec> products_suite();  // a part of it, on any device
std::vector<Chain> h200_chains();    // the layers of a decoder block

// Quantizing and importing checkpoints, against the machine's copy rate.
int run_checkpoint_bench(const BenchOptions&);

// Loading the library with a first call, and what a call costs before it does any work.
std::vector<Row> measure_overheads(const Machine&, double seconds);

}  // namespace quantfuse::cli
