// SPDX-License-Identifier: Apache-2.0
//
// y = epilogue( x w^T ) for many tokens, x and a weight that is not quantized both FP16 or both BF16, by
// product/product_wgmma.h: the kernel for the epilogues that cuBLASLt has not.
//
// Its matrices are bytes: 128 of them, a swizzled row, are 64 numbers here, and the 32 that wgmma takes at a
// time 16. Sums are float32 in the tensor cores, all of k in one, so that a row's bits do not depend on m.
#include "core/choose.h"
#include "core/device.h"
#include "cuda/tensor_map.h"
#include "linear/linear_canonical.h"
#include "linear/plain_epilogue.h"
#include "product/product_wgmma.h"

namespace quantfuse::product {

// To product_wgmma.h these are like integers in that nothing has to be promoted.
template <class T>
struct Halves {
  static constexpr bool kIsInteger = true, kDecodes = false;
};

template <class S, class T>
struct Consumer<S, Halves<T>, Scaling::whole> {
  int group, warp, lane;     // the warpgroup, its warp, and the warp's lane
  uint32_t residual_parity;  // of the warp's barrier
  float totals[S::kSums];

  __device__ int first_token() const { return group * kGroupTokens + warp * kWarpTokens + lane / 4; }

  __device__ __forceinline__ void multiply(Ring<S>& ring, int count) {
    int before = 0;
#pragma unroll 1
    for (int k = 0; k < count; ++k) {
      const int stage = ring.take();
      const uint32_t x = ring.smem.x_at(stage) + group * kGroupTokens * kBlockK,
                     w = ring.smem.weight_at(stage);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        ptx::wgmma_halves<T>(totals, ptx::swizzled_rows(x, step), ptx::swizzled_rows(w, step),
                             step > 0 ? 1 : k);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      if (k > 0) ring.give_back(before, lane);
      before = stage;
    }
    ptx::wgmma_wait<0>();
    ring.give_back(before, lane);
  }
};

}  // namespace quantfuse::product

