// SPDX-License-Identifier: Apache-2.0
//
// Codes and activations as pairs of BF16 numbers, which one instruction multiplies: a word is two k. Which
// two is what a mask finds in a packed word of codes: of 8 consecutive k (0, 2), (1, 3), (4, 6) and (5, 7). A
// packed word of BF16 numbers is two neighbours already.
#pragma once

#include "cpu/panel_codes.h"
#include "linear/linear.h"

namespace quantfuse::linear {

// The first of each pair, and how much further on the other is.
struct Pairs {
  int first[4], distance;
};
inline constexpr Pairs kPairsOfCodes = {{0, 1, 4, 5}, 2}, kNeighbours = {{0, 2, 4, 6}, 1};

// The same as columns: that of each half of 16 words.
struct PairOrder {
  alignas(64) uint16_t columns[32];
  constexpr explicit PairOrder(const Pairs& pairs) : columns() {
    for (int i = 0; i < 32; ++i) {
      columns[i] = static_cast<uint16_t>(i / 8 * 8 + pairs.first[i % 8 / 2] + i % 2 * pairs.distance);
    }
  }
};
inline constexpr PairOrder kOrderOfCodes(kPairsOfCodes), kOrderOfNeighbours(kNeighbours);

constexpr uint16_t bf16_of(float value) {
  return static_cast<uint16_t>(__builtin_bit_cast(uint32_t, value) >> 16);
}

// BF16 values of the 4-bit codes, twice: an index has 5 bits, and the uppermost belongs to another code.
struct Bf16Table {
  alignas(64) uint16_t values[32];
  constexpr explicit Bf16Table(const float (&of)[16]) : values() {
    for (int i = 0; i < 32; ++i) values[i] = bf16_of(of[i % 16]);
  }
};
inline constexpr Bf16Table kInt4Bf16(kStoredInt4Values), kFp4Bf16(kValuesOf<QF_FP4_E2M1>.values),
    kIq4NlBf16(kValuesOf<QF_IQ4_NL>.values);

template <class Simd>
struct PairDot {
  using S = Simd;
  using Word = int32_t;
  using Sum = typename S::F;
  static constexpr int kPerWord = 2;

  QF_INLINE static typename S::I load(const int32_t* w) { return S::load_i(w); }
  QF_INLINE static void store(int32_t* w, typename S::I v) { S::store_i(w, v); }
  QF_INLINE static Sum add(Sum sum, typename S::I w, typename S::I x) { return S::dot2(sum, w, x); }
};

template <class S, qf_format Format>
struct PairDecoder : PanelDecoder<S, Format> {
  using Base = PanelDecoder<S, Format>;
  using Dot = PairDot<S>;
  using F = typename S::F;
  using I = typename S::I;
  static constexpr int kSteps = Base::kPerWord / 2;
  I bf16_table;

  QF_INLINE explicit PairDecoder(qf_format format) : Base(format) {
    bf16_table = S::load_i(Format == QF_INT4     ? kInt4Bf16.values
                           : format == QF_IQ4_NL ? kIq4NlBf16.values
                                                 : kFp4Bf16.values);
  }

  template <int Step, bool HasZeros>
  QF_INLINE I step(I word, F zero) const {
    constexpr int kFirst = kPairsOfCodes.first[Step];
    if constexpr (Format == QF_BF16) {
      return word;
    } else if constexpr (Base::kIs4Bit && !HasZeros) {
      constexpr int kShift = kFirst < 4 ? 8 * kFirst : 8 * (kFirst - 4) + 4;  // as in PanelDecoder
      return S::lookup_u16(bf16_table, kShift == 0 ? word : S::template shr<kShift>(word));
    } else if constexpr (Base::kHasPairs && !HasZeros) {
      return this->template bf16_pair<kFirst>(word);
    } else {
      auto low = this->template value<kFirst>(word), high = this->template value<kFirst + 2>(word);
      if constexpr (HasZeros) low = S::sub(low, zero), high = S::sub(high, zero);
      return S::or_masked(S::bits(high), S::set1(static_cast<int32_t>(0xffff0000u)),
                          S::template shr<16>(S::bits(low)));
    }
  }
};

// Which weights have codes that are BF16 numbers, less their integer zero points.
QF_INLINE bool has_bf16_codes(const Weight& w) {
  return w.format != QF_NF4 && w.format != QF_FP4_BNB && w.format != QF_F32 && w.format != QF_F16;
}

}  // namespace quantfuse::linear
