// SPDX-License-Identifier: Apache-2.0
//
// What the CPU kernels that work in panels of columns share: how a call is cut, its workspace, and the columns' terms.
//
// A call goes: prepare a batch of rows of a (as bytes or floats, interleaved by tiles of rows) -> every thread takes a
// range of (chunk of rows, panel of 2 * lanes columns of b). For each run of k ("segment") it packs the panel's part of b
// into 16 KB on its stack, which stays in L1, and multiplies it with every tile of rows of the chunk.
//
//   prepared a   [segment][tile][words or numbers of the segment][rows of the tile]: a chunk reads it as one stream
//   packed b     [words or numbers of the segment][2][lanes]: what cpu/tile.h multiplies
//
// b is packed again for every chunk, because a packed copy of b in memory would cost more traffic than b itself: 3 times
// its bytes (write, the read that a write implies, read), where packing from L2 costs 7% of a chunk's arithmetic.
#pragma once

#include "cpu/output.h"
#include "cpu/threads.h"
#include "cpu/tile.h"
#include "scaled_mm/scaled_mm.h"

namespace quantfuse::scaled_mm {

// A run of k with one scale of each row of a and each column of b.
struct Segment {
  int64_t begin, count;  // of k
  int64_t offset;        // in a prepared row: units (words of 4 bytes, or floats) before it
  int64_t a_group, b_group;
};

inline constexpr int64_t kMaxChunkRows = 192;                // totals of a chunk: 192 x 32 words, 24 KB
inline constexpr int64_t kMinChunkRows = 96;                 // fewer do not pay for packing a panel
inline constexpr int64_t kChunkBytes = 768 * 1024;           // of prepared a: what an L2 cache of 1.25 MB holds beside b
inline constexpr int64_t kPreparedBytes = 32 * 1024 * 1024;  // of prepared a in the workspace
inline constexpr int64_t kMinPartProducts = 1 << 20;         // multiplications worth a thread: a few microseconds

// What a kernel makes of a row of a: units of 4 bytes that hold `per_unit` numbers, in segments of at most `cap` of k.
struct Preparation {
  int64_t per_unit, cap;
};

// Calls body(const Segment&) for every segment in order of k. Returns the units of a prepared row.
template <class Body>
QF_INLINE int64_t for_each_segment(const Problem& p, const Preparation& preparation, const Body& body) {
  int64_t offset = 0;
  for (int64_t begin = 0; begin < p.k;) {
    const int64_t a_group = begin / p.a_block.cols, b_group = begin / p.b_block.cols;
    int64_t end = begin + preparation.cap;
    const int64_t a_end = (a_group + 1) * p.a_block.cols, b_end = (b_group + 1) * p.b_block.cols;
    end = end < a_end ? end : a_end;
    end = end < b_end ? end : b_end;
    end = end < p.k ? end : p.k;
    body(Segment{begin, end - begin, offset, a_group, b_group});
    offset += ceil_div(end - begin, preparation.per_unit);
    begin = end;
  }
  return offset;
}

// Sizes of a call and its workspace.
struct Plan {
  int64_t num_segments, row_units;
  int64_t num_panels;
  int64_t batch_rows;                              // rows prepared at a time
  int64_t segments, a, scales, sums, total_bytes;  // offsets in the workspace
};

template <class S>
QF_INLINE Plan make_plan(const Problem& p, const Preparation& preparation) {
  Plan plan = {};
  plan.row_units = for_each_segment(p, preparation, [&](const Segment&) { ++plan.num_segments; });
  plan.num_panels = ceil_div(p.n, 2 * S::kLanes);
  int64_t rows = kPreparedBytes / (plan.row_units * 4 + 1);
  rows = rows < kMaxChunkRows ? kMaxChunkRows : rows;
  plan.batch_rows = p.m < rows ? p.m : rows;

  int64_t offset = 0;
  auto reserve = [&](int64_t bytes) {
    const int64_t at = offset;
    offset = round_up(offset + bytes, 64);
    return at;
  };
  plan.segments = reserve(plan.num_segments * static_cast<int64_t>(sizeof(Segment)));
  plan.a = reserve(plan.batch_rows * plan.row_units * 4);
  plan.scales = reserve(plan.batch_rows * plan.num_segments * 4);
  plan.sums = reserve(plan.batch_rows * (plan.num_segments + 1) * 4);
  plan.total_bytes = offset;
  return plan;
}

// A batch of prepared rows.
struct Batch {
  const Problem& p;
  const Plan& plan;
  const Segment* segments;
  int32_t* a;      // prepared, words of 4 codes or bits of floats
  float* scales;   // [segment][row]: of a
  int32_t* sums;   // [segment][row]: of the codes of a, and [row] over all k behind them
  int64_t first_row, rows, tile_rows, chunk_rows;

