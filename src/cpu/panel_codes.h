// SPDX-License-Identifier: Apache-2.0
//
// Words of a packed panel (linear/packed.h) as vectors: the k-th number of each lane's word as a float, or
// 4-bit codes spread to bytes.
#pragma once

#include "cpu/vector_math.h"

namespace quantfuse {

// Values of the stored 4-bit codes.
constexpr float kInt4Values[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
constexpr float kFp4Values[16] = {0,     0.5f,  1,     1.5f,  2,     3,     4,     6,
                                  -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

template <class S, qf_format Format>
struct PanelDecoder {
  static constexpr bool kIs4Bit = Format == QF_INT4 || Format == QF_FP4_E2M1;
  static constexpr int kPerWord = kIs4Bit ? 8 : 4;
  typename S::Table16 table;  // of the 4-bit formats

  QF_INLINE PanelDecoder() {
    if constexpr (kIs4Bit) table = S::table16(Format == QF_INT4 ? kInt4Values : kFp4Values);
  }

  // The value at position K (0 .. kPerWord - 1) of every lane's word.
  template <int K>
  QF_INLINE typename S::F value(typename S::I word) const {
    if constexpr (kIs4Bit) {
      constexpr int kShift = K < 4 ? 8 * K : 8 * (K - 4) + 4;
      return S::lookup(table, kShift == 0 ? word : S::template shr<kShift>(word));
    } else {
      const auto moved = K == 0 ? word : S::template shr<8 * K>(word);
      const auto byte = K == 3 ? moved : S::and_(moved, S::set1(255));
      if constexpr (Format == QF_INT8) return S::sub(S::to_float(byte), S::set1(128.0f));
      else return decode_fp8<S, Format>(byte);
    }
  }
};

// [k / per word][2][lanes] words of one panel -> [k][2][lanes] floats, zero points (2 vectors, or null)
// subtracted.
template <class S, qf_format Format>
QF_INLINE void decode_panel(const uint8_t* codes, const float* zeros, int64_t k, float* out) {
  using Decoder = PanelDecoder<S, Format>;
  const Decoder decoder;
  const auto zero0 = zeros ? S::load(zeros) : S::zero(),
             zero1 = zeros ? S::load(zeros + S::kLanes) : S::zero();
  for (int64_t word = 0; word < k / Decoder::kPerWord; ++word, codes += 8 * S::kLanes) {
    const auto word0 = S::load_i(codes), word1 = S::load_i(codes + 4 * S::kLanes);
    unrolled<Decoder::kPerWord>([&](auto position) __attribute__((always_inline)) {
      auto w0 = decoder.template value<position.value>(word0),
           w1 = decoder.template value<position.value>(word1);
      if (zeros) w0 = S::sub(w0, zero0), w1 = S::sub(w1, zero1);
      S::store(out, w0);
      S::store(out + S::kLanes, w1);
      out += 2 * S::kLanes;
    });
  }
}

// [k / 8][2][lanes] words of 8 nibbles -> [k / 4][2][lanes] words of 4 bytes.
template <class S>
QF_INLINE void spread_nibbles(const uint8_t* codes, int64_t k, uint32_t* out) {
  const auto low = S::set1(0x0f0f0f0f);
  for (int64_t word = 0; word < k / 8; ++word, codes += 8 * S::kLanes, out += 4 * S::kLanes) {
    const auto word0 = S::load_i(codes), word1 = S::load_i(codes + 4 * S::kLanes);
    S::store_i(out, S::and_(word0, low));
    S::store_i(out + S::kLanes, S::and_(word1, low));
    S::store_i(out + 2 * S::kLanes, S::and_(S::template shr<4>(word0), low));
    S::store_i(out + 3 * S::kLanes, S::and_(S::template shr<4>(word1), low));
  }
}

}  // namespace quantfuse
