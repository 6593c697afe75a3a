// SPDX-License-Identifier: Apache-2.0
//
// quantize on vectors of AVX2: the algorithm of quantize_rows.h.
#include "cpu/simd_avx2.h"
#include "quantize/quantize_rows.h"

namespace quantfuse::quantize_avx2 {
using quantize::Problem;
namespace {

Verdict accepts(const Problem& p) { return quantize::accepts_rows(p); }
void launch(const Problem& p, const Launch& launch) {
  quantize::quantize_rows<Avx2>(p, static_cast<float*>(launch.workspace));
}

}  // namespace

extern const Kernel<Problem> entry = {"quantize_avx2", Target::avx2, accepts, quantize::slab_bytes, launch};

}  // namespace quantfuse::quantize_avx2
