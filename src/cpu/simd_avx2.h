// SPDX-License-Identifier: Apache-2.0
//
// Vectors of AVX2 with FMA and F16C: 8 floats or 32-bit integers. Same names as cpu/simd_avx512.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "formats/numbers.h"

#define QF_SIMD static inline __attribute__((always_inline))

namespace quantfuse {

struct Avx2Double;

struct Avx2 {
  using Number = float;
  using Double = Avx2Double;
  using F = __m256;
  using I = __m256i;
  // Accumulators of dot4. A type of 32-bit lanes of its own: an array of I, which the compiler sees as 64-bit
  // lanes and converts at every step, stays in memory.
  using Sums = int32_t __attribute__((vector_size(32)));
  using M = __m256i;  // all ones in chosen lanes
  static constexpr int kLanes = 8;
  static constexpr int kRegisters = 16;

  QF_SIMD M first(int64_t n) {
    const int count = static_cast<int>(n < 0 ? 0 : n > 8 ? 8 : n);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }

  QF_SIMD F zero() { return _mm256_setzero_ps(); }
  QF_SIMD F set1(float x) { return _mm256_set1_ps(x); }
  QF_SIMD I set1(int32_t x) { return _mm256_set1_epi32(x); }
  QF_SIMD I zero_i() { return _mm256_setzero_si256(); }

