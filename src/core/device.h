// SPDX-License-Identifier: Apache-2.0
//
// The machine: what the CPU can do, which GPUs there are. The CUDA half is cuda/device.cu, or a stub of it
// where the library is built without nvcc; both find no GPU, and no error, on a machine without a driver.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/kernel.h"

namespace quantfuse {

inline constexpr int kMaxThreads = 1024;

// What the environment says of this process, read once, at the first use; an Error where it makes no sense.
struct CpuSettings {
  Target target;     // the best that may be used: of what the processor has, as QUANTFUSE_ISA says
  uint32_t targets;  // a bit for each that the processor has, up to that one
  int threads;       // QUANTFUSE_NUM_THREADS, or as many as there are CPUs for this process

  bool has(Target t) const { return (targets >> static_cast<int>(t) & 1) != 0; }
};
const CpuSettings& cpu_settings();

struct CpuInfo {
  std::string model;
  int num_cpus = 0;  // this process may run on
  int64_t l1_bytes = 0, l2_bytes = 0, l3_bytes = 0;
  Target detected = Target::reference;
};
CpuInfo cpu_info();

struct GpuInfo {
  std::string name;
  int compute_capability = 0;  // 90 for 9.0
  int acts_as = 0;             // the same, lowered by QUANTFUSE_MAX_SM
  int num_sms = 0;
  int64_t memory_bytes = 0, l2_bytes = 0, max_smem_bytes = 0;
};

std::vector<GpuInfo> gpu_list();
// The compute capability device `id` acts as, or 0 if there is no such device. Cached: no driver call after
// the first.
int gpu_acts_as(int id);
int gpu_num_sms(int id);
int64_t gpu_max_smem_bytes(int id);         // of a block
std::string cuda_driver_version();          // "" without a driver
const char* cuda_compiled_architectures();  // "" without CUDA kernels

}  // namespace quantfuse
