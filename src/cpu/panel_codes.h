// SPDX-License-Identifier: Apache-2.0
//
// Words of a packed panel (linear/packed.h) as vectors: the k-th number of each lane's word as a float, or
// codes as bytes.
#pragma once

#include "cpu/tile.h"
#include "formats/integer_bytes.h"

namespace quantfuse {

// Values of the stored INT4 codes.
constexpr float kStoredInt4Values[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};

// The magnitudes of an FP8 format as BF16 numbers, which they all are, by the low 7 bits of the code.
struct Fp8Magnitudes {
  alignas(64) uint16_t words[128];
  constexpr Fp8Magnitudes(int mantissa_bits, int bias, bool has_infinity) : words() {
    for (int code = 1; code < 128; ++code) {
      int exponent = code >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
      if (has_infinity ? exponent == 31 : code == 127) {
        words[code] = has_infinity && mantissa == 0 ? 0x7f80 : 0x7fc0;
        continue;
      }
      if (exponent == 0) {  // subnormal: moved up to its leading bit
        for (exponent = 1; mantissa >> mantissa_bits == 0; --exponent) mantissa <<= 1;
        mantissa -= 1 << mantissa_bits;
      }
      words[code] = static_cast<uint16_t>((exponent - bias + 127) << 7 | mantissa << (7 - mantissa_bits));
    }
  }
};
inline constexpr Fp8Magnitudes kE4m3Magnitudes(3, 7, false), kE5m2Magnitudes(2, 15, true);

// Two FP8 codes in the low bytes of the halves of each lane, as BF16 numbers, where S can look them up: a
// third of the instructions of decode_fp8.
template <class S, bool kIsLookedUp>
struct Fp8Pairs {};
template <class S>
struct Fp8Pairs<S, true> {
  typename S::Table128 magnitudes;
  QF_INLINE typename S::I decode(typename S::I codes) const {
    const auto signs = S::and_(S::template shl<8>(codes), S::set1(static_cast<int32_t>(0x80008000u)));
    return S::or_(S::lookup_u16(magnitudes, codes), signs);
  }
};

// Format is the code path (formats/codes.h); the format itself chooses the table.
template <class S, qf_format Format>
struct PanelDecoder {
  static constexpr bool kIs4Bit = is_packed_4bit(Format);
  static constexpr bool kHasPairs = is_fp8(Format) && requires { typename S::Table128; };
  static constexpr int kPerWord = 32 / code_bits(Format);
  typename S::Table16 table;  // of the 4-bit formats
  [[no_unique_address]] Fp8Pairs<S, kHasPairs> pairs;

  QF_INLINE explicit PanelDecoder([[maybe_unused]] qf_format format) {
    if constexpr (kIs4Bit) table = S::table16(Format == QF_INT4 ? kStoredInt4Values : codebook_of(format));
    if constexpr (kHasPairs)
      pairs = {S::table128(Format == QF_FP8_E4M3 ? kE4m3Magnitudes.words : kE5m2Magnitudes.words)};
  }

  // The codes at positions K and K + 2 as BF16 numbers, in the halves of each lane.
  template <int K>
  QF_INLINE typename S::I bf16_pair(typename S::I word) const {
    static_assert(kHasPairs && K < 2);
    return pairs.decode(K == 0 ? word : S::template shr<8>(word));
  }

