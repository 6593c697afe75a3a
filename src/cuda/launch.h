// SPDX-License-Identifier: Apache-2.0
//
// The only place that launches. Checks the launch, names the kernel in the error, and offers programmatic
// dependent launch: a kernel launched with `overlap_previous` may start while the one before it on the stream
// is still running, and must execute griddepcontrol.wait before it touches anything that kernel wrote.
#pragma once

#include <cuda_runtime.h>

#include <string>
#include <type_traits>

#include "core/error.h"
#include "core/kernel.h"

namespace quantfuse {

struct LaunchShape {
  dim3 grid;
  dim3 block;
  size_t smem_bytes = 0;
  bool overlap_previous = false;
  unsigned cluster = 1;  // blocks, along x
};

template <class... KernelArgs, class... Args>
void launch_kernel(const char* name, void (*kernel)(KernelArgs...), const LaunchShape& shape,
                   const Launch& launch, Args&&... args) {
  auto check = [&](cudaError_t e) {
    if (e == cudaSuccess) return;
    cudaGetLastError();  // not sticky: do not let the next call find it
    fail_device(std::string(name) + ": " + cudaGetErrorString(e));
  };
  if (shape.smem_bytes > 48 * 1024) {
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shape.smem_bytes)));
  }
  // Only code compiled for sm_90 or newer has the wait in it. A newer GPU may be running the PTX of an older
  // target.
  bool may_overlap = shape.overlap_previous;
  if (may_overlap) {
    cudaFuncAttributes code;
    check(cudaFuncGetAttributes(&code, reinterpret_cast<const void*>(kernel)));
    may_overlap = code.ptxVersion >= 90;
  }
  cudaLaunchAttribute attributes[2];
  unsigned num_attributes = 0;
  if (may_overlap) {
    cudaLaunchAttribute& overlap = attributes[num_attributes++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[num_attributes++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {shape.cluster, 1, 1};
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.smem_bytes;
  config.stream = static_cast<cudaStream_t>(launch.stream);
  config.attrs = attributes;
  config.numAttrs = num_attributes;
  check(cudaLaunchKernelEx(&config, kernel, static_cast<KernelArgs>(std::forward<Args>(args))...));
}

}  // namespace quantfuse
