// SPDX-License-Identifier: Apache-2.0
//
// The product of FP8 codes in float32: x86 has no FP8 arithmetic, and every FP8 number is a float32.
//
//   b  packed words or rows --decode--> 16 KB of floats in L1 --fma with tiles of 12 (6) rows--> times both scales --> totals
//
// A sum is one fma chain per segment of at most 128 k, times the scales, added to the total: the same bits for every m.
#pragma once

#include "cpu/panel_codes.h"
#include "scaled_mm/scaled_mm_pack.h"

namespace quantfuse::scaled_mm {

inline constexpr int64_t kFloatSegment = 128;
inline constexpr Preparation kFloatPreparation = {1, kFloatSegment};

QF_INLINE Requirements accepts_float(const Problem& p) {
  Requirements r;
  r.require(!p.is_integer_product(), "the codes are not FP8");
  return r;
}

template <class S>
__attribute__((noinline)) void prepare_float_tile(const Batch& batch, int64_t row) {
  const Problem& p = batch.p;
  const int64_t rows = batch.rows_of_tile(row);
  alignas(64) float values[kMaxTileRows<S>][kFloatSegment];
  for (int64_t s = 0; s < batch.plan.num_segments; ++s) {
    const Segment& segment = batch.segments[s];
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t r = batch.first_row + row + i;
      const char* codes = p.a.row_bytes_at(r) + segment.begin;
      choose_value<QF_FP8_E4M3, QF_FP8_E5M2>(p.a_format, [&](auto format) __attribute__((always_inline)) {
        for (int64_t k = 0; k < segment.count; k += S::kLanes) {
          S::store(values[i] + k, decode_fp8<S, format.value>(S::load_u8(codes + k, segment.count - k)));
        }
      });
      batch.scales_at(s)[row + i] = p.a_scale_at(r, segment.a_group);
    }
    auto* out = reinterpret_cast<float*>(batch.tile_at(segment, row, segment.count));
    for (int64_t k = 0; k < segment.count; ++k, out += rows) {
      for (int64_t i = 0; i < rows; ++i) out[i] = values[i][k];
    }
  }
}

// A segment of a panel of b as floats, [k][2][lanes]; up to 3 more k are written where it does not end a word.
template <class S, qf_format Format>
__attribute__((noinline)) void decode_segment(const Problem& p, int64_t panel, const Segment& segment, float* out) {
  constexpr int64_t L = S::kLanes;
  if (p.b_order == QF_NK) {
    alignas(64) uint32_t packed[kFloatSegment / 4 * 2 * L];
    pack_rows<S, Format>(p, panel, segment, packed);
    return decode_panel<S, Format>(reinterpret_cast<const uint8_t*>(packed), nullptr, round_up(segment.count, 4), out);
  }
  for (int64_t k = segment.begin; k < segment.begin + segment.count; ++k) {
    for (int64_t half = 0; half < 2; ++half, out += L) {
      S::store(out, decode_fp8<S, Format>(load_row_codes<S, Format>(p, k, (panel * 2 + half) * L)));
    }
  }
}

// totals += the product of a tile and a segment of b, scaled.
template <class S, int MT>
__attribute__((noinline)) void add_float_tile(const Columns<S>& columns, const float* a, const float* b, int64_t k,
                                              const float* a_scales, float* totals) {
  constexpr int64_t L = S::kLanes;
  FloatTile<S, MT> tile;
  tile.clear();
  tile.add(a, b, k);
#pragma GCC unroll 16
  for (int m = 0; m < MT; ++m) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      float* total = totals + (m * 2 + half) * L;
      const auto scale = S::mul(S::load(columns.scale + half * L), S::set1(a_scales[m]));
      S::store(total, S::fma(tile.acc[m][half], scale, S::load(total)));
    }
  }
}

template <class S>
__attribute__((noinline)) void multiply_float(const Batch& batch, int64_t row0, int64_t row1, int64_t panel) {
  constexpr int64_t L = S::kLanes;
  const Problem& p = batch.p;
  alignas(64) float decoded[kFloatSegment * 2 * L];
  alignas(64) float totals[kMaxChunkRows * 2 * L];
  __builtin_memset(totals, 0, static_cast<size_t>((row1 - row0) * 2 * L * 4));
  Columns<S> columns(p, panel, 0);

  for (int64_t s = 0; s < batch.plan.num_segments; ++s) {
    const Segment& segment = batch.segments[s];
    choose_value<QF_FP8_E4M3, QF_FP8_E5M2>(p.b_format, [&](auto format) __attribute__((always_inline)) {
      decode_segment<S, format.value>(p, panel, segment, decoded);
    });
    columns.load_scales(p, segment.b_group);
    for (int64_t row = row0; row < row1; row += batch.tile_rows) {
      const auto* a = reinterpret_cast<const float*>(batch.tile_at(segment, row, segment.count));
      choose_tile_rows<S>(batch.rows_of_tile(row), [&](auto mt) __attribute__((always_inline)) {
        add_float_tile<S, mt.value>(columns, a, decoded, segment.count, batch.scales_at(s) + row,
                                    totals + (row - row0) * 2 * L);
      });
    }
  }
  for (int64_t row = row0; row < row1; ++row) {
    store_row<S>(p, columns, batch.first_row + row, totals + (row - row0) * 2 * L);
  }
}

// ---- The call ----

template <class S>
QF_INLINE size_t float_workspace_bytes(const Problem& p) {
  return static_cast<size_t>(make_plan<S>(p, kFloatPreparation).total_bytes);
}

template <class S>
QF_INLINE void launch_float(const Problem& p, const Launch& launch) {
  run_batches<S>(p, kFloatPreparation, launch, prepare_float_tile<S>, multiply_float<S>);
}

}  // namespace quantfuse::scaled_mm
