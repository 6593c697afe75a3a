// SPDX-License-Identifier: Apache-2.0
//
// x[k,n] = (q[k,n] - zero[g,n]) * scale[g,n],   g = k / group or g_idx[k]
//
// of codes and zero points in words of 32 bits, as AutoAWQ and the tools of GPTQ store them. In float32: the
// difference is exact, the product rounded, and rounded again to x's type.
#pragma once

#include "core/element.h"
#include "core/kernel.h"
#include "core/operation.h"

namespace quantfuse::dequantize_words {

struct Problem {
  Matrix qweight;  // i32: AWQ [k, n/8], GPTQ [ceil(k bits / 32), n]
  Matrix qzeros;   // i32: AWQ [groups, n/8], GPTQ [groups, ceil(n bits / 32)]
  Matrix scales;   // [groups, n] f32 | f16 | bf16
  Vector g_idx;    // [k] i32; absent: k / group
  Matrix x;        // [k, n] f32 | f16 | bf16
  qf_word_layout layout;
  int32_t bits;   // 2, 3, 4 or 8
  int64_t group;  // never 0
  int64_t k, n;

  QF_HD int64_t group_of(int64_t row) const { return g_idx ? g_idx.as<const int32_t>()[row] : row / group; }
};

// Bits of field `i` of a stream of words that are `stride` apart, field 0 lowest in word 0. A field of 3 bits
// may reach into the next word.
QF_HD uint32_t field_at(const uint32_t* words, int64_t stride, int64_t i, int bits) {
  const int64_t bit = i * bits;
  const int shift = static_cast<int>(bit % 32);
  uint32_t value = words[bit / 32 * stride] >> shift;
  if (shift + bits > 32) value |= words[(bit / 32 + 1) * stride] << (32 - shift);
  return value & ((1u << bits) - 1);
}

// AWQ has the columns 0 2 4 6 1 3 5 7 of every 8 in the nibbles of a word.
QF_HD int awq_shift(int64_t column) {
  const int i = static_cast<int>(column % 8);
  return 4 * (i % 2 * 4 + i / 2);
}

QF_HD int code_at(const Problem& p, int64_t row, int64_t col) {
  if (p.layout == QF_WORDS_AWQ) {
    return static_cast<int>(p.qweight.row<const uint32_t>(row)[col / 8] >> awq_shift(col) & 15);
  }
  return static_cast<int>(
      field_at(static_cast<const uint32_t*>(p.qweight.data) + col, p.qweight.row_stride, row, p.bits));
}

// GPTQ's first version stores zero points less one. For 2, 4 and 8 bits that was taken off the whole word, so
// that a zero point of 0 borrowed from its neighbour: it is put back the same way. At 3 bits every field was
// reduced by itself.
QF_HD int zero_at(const Problem& p, int64_t group, int64_t col) {
  const auto* words = p.qzeros.row<const uint32_t>(group);
  if (p.layout == QF_WORDS_AWQ) return static_cast<int>(words[col / 8] >> awq_shift(col) & 15);
  const bool is_less_one = p.layout == QF_WORDS_GPTQ;
  if (p.bits == 3) return static_cast<int>((field_at(words, 1, col, 3) + is_less_one) & 7);
  const uint32_t ones = p.bits == 2 ? 0x55555555u : p.bits == 4 ? 0x11111111u : 0x01010101u;
  const int64_t bit = col * p.bits;
  const uint32_t word = words[bit / 32] + (is_less_one ? ones : 0u);
  return static_cast<int>(word >> (bit % 32) & ((1u << p.bits) - 1));
}

struct Op {
  static constexpr const char* name = "dequantize_words";
  using Args = qf_dequantize_words_args;
  using Problem = dequantize_words::Problem;
  static Problem parse(const Args& args, Arguments& arg);
  static bool is_empty(const Problem& p) { return p.k == 0 || p.n == 0; }
  static std::span<const Kernel<Problem>* const> kernels();
};

}  // namespace quantfuse::dequantize_words
