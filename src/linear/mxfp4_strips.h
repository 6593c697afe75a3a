// SPDX-License-Identifier: Apache-2.0
//
// What is different in packed_strips.h for E2M1 codes, and for MXFP4: E2M1 with an E8M0 scale for 32 columns
// (and no g_idx), whose scales stay a byte.
//
//   tile of MXFP4:   | codes 1024 bytes | scales [8 rows g][row g, row g + 8][4 groups] bytes |
//
// so that a lane has the eight scales of its rows by one load.
#pragma once

#include "linear/packed_strips.h"

namespace quantfuse::linear {

// Where the bits of a word's code number i are in half i / 4: the magnitude's lowest bit, and the sign. Codes
// 0 and 1 become bf16, which has the exponent's lowest bits at 7 and the sign at 15, by one shift and one
// mask; the other two take a shift and a mask more. No order of 16 bits spares more of them.
struct E2m1Place {
  int magnitude, sign;
};
QF_HD constexpr E2m1Place e2m1_place(int i) {
  constexpr E2m1Place kPlaces[4] = {{6, 15}, {0, 9}, {3, 13}, {10, 14}};
  return kPlaces[i % 4];
}

// The byte of a scale 2^e is the exponent field of 2^(e + 110) in bf16: a code's bits at the places of bf16's
// are the value times 2^-126, and times this number they are the weight times 2^-16. Without the 2^-16 bf16
// would have no such number for scales above 2. Sums of such numbers are multiplied by kByteScaleUnit.
// pack() refuses scales with which a number could be too large or not normal. Rows and columns beyond the
// matrix have scale 1.
inline constexpr int kByteScaleBias = 127 + 110;
inline constexpr float kByteScaleUnit = 0x1p16f;
inline constexpr float kSmallestByteScale = 0x1p-100f, kLargestByteScale = 0x1p17f;

// Of weights of this format and these groups; the type of the scales is another question.
inline bool may_have_byte_scales(const Weight& w) {
  return w.format == QF_FP4_E2M1 && w.block.cols == 32 && w.block.cols < w.k;
}
QF_HD bool has_byte_scales(const StripLayout& w) {
  return w.format == QF_FP4_E2M1 && w.tile_bytes < w.code_bytes + w.groups * StripLayout::kRows * 4;
}

}  // namespace quantfuse::linear
