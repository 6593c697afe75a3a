// SPDX-License-Identifier: Apache-2.0
//
// What a user would call instead of this library: OpenBLAS and oneDNN, where they were found at build time,
// and cuBLASLt, where it is found at run time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "measure.h"
#include "output.h"
#include "quantfuse/quantfuse.h"

namespace quantfuse::cli {

enum class WeightOrder { packed, nk, kn };  // packed: as a library likes it best, ahead of time

struct Shape {  // y[m, n] = x[m, k] w[n, k]^T
  int64_t m = 0, n = 0, k = 0;
  WeightOrder order = WeightOrder::packed;
};

enum class Arithmetic { f32, int8 };

// One library's product on `copies` sets of data, made when it is constructed.
class Baseline {
 public:
  virtual ~Baseline() = default;
  virtual void run(int copy) = 0;
};

struct BaselineTiming {
  std::string name;  // "oneDNN f32"
  Timing timing;
};

struct NamedContender {
  std::string name;
  Contender contender;
};

class Baselines {
 public:
  Baselines(int threads, double cache_bytes);

  // Every library's product of this shape, ready to run.
  std::vector<NamedContender> prepare(Arithmetic arithmetic, const Shape& shape) const;
  std::vector<BaselineTiming> measure(Arithmetic arithmetic, const Shape& shape, double seconds) const;
  static Json versions();  // {"OpenBLAS": ...}; empty where there is none

 private:
  double cache_bytes_;
  bool has_onednn_ = false;
};

// The last: with a scale per 128 columns of x and per 128 x 128 of w.
enum class GpuNumbers { f16, bf16, int8, e4m3, e4m3_blocks };

// A product on a GPU, on copies of its data of its own.
class GpuBaseline {
 public:
  virtual ~GpuBaseline() = default;
  virtual void run(int copy, void* stream) = 0;
  std::string name;
  int copies = 1;
};
// Null where there is none for this product, or no library.
std::unique_ptr<GpuBaseline> make_gpu_baseline(int id, const Shape& shape, GpuNumbers numbers,
                                               double cache_bytes);

// The quickest, or null where there is none.
const BaselineTiming* quickest(const std::vector<BaselineTiming>& timings);

}  // namespace quantfuse::cli
