// SPDX-License-Identifier: Apache-2.0
//
// Vectors of AVX-512 (F, BW, DQ, VL, VNNI): 16 floats or 32-bit integers. Same names as cpu/simd_avx2.h, so
// that a kernel is one template over the vector type, compiled once per instruction set.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "formats/numbers.h"

#define QF_SIMD static inline __attribute__((always_inline))

namespace quantfuse {

struct Avx512Double;

struct Avx512 {
  using Number = float;
  using Double = Avx512Double;
  using F = __m512;
  using I = __m512i;
  // Accumulators of dot4. A type of 32-bit lanes of its own: an array of I, which the compiler sees as 64-bit
  // lanes and converts at every step, stays in memory.
  using Sums = int32_t __attribute__((vector_size(64)));
  using M = __mmask16;
  static constexpr int kLanes = 16;
  static constexpr int kRegisters = 32;

  // The mask of the first n lanes, n clipped to [0, 16].
  QF_SIMD M first(int64_t n) { return n >= 16 ? 0xffff : static_cast<M>((1u << (n < 0 ? 0 : n)) - 1); }

  QF_SIMD F zero() { return _mm512_setzero_ps(); }
  QF_SIMD F set1(float x) { return _mm512_set1_ps(x); }
  QF_SIMD I set1(int32_t x) { return _mm512_set1_epi32(x); }
  QF_SIMD I zero_i() { return _mm512_setzero_si512(); }

