// SPDX-License-Identifier: Apache-2.0
//
// The CUDA half of measure.h in a build without CUDA.
#include "commands.h"
#include "measure.h"

namespace quantfuse::cli {

GpuLimits measure_gpu_limits(int) { throw UsageError("this build has no CUDA"); }
Timing measure_on_gpu(int, const std::function<void(int, void*)>&, int, double, bool) {
  throw UsageError("this build has no CUDA");
}

}  // namespace quantfuse::cli
