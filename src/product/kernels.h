// SPDX-License-Identifier: Apache-2.0
//
// The kernels of products that scaled_mm and linear share.
#pragma once

#include "linear/linear_canonical.h"
#include "product/product.h"

namespace quantfuse {

namespace product {

// Sizes that kernels keep in 32 bits, and tiles of 16 x 32 outputs that fit a grid.
inline Requirements accepts_sizes(int64_t m, int64_t n, int64_t k) {
  constexpr int64_t kLimit = 1ll << 30;
  return Requirements()
      .require(m < kLimit && n < kLimit && k < kLimit, "m, n or k is 2^30 or more")
      .require(ceil_div(m, 16) * ceil_div(n, 16) < kLimit, "m times n is too large");
}

// A call of linear, before or after x has been quantized.
inline Requirements accepts_linear(const linear::Problem& p) {
  Requirements requirements = is_product(p);
  for (const Verdict more : {Verdict(linear::accepts_canonical(p)), Verdict(accepts_sizes(p.m, p.n, p.k))})
    requirements.require(!more.reason, more.reason);
  return requirements;
}
// Of the kernels of product_mma.h, which divide k by the number of rows: integers have the same sum in any
// order.
inline Requirements accepts_batch_invariant(const linear::Problem& p) {
  const bool has_integer_sums = is_integer(p.act_format) && is_integer(p.weight.format) &&
                                p.act_group >= p.k && p.weight.block.cols >= p.k && p.k <= 131071;
  return accepts_linear(p).require(!p.batch_invariant || has_integer_sums,
                                   "the bits of a row depend on the number of rows");
}

}  // namespace product

// A kernel that only some products suit.
namespace product {
struct Choosy {
  Requirements (*accepts)(const Product& p);
  bool (*quantizes)(const Output& out);  // whether it makes the codes of an output itself
  void (*launch)(const Product& p, float* staged, const Launch& launch);
};
}  // namespace product

namespace product_int4_sm90 {  // product_int4.h
extern const product::Choosy kernel;
}
namespace product_stream_sm90 {  // product_stream.h
extern const product::Choosy kernel;
}
namespace product_wgmma_sm90 {  // product_wgmma.h
extern const product::Choosy kernel;
void launch_e5m2(const product::Product& p, float* staged, const Launch& launch);  // what it does with E5M2
}  // namespace product_wgmma_sm90

// product_mma.h for sm_80 and newer, and for sm_75. Where y has dynamic scales, float32 numbers go to
// `staged`, [m, n_out].
namespace product_mma_sm80 {
void launch(const product::Product& p, float* staged, const Launch& launch);
}
namespace product_mma_sm75 {
void launch(const product::Product& p, float* staged, const Launch& launch);
}

}  // namespace quantfuse