namespace quantfuse::linear_halves_sm90 {
using linear::Problem;
using namespace product;
namespace {

using Tile = Shape<256>;
constexpr int64_t kMinTokens = 65;

Matrix as_bytes(const Matrix& m) { return {m.data, m.rows, 2 * m.cols, 2 * m.row_stride, DType::u8}; }

// Whether it makes the codes of an output itself.
bool quantizes(const Output& out) {
  return out.is_quantized() && out.format != QF_FP8_E5M2 && (out.is_static || out.group == 128) &&
         has_boxes(out.y);
}

TileProblem make_problem(const Problem& p, float* staged) {
  TileProblem t = {};
  t.m = p.m, t.n_out = p.n_out, t.is_gated = p.weight.is_gated;
  t.token_blocks = static_cast<int32_t>(ceil_div(ceil_div(p.m, Tile::kTokens), kPair));
  t.col_blocks = static_cast<int32_t>(ceil_div(p.n, Tile::kCols));
  t.k_blocks = static_cast<int32_t>(ceil_div(2 * p.k, kBlockK));

  const Matrix w = as_bytes(p.weight.codes);
  const int64_t row = w.row_stride;
  constexpr int kHalf = Tile::kCols / kPair;
  t.x = row_boxes(as_bytes(p.x), Tile::kTokens);
  if (t.is_gated) {
    t.w = tensor_map<4>(map_type(DType::u8), w.data, {w.cols, 8, 2, p.n_out / 8},
                        {row, row * p.n_out, row * 8}, {kBlockK, 8, 2, kHalf / 16});
  } else {
    t.w = tensor_map<4>(map_type(DType::u8), w.data, {w.cols, p.n, 1, 1}, {row, row, row},
                        {kBlockK, kHalf, 1, 1});
  }
  t.w_block_rows = 1;

  t.bias = p.bias, t.activation = p.activation;
  if (staged) {
    t.out = {staged, p.m, p.n_out, p.n_out, DType::f32};
    return t;
  }
  t.out = p.out.y;
  t.out_format = p.out.format, t.has_dynamic_scale = !p.out.is_static;
  t.out_scale = static_cast<float*>(p.out.scale.data), t.out_groups = static_cast<int32_t>(p.out.scale.cols);
  t.out_scale_row_stride = p.out.scale.row_stride, t.out_scale_col_stride = p.out.scale_col_stride;
  if (dtype_bytes(t.out.dtype) < 4) t.y = row_boxes(t.out, kWarpTokens);
  if (p.residual) t.residual = row_boxes(p.residual, kWarpTokens), t.has_residual = true;
  return t;
}

Verdict accepts(const Problem& p) {
  const DType y = p.out.y.dtype;
  const bool is_half = p.x.dtype == DType::f16 || p.x.dtype == DType::bf16;
  // Asked for plain weights alone: it loads the library.
  const bool is_cublaslts = is_plain(p.weight.format) && !p.batch_invariant && linear::cublaslt_writes_y(p);
  const bool has_half_y = !p.out.is_quantized() && (y == DType::f16 || y == DType::bf16);
  return Requirements()
      .require(is_plain(p.weight.format), "the weight is quantized")
      .require(static_cast<bool>(p.weight.codes),
               "reads the canonical weight, and only the packed one is given")
      .require(is_half && p.x.dtype == p.weight.codes.dtype,
               "x and the weight are not both FP16 or both BF16")
      .require(p.m >= kMinTokens || p.batch_invariant, "m is at most 64: the weight is the traffic")
      .require(!is_cublaslts, "cuBLASLt has this epilogue")
      .require(p.m < 1 << 30 && p.n < 1 << 30 && p.k < 1 << 29, "m, n or k is too large")
      .require(p.k > 0, "k is 0")
      .require(has_boxes(p.x) && has_boxes(p.weight.codes),
               "rows of x or of the weight do not begin at multiples of 16 bytes")
      .require(!p.weight.is_gated || p.n_out % 8 == 0, "gate rows are not a multiple of 8")
      .require(!has_half_y || has_boxes(p.out.y), "rows of y do not begin at multiples of 16 bytes")
      .require(!p.out.is_quantized() || !p.out.is_static || quantizes(p.out),
               "y's codes are E5M2, or do not begin at multiples of 16 bytes")
      .require(!p.residual || (has_half_y && p.residual.dtype == y && has_boxes(p.residual)),
               "the residual is not of y's type, or not at multiples of 16 bytes");
}

size_t workspace_bytes(const Problem& p) {
  return static_cast<size_t>(linear::plan_canonical(p, quantizes(p.out)).total_bytes);
}

void launch(const Problem& problem, const Launch& launch) {
  const auto product = [&](const Problem& p, float* staged) {
    const TileProblem tiles = make_problem(p, staged);
    const int64_t count = static_cast<int64_t>(tiles.token_blocks) * tiles.col_blocks;
    const int64_t pairs = std::min<int64_t>(gpu_num_sms(p.device.id) / kPair, count);
    const LaunchShape shape = {dim3(static_cast<unsigned>(pairs * kPair)), dim3(Tile::kThreads),
                               static_cast<size_t>(Smem<Tile>::kBytes), /*overlap_previous=*/true};
    choose_bool(p.x.dtype == DType::bf16, [&](auto is_bf16) {
      using T = std::conditional_t<is_bf16.value, bf16, f16>;
      launch_kernel("linear_halves_sm90", wgmma_kernel<Tile, Halves<T>, Scaling::whole>, shape, launch,
                    tiles);
    });
  };
  linear::launch_canonical(problem, launch, product, quantizes(problem.out));
}

}  // namespace

extern const Kernel<Problem> entry = {"linear_halves_sm90", Target::sm90, accepts,
                                      workspace_bytes,      launch,       /*is_batch_invariant=*/true};

}  // namespace quantfuse::linear_halves_sm90
