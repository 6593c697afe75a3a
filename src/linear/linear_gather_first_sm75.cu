// SPDX-License-Identifier: Apache-2.0
//
// A packed weight whose columns are sorted by group (act-order): x is brought into their order in the
// workspace, and the best kernel for what is left does the rest.
//   gmem x --one number a load--> regs --16 bytes a store--> workspace [m, k padded] --> another kernel
#include "core/choose.h"
#include "cuda/launch.h"
#include "linear/linear.h"

namespace quantfuse::linear_gather_first_sm75 {
using linear::Problem;
namespace {

constexpr int kThreads = 256, kRun = 8;  // numbers that a thread stores at once: 16 bytes

struct Steps {
  Problem rest;
  const Kernel<Problem>* rest_kernel;
  int64_t x_bytes;

  Steps(const Problem& p, void* x) : rest(p) {
    const int64_t row_stride = round_up(p.k, kRun);  // what copies of boxes need
    x_bytes = round_up(p.m * row_stride * 2, 256);
    rest.x = {x, p.m, p.k, row_stride, p.x.dtype};
    rest.strips.is_there = true, rest.strips.layout.has_k_map = false;
    // The canonical form has another order of columns than x has now.
    rest.weight.codes = rest.weight.scale = rest.weight.zero = rest.weight.offset = {};
    rest.weight.g_idx = {};
    rest_kernel = select<linear::Op>(rest, p.device, kDefaultCall).kernel;
  }
};

__global__ void gather(const Matrix x, const int32_t* __restrict__ k_map, const Matrix out) {
  const int64_t runs = out.row_stride / kRun;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= x.rows * runs) return;
  const int64_t row = index / runs, k = index % runs * kRun;
  const auto* from = x.row<const uint16_t>(row);
  alignas(16) uint16_t run[kRun];
#pragma unroll
  for (int i = 0; i < kRun; ++i) run[i] = k + i < x.cols ? from[k_map[k + i]] : 0;
  *reinterpret_cast<uint4*>(out.row<uint16_t>(row) + k) = *reinterpret_cast<const uint4*>(run);
}

Verdict accepts(const Problem& p) {
  const Verdict own = Requirements()
                          .require(p.strips.layout.has_k_map,
                                   "the weight's columns are in the order of x, or it is not packed")
                          .require(!p.x_gain, "x is to be normalized first")
                          .require(!p.has_act_quant(), "the activations are quantized")
                          .require(p.x.dtype == DType::f16 || p.x.dtype == DType::bf16,
                                   "the activations are not FP16 or BF16")
                          .require(ceil_div(p.m * round_up(p.k, kRun), int64_t{kThreads * kRun}) < 1ll << 31,
                                   "x is too large");
  if (!own) return own;
  return Requirements().require(Steps(p, nullptr).rest_kernel != nullptr, "no kernel takes the sorted x");
}

size_t workspace_bytes(const Problem& p) {
  const Steps steps(p, nullptr);
  return static_cast<size_t>(steps.x_bytes) + steps.rest_kernel->workspace_bytes(steps.rest);
}

void launch(const Problem& p, const Launch& launch) {
  const Steps steps(p, launch.workspace);
  const int64_t blocks = ceil_div(p.m * steps.rest.x.row_stride / kRun, int64_t{kThreads});
  launch_kernel("linear_gather_first_sm75", gather, {dim3(static_cast<unsigned>(blocks)), dim3(kThreads)},
                launch, p.x, p.strips.k_map(), steps.rest.x);
  steps.rest_kernel->launch(steps.rest,
                            {launch.stream, static_cast<char*>(launch.workspace) + steps.x_bytes});
}

}  // namespace

extern const Kernel<Problem> entry = {
    "linear_gather_first_sm75", Target::sm75, accepts, workspace_bytes, launch,
    /*is_batch_invariant=*/true};

}  // namespace quantfuse::linear_gather_first_sm75
