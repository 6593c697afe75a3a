// SPDX-License-Identifier: Apache-2.0
#include "cpu/simd_avx2.h"
#include "rms_norm/rms_norm_rows.h"

namespace quantfuse::rms_norm_avx2 {
using rms_norm::Problem;
namespace {

Verdict accepts(const Problem& p) { return accepts_row_output(p.out, p.n); }

}  // namespace

extern const Kernel<Problem> entry = {"rms_norm_avx2", Target::avx2, accepts, no_workspace<Problem>,
                                      rms_norm::launch_rows<Avx2>};

}  // namespace quantfuse::rms_norm_avx2
