// SPDX-License-Identifier: Apache-2.0
//
// The formula as written, one number at a time. The oracle of every other dequantize_words kernel, which
// match it bit for bit.
#include "dequantize_words/dequantize_words.h"

namespace quantfuse::dequantize_words_ref {
using dequantize_words::Problem;
namespace {

Verdict accepts(const Problem&) { return kYes; }

void launch(const Problem& p, const Launch&) {
  for (int64_t row = 0; row < p.k; ++row) {
    const int64_t group = p.group_of(row);
    for (int64_t col = 0; col < p.n; ++col) {
      const int difference =
          dequantize_words::code_at(p, row, col) - dequantize_words::zero_at(p, group, col);
      set_float(p.x, row, col, static_cast<float>(difference) * float_at(p.scales, group, col));
    }
  }
}

}  // namespace

extern const Kernel<Problem> entry = {"dequantize_words_ref", Target::reference, accepts,
                                      no_workspace<Problem>, launch};

}  // namespace quantfuse::dequantize_words_ref
