// SPDX-License-Identifier: Apache-2.0
#include "dequantize_words/dequantize_words.h"

#include "core/block.h"

namespace quantfuse::dequantize_words {
Problem Op::parse(const Args& a, Arguments& arg) {
  Problem p = {};
  arg.require(a.layout >= QF_WORDS_AWQ && a.layout <= QF_WORDS_GPTQ_V2, "layout is unknown");
  p.layout = a.layout;
  const bool is_awq = p.layout == QF_WORDS_AWQ;
  p.bits = a.bits == 0 ? 4 : a.bits;
  arg.require(p.bits == 4 || (!is_awq && (p.bits == 2 || p.bits == 3 || p.bits == 8)),
              is_awq ? "bits is not 4, which AWQ has" : "bits is not 2, 3, 4 or 8");

  Dim k{"k"}, n{"n"};
  p.x = arg.expect("x", a.x).shape(k, n).dtype(kFloats).matrix();
  p.k = k, p.n = n;
  arg.require(!is_awq || p.n % 8 == 0, "x has a number of columns that is no multiple of 8, which AWQ's are");
  arg.require(a.group >= 0, "group is negative, expected 0 (all rows) or more");
  p.group = a.group == 0 || a.group > p.k ? (p.k > 0 ? p.k : 1) : a.group;

  const int64_t packed_n = ceil_div(p.n * p.bits, 32);
  Dim word_rows{"words of k", is_awq ? p.k : ceil_div(p.k * p.bits, 32)},
      word_cols{"words of n", is_awq ? packed_n : p.n}, zero_cols{"words of n", packed_n},
      groups{"groups", ceil_div(p.k, p.group)};
  p.qweight = arg.expect("qweight", a.qweight).shape(word_rows, word_cols).dtype({DType::i32}).matrix();
  p.qzeros = arg.expect("qzeros", a.qzeros).shape(groups, zero_cols).dtype({DType::i32}).matrix();
  p.scales = arg.expect("scales", a.scales).shape(groups, n).dtype(kFloats).matrix();
  if (a.g_idx) {
    arg.require(!is_awq, "g_idx is given, and AWQ has none");
    p.g_idx = arg.expect("g_idx", a.g_idx).shape(k).dtype({DType::i32}).vector();
    check_groups(arg, "g_idx", p.g_idx, groups);
  }
  arg.writes("x");
  return p;
}

}  // namespace quantfuse::dequantize_words

using namespace quantfuse;
QF_DEFINE_OPERATION(qf_dequantize_words, dequantize_words::Op)
