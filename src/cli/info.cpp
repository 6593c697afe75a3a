// SPDX-License-Identifier: Apache-2.0
//
// `quantfuse info`: the library, this machine, and which kernels would run on it.
#include <fmt/format.h>

#include "build_info.h"
#include "commands.h"
#include "library.h"

namespace quantfuse::cli {
namespace {

std::string text(const Json& json, const char* key) { return json.at(key).get<std::string>(); }

void print_cpu(const Json& cpu) {
  const std::string isa = text(cpu, "isa"), detected = text(cpu, "isa_detected");
  const auto cache = [&](const char* key) {
    return fmt::format("{} KiB", cpu.at(key).get<int64_t>() / 1024);
  };
  fmt::print("{}       {}\n", styled(Style::bold, "CPU"), text(cpu, "model"));
  fmt::print("  ISA     {}{}\n", isa,
             isa == detected ? "" : " (this CPU has " + detected + "; QUANTFUSE_ISA chooses)");
  fmt::print("  threads {} of {} CPUs\n", cpu.at("threads").get<int>(), cpu.at("cpus").get<int>());
  fmt::print("  caches  L1d {}, L2 {}, L3 {}\n", cache("l1_bytes"), cache("l2_bytes"), cache("l3_bytes"));
}

void print_cuda(const Json& cuda) {
  const std::string architectures = text(cuda, "architectures"), driver = text(cuda, "driver");
  fmt::print("{}\n", styled(Style::bold, "CUDA"));
  fmt::print("  compiled for  {}\n",
             architectures.empty() ? "nothing: this build has no CUDA kernels" : architectures);
  fmt::print("  driver        {}\n", driver.empty() ? "none" : driver);
  const Json& devices = cuda.at("devices");
  if (devices.empty()) fmt::print("  devices       none\n");
  for (size_t i = 0; i < devices.size(); ++i) {
    const Json& gpu = devices[i];
    const int capability = gpu.at("compute_capability"), acts_as = gpu.at("acts_as");
    fmt::print("  cuda:{}        {}, compute capability {}.{}, {} SMs, {}, L2 {}{}\n", i, text(gpu, "name"),
               capability / 10, capability % 10, gpu.at("sms").get<int>(),
               human_bytes(gpu.at("memory_bytes")), human_bytes(gpu.at("l2_bytes")),
               acts_as == capability ? "" : fmt::format(", acting as {}.{}", acts_as / 10, acts_as % 10));
  }
}

void print_kernels(const Json& kernels) {
  fmt::print("{}, the best of each operation first\n", styled(Style::bold, "Kernels"));
  size_t width = 0;
  for (const Json& kernel : kernels) width = std::max(width, text(kernel, "kernel").size());
  std::string op;
  for (const Json& kernel : kernels) {
    if (text(kernel, "op") != op) fmt::print("  {}\n", op = text(kernel, "op"));
    const bool is_available = kernel.at("available");
    const std::string line =
        fmt::format("    {} {:<{}}  {}", is_available ? "+" : "-", text(kernel, "kernel"), width,
                    is_available ? "runs here" : text(kernel, "reason"));
    fmt::print("{}\n", styled(is_available ? Style::good : Style::dim, line));
  }
}

}  // namespace

int run_info(const InfoOptions& options) {
  JsonFile file(options.json_path);
  Json info = library_info();
  info["commit"] = build_commit();
  info["compiler"] = build_compiler();
  info["kernels"] = library_kernels();

  fmt::print("{} {} ({}, {})\n\n", styled(Style::bold, "quantfuse"), text(info, "version"), build_commit(),
             build_compiler());
  print_cpu(info["cpu"]);
  fmt::print("\n");
  print_cuda(info["cuda"]);
  fmt::print("\n");
  print_kernels(info["kernels"]);
  file.write(info);
  return kSuccess;
}

}  // namespace quantfuse::cli
