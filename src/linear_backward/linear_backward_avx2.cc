// SPDX-License-Identifier: Apache-2.0
#include "cpu/simd_avx2.h"
#include "linear_backward/linear_backward_tiles.h"

namespace quantfuse::linear_backward_avx2 {
using linear_backward::Problem;
namespace {

Verdict accepts(const Problem&) { return kYes; }

}  // namespace

extern const Kernel<Problem> entry = {"linear_backward_avx2", Target::avx2, accepts,
                                      linear_backward::workspace_bytes<Avx2>, linear_backward::launch<Avx2>};

}  // namespace quantfuse::linear_backward_avx2
