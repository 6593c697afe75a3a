// SPDX-License-Identifier: Apache-2.0
//
// norm_first.h on CUDA, for every x that no kernel normalizes on its way in.
#include "linear/norm_first.h"

namespace quantfuse::linear_norm_first_sm75 {

extern const Kernel<linear::Problem> entry = {"linear_norm_first_sm75",    Target::sm75,
                                              linear::accepts_norm_first,  linear::norm_first_workspace_bytes,
                                              linear::launch_norm_first,
                                              /*is_batch_invariant=*/true,
                                              /*normalizes_x=*/true};

}  // namespace quantfuse::linear_norm_first_sm75
