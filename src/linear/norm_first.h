// SPDX-License-Identifier: Apache-2.0
//
// x normalized by the best kernel of rms_norm into the workspace, then the best kernel of linear for the
// rest: what linear_norm_first_* are made of.
#pragma once

#include "linear/linear.h"

namespace quantfuse::linear {

Verdict accepts_norm_first(const Problem& p);
size_t norm_first_workspace_bytes(const Problem& p);
void launch_norm_first(const Problem& p, const Launch& launch);

}  // namespace quantfuse::linear
