// SPDX-License-Identifier: Apache-2.0
//
// core/device.h and DeviceScope for a build without CUDA: there are no GPUs.
#include "core/device.h"
#include "core/operation.h"

namespace quantfuse {

std::vector<GpuInfo> gpu_list() { return {}; }
int gpu_acts_as(int) { return 0; }
int gpu_num_sms(int) { return 0; }
int64_t gpu_max_smem_bytes(int) { return 0; }
std::string cuda_driver_version() { return ""; }
const char* cuda_compiled_architectures() { return ""; }

DeviceScope::DeviceScope(qf_device) {}
DeviceScope::~DeviceScope() = default;

}  // namespace quantfuse
