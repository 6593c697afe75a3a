// SPDX-License-Identifier: Apache-2.0
//
// y[m,n] = epilogue( sum_k x[m,k] * ((q[n,k] - z[n,g]) * s[n,g] + o[n,g]) )    to 8 tokens, any weight and x
//
// Dot products along k from the canonical weight, float32 throughout. A warp takes a row of the weight (a
// gate and its up projection where there are two), a lane 8 consecutive columns of every 256:
//   gmem x --> f32 in smem, 1024 columns at a time, shared by the warps of a block
//   gmem q --4 or 8 bytes a lane--> regs --decode, scale--> * x --> one sum a token --shuffles--> y
#include "core/choose.h"
#include "linear/linear_canonical.h"

namespace quantfuse::linear_rows_sm75 {
using linear::Problem;
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps, kMaxTokens = 8;
constexpr int kColumns = 1024;              // of x in shared memory
constexpr int kStep = 32 * kCodeRun;        // columns that a warp takes at once
constexpr int kRuns = kColumns / kCodeRun;  // of a token

// x as [token][half][run] vectors of 4: the lanes of a warp, which read neighbouring runs, find them in
// neighbouring banks.
template <int kTokens>
struct Shared {
  float4 x[kTokens][2][kRuns];
};

// Sets x to number(token, column) where there is one. Eight loads are under way at once.
template <int kTokens, class Number>
__device__ __forceinline__ void fill_x(const Problem& p, int64_t first, Shared<kTokens>& shared,
                                       const Number& number) {
#pragma unroll(kTokens < 2 ? 4 : 8)
  for (int j = 0; j < kTokens * kColumns / kThreads; ++j) {
    const int i = j * kThreads + threadIdx.x;
    const int token = i / kColumns, column = i % kColumns;
    const bool exists = token < p.m && first + column < p.k;
    auto* run = reinterpret_cast<float*>(&shared.x[token][column / 4 % 2][column / kCodeRun]);
    run[column % 4] = exists ? number(token, first + column) : 0.0f;
  }
}

template <int kTokens>
__device__ void load_x(const Problem& p, int64_t first, Shared<kTokens>& shared) {
  const auto of_type = [&]<class T>(T) {
    fill_x<kTokens>(p, first, shared, [&](int token, int64_t k) { return to_float(p.x.row<T>(token)[k]); });
  };
  if (p.x_scale) {
    fill_x<kTokens>(p, first, shared,
                    [&](int token, int64_t k) { return linear::quantized_input(p, token, k); });
  } else if (p.x.dtype == DType::f32) {
    of_type(0.0f);
  } else if (p.x.dtype == DType::f16) {
    of_type(f16{});
  } else {
    of_type(bf16{});
  }
}

template <qf_format Format, int kTokens, bool kIsAligned>
__device__ void add_row(const Problem& p, const WeightRow& row, int64_t first, const Shared<kTokens>& shared,
                        int lane, float (&sums)[kTokens]) {
#pragma unroll
  for (int step = 0; step < kColumns / kStep; ++step) {
    const int run = step * 32 + lane;
    const int64_t k = first + run * kCodeRun;
    if (k >= p.k) return;
    float w[kCodeRun];
    load_weights<Format, kIsAligned>(p.weight, row, k, static_cast<int>(min(p.k - k, int64_t{kCodeRun})), w);
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      const float4 x0 = shared.x[token][0][run], x1 = shared.x[token][1][run];
      float sum = sums[token];
      sum = fmaf(w[0], x0.x, sum), sum = fmaf(w[1], x0.y, sum);
      sum = fmaf(w[2], x0.z, sum), sum = fmaf(w[3], x0.w, sum);
      sum = fmaf(w[4], x1.x, sum), sum = fmaf(w[5], x1.y, sum);
      sum = fmaf(w[6], x1.z, sum), sum = fmaf(w[7], x1.w, sum);
      sums[token] = sum;
    }
  }
}

// The same sum in every lane.
__device__ float sum_over_warp(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}

template <qf_format Format, int kTokens, bool kIsAligned>
__global__ void __launch_bounds__(kThreads) kernel(const __grid_constant__ Problem p, float* staged) {
  __shared__ Shared<kTokens> shared;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  const bool exists = row < p.n_out;
  const WeightRow weights = row_of(p.weight, exists ? row : 0);
  const WeightRow up_weights = row_of(p.weight, exists && p.weight.is_gated ? p.n_out + row : 0);
  float sums[kTokens] = {}, ups[kTokens] = {};
  for (int64_t first = 0; first < p.k; first += kColumns) {
    if (first > 0) __syncthreads();
    load_x<kTokens>(p, first, shared);
    __syncthreads();
    if (!exists) continue;
    add_row<Format, kTokens, kIsAligned>(p, weights, first, shared, lane, sums);
    if (p.weight.is_gated) add_row<Format, kTokens, kIsAligned>(p, up_weights, first, shared, lane, ups);
  }
  if (!exists) return;
#pragma unroll
  for (int token = 0; token < kTokens; ++token) {
    const float sum = sum_over_warp(sums[token]), up = sum_over_warp(ups[token]);
    if (lane == token && token < p.m) linear::finish_device(p, staged, token, row, sum, up);
  }
}

Verdict accepts(const Problem& p) {
  return linear::accepts_canonical(p).require(p.m <= kMaxTokens, "m is more than 8");
}

void launch(const Problem& problem, const Launch& launch) {
  linear::launch_canonical(problem, launch, [&](const Problem& p, float* staged) {
    const LaunchShape shape = {dim3(static_cast<unsigned>(ceil_div(p.n_out, kWarps))), dim3(kThreads)};
    choose_value<QF_INT4, QF_FP4_E2M1, QF_NF4, QF_INT8, QF_FP8_E4M3, QF_FP8_E5M2, QF_F32, QF_F16, QF_BF16>(
        device_code_path(p.weight.format), [&](auto format) {
          choose_value<1, 2, 4, 8>(p.m <= 2   ? static_cast<int>(p.m)
                                   : p.m <= 4 ? 4
                                              : 8,
                                   [&](auto tokens) {
                                     choose_bool(has_aligned_runs(p.weight), [&](auto aligned) {
                                       launch_kernel("linear_rows_sm75",
                                                     kernel<format.value, tokens.value, aligned.value>, shape,
                                                     launch, p, staged);
                                     });
                                   });
        });
  });
}

}  // namespace

extern const Kernel<Problem> entry = {"linear_rows_sm75", Target::sm75, accepts,
                                      linear::canonical_workspace_bytes, launch};

}  // namespace quantfuse::linear_rows_sm75