  // The value at position K (0 .. kPerWord - 1) of every lane's word.
  template <int K>
  QF_INLINE typename S::F value(typename S::I word) const {
    constexpr int kShift = K < 4 ? 8 * K : 8 * (K - 4) + 4;  // of a 4-bit code
    if constexpr (Format == QF_INT4 && !S::kLooksUpAtOnce) {
      // Where it stands, as the units of a power of two that is large enough; the uppermost three moved down.
      constexpr int kAt = kShift > 16 ? kShift - 12 : kShift;
      constexpr auto kPower = static_cast<float>(1 << (23 - kAt));
      const auto base = S::set1(static_cast<int32_t>(__builtin_bit_cast(uint32_t, kPower)));
      const auto moved = kShift > 16 ? S::template shr<12>(word) : word;
      return S::sub(S::from_bits(S::or_masked(moved, S::set1(15 << kAt), base)), S::set1(kPower + 8));
    } else if constexpr (kIs4Bit) {
      return S::lookup(table, kShift == 0 ? word : S::template shr<kShift>(word));
    } else if constexpr (Format == QF_F32) {
      return S::from_bits(word);
    } else if constexpr (Format == QF_F16) {
      return S::f16_lanes_to_float(K == 0 ? S::and_(word, S::set1(0xffff)) : S::template shr<16>(word));
    } else if constexpr (Format == QF_BF16) {
      constexpr auto kUpper = static_cast<int32_t>(0xffff0000u);
      return S::from_bits(K == 0 ? S::template shl<16>(word) : S::and_(word, S::set1(kUpper)));
    } else if constexpr (kHasPairs) {
      const auto pair = bf16_pair<K % 2>(word);
      constexpr auto kUpper = static_cast<int32_t>(0xffff0000u);
      return S::from_bits(K < 2 ? S::template shl<16>(pair) : S::and_(pair, S::set1(kUpper)));
    } else {
      const auto moved = K == 0 ? word : S::template shr<8 * K>(word);
      if constexpr (Format == QF_INT8) {
        // In the lowest bits of 2^23, whose steps are 1; the 128 are the offset of stored codes.
        const auto base = S::set1(0x4b000000);
        const auto sum = K == 3 ? S::or_(moved, base) : S::or_masked(moved, S::set1(255), base);
        return S::sub(S::from_bits(sum), S::set1(8388608.0f + 128.0f));
      } else {
        return decode_fp8<S, Format>(K == 3 ? moved : S::and_(moved, S::set1(255)));
      }
    }
  }
};

// The words of w that a step of k multiplies (cpu/tile.h), from the packed words: kSteps of them in each.
template <class S, qf_format Format>
struct FloatDecoder : PanelDecoder<S, Format> {
  using PanelDecoder<S, Format>::PanelDecoder;
  using Dot = FloatDot<S>;
  static constexpr int kSteps = PanelDecoder<S, Format>::kPerWord;

  template <int Step, bool HasZeros>
  QF_INLINE typename S::F step(typename S::I word, typename S::F zero) const {
    const auto w = this->template value<Step>(word);
    return HasZeros ? S::sub(w, zero) : w;
  }
};

// [k / per word][2][lanes] words of one panel -> [step][2][lanes] words of w, less the zero points (2
// vectors) where HasZeros.
template <bool HasZeros, class Decoder>
QF_INLINE void decode_panel(const Decoder& decoder, const uint8_t* codes, [[maybe_unused]] const float* zeros,
                            int64_t k, typename Decoder::Dot::Word* out) {
  using S = typename Decoder::Dot::S;
  typename S::F zero[2] = {};
  if constexpr (HasZeros) zero[0] = S::load(zeros), zero[1] = S::load(zeros + S::kLanes);
  for (int64_t word = 0; word < k / Decoder::kPerWord; ++word, codes += 8 * S::kLanes) {
    const typename S::I words[2] = {S::load_i(codes), S::load_i(codes + 4 * S::kLanes)};
    unrolled<2 * Decoder::kSteps>([&](auto i) __attribute__((always_inline)) {
      Decoder::Dot::store(out + i * S::kLanes,
                          decoder.template step<i / 2, HasZeros>(words[i % 2], zero[i % 2]));
    });
    out += 2 * Decoder::kSteps * S::kLanes;
  }
}

// Codes as the unsigned bytes that a dot product takes (has_integer_numbers), 4 k in a word. Of a word of 8
// nibbles the low ones are the first 4 k. Stored INT4 and INT8 codes are such bytes; others are looked up.
template <class S, qf_format Format>
struct ByteDecoder {
  using Dot = ByteDot<S>;
  static constexpr bool kIs4Bit = is_packed_4bit(Format), kIsLookedUp = kIs4Bit && Format != QF_INT4;
  static constexpr int kPerWord = 32 / code_bits(Format), kSteps = kPerWord / 4;
  typename S::I table;

  QF_INLINE explicit ByteDecoder([[maybe_unused]] qf_format format) {
    table = S::zero_i();
    if constexpr (kIsLookedUp)
      table = S::table_u8(format == QF_IQ4_NL ? kBytesOfIq4Nl.bytes : kBytesOfE2m1.bytes);
  }

  template <int Step, bool HasZeros>
  QF_INLINE typename S::I step(typename S::I word, typename S::F) const {
    if constexpr (!kIs4Bit) return word;
    const auto codes = S::and_(Step == 0 ? word : S::template shr<4>(word), S::set1(0x0f0f0f0f));
    return kIsLookedUp ? S::lookup_u8(table, codes) : codes;
  }
};

}  // namespace quantfuse
