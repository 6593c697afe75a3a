// SPDX-License-Identifier: Apache-2.0
//
// x[r,c] = (q[r,c] - zero[R,C]) * scale[R,C] + offset[R,C]                  any format, block and g_idx
//
// A thread takes 8 consecutive columns of a row, whose codes are 4 or 8 bytes and whose numbers are one
// vector of 16 bytes, or two:
//   gmem q --> regs --decode, scale--> gmem x
#include "core/choose.h"
#include "core/element.h"
#include "cuda/launch.h"
#include "dequantize/dequantize.h"
#include "linear/device_weight.h"

namespace quantfuse::dequantize_rows_sm75 {
using dequantize::Problem;
namespace {

constexpr int kThreads = 256;

// The matrix of codes is a weight without the rest of a layer.
Weight as_weight(const Problem& p) {
  Weight w;
  w.format = p.format;
  w.n = p.rows, w.k = p.cols;
  w.block = p.block, w.num_groups = p.col_blocks();
  w.codes = p.q, w.scale = p.scale, w.zero = p.zero, w.offset = p.offset, w.g_idx = p.g_idx;
  return w;
}

template <class T>
struct alignas(16) Numbers {
  T values[kCodeRun];
};

template <qf_format Format, class T, bool kIsAligned>
__global__ void __launch_bounds__(kThreads)
    kernel(const __grid_constant__ Weight w, const __grid_constant__ Matrix x) {
  const int64_t runs = (w.k + kCodeRun - 1) / kCodeRun;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = i / runs, k = i % runs * kCodeRun;
  if (row >= w.n) return;
  const int count = static_cast<int>(min(w.k - k, int64_t{kCodeRun}));
  float numbers[kCodeRun];
  load_weights<Format, kIsAligned>(w, row_of(w, row), k, count, numbers);
  Numbers<T> out;
#pragma unroll
  for (int j = 0; j < kCodeRun; ++j) from_float(numbers[j], out.values[j]);
  T* to = x.row<T>(row) + k;
  if (kIsAligned && count == kCodeRun) {
    *reinterpret_cast<Numbers<T>*>(to) = out;
  } else {
    for (int j = 0; j < count; ++j) to[j] = out.values[j];
  }
}

Verdict accepts(const Problem& p) {
  return Requirements()
      .require(p.cols < 1ll << 31, "rows have 2^31 numbers or more")
      .require(p.rows * ceil_div(p.cols, kCodeRun) < (1ll << 31) * kThreads,
               "there are 2^42 numbers or more");
}

void launch(const Problem& p, const Launch& launch) {
  const Weight w = as_weight(p);
  const bool is_aligned = has_aligned_runs(w) && reinterpret_cast<uint64_t>(p.x.data) % 16 == 0 &&
                          p.x.row_stride * dtype_bytes(p.x.dtype) % 16 == 0;
  const LaunchShape shape = {
      dim3(static_cast<unsigned>(ceil_div(p.rows * ceil_div(p.cols, kCodeRun), kThreads))), dim3(kThreads)};
  choose_value<QF_INT4, QF_FP4_E2M1, QF_NF4, QF_INT8, QF_FP8_E4M3, QF_FP8_E5M2>(
      device_code_path(p.format), [&](auto format) {
        choose_float(p.x.dtype, [&](auto type) {
          choose_bool(is_aligned, [&](auto aligned) {
            launch_kernel("dequantize_rows_sm75",
                          kernel<format.value, typename decltype(type)::type, aligned.value>, shape, launch,
                          w, p.x);
          });
        });
      });
}

}  // namespace

extern const Kernel<Problem> entry = {"dequantize_rows_sm75", Target::sm75, accepts, no_workspace<Problem>,
                                      launch};

}  // namespace quantfuse::dequantize_rows_sm75
