// SPDX-License-Identifier: Apache-2.0
//
// griddepcontrol (PTX ISA 7.8, sm_90): the device side of programmatic dependent launch. Nothing on older
// targets, which cuda/launch.h never launches so.
#pragma once

namespace quantfuse::ptx {

// Returns once all that the kernels before on the stream have written can be seen. Every thread calls it
// before it touches memory, or a kernel could end before one that it follows.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may be launched as soon as every block has called this: its blocks then fill the places
// that ours leave free, and wait there.
__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace quantfuse::ptx