  QF_SIMD F load(const float* p) { return _mm256_loadu_ps(p); }
  QF_SIMD F load(const f16* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  QF_SIMD F load(const bf16* p) {
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
  }
  // The first n lanes from memory, the rest zero; nothing beyond them is touched.
  QF_SIMD F load(const float* p, int64_t n) { return _mm256_maskload_ps(p, first(n)); }
  QF_SIMD F load(const f16* p, int64_t n) { return n >= 8 ? load(p) : load(Buffer<f16>(p, n).v); }
  QF_SIMD F load(const bf16* p, int64_t n) { return n >= 8 ? load(p) : load(Buffer<bf16>(p, n).v); }

  QF_SIMD void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  QF_SIMD void store(f16* p, F v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  QF_SIMD void store(bf16* p, F v) {
    const I u = bits(v);
    const I rounded = add(u, add(set1(0x7fff), and_(shr<16>(u), set1(1))));
    const I high = shr<16>(select(is_nan(v), or_(u, set1(0x400000)), rounded));
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
  }
  QF_SIMD void store(float* p, F v, int64_t n) { _mm256_maskstore_ps(p, first(n), v); }
  QF_SIMD void store(f16* p, F v, int64_t n) { store_some(p, v, n); }
  QF_SIMD void store(bf16* p, F v, int64_t n) { store_some(p, v, n); }

  // Lane i gets what lane i ^ Step has; Step is 1, 2 or 4.
  template <int Step>
  QF_SIMD F swap_lanes(F v) {
    if constexpr (Step == 4) return _mm256_permute2f128_ps(v, v, 1);
    else return _mm256_permute_ps(v, Step == 1 ? 0xb1 : 0x4e);
  }

  QF_SIMD I load_i(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  QF_SIMD void store_i(void* p, I v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
  QF_SIMD void store_i(int32_t* p, I v, int64_t n) { _mm256_maskstore_epi32(p, first(n), v); }
  QF_SIMD I load_u8(const void* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
  }
  QF_SIMD I load_i8(const void* p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
  }
  QF_SIMD I load_u8(const void* p, int64_t n) {
    return n >= 8 ? load_u8(p) : load_u8(Buffer<uint8_t>(p, n).v);
  }
  QF_SIMD I load_i8(const void* p, int64_t n) {
    return n >= 8 ? load_i8(p) : load_i8(Buffer<uint8_t>(p, n).v);
  }
  QF_SIMD void store_u8(void* p, I v) {
    const I low = and_(v, set1(255));
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    _mm_storel_epi64(static_cast<__m128i*>(p), _mm_packus_epi16(words, words));
  }
  QF_SIMD void store_u8(void* p, I v, int64_t n) {
    if (n >= 8) return store_u8(p, v);
    uint8_t bytes[8];
    store_u8(bytes, v);
    if (n > 0) __builtin_memcpy(p, bytes, static_cast<size_t>(n));
  }
  QF_SIMD void store_u16(void* p, I v) {
    const I low = and_(v, set1(0xffff));
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    _mm_storeu_si128(static_cast<__m128i*>(p), words);
  }

  QF_SIMD I load_u4(const void* p) {
    int bytes;
    __builtin_memcpy(&bytes, p, 4);
    return split_nibbles(bytes);
  }
  QF_SIMD I load_u4(const void* p, int64_t n) {
    if (n >= 7) return load_u4(p);
    int bytes = 0;
    if (n > 0) __builtin_memcpy(&bytes, p, static_cast<size_t>((n + 1) / 2));
    return split_nibbles(bytes);
  }
  QF_SIMD void store_u4(void* p, I v) {
    const int bytes = join_nibbles(v);
    __builtin_memcpy(p, &bytes, 4);
  }
  QF_SIMD void store_u4(void* p, I v, int64_t n) {
    if (n >= 8) return store_u4(p, v);
    const int bytes = join_nibbles(select(first(n), v, zero_i()));
    if (n > 0) __builtin_memcpy(p, &bytes, static_cast<size_t>((n + 1) / 2));
  }

  QF_SIMD F add(F a, F b) { return _mm256_add_ps(a, b); }
  QF_SIMD F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  QF_SIMD F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  QF_SIMD F round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // From 2^-126 to 2^127.
  QF_SIMD F times_power_of_2(F a, F exponent) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(exponent), _mm256_set1_epi32(127));
    return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
  }
  QF_SIMD F div(F a, F b) { return _mm256_div_ps(a, b); }
  QF_SIMD F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  QF_SIMD F fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
  QF_SIMD F max(F a, F b) { return _mm256_max_ps(a, b); }
  QF_SIMD F min(F a, F b) { return _mm256_min_ps(a, b); }
  QF_SIMD F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }

  QF_SIMD I to_int(F a) { return _mm256_cvtps_epi32(a); }
  QF_SIMD F to_float(I a) { return _mm256_cvtepi32_ps(a); }
  QF_SIMD I bits(F a) { return _mm256_castps_si256(a); }
  QF_SIMD F from_bits(I a) { return _mm256_castsi256_ps(a); }

  QF_SIMD I add(I a, I b) { return _mm256_add_epi32(a, b); }
  QF_SIMD I sub(I a, I b) { return _mm256_sub_epi32(a, b); }
  QF_SIMD I mul(I a, I b) { return _mm256_mullo_epi32(a, b); }
  QF_SIMD I min(I a, I b) { return _mm256_min_epi32(a, b); }
  QF_SIMD I max(I a, I b) { return _mm256_max_epi32(a, b); }
  QF_SIMD I max_u16(I a, I b) { return _mm256_max_epu16(a, b); }
  QF_SIMD I and_(I a, I b) { return _mm256_and_si256(a, b); }
  QF_SIMD I or_(I a, I b) { return _mm256_or_si256(a, b); }
  QF_SIMD I xor_(I a, I b) { return _mm256_xor_si256(a, b); }
  QF_SIMD I or_masked(I a, I mask, I b) { return or_(and_(a, mask), b); }
  QF_SIMD I merge_bits(I mask, I yes, I no) { return or_(and_(mask, yes), _mm256_andnot_si256(mask, no)); }
  template <int N>
  QF_SIMD I shl(I a) {
    return _mm256_slli_epi32(a, N);
  }
  template <int N>
  QF_SIMD I shr(I a) {
    return _mm256_srli_epi32(a, N);
  }

  QF_SIMD M is_nan(F a) { return _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }
  QF_SIMD M less(F a, F b) { return _mm256_castps_si256(_mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
  QF_SIMD M less(I a, I b) { return _mm256_cmpgt_epi32(b, a); }
  QF_SIMD M equal(I a, I b) { return _mm256_cmpeq_epi32(a, b); }
  QF_SIMD F select(M m, F yes, F no) { return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(m)); }
  QF_SIMD I select(M m, I yes, I no) { return _mm256_blendv_epi8(no, yes, m); }

  QF_SIMD float reduce_add(F a) {
    const __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 t = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
  }
  QF_SIMD float reduce_max(F a) {
    const __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 t = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(t, _mm_movehdup_ps(t)));
  }
  QF_SIMD float reduce_min(F a) {
    const __m128 s = _mm_min_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 t = _mm_min_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_min_ss(t, _mm_movehdup_ps(t)));
  }
  QF_SIMD int32_t reduce_add(I a) {
    const __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    const __m128i t = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(t, _mm_shuffle_epi32(t, 0xb1)));
  }

