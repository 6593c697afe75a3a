// SPDX-License-Identifier: Apache-2.0
//
// quantize on vectors of AVX-512: the algorithm of quantize_rows.h.
#include "cpu/simd_avx512.h"
#include "quantize/quantize_rows.h"

namespace quantfuse::quantize_avx512 {
using quantize::Problem;
namespace {

Verdict accepts(const Problem& p) { return quantize::accepts_rows(p); }
void launch(const Problem& p, const Launch& launch) {
  quantize::quantize_rows<Avx512>(p, static_cast<float*>(launch.workspace));
}

}  // namespace

extern const Kernel<Problem> entry = {"quantize_avx512", Target::avx512, accepts, quantize::slab_bytes,
                                      launch};

}  // namespace quantfuse::quantize_avx512
