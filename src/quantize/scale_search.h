// SPDX-License-Identifier: Apache-2.0
//
// The candidates of the MSE search: the range of a block shrunk step by step. Shared by every kernel, so that all of them
// choose among the same scales.
#pragma once

namespace quantfuse::quantize {

// 1.00, 0.99, ... 0.60 of the full range. Normal data lose least near 0.85 at 4 bits and near 1 at 8; below 0.6 the
// clipped tail always costs more than the finer step gains.
inline constexpr int kSearchSteps = 41;
constexpr float shrink_factor(int step) { return 1.0f - 0.01f * static_cast<float>(step); }

}  // namespace quantfuse::quantize
