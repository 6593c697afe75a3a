// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "core/device.h"
#include "core/operation.h"
#include "cuda/launch.h"

namespace quantfuse {

// How many clusters of `cluster` blocks, each with an SM to itself, run at once. Clusters do not reach across
// the parts that a GPU is made of (132 SMs hold 30 clusters of 4), so beyond the pairs of SMs the driver is
// asked, once for each device; its answer is of the whole GPU, whatever QUANTFUSE_NUM_SMS says. `kernel` may
// be any that is launched with `threads`.
template <class... KernelArgs>
int resident_clusters(void (*kernel)(KernelArgs...), int device, int cluster, int threads) {
  const int most = gpu_num_sms(device) / cluster;
  if (cluster <= 2) return most;
  static std::mutex mutex;
  static std::map<std::pair<int, int>, int> known;
  const std::lock_guard lock(mutex);
  const auto [found, is_new] = known.try_emplace({device, cluster}, 0);
  if (!is_new) return std::min(found->second, most);
  const DeviceScope scope({QF_CUDA, device});
  const auto* function = reinterpret_cast<const void*>(kernel);
  const auto smem_bytes = static_cast<int>(gpu_max_smem_bytes(device));
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(std::max(most, 1) * cluster));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(smem_bytes);
  config.attrs = &attribute, config.numAttrs = 1;
  if (cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes) !=
          cudaSuccess ||
      cudaOccupancyMaxActiveClusters(&found->second, function, &config) != cudaSuccess) {
    cudaGetLastError();
    found->second = 0;
  }
  return std::min(found->second, most);
}

}  // namespace quantfuse
