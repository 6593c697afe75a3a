// SPDX-License-Identifier: Apache-2.0
//
// What the kernels on tiles of AMX share (cpu/tiles_amx.h): packed panels are what tiles read, so that the
// packed weight of linear_panels.h serves them too. A product of tiles takes as long as two or four of
// vectors, and does 16 times as much; what is done beside it counts.
//
//   for each panel, for each segment of k:
//     w: as it lies in memory, or decoded, up to 32 KB: it stays in the L1 cache
//     for each block of 32 rows (at the end 16): x, from the L2 cache, times w -> sums, 4 KB.
//       Meanwhile the sums of the block before are scaled and added to its totals
//   epilogue of the panel
//
// Prepared x is [segment][16 rows][step][part][row][64 bytes], zero where a segment's last step or the last
// rows are not whole: a tile of it is one run of 1 KB.
#pragma once

#include "cpu/tiles_amx.h"
#include "linear/linear_panels.h"

namespace quantfuse::linear {

// Of prepared x, beside which a panel of w and the totals have room in an L2 cache of 2 MB: what has to come
// from further away at every product would hold it up.
inline constexpr int64_t kTileChunkBytes = 1280 * 1024;

inline constexpr int64_t kMostFewRows = 4;
inline constexpr const char* kFewRows = "a few rows take the time that reading the weight takes";

// Bytes of a panel's segment as tiles read it.
template <class Tiles>
constexpr int64_t tile_bytes_of_panel(int64_t k) {
  return round_up(k, Tiles::kPerStep) / Tiles::kPerWord * kPanelColumns * 4;
}

// Where the words of rows [row, row + 16) of a segment are, and how far apart steps are.
template <class Tiles, int kParts>
struct XTiles {
  static constexpr int64_t kStepBytes = kParts * kTileBytes;
  char* first;
  int64_t row_tiles;

  QF_INLINE XTiles(const void* x, int64_t rows)
      : first(static_cast<char*>(const_cast<void*>(x))), row_tiles(ceil_div(rows, kTileRows)) {}
  QF_INLINE static int64_t steps(const Segment& s) { return ceil_div(s.end - s.begin, Tiles::kPerStep); }
  QF_INLINE char* at(const Segment& s, int64_t row) const {
    return first + (s.x_begin / Tiles::kPerStep * row_tiles + row / kTileRows * steps(s)) * kStepBytes;
  }
};

// What a batch does on tiles is the work of its kernel:
//
//   Work::Tiles, kParts         of its products
//   Work::kMaxSegment           of k
//   keeps_sums()                whether the sums of all segments are one, and totals are these sums
//   begin_totals(row, rows, totals)  then what they begin with
//   columns(panel, segment, decoded)  w as tiles read it: there, or where it lies
//   code_bytes(k)               of a panel
//   add(panel, s, row, rows, sums, totals)  totals += scaled sums, or, of the first segment, = them
//   finish(row, rows, panel, panels, totals)  the epilogue
//
// Sums and totals are rows of 32.

// Sums of a block that are to be added to its totals.
struct WaitingSums {
  int64_t s, row, rows, done;
};

// Rows [row0, row1) of a batch by panels [begin, end).
template <class Work>
__attribute__((noinline)) void multiply_tiles(const Work& work, int64_t row0, int64_t row1, int64_t begin,
                                              int64_t end) {
  using Tiles = typename Work::Tiles;
  constexpr int kParts = Work::kParts;
  alignas(64) char decoded[tile_bytes_of_panel<Tiles>(Work::kMaxSegment)];
  alignas(64) float totals[round_up(kMaxChunkRows, kTileRows) * kPanelColumns];
  alignas(64) typename Tiles::Sum sums[kBlockRows * kPanelColumns];
  const auto& c = work.batch;
  const int64_t rows = row1 - row0, blocks = ceil_div(rows, kBlockRows);
  const XTiles<Tiles, kParts> x(c.x, c.rows);
  const bool keeps_sums = work.keeps_sums();
  const TileRegisters registers;

  for (int64_t panel = begin; panel < end; ++panel) {
    if (keeps_sums) {
      work.begin_totals(row0, rows, totals);
    } else if (c.num_segments == 0) {
      __builtin_memset(totals, 0, static_cast<size_t>(rows * kPanelColumns) * sizeof(float));
    }
    WaitingSums waiting = {};
    const auto add_waiting = [&](int64_t most) __attribute__((always_inline)) {
      const int64_t left = waiting.rows - waiting.done, count = left < most ? left : most;
      if (count == 0) return;
      const int64_t at = waiting.row - row0 + waiting.done;
      work.add(panel, waiting.s, waiting.row + waiting.done, count, sums + waiting.done * kPanelColumns,
               totals + at * kPanelColumns);
      waiting.done += count;
    };
    for (int64_t s = 0; s < c.num_segments; ++s) {
      const Segment& segment = c.segments[s];
      const bool is_last = s + 1 == c.num_segments;
      const int64_t steps = x.steps(segment), x_tile = steps * x.kStepBytes;
      const void* w = work.columns(panel, segment, decoded);
      // The codes of the next segment, or of the next panel's first, lie behind these. A share at every step.
      const Segment& next = c.segments[is_last ? 0 : s + 1];
      const uint8_t* ahead = work.codes_at(panel, segment) + work.code_bytes(segment.end - segment.begin);
      const int64_t lines = ceil_div(work.code_bytes(next.end - next.begin), 64 * blocks * steps);
      const int64_t waiting_rows = ceil_div(kBlockRows, steps);

      for (int64_t row = row0; row < row1; row += kBlockRows) {
        const int64_t count = row + kBlockRows < row1 ? kBlockRows : row1 - row;
        float* const totals_of_block = totals + (row - row0) * kPanelColumns;
        if (is_last) fetch_y<typename Work::S>(c.p, c.to, row, count, panel, 1);
        const auto beside = [&](int64_t) __attribute__((always_inline)) {
          for (int64_t i = 0; i < lines; ++i, ahead += 64) __builtin_prefetch(ahead, 0, 2);
          add_waiting(waiting_rows);
        };
        multiply_block<Tiles, kParts>(count, x.at(segment, row), x_tile, w, steps, keeps_sums,
                                      keeps_sums ? static_cast<void*>(totals_of_block) : sums, beside);
        if (!keeps_sums) waiting = {s, row, count, 0};
      }
    }
    add_waiting(kBlockRows);
    work.finish(row0, rows, panel, 1, totals);
  }
}

// All rows of a batch by all panels.
template <class Work>
QF_INLINE void multiply_batch_on_tiles(const Work& work) {
  const auto& c = work.batch;
  const int64_t row_bytes = c.plan.k_padded * Work::kParts * 4 / Work::Tiles::kPerWord;
  int64_t most = kTileChunkBytes / (row_bytes + 1);
  most = most < kBlockRows ? kBlockRows : most > kMaxChunkRows ? kMaxChunkRows : most;
  divide_batch<typename Work::S, 1>(c.plan, c.rows, even_chunk_rows(c.rows, most, kBlockRows),
                                    [&](int64_t row0, int64_t row1, int64_t first, int64_t last) {
                                      multiply_tiles(work, row0, row1, first, last);
                                    });
}

}  // namespace quantfuse::linear
