// SPDX-License-Identifier: Apache-2.0
//
// One block of c: the loop over its chunks of rows, segments of k, and panels, and what the columns of a
// panel bring to the epilogue. The arithmetic is that of a Panels type (IntPanels, FloatPanels), which holds
// totals for a chunk of rows:
//
//   Panels(batch, block)   columns of every panel
//   begin(chunk)           clear the totals
//   add<NP>(s, i, b)       totals of NP panels from i on += every tile of the chunk times b, their packed
//                          segments s
//   finish()               write the chunk's rows of c
#pragma once

#include "scaled_mm/scaled_mm_pack.h"

namespace quantfuse::scaled_mm {

// What each column of a panel brings to the epilogue. Those beyond n repeat the first one and are never
// stored.
template <class S>
struct Columns {
  static constexpr int64_t kCols = 2 * S::kLanes;
  alignas(64) float scale[kCols];
  alignas(64) float bias[kCols];
  alignas(64) int32_t zero[kCols];  // b_zero plus the offset that made its codes unsigned
  int64_t scale_row[kCols];         // of b_scale
  int64_t col, count;

  QF_INLINE void init(const Problem& p, int64_t panel, int32_t offset) {
    col = panel * kCols;
    count = p.n - col < kCols ? p.n - col : kCols;
    for (int64_t i = 0; i < kCols; ++i) {
      const int64_t at = i < count ? col + i : col;
      scale_row[i] = p.b_scale ? at / p.b_block.rows * p.b_scale.cols : 0;
      zero[i] = static_cast<int32_t>(static_cast<uint32_t>(p.b_zero_at(at)) + static_cast<uint32_t>(offset));
    }
    S::store(bias, S::zero());
    S::store(bias + S::kLanes, S::zero());
    if (!p.bias) return;
    choose_float(
        p.bias.dtype, [&](auto type) __attribute__((always_inline)) {
          const auto* from = p.bias.as<const typename decltype(type)::type>() + col;
          S::store(bias, S::load(from, count));
          S::store(bias + S::kLanes, S::load(from + S::kLanes, count - S::kLanes));
        });
  }

  // Scales of one group along k.
  QF_INLINE void load_scales(const Problem& p, int64_t group) {
    const auto* from = static_cast<const float*>(p.b_scale.data) + group;
    for (int64_t i = 0; i < kCols; ++i) scale[i] = p.b_scale ? from[scale_row[i]] : 1.0f;
  }
};

// Row r of c, from finished sums without the bias.
template <class S>
QF_INLINE void store_row(const Problem& p, const Columns<S>& columns, int64_t r, const float* sums) {
  constexpr int64_t L = S::kLanes;
  alignas(64) float values[2 * L];
  for (int64_t i = 0; i < 2 * L; i += L) {
    S::store(values + i, p.bias ? S::add(S::load(sums + i), S::load(columns.bias + i)) : S::load(sums + i));
  }
  store_floats<S>(p.c, r, columns.col, values, columns.count);
}

// Rows [row0, row1) of a batch.
struct Chunk {
  int64_t row0, row1;
};

// Not inlined: the stack should hold the buffers of one format, not of all that a caller chooses from.
template <class S, class Panels, qf_format Format>
__attribute__((noinline)) void multiply_segments(const Batch& batch, const Block& block) {
  constexpr int64_t L = S::kLanes;
  alignas(64) int32_t packed[kMaxPackedLength / 4 * 2 * L];
  Panels panels(batch, block);
  for (int64_t row0 = block.row0; row0 < block.row1; row0 += batch.chunk_rows) {
    panels.begin({row0, row0 + batch.chunk_rows < block.row1 ? row0 + batch.chunk_rows : block.row1});
    for (int64_t s = 0; s < batch.plan.num_segments; ++s) {
      const Segment& segment = batch.segments[s];
      int32_t* b = block.kept ? block.kept + segment.word * block.panels * 2 * L : packed;
      if (!block.kept || row0 == block.row0) pack_segment<S, Format>(batch.p, block, segment, b);
      int64_t i = 0;
      for (; i + kMaxTilePanels<S> <= block.panels; i += kMaxTilePanels<S>) {
        panels.template add<kMaxTilePanels<S>>(s, i, b + i * segment.words * 2 * L);
      }
      if constexpr (kMaxTilePanels < S >> 1) {
        if (i < block.panels) panels.template add<1>(s, i, b + i * segment.words * 2 * L);
      }
    }
    panels.finish();
  }
}

}  // namespace quantfuse::scaled_mm
