// SPDX-License-Identifier: Apache-2.0
//
// The product of FP8 codes in float32: x86 has no FP8 arithmetic, and every FP8 number is a float32.
//
//   b  packed codes --decode--> 32 KB (8 KB) of floats in L1 --fma, tiles of 6 rows--> * scales --> totals
//
// A sum is one fma chain per segment of at most 128 k, times the scales, added to the total: the same bits
// for every m.
#pragma once

#include "cpu/panel_codes.h"
#include "scaled_mm/scaled_mm_block.h"

namespace quantfuse::scaled_mm {

inline constexpr int64_t kFloatSegment = 128;
// By qf_order. Fewer rows than 96 do not pay for decoding a panel; with long k, more leave the L2 cache and
// gain nothing.
constexpr Blocking kFloatBlocking[] = {{1, kFloatSegment, 4, 96, 192}, {1, kFloatSegment, 8, 96, 96}};

QF_INLINE Requirements accepts_float(const Problem& p) {
  Requirements r;
  r.require(!p.is_integer_product(), "the codes are not FP8");
  return r;
}

template <class S>
__attribute__((noinline)) void prepare_float_tile(const Batch& batch, int64_t row) {
  const Problem& p = batch.p;
  const int64_t rows = batch.rows_of_tile(row);
  alignas(64) float values[kMaxTileRows][kFloatSegment];
  for (int64_t s = 0; s < batch.plan.num_segments; ++s) {
    const Segment& segment = batch.segments[s];
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t r = batch.first_row + row + i;
      const char* codes = p.a.row_bytes_at(r) + segment.begin;
      choose_value<QF_FP8_E4M3, QF_FP8_E5M2>(
          p.a_format, [&](auto format) __attribute__((always_inline)) {
            for (int64_t k = 0; k < segment.count; k += S::kLanes) {
              S::store(values[i] + k, decode_fp8<S, format.value>(S::load_u8(codes + k, segment.count - k)));
            }
          });
      batch.scales_at(s)[row + i] = p.a_scale_at(r, segment.a_group);
    }
    auto* out = reinterpret_cast<float*>(batch.tile_at(segment, row, segment.count));
    interleave_rows<S>(values[0], kFloatSegment, rows, segment.count, out);
  }
}

// totals += the product of a tile and a segment of b, scaled.
template <class S, int MT, int NP>
__attribute__((noinline)) void add_float_tile(const Columns<S>* columns, const float* a, const float* b,
                                              int64_t b_stride, int64_t k, const float* a_scales,
                                              float* totals, int64_t panel_totals) {
  constexpr int64_t L = S::kLanes;
  Tile<FloatDot<S>, MT, NP> tile;
  tile.clear();
  const auto last = tile.add(a, b, b_stride, k, NothingAhead{});
  tile.finish(
      last, [&](auto& sum, auto m, auto v) __attribute__((always_inline)) {
        float* total = totals + v / 2 * panel_totals + (m * 2 + v % 2) * L;
        const auto scale = S::mul(S::load(columns[v / 2].scale + v % 2 * L), S::set1(a_scales[m]));
        S::store(total, S::fma(sum, scale, S::load(total)));
      });
}

template <class S, qf_format Format>
class FloatPanels {
 public:
  QF_INLINE FloatPanels(const Batch& batch, const Block& block)
      : batch_(batch), p_(batch.p), panels_(block.panels) {
    for (int64_t i = 0; i < panels_; ++i) columns_[i].init(p_, block.panel + i, 0);
  }

  QF_INLINE void begin(Chunk chunk) {
    chunk_ = chunk;
    __builtin_memset(totals_, 0, static_cast<size_t>(panels_ * (chunk.row1 - chunk.row0) * 2 * L * 4));
  }

  template <int NP>
  QF_INLINE void add(int64_t s, int64_t i, const int32_t* b) {
    const Segment& segment = batch_.segments[s];
    alignas(64) float decoded[NP * kFloatSegment * 2 * L];
    const int64_t stride = 4 * segment.words * 2 * L;
    for (int q = 0; q < NP; ++q) {
      const auto* codes = reinterpret_cast<const uint8_t*>(b + q * segment.words * 2 * L);
      decode_panel<false>(FloatDecoder<S, Format>(Format), codes, nullptr, 4 * segment.words,
                          decoded + q * stride);
      columns_[i + q].load_scales(p_, segment.b_group);
    }
    for (int64_t row = chunk_.row0; row < chunk_.row1; row += batch_.tile_rows) {
      const auto* a = reinterpret_cast<const float*>(batch_.tile_at(segment, row, segment.count));
      choose_rows<kMaxTileRows>(
          batch_.rows_of_tile(row), [&](auto mt) __attribute__((always_inline)) {
            add_float_tile<S, mt.value, NP>(columns_ + i, a, decoded, stride, segment.count,
                                            batch_.scales_at(s) + row, totals_ + at(i, row),
                                            at(1, chunk_.row0));
          });
    }
  }

  QF_INLINE void finish() {
    for (int64_t i = 0; i < panels_; ++i) {
      for (int64_t row = chunk_.row0; row < chunk_.row1; ++row) {
        store_row<S>(p_, columns_[i], batch_.first_row + row, totals_ + at(i, row));
      }
    }
  }

 private:
  static constexpr int64_t L = S::kLanes;

  QF_INLINE int64_t at(int64_t panel, int64_t row) const {
    return (panel * (chunk_.row1 - chunk_.row0) + row - chunk_.row0) * 2 * L;
  }

  const Batch& batch_;
  const Problem& p_;
  const int64_t panels_;
  Chunk chunk_ = {};
  Columns<S> columns_[kMaxGroup];
  alignas(64) float totals_[kMaxTotalRows * 2 * L];
};

template <class S>
__attribute__((noinline)) void multiply_float(const Batch& batch, const Block& block) {
  choose_value<QF_FP8_E4M3, QF_FP8_E5M2>(
      batch.p.b_format, [&](auto format) __attribute__((always_inline)) {
        multiply_segments<S, FloatPanels<S, format.value>, format.value>(batch, block);
      });
}

// ---- The call ----

template <class S>
QF_INLINE size_t float_workspace_bytes(const Problem& p) {
  return static_cast<size_t>(make_plan<S>(p, kFloatBlocking[p.b_order]).total_bytes);
}

template <class S>
QF_INLINE void launch_float(const Problem& p, const Launch& launch) {
  run_batches<S>(p, kFloatBlocking[p.b_order], launch, prepare_float_tile<S>, multiply_float<S>);
}

}  // namespace quantfuse::scaled_mm
