// SPDX-License-Identifier: Apache-2.0
//
// A few rows of integer codes times INT8 rows of b, read once as they lie: see scaled_mm_int_dot.h.
#include "cpu/simd_avx_vnni.h"
#include "scaled_mm/scaled_mm_int_dot.h"

namespace quantfuse::scaled_mm_int_dot_avx_vnni {
using scaled_mm::Problem;
namespace {

Verdict accepts(const Problem& p) { return scaled_mm::accepts_int_dot(p); }
size_t workspace_bytes(const Problem& p) { return scaled_mm::int_dot_workspace_bytes<AvxVnni>(p); }
void launch(const Problem& p, const Launch& launch) { scaled_mm::launch_int_dot<AvxVnni>(p, launch); }

}  // namespace

extern const Kernel<Problem> entry = {"scaled_mm_int_dot_avx_vnni", Target::avx_vnni, accepts,
                                      workspace_bytes, launch};

}  // namespace quantfuse::scaled_mm_int_dot_avx_vnni