  QF_INLINE int32_t* tile_at(const Segment& s, int64_t row, int64_t units) const {
    return a + s.offset * rows + row * units;
  }
  QF_INLINE float* scales_at(int64_t segment) const { return scales + segment * rows; }
  QF_INLINE int32_t* sums_at(int64_t segment) const { return sums + segment * rows; }
  QF_INLINE int32_t* row_sums() const { return sums_at(plan.num_segments); }
  QF_INLINE int64_t rows_of_tile(int64_t row) const { return rows - row < tile_rows ? rows - row : tile_rows; }
};

// Rows of a chunk: whole tiles, as many as fit the cache.
QF_INLINE int64_t chunk_rows_for(const Plan& plan, int64_t tile_rows) {
  int64_t rows = kChunkBytes / (plan.row_units * 4 + 1);
  rows = rows < kMinChunkRows ? kMinChunkRows : rows > kMaxChunkRows ? kMaxChunkRows : rows;
  return rows / tile_rows * tile_rows;
}

// Runs every batch: prepare(batch, row, rows of the tile), then multiply(batch, row0, row1, panel) for chunks of rows.
template <class S, class Prepare, class Multiply>
QF_INLINE void run_batches(const Problem& p, const Preparation& preparation, const Launch& launch,
                           const Prepare& prepare, const Multiply& multiply) {
  const Plan plan = make_plan<S>(p, preparation);
  char* workspace = static_cast<char*>(launch.workspace);
  auto* segments = reinterpret_cast<Segment*>(workspace + plan.segments);
  int64_t count = 0;
  for_each_segment(p, preparation, [&](const Segment& s) { segments[count++] = s; });

  for (int64_t first_row = 0; first_row < p.m; first_row += plan.batch_rows) {
    const int64_t rows = p.m - first_row < plan.batch_rows ? p.m - first_row : plan.batch_rows;
    const int64_t tile_rows = tile_rows_for<S>(rows), chunk_rows = chunk_rows_for(plan, tile_rows);
    const Batch batch = {p,
                         plan,
                         segments,
                         reinterpret_cast<int32_t*>(workspace + plan.a),
                         reinterpret_cast<float*>(workspace + plan.scales),
                         reinterpret_cast<int32_t*>(workspace + plan.sums),
                         first_row,
                         rows,
                         tile_rows,
                         chunk_rows};
    const int64_t tile_work = tile_rows * (p.k + 1);
    parallel_ranges(ceil_div(rows, tile_rows), ceil_div(kMinPartProducts / 16, tile_work),
                    [&](int64_t begin, int64_t end) {
                      for (int64_t tile = begin; tile < end; ++tile) prepare(batch, tile * tile_rows);
                    });
    const int64_t chunk_work = (rows < chunk_rows ? rows : chunk_rows) * 2 * S::kLanes * (p.k + 1);
    parallel_ranges(ceil_div(rows, chunk_rows) * plan.num_panels, ceil_div(kMinPartProducts, chunk_work),
                    [&](int64_t begin, int64_t end) {
                      for (int64_t item = begin; item < end; ++item) {
                        const int64_t row0 = item / plan.num_panels * chunk_rows;
                        const int64_t row1 = rows - row0 < chunk_rows ? rows : row0 + chunk_rows;
                        multiply(batch, row0, row1, item % plan.num_panels);
                      }
                    });
  }
}

// What each column of a panel brings to the epilogue. Columns beyond n have zeros.
template <class S>
struct Columns {
  static constexpr int64_t kCols = 2 * S::kLanes;
  alignas(64) float scale[kCols];
  alignas(64) float bias[kCols] = {};
  alignas(64) int32_t zero[kCols];  // b_zero plus the offset that made its codes unsigned
  int64_t scale_row[kCols];         // of b_scale
  int64_t col, count;

  QF_INLINE Columns(const Problem& p, int64_t panel, int32_t offset) {
    col = panel * kCols;
    count = p.n - col < kCols ? p.n - col : kCols;
    for (int64_t i = 0; i < kCols; ++i) {
      const int64_t at = i < count ? col + i : col;
      scale_row[i] = p.b_scale ? at / p.b_block.rows * p.b_scale.cols : 0;
      zero[i] = static_cast<int32_t>(static_cast<uint32_t>(p.b_zero_at(at)) + static_cast<uint32_t>(offset));
    }
    if (!p.bias) return;
    choose_float(p.bias.dtype, [&](auto type) __attribute__((always_inline)) {
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

}  // namespace quantfuse::scaled_mm
