// SPDX-License-Identifier: Apache-2.0
//
// The instructions on AMX tiles in software: included ahead of the kernels where QUANTFUSE_EMULATE_AMX is on,
// for tests on CPUs with AVX-512 and without AMX, and for the sanitizers, which do not see what tiles read
// and write. As Intel's manual has them (LDTILECFG, TILELOADD, TDPBSUD, TDPBF16PS).
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulated_amx {

struct Tile {
  alignas(64) unsigned char bytes[16][64];
};
struct Registers {
  bool are_configured;
  int rows[8], row_bytes[8];
  Tile tiles[8];
};
inline thread_local Registers registers_of_amx;

inline Tile& tile(int t) {
  Registers& r = registers_of_amx;
  if (r.are_configured && t >= 0 && t < 8 && r.rows[t] > 0) return r.tiles[t];
  std::fprintf(stderr, "AMX: tile %d is used without a shape\n", t);
  std::abort();
}

inline void configure(const void* from) {
  unsigned char config[64];
  std::memcpy(config, from, 64);
  Registers& r = registers_of_amx;
  if (config[0] != 1 || r.are_configured) {
    std::fprintf(stderr, "AMX: palette %d, or configured twice\n", config[0]);
    std::abort();
  }
  std::memset(&r, 0, sizeof r);
  r.are_configured = true;
  for (int t = 0; t < 8; ++t) {
    r.rows[t] = config[48 + t];
    r.row_bytes[t] = config[16 + 2 * t] | config[17 + 2 * t] << 8;
  }
}
inline void release() { registers_of_amx.are_configured = false; }

inline void zero(int t) { std::memset(&tile(t), 0, sizeof(Tile)); }
inline void load(int t, const void* base, int64_t stride) {
  Tile& to = tile(t);
  std::memset(&to, 0, sizeof to);
  for (int r = 0; r < registers_of_amx.rows[t]; ++r) {
    std::memcpy(to.bytes[r], static_cast<const char*>(base) + r * stride,
                static_cast<size_t>(registers_of_amx.row_bytes[t]));
  }
}
inline void store(int t, void* base, int64_t stride) {
  const Tile& from = tile(t);
  for (int r = 0; r < registers_of_amx.rows[t]; ++r) {
    std::memcpy(static_cast<char*>(base) + r * stride, from.bytes[r],
                static_cast<size_t>(registers_of_amx.row_bytes[t]));
  }
}

// Sums of 4 products of signed bytes of a by unsigned bytes of b.
inline void dot_signed_by_unsigned(int sums, int a, int b) {
  Tile &c = tile(sums), &x = tile(a), &w = tile(b);
  for (int m = 0; m < registers_of_amx.rows[sums]; ++m) {
    __m512i total = _mm512_load_si512(c.bytes[m]);
    for (int k = 0; k < registers_of_amx.row_bytes[a] / 4; ++k) {
      int32_t word;
      std::memcpy(&word, x.bytes[m] + 4 * k, 4);
      total = _mm512_dpbusd_epi32(total, _mm512_load_si512(w.bytes[k]), _mm512_set1_epi32(word));
    }
    _mm512_store_si512(c.bytes[m], total);
  }
}

// A number below 2^-126 in magnitude is taken as zero, and given as zero.
inline __m512 without_subnormals(__m512 v) {
  const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fffffff));
  const __mmask16 is_normal = _mm512_cmpge_epi32_mask(magnitude, _mm512_set1_epi32(0x00800000));
  return _mm512_maskz_mov_ps(is_normal, v);
}

// Pairs of products of BF16 numbers: the first ones have a sum of their own, and the second ones too.
inline void dot_bf16(int sums, int a, int b) {
  Tile &c = tile(sums), &x = tile(a), &w = tile(b);
  for (int m = 0; m < registers_of_amx.rows[sums]; ++m) {
    __m512 first = _mm512_setzero_ps(), second = _mm512_setzero_ps();
    for (int k = 0; k < registers_of_amx.row_bytes[a] / 4; ++k) {
      int32_t word;
      std::memcpy(&word, x.bytes[m] + 4 * k, 4);
      const __m512i pairs[2] = {_mm512_load_si512(w.bytes[k]), _mm512_set1_epi32(word)};
      const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
      __m512 low[2], high[2];
      for (int i = 0; i < 2; ++i) {
        low[i] = without_subnormals(_mm512_castsi512_ps(_mm512_slli_epi32(pairs[i], 16)));
        high[i] = without_subnormals(_mm512_castsi512_ps(_mm512_and_si512(pairs[i], upper)));
      }
      first = without_subnormals(_mm512_fmadd_ps(low[0], low[1], first));
      second = without_subnormals(_mm512_fmadd_ps(high[0], high[1], second));
    }
    const __m512 pair = without_subnormals(_mm512_add_ps(first, second));
    const __m512 before = without_subnormals(_mm512_load_ps(reinterpret_cast<float*>(c.bytes[m])));
    _mm512_store_ps(reinterpret_cast<float*>(c.bytes[m]), without_subnormals(_mm512_add_ps(before, pair)));
  }
}

}  // namespace emulated_amx

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated_amx::configure
#define _tile_release emulated_amx::release
#define _tile_zero emulated_amx::zero
#define _tile_loadd emulated_amx::load
#define _tile_stored emulated_amx::store
#define _tile_dpbsud emulated_amx::dot_signed_by_unsigned
#define _tile_dpbf16ps emulated_amx::dot_bf16