  // acc[lane] += sum over the lane's 4 bytes of w (unsigned) * x (signed). Not by vpmaddubsw, which saturates
  // at 16 bits: even and odd bytes are widened and multiplied as 16-bit pairs, which is exact.
  QF_SIMD I ints(Sums a) { return (I)a; }
  QF_SIMD Sums sums(I a) { return (Sums)a; }
  QF_SIMD I dot4(I acc, I w_u8, I x_s8) { return ints(dot4(sums(acc), w_u8, x_s8)); }
  QF_SIMD Sums dot4(Sums acc, I w_u8, I x_s8) {
    const I w_even = _mm256_and_si256(w_u8, _mm256_set1_epi16(255)), w_odd = _mm256_srli_epi16(w_u8, 8);
    const I x_even = _mm256_srai_epi16(_mm256_slli_epi16(x_s8, 8), 8), x_odd = _mm256_srai_epi16(x_s8, 8);
    return acc + (Sums)_mm256_madd_epi16(w_even, x_even) + (Sums)_mm256_madd_epi16(w_odd, x_odd);
  }

  // A table of 16 bytes, looked up by each byte, which is below 16.
  QF_SIMD I table_u8(const uint8_t* bytes) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
  }
  QF_SIMD I lookup_u8(I table, I index) { return _mm256_shuffle_epi8(table, index); }

  // A table of 16 floats looked up by the low 4 bits of each lane: vpermps knows 8 entries, so two and a
  // blend.
  static constexpr bool kLooksUpAtOnce = false;
  struct Table16 {
    __m256 low, high;
  };
  QF_SIMD Table16 table16(const float* values) {
    return {_mm256_loadu_ps(values), _mm256_loadu_ps(values + 8)};
  }
  QF_SIMD F lookup(Table16 t, I index) {
    const F by_bit3 = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(t.low, index), _mm256_permutevar8x32_ps(t.high, index),
                            by_bit3);
  }
  QF_SIMD F gather(const float* values, I index) { return _mm256_i32gather_ps(values, index, 4); }

  QF_SIMD F f16_lanes_to_float(I a) {
    return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)));
  }

  // Rows r of an 8x8 matrix of 32-bit words become columns.
  QF_SIMD void transpose(I (&r)[8]) {
    I t[8];
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
      t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
      r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
      r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
      r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
      t[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
      t[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
    }
    for (int i = 0; i < 8; ++i) r[i] = t[i];
  }

  // The words of lane i of every row to out + i * count, one lane after the other: 8 words each, of which the
  // next lane writes over those from `count` on. Up to 8 - count words behind the last are written too.
  QF_SIMD void store_interleaved(I (&r)[8], int64_t count, int32_t* out) {
    transpose(r);
    for (int i = 0; i < 8; ++i, out += count) store_i(out, r[i]);
  }

 private:
  QF_SIMD I split_nibbles(int bytes) {
    const I wide = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(bytes));
    return and_(or_(wide, _mm256_slli_epi64(wide, 28)), set1(15));
  }
  QF_SIMD int join_nibbles(I v) {
    const I low = and_(v, set1(15));
    const I wide = and_(or_(low, _mm256_srli_epi64(low, 28)), _mm256_set1_epi64x(255));
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    const __m128i spread = _mm_packus_epi32(words, words);
    return _mm_cvtsi128_si32(_mm_packus_epi16(spread, spread));
  }
  // A full vector's worth of memory holding the first n < 8 elements at p and zeros.
  template <class T>
  struct Buffer {
    T v[8] = {};
    inline __attribute__((always_inline)) Buffer(const void* p, int64_t n) {
      if (n > 0) __builtin_memcpy(v, p, static_cast<size_t>(n) * sizeof(T));
    }
  };
  template <class T>
  QF_SIMD void store_some(T* p, F v, int64_t n) {
    if (n >= 8) return store(p, v);
    T some[8];
    store(some, v);
    if (n > 0) __builtin_memcpy(p, some, static_cast<size_t>(n) * sizeof(T));
  }
};

// 4 doubles, for sums that float32 is too coarse for.
struct Avx2Double {
  using F = __m256d;
  using Number = double;
  static constexpr int kLanes = 4;
  static constexpr int kRegisters = 16;
  QF_SIMD F set1(double x) { return _mm256_set1_pd(x); }
  QF_SIMD F load(const double* p) { return _mm256_loadu_pd(p); }
  QF_SIMD void store(double* p, F v) { _mm256_storeu_pd(p, v); }
  QF_SIMD F fma(F a, F b, F c) { return _mm256_fmadd_pd(a, b, c); }    // a * b + c
  QF_SIMD F fnma(F a, F b, F c) { return _mm256_fnmadd_pd(a, b, c); }  // c - a * b
};

}  // namespace quantfuse
