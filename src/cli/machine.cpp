// SPDX-License-Identifier: Apache-2.0
//
// The machine a bench runs on, in figures and in words.
#include <fmt/format.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>

#include "bench.h"
#include "build_info.h"
#include "commands.h"
#include "library.h"
#include "nvml.h"

namespace quantfuse::cli {
namespace {

std::string operating_system() {
  std::string name = "Linux";
  std::ifstream file("/etc/os-release");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("PRETTY_NAME=\"", 0) == 0) name = line.substr(13, line.size() - 14);
  }
  utsname kernel;
  return uname(&kernel) == 0 ? name + ", " + kernel.sysname + " " + kernel.release : name;
}

std::string machine_words(const Json& info) {
  utsname kernel;
  const double memory =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  std::string s =
      fmt::format("{}, {} CPUs of {}, {:.0f} GiB", uname(&kernel) == 0 ? kernel.machine : "unknown",
                  info["cpu"]["cpus"].get<int>(), info["cpu"]["model"].get<std::string>(), memory / 0x1p30);
  for (const Json& gpu : info["cuda"]["devices"]) s += ", " + gpu["name"].get<std::string>();
  return s;
}

double rounded(double value) { return std::round(value * 10) / 10; }

}  // namespace

Machine measure_machine(qf_device device, int threads) {
  const Json info = library_info();
  Machine machine;
  machine.device = device;
  machine.device_name = device_text(device);
  machine.threads = threads;
  if (device.type == QF_CPU) {
    machine.cache_bytes =
        std::max(info["cpu"]["l3_bytes"].get<double>(), info["cpu"]["l2_bytes"].get<double>());
    if (machine.cache_bytes <= 0) machine.cache_bytes = 64e6;  // the system does not say: more than most have
    machine.memory.emplace(threads);
    machine.cpu = measure_cpu_limits(threads, *machine.memory, info["cpu"]["isa"]);
  } else {
    const Json& gpus = info["cuda"]["devices"];
    if (device.id >= static_cast<int>(gpus.size())) {
      throw UsageError(
          fmt::format("--device: there is no cuda:{} here, only {} CUDA devices", device.id, gpus.size()));
    }
    machine.cache_bytes = gpus[device.id]["l2_bytes"].get<double>();
    machine.gpu = measure_gpu_limits(device.id);
  }
  return machine;
}

Json header_json(const Machine& machine) {
  const Json info = library_info();
  Json header;
  header["machine"] = machine_words(info);
  header["cpu"] = info["cpu"]["model"];
  header["isa"] = info["cpu"]["isa"];
  header["threads"] = machine.threads;
  header["caches"] = {{"l1_bytes", info["cpu"]["l1_bytes"]},
                      {"l2_bytes", info["cpu"]["l2_bytes"]},
                      {"l3_bytes", info["cpu"]["l3_bytes"]}};
  header["os"] = operating_system();
  header["compiler"] = build_compiler();
  header["quantfuse"] = qf_version();
  header["commit"] = build_commit();
  header["baselines"] = Baselines::versions();
  header["device"] = machine.device_name;
  header["read_gbps"] = rounded(machine.read_gbps());
  if (machine.device.type == QF_CPU) {
    header["peak_gops"] = {{"f32", rounded(machine.cpu.f32_gflops)},
                           {"bf16", rounded(machine.cpu.bf16_gflops)},
                           {"int8", rounded(machine.cpu.int8_gops)}};
  } else {
    header["copy_gbps"] = rounded(machine.gpu.copy_gbps);
    header["gpu"] = info["cuda"]["devices"][machine.device.id];
    header["driver"] = driver_version();
    header["cuda_driver"] = info["cuda"]["driver"];
    header["cuda_runtime"] = machine.gpu.runtime;
    header["cuda_architectures"] = info["cuda"]["architectures"];
  }
  return header;
}

}  // namespace quantfuse::cli
