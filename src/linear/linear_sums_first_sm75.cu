// SPDX-License-Identifier: Apache-2.0
//
// A packed weight with offsets, w = q s + o (packed_strips.h): the sums of x over the columns that an offset
// is for are made in the workspace, and the best kernel for what is left adds o times them to its totals.
//   gmem x --16 bytes a lane--> sum of 16 to 128 columns --> workspace [sums of a token][tokens padded]
//
// For kernels that do not have all of x in a block, and so would make the sums again and again.
#include "core/choose.h"
#include "cuda/launch.h"
#include "linear/linear.h"
#include "linear/x_sums.h"

namespace quantfuse::linear_sums_first_sm75 {
using linear::Problem;
using linear::StripLayout;
namespace {

constexpr int kThreads = 256, kRun = 8;  // numbers that a lane loads at once: 16 bytes

struct Steps {
  Problem rest;
  const Kernel<Problem>* rest_kernel;
  int64_t sum_bytes;

  Steps(const Problem& p, void* sums) : rest(p) {
    const int64_t rows = p.strips.layout.tiles * p.strips.layout.groups;
    const int64_t tokens = round_up(p.m, linear::kSumTokens);
    sum_bytes = round_up(rows * tokens * 4, 256);
    rest.x_sums = {sums, rows, tokens, tokens, DType::f32};
    // What reads the canonical form has no use for sums.
    rest.weight.codes = rest.weight.scale = rest.weight.zero = rest.weight.offset = {};
    rest_kernel = select<linear::Op>(rest, p.device, kDefaultCall).kernel;
  }
};

// kLanes lanes of 8 numbers make a sum.
template <class T, int kLanes>
__global__ void __launch_bounds__(kThreads) sum_groups(const Matrix x, bool is_aligned, const Matrix sums) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  const int64_t token = index / sums.rows, group = index % sums.rows;
  const int64_t k = (group * kLanes + threadIdx.x % kLanes) * kRun;
  float sum = 0;
  if (token < x.rows && k < x.cols) {
    const T* from = x.row<const T>(token) + k;
    if (is_aligned && k + kRun <= x.cols) {
      const uint4 words = *reinterpret_cast<const uint4*>(from);
      const T* numbers = reinterpret_cast<const T*>(&words);
#pragma unroll
      for (int i = 0; i < kRun; ++i) sum += to_float(numbers[i]);
    } else {
      for (int i = 0; i < kRun && k + i < x.cols; ++i) sum += to_float(from[i]);
    }
  }
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  if (token < x.rows && threadIdx.x % kLanes == 0) sums.row<float>(group)[token] = sum;
}

Verdict accepts(const Problem& p) {
  const Verdict own =
      Requirements()
          .require(p.strips.is_there && p.strips.layout.has_offsets,
                   "the weight has no offsets or floating zero points, or is not packed in the order of x")
          .require(!p.x_sums, "the sums of x are there")
          .require(!p.x_gain, "x is to be normalized first")
          .require(!p.has_act_quant(), "the activations are quantized")
          .require(p.x.dtype == DType::f16 || p.x.dtype == DType::bf16,
                   "the activations are not FP16 or BF16")
          .require(p.m * p.strips.layout.tiles * p.strips.layout.groups < 1ll << 31, "x is too large");
  if (!own) return own;
  return Requirements().require(Steps(p, nullptr).rest_kernel != nullptr, "no kernel takes x and its sums");
}

size_t workspace_bytes(const Problem& p) {
  const Steps steps(p, nullptr);
  return static_cast<size_t>(steps.sum_bytes) + steps.rest_kernel->workspace_bytes(steps.rest);
}

void launch(const Problem& p, const Launch& launch) {
  const Steps steps(p, launch.workspace);
  const bool is_aligned = reinterpret_cast<uintptr_t>(p.x.data) % 16 == 0 && p.x.row_stride % kRun == 0;
  choose_bool(p.x.dtype == DType::bf16, [&](auto is_bf16) {
    using T = std::conditional_t<is_bf16.value, bf16, f16>;
    choose_value<1, 2, 4, 8>(p.strips.layout.groups, [&](auto groups) {
      constexpr int kLanes = StripLayout::kCols / kRun / groups.value;
      const int64_t blocks = ceil_div(p.m * steps.rest.x_sums.rows * kLanes, int64_t{kThreads});
      launch_kernel("linear_sums_first_sm75", sum_groups<T, kLanes>,
                    {dim3(static_cast<unsigned>(blocks)), dim3(kThreads)}, launch, p.x, is_aligned,
                    steps.rest.x_sums);
    });
  });
  steps.rest_kernel->launch(steps.rest,
                            {launch.stream, static_cast<char*>(launch.workspace) + steps.sum_bytes});
}

}  // namespace

extern const Kernel<Problem> entry = {
    "linear_sums_first_sm75",   Target::sm75, accepts, workspace_bytes, launch,
    /*is_batch_invariant=*/true};

}  // namespace quantfuse::linear_sums_first_sm75
