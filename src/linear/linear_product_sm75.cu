// SPDX-License-Identifier: Apache-2.0
//
// y = epilogue( x_q w^T ) with quantized activations on the tensor cores of sm_75: any canonical
// weight but those of is_product(), by product/product_mma.h.
//
//   [x --quantize_rows--> codes]  -->  product, epilogue  -->  y   [--quantize_rows--> codes of y]
#include "product/kernels.h"

namespace quantfuse::linear_product_sm75 {
using linear::Problem;
namespace {

Verdict accepts(const Problem& p) { return product::accepts_batch_invariant(p); }

void launch(const Problem& problem, const Launch& launch) {
  linear::launch_canonical(problem, launch, [&](const Problem& p, float* staged) {
    product_mma_sm75::launch(product::from(p), staged, launch);
  });
}

}  // namespace

extern const Kernel<Problem> entry = {
    "linear_product_sm75",      Target::sm75, accepts, linear::canonical_workspace_bytes, launch,
    /*is_batch_invariant=*/true};

}  // namespace quantfuse::linear_product_sm75
