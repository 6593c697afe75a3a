// SPDX-License-Identifier: Apache-2.0
//
// INT8 or INT4 codes in either operand, any scales: see scaled_mm_int.h.
#include "cpu/simd_avx_vnni.h"
#include "scaled_mm/scaled_mm_int.h"

namespace quantfuse::scaled_mm_int_avx_vnni {
using scaled_mm::Problem;
namespace {

Verdict accepts(const Problem& p) { return scaled_mm::accepts_int(p); }
size_t workspace_bytes(const Problem& p) { return scaled_mm::int_workspace_bytes<AvxVnni>(p); }
void launch(const Problem& p, const Launch& launch) { scaled_mm::launch_int<AvxVnni>(p, launch); }

}  // namespace

extern const Kernel<Problem> entry = {"scaled_mm_int_avx_vnni", Target::avx_vnni, accepts, workspace_bytes,
                                      launch};

}  // namespace quantfuse::scaled_mm_int_avx_vnni
