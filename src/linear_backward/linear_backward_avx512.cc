// SPDX-License-Identifier: Apache-2.0
#include "cpu/simd_avx512.h"
#include "linear_backward/linear_backward_tiles.h"

namespace quantfuse::linear_backward_avx512 {
using linear_backward::Problem;
namespace {

Verdict accepts(const Problem&) { return kYes; }

}  // namespace

extern const Kernel<Problem> entry = {"linear_backward_avx512", Target::avx512, accepts,
                                      linear_backward::workspace_bytes<Avx512>,
                                      linear_backward::launch<Avx512>};

}  // namespace quantfuse::linear_backward_avx512
