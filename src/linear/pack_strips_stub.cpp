// SPDX-License-Identifier: Apache-2.0
//
// pack_strips() for a build without CUDA.
#include "linear/packed_strips.h"

namespace quantfuse::linear {

void pack_strips(const Arguments&, const Weight&, const StripLayout&, void*, void*) {
  fail_unsupported("weight_pack: this build has no CUDA kernels");
}

}  // namespace quantfuse::linear