  QF_SIMD F load(const float* p) { return _mm512_loadu_ps(p); }
  QF_SIMD F load(const f16* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  QF_SIMD F load(const bf16* p) {
    const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
  }
  // The first n lanes from memory, the rest zero; nothing beyond them is touched.
  QF_SIMD F load(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first(n), p); }
  QF_SIMD F load(const f16* p, int64_t n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p)); }
  QF_SIMD F load(const bf16* p, int64_t n) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p)), 16));
  }

  QF_SIMD void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  QF_SIMD void store(f16* p, F v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), f16_bits(v)); }
  QF_SIMD void store(bf16* p, F v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bf16_bits(v)); }
  QF_SIMD void store(float* p, F v, int64_t n) { _mm512_mask_storeu_ps(p, first(n), v); }
  QF_SIMD void store(f16* p, F v, int64_t n) { _mm256_mask_storeu_epi16(p, first(n), f16_bits(v)); }
  QF_SIMD void store(bf16* p, F v, int64_t n) { _mm256_mask_storeu_epi16(p, first(n), bf16_bits(v)); }

  // Lane i gets what lane i ^ Step has; Step is 1, 2, 4 or 8.
  template <int Step>
  QF_SIMD F swap_lanes(F v) {
    if constexpr (Step >= 4) return _mm512_shuffle_f32x4(v, v, Step == 4 ? 0xb1 : 0x4e);
    else return _mm512_permute_ps(v, Step == 1 ? 0xb1 : 0x4e);
  }

  QF_SIMD I load_i(const void* p) { return _mm512_loadu_si512(p); }
  QF_SIMD void store_i(void* p, I v) { _mm512_storeu_si512(p, v); }
  QF_SIMD void store_i(int32_t* p, I v, int64_t n) { _mm512_mask_storeu_epi32(p, first(n), v); }
  // 16 bytes widened to 32 bits each; the low bytes of 32-bit lanes.
  QF_SIMD I load_u8(const void* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  }
  QF_SIMD I load_i8(const void* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  }
  QF_SIMD I load_u8(const void* p, int64_t n) {
    return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(first(n), p));
  }
  QF_SIMD I load_i8(const void* p, int64_t n) {
    return _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first(n), p));
  }
  QF_SIMD void store_u8(void* p, I v) { _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v)); }
  QF_SIMD void store_u8(void* p, I v, int64_t n) {
    _mm_mask_storeu_epi8(p, first(n), _mm512_cvtepi32_epi8(v));
  }
  // The low halves of 32-bit lanes.
  QF_SIMD void store_u16(void* p, I v) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(v));
  }

  // 16 nibbles, the low one of each byte first: from memory to one per lane, and the low bits of each lane to
  // memory.
  QF_SIMD I load_u4(const void* p) { return split_nibbles(_mm_loadl_epi64(static_cast<const __m128i*>(p))); }
  QF_SIMD I load_u4(const void* p, int64_t n) {
    return split_nibbles(_mm_maskz_loadu_epi8(nibble_bytes(n), p));
  }
  QF_SIMD void store_u4(void* p, I v) { _mm_storel_epi64(static_cast<__m128i*>(p), join_nibbles(v)); }
  // The first n nibbles; the high half behind an odd n is zero.
  QF_SIMD void store_u4(void* p, I v, int64_t n) {
    _mm_mask_storeu_epi8(p, nibble_bytes(n), join_nibbles(select(first(n), v, zero_i())));
  }

  QF_SIMD F add(F a, F b) { return _mm512_add_ps(a, b); }
  QF_SIMD F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  QF_SIMD F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  QF_SIMD F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  QF_SIMD F times_power_of_2(F a, F exponent) { return _mm512_scalef_ps(a, exponent); }  // a whole exponent
  QF_SIMD F div(F a, F b) { return _mm512_div_ps(a, b); }
  QF_SIMD F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }    // a * b + c
  QF_SIMD F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b
  // Where one operand is NaN these give `b`: max(x, acc) skips NaN in x.
  QF_SIMD F max(F a, F b) { return _mm512_max_ps(a, b); }
  QF_SIMD F min(F a, F b) { return _mm512_min_ps(a, b); }
  QF_SIMD F abs(F a) { return _mm512_abs_ps(a); }

  QF_SIMD I to_int(F a) { return _mm512_cvtps_epi32(a); }  // to nearest, ties to even
  QF_SIMD F to_float(I a) { return _mm512_cvtepi32_ps(a); }
  QF_SIMD I bits(F a) { return _mm512_castps_si512(a); }
  QF_SIMD F from_bits(I a) { return _mm512_castsi512_ps(a); }

  QF_SIMD I add(I a, I b) { return _mm512_add_epi32(a, b); }
  QF_SIMD I sub(I a, I b) { return _mm512_sub_epi32(a, b); }
  QF_SIMD I mul(I a, I b) { return _mm512_mullo_epi32(a, b); }
  QF_SIMD I min(I a, I b) { return _mm512_min_epi32(a, b); }
  QF_SIMD I max(I a, I b) { return _mm512_max_epi32(a, b); }
  QF_SIMD I max_u16(I a, I b) { return _mm512_max_epu16(a, b); }  // of 32 16-bit lanes
  QF_SIMD I and_(I a, I b) { return _mm512_and_si512(a, b); }
  QF_SIMD I or_(I a, I b) { return _mm512_or_si512(a, b); }
  QF_SIMD I xor_(I a, I b) { return _mm512_xor_si512(a, b); }
  // a & mask | b
  QF_SIMD I or_masked(I a, I mask, I b) { return _mm512_ternarylogic_epi32(a, mask, b, 0xea); }
  // The bits of `yes` where those of the mask are set, else of `no`.
  QF_SIMD I merge_bits(I mask, I yes, I no) { return _mm512_ternarylogic_epi32(mask, yes, no, 0xca); }
  template <int N>
  QF_SIMD I shl(I a) {
    return _mm512_slli_epi32(a, N);
  }
  template <int N>
  QF_SIMD I shr(I a) {
    return _mm512_srli_epi32(a, N);
  }

  QF_SIMD M is_nan(F a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
  QF_SIMD M less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  QF_SIMD M less(I a, I b) { return _mm512_cmplt_epi32_mask(a, b); }
  QF_SIMD M equal(I a, I b) { return _mm512_cmpeq_epi32_mask(a, b); }
  QF_SIMD F select(M m, F yes, F no) { return _mm512_mask_blend_ps(m, no, yes); }
  QF_SIMD I select(M m, I yes, I no) { return _mm512_mask_blend_epi32(m, no, yes); }

  QF_SIMD float reduce_add(F a) { return _mm512_reduce_add_ps(a); }
  QF_SIMD float reduce_max(F a) { return _mm512_reduce_max_ps(a); }
  QF_SIMD float reduce_min(F a) { return _mm512_reduce_min_ps(a); }
  QF_SIMD int32_t reduce_add(I a) { return _mm512_reduce_add_epi32(a); }

  // acc[lane] += sum over the lane's 4 bytes of w (unsigned) * x (signed).
  QF_SIMD Sums dot4(Sums acc, I w_u8, I x_s8) { return (Sums)_mm512_dpbusd_epi32((I)acc, w_u8, x_s8); }
  QF_SIMD I ints(Sums a) { return (I)a; }
  QF_SIMD Sums sums(I a) { return (Sums)a; }
  QF_SIMD I dot4(I acc, I w_u8, I x_s8) { return ints(dot4(sums(acc), w_u8, x_s8)); }

  // A table of 16 floats looked up by the low 4 bits of each lane; the bits above them are ignored.
  static constexpr bool kLooksUpAtOnce = true;  // by one instruction
  using Table16 = __m512;
  QF_SIMD Table16 table16(const float* values) { return _mm512_loadu_ps(values); }
  QF_SIMD F lookup(Table16 t, I index) { return _mm512_permutexvar_ps(index, t); }
  // A table of 16 bytes, looked up by each byte, which is below 16.
  QF_SIMD I table_u8(const uint8_t* bytes) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
  }
  QF_SIMD I lookup_u8(I table, I index) { return _mm512_shuffle_epi8(table, index); }
  // A table of 32 16-bit words, or of 64 in two vectors, looked up by the low 5 or 6 bits of each of 32
  // 16-bit lanes.
  QF_SIMD I lookup_u16(I table, I index) { return _mm512_permutexvar_epi16(index, table); }
  QF_SIMD I lookup_u16(I low, I high, I index) { return _mm512_permutex2var_epi16(low, index, high); }
  // The same of 128, by the low 7 bits.
  struct Table128 {
    I words[4];
  };
  QF_SIMD Table128 table128(const uint16_t* words) {
    return {{load_i(words), load_i(words + 32), load_i(words + 64), load_i(words + 96)}};
  }
  QF_SIMD I lookup_u16(const Table128& t, I index) {
    const __mmask32 is_upper = _mm512_test_epi16_mask(index, _mm512_set1_epi16(64));
    return _mm512_mask_blend_epi16(is_upper, _mm512_permutex2var_epi16(t.words[0], index, t.words[1]),
                                   _mm512_permutex2var_epi16(t.words[2], index, t.words[3]));
  }
  // values[index] of each lane.
  QF_SIMD F gather(const float* values, I index) {
    return _mm512_mask_i32gather_ps(zero(), 0xffff, index, values, 4);
  }

  // Bit patterns of f16 in the low half of each lane, as floats.
  QF_SIMD F f16_lanes_to_float(I a) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)); }

  // Rows r of a 16x16 matrix of 32-bit words become columns.
  QF_SIMD void transpose(I (&r)[16]) {
    I t[16];
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
      r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
      r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
      r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
      r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
      t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
      t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
      t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
      t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
      r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
      r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
      r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
      r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
  }

  // The words of lane i of every row to out + i * count, one lane after the other: 8 words each, of which the
  // next lane writes over those from `count` on. Up to 8 - count words behind the last are written too.
  QF_SIMD void store_interleaved(const I (&r)[8], int64_t count, int32_t* out) {
    I t[8], u[8];
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {  // u[i], u[i + 4]: both halves of lanes i, i + 4, i + 8 and i + 12
      u[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
      u[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
      u[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
      u[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    const I first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11),
            last = _mm512_add_epi64(first, _mm512_set1_epi64(4));
    for (int i = 0; i < 4; ++i) {
      t[i] = _mm512_permutex2var_epi64(u[i], first, u[i + 4]);
      t[i + 4] = _mm512_permutex2var_epi64(u[i], last, u[i + 4]);
    }
    for (int i = 0; i < 16; ++i, out += count) {
      const I lanes = t[i / 8 * 4 + i % 4];
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), i / 4 % 2 == 0
                                                               ? _mm512_castsi512_si256(lanes)
                                                               : _mm512_extracti64x4_epi64(lanes, 1));
    }
  }

 private:
  QF_SIMD M nibble_bytes(int64_t n) { return first(n > 16 ? 8 : (n + 1) / 2); }
  // A byte in 64 bits, doubled 28 bits higher, has its nibbles at the bottom of either half; and the reverse.
  QF_SIMD I split_nibbles(__m128i bytes) {
    const I wide = _mm512_cvtepu8_epi64(bytes);
    return and_(or_(wide, _mm512_slli_epi64(wide, 28)), set1(15));
  }
  QF_SIMD __m128i join_nibbles(I v) {
    const I low = and_(v, set1(15));
    return _mm512_cvtepi64_epi8(or_(low, _mm512_srli_epi64(low, 28)));
  }
  QF_SIMD __m256i f16_bits(F v) { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  QF_SIMD __m256i bf16_bits(F v) {
    const I u = bits(v);
    const I rounded = add(u, add(set1(0x7fff), and_(shr<16>(u), set1(1))));
    return _mm512_cvtepi32_epi16(shr<16>(_mm512_mask_or_epi32(rounded, is_nan(v), u, set1(0x400000))));
  }
};

// 8 doubles, for sums that float32 is too coarse for.
struct Avx512Double {
  using F = __m512d;
  using Number = double;
  static constexpr int kLanes = 8;
  static constexpr int kRegisters = 32;
  QF_SIMD F set1(double x) { return _mm512_set1_pd(x); }
  QF_SIMD F load(const double* p) { return _mm512_loadu_pd(p); }
  QF_SIMD void store(double* p, F v) { _mm512_storeu_pd(p, v); }
  QF_SIMD F fma(F a, F b, F c) { return _mm512_fmadd_pd(a, b, c); }    // a * b + c
  QF_SIMD F fnma(F a, F b, F c) { return _mm512_fnmadd_pd(a, b, c); }  // c - a * b
};

}  // namespace quantfuse
