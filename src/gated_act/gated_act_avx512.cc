// SPDX-License-Identifier: Apache-2.0
#include "cpu/simd_avx512.h"
#include "gated_act/gated_act_rows.h"

namespace quantfuse::gated_act_avx512 {
using gated_act::Problem;
namespace {

Verdict accepts(const Problem& p) { return accepts_row_output(p.out, p.n); }

}  // namespace

extern const Kernel<Problem> entry = {"gated_act_avx512", Target::avx512, accepts, no_workspace<Problem>,
                                      gated_act::launch_rows<Avx512>};

}  // namespace quantfuse::gated_act_avx512
