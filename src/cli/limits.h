// SPDX-License-Identifier: Apache-2.0
//
// What this CPU can do at most, measured: the roofline that a bench compares with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace quantfuse::cli {

// A read of more memory than any cache holds, by all threads: the limit of what reads memory, where both take
// turns.
class MemoryRead {
 public:
  explicit MemoryRead(int threads);
  double run() const;  // seconds
  double bytes() const { return static_cast<double>(part_) * threads_; }

 private:
  int threads_;
  size_t part_;  // bytes of a thread
  std::shared_ptr<uint8_t> data_;
};

struct CpuLimits {
  double read_gbps = 0;    // memory, all threads reading
  double f32_gflops = 0;   // fused multiply-adds, two operations each
  double bf16_gflops = 0;  // BF16 dot products; 0 where there are none
  double int8_gops = 0;    // 8-bit dot products, by VNNI where there is one
};
// isa: the library's here. Dot products are those of tiles where it is AMX.
CpuLimits measure_cpu_limits(int threads, const MemoryRead& memory, const std::string& isa);

}  // namespace quantfuse::cli
