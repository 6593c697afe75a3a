// SPDX-License-Identifier: Apache-2.0
//
// core/device.h for a build with CUDA. The runtime is linked statically: without a driver every query finds
// no device.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>

#include "core/device.h"
#include "core/operation.h"

namespace quantfuse {
namespace {

struct GpuTable {
  std::vector<GpuInfo> gpus;
  int driver_version = 0;
};

int max_sm_from_environment() {
  const char* text = std::getenv("QUANTFUSE_MAX_SM");
  if (!text || !*text) return 0;
  const int sm = std::atoi(text);
  if (sm < 75 || sm > 999) {
    fail_argument(std::string("QUANTFUSE_MAX_SM is '") + text +
                  "', expected a compute capability such as 80");
  }
  return sm;
}

int num_sms_from_environment() {
  const char* text = std::getenv("QUANTFUSE_NUM_SMS");
  if (!text || !*text) return 0;
  const int sms = std::atoi(text);
  if (sms < 1)
    fail_argument(std::string("QUANTFUSE_NUM_SMS is '") + text + "', expected a number of multiprocessors");
  return sms;
}

// Attributes only, no context: a process that never calls a CUDA kernel never creates one.
GpuTable query() {
  GpuTable table;
  cudaDriverGetVersion(&table.driver_version);
  int count = 0;
  if (table.driver_version == 0 || cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return table;
  }
  const int max_sm = max_sm_from_environment(), max_sms = num_sms_from_environment();
  for (int id = 0; id < count; ++id) {
    cudaDeviceProp prop;
    if (cudaGetDeviceProperties(&prop, id) != cudaSuccess) continue;
    GpuInfo info;
    info.name = prop.name;
    info.compute_capability = prop.major * 10 + prop.minor;
    info.acts_as = max_sm > 0 && max_sm < info.compute_capability ? max_sm : info.compute_capability;
    info.num_sms = max_sms > 0 ? std::min(max_sms, prop.multiProcessorCount) : prop.multiProcessorCount;
    info.memory_bytes = static_cast<int64_t>(prop.totalGlobalMem);
    info.l2_bytes = prop.l2CacheSize;
    info.max_smem_bytes = static_cast<int64_t>(prop.sharedMemPerBlockOptin);
    table.gpus.push_back(info);
  }
  return table;
}

const GpuTable& table() {
  static const GpuTable cached = query();
  return cached;
}

// All zeros where there is no such device.
const GpuInfo& facts_of(int id) {
  static const GpuInfo none;
  const auto& gpus = table().gpus;
  return id >= 0 && id < static_cast<int>(gpus.size()) ? gpus[id] : none;
}

}  // namespace

std::vector<GpuInfo> gpu_list() { return table().gpus; }

int gpu_acts_as(int id) { return facts_of(id).acts_as; }
int gpu_num_sms(int id) { return facts_of(id).num_sms; }
int64_t gpu_max_smem_bytes(int id) { return facts_of(id).max_smem_bytes; }

std::string cuda_driver_version() {
  const int v = table().driver_version;
  return v == 0 ? "" : std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10);
}

const char* cuda_compiled_architectures() { return QF_CUDA_ARCHITECTURES; }

DeviceScope::DeviceScope(qf_device device) {
  if (device.type != QF_CUDA) return;
  if (gpu_acts_as(device.id) == 0) {
    fail_device("there is no device cuda:" + std::to_string(device.id) + " here (" +
                std::to_string(table().gpus.size()) + " found)");
  }
  int current = 0;
  cudaGetDevice(&current);
  if (current == device.id) return;
  if (const cudaError_t e = cudaSetDevice(device.id); e != cudaSuccess) {
    fail_device("cuda:" + std::to_string(device.id) + ": " + cudaGetErrorString(e));
  }
  previous_ = current;
}

DeviceScope::~DeviceScope() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

}  // namespace quantfuse
