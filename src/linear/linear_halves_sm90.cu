// SPDX-License-Identifier: Apache-2.0
//
// y = epilogue( x w^T ) for many tokens, x and a weight that is not quantized both FP16 or both BF16, by
// product/product_wgmma.h: the kernel for the epilogues that cuBLASLt has not.
//
// Its matrices are bytes: 128 of them, a swizzled row, are 64 numbers here, and the 32 that wgmma takes at a
// time 16. Sums are float32 in the tensor cores, all of k in one, so that a row's bits do not depend on m.
#include "core/choose.h"
#include "linear/linear_canonical.h"
#include "linear/plain_epilogue.h"
#include "product/wgmma_tiles.h"

namespace quantfuse::linear_halves_sm90 {
using linear::Problem;
using product::Product;
namespace {

// Of 8 or fewer the weight is the traffic, which linear_rows_sm75 reads once as well.
constexpr int64_t kMinTokens = 9;
// A pair of blocks makes 256 tokens: up to 128 one of the two has none. There cuBLASLt and a second kernel
// took 45 us for SiLU, and this one 53; for 256 tokens 58 and 54 (n = 16384, k = 4096, on an H200).
constexpr int64_t kMinTokensBesideCublaslt = 129;

template <class T>
struct Halves {
  static constexpr bool kIsExact = true;  // float32 from the first product to the last: nothing to promote
  using Sum = float;
  template <int kSums>
  __device__ static __forceinline__ void multiply(float (&d)[kSums], uint64_t rows, uint64_t columns,
                                                  int adds) {
    ptx::wgmma_halves<T>(d, rows, columns, adds);
  }
};

product::Operand as_bytes(const Matrix& m) {
  const Matrix bytes = {m.data, m.rows, 2 * m.cols, 2 * m.row_stride, DType::u8};
  return {bytes, QF_INT8, {}, {1, bytes.cols}, {}, {}};
}

Product byte_product(const Problem& p) {
  Product product = product::from(p);
  product.k = 2 * p.k;
  product.a = as_bytes(p.x), product.b = as_bytes(p.weight.codes);
  return product;
}

Verdict accepts(const Problem& p) {
  const bool is_half = p.x.dtype == DType::f16 || p.x.dtype == DType::bf16;
  // Of the library asked for plain weights alone: it is loaded then.
  const bool is_cublaslts = is_plain(p.weight.format) && !p.batch_invariant &&
                            (p.m < kMinTokensBesideCublaslt || linear::has_cublaslt_epilogue(p)) &&
                            linear::has_cublaslt();
  Requirements requirements =
      Requirements()
          .require(is_plain(p.weight.format), "the weight is quantized")
          .require(static_cast<bool>(p.weight.codes),
                   "reads the canonical weight, and only the packed one is given")
          .require(is_half && p.x.dtype == p.weight.codes.dtype,
                   "x and the weight are not both FP16 or both BF16")
          .require(p.m >= kMinTokens || p.batch_invariant, "m is at most 8: the weight is the traffic")
          .require(!is_cublaslts, "cuBLASLt has this epilogue, or m is at most 128")
          .require(p.m < 1 << 30 && p.n < 1 << 30 && p.k < 1 << 29, "m, n or k is too large")
          .require(p.k > 0, "k is 0")
          .require(has_boxes(p.x) && has_boxes(p.weight.codes),
                   "rows of x or of the weight do not begin at multiples of 16 bytes")
          .require(!p.weight.is_gated || p.n_out % 8 == 0, "gate rows are not a multiple of 8");
  product::require_tile_epilogue(byte_product(p), requirements);
  return requirements;
}

size_t workspace_bytes(const Problem& p) {
  return static_cast<size_t>(linear::plan_canonical(p, product::tiles_quantize(p.out)).total_bytes);
}

void launch(const Problem& problem, const Launch& launch) {
  linear::launch_canonical(
      problem, launch,
      [&](const Problem& p, float* staged) {
        choose_bool(p.x.dtype == DType::bf16, [&](auto is_bf16) {
          using N = Halves<std::conditional_t<is_bf16.value, bf16, f16>>;
          product::launch_tiles<N, product::Scaling::whole>("linear_halves_sm90", byte_product(p), staged,
                                                            launch);
        });
      },
      product::tiles_quantize(problem.out));
}

}  // namespace

extern const Kernel<Problem> entry = {"linear_halves_sm90", Target::sm90, accepts,
                                      workspace_bytes,      launch,       /*is_batch_invariant=*/true};

}  // namespace quantfuse::linear_halves_sm90
