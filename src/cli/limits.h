// SPDX-License-Identifier: Apache-2.0
//
// What this CPU can do at most, measured: the roofline that a bench compares with.
#pragma once

namespace quantfuse::cli {

struct CpuLimits {
  double read_gbps = 0;    // memory, all threads reading
  double f32_gflops = 0;   // fused multiply-adds, two operations each
  double bf16_gflops = 0;  // BF16 dot products; 0 where there are none
  double int8_gops = 0;    // 8-bit dot products, by VNNI where there is one
};
CpuLimits measure_cpu_limits(int threads);

}  // namespace quantfuse::cli
