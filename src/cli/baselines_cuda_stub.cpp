// SPDX-License-Identifier: Apache-2.0
//
// A build without CUDA, or without the header of cuBLASLt: nothing to compare with on a GPU.
#include "baselines.h"

namespace quantfuse::cli {

std::unique_ptr<GpuBaseline> make_gpu_baseline(int, const Shape&, GpuNumbers, double) { return nullptr; }

}  // namespace quantfuse::cli
