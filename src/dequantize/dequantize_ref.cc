// SPDX-License-Identifier: Apache-2.0
//
// The formula as written, one number at a time. The oracle of every other dequantize kernel, which match it
// bit for bit.
#include "cpu/scalar.h"
#include "dequantize/dequantize.h"

namespace quantfuse::dequantize_ref {
using dequantize::Problem;
namespace {

Verdict accepts(const Problem&) { return kYes; }

void launch(const Problem& p, const Launch&) {
  for (int64_t r = 0; r < p.rows; ++r) {
    for (int64_t c = 0; c < p.cols; ++c) {
      const int64_t block = r / p.block.rows * p.col_blocks() + dequantize::col_block_at(p, c);
      const float code = decode_at(p.format, p.q.row_bytes_at(r), c);
      const float scaled = (code - dequantize::zero_at(p, block)) * dequantize::scale_at(p, block);
      set_float(p.x, r, c, scaled + dequantize::offset_at(p, block));
    }
  }
}

}  // namespace

extern const Kernel<Problem> entry = {"dequantize_ref", Target::reference, accepts, no_workspace<Problem>,
                                      launch};

}  // namespace quantfuse::dequantize_ref
