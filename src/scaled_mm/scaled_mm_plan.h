// SPDX-License-Identifier: Apache-2.0
//
// How the CPU kernels that work in panels of columns cut a call, and its workspace.
//
// A call goes: prepare a batch of rows of a (as bytes or floats, interleaved by tiles of rows) -> every
// thread takes a range of blocks: some rows by a group of panels of 2 * lanes columns of b. For each run of k
// ("segment") of a block, it packs the group's part of b, then multiplies each panel with every tile of rows
// (scaled_mm_block.h).
//
//   prepared a   [segment][tile][words or numbers of the segment][rows of the tile]: read as one stream
//   packed b     [words of the segment][2][lanes]: what cpu/tile.h multiplies, up to 128 KB that stay in L2
//
// A block is a group of panels by all rows (or by a part of them where there are too few groups for all
// threads), in chunks of rows whose prepared a stays in L2. Where there are several chunks, the packed group
// is kept for the next ones. Of b as [k, n], groups are wider: a row of b is a page of memory or more, and
// going from row to row costs a look-up of the page.
#pragma once

#include "cpu/output.h"
#include "cpu/threads.h"
#include "cpu/tile.h"
#include "scaled_mm/scaled_mm.h"

namespace quantfuse::scaled_mm {

// A run of k with one scale of each row of a and each column of b.
struct Segment {
  int64_t begin, count;  // of k
  int64_t words;         // of 4 k, the last one padded, and padded to whole steps
  int64_t unit, word;    // units of prepared a, and words of packed b, before it
  int64_t a_group, b_group;
};

// What a unit of 4 bytes of prepared a holds, and how the work is cut for one order of b.
struct Blocking {
  int64_t per_unit;            // numbers: 4 bytes or one float
  int64_t segment;             // longest, in k
  int64_t group;               // largest, in panels
  int64_t min_rows, max_rows;  // of a chunk
  int64_t tile_rows = 0;       // of a, padded to whole tiles; 0: equal tiles of at most kMaxTileRows
  int64_t step_units = 1;      // a segment is padded to a multiple of this

  QF_INLINE int64_t tile_rows_of(int64_t rows) const { return tile_rows ? tile_rows : tile_rows_for(rows); }
  QF_INLINE int64_t units(int64_t count) const { return round_up(ceil_div(count, per_unit), step_units); }
};

// What a block needs of its thread's stack: 128 KB for a packed segment, 96 KB for totals (half of it with
// AVX2).
inline constexpr int64_t kMaxGroup = 8;
inline constexpr int64_t kMaxPackedLength = 2 * 2048;  // group * segment
inline constexpr int64_t kMaxTotalRows = 8 * 96;       // group * max_rows
// Threads for which the workspace has room to keep a packed group. With more of them, groups are packed again
// for every chunk.
inline constexpr int64_t kMaxKeepers = 64;

inline constexpr int64_t kChunkBytes = 768 << 10;  // of prepared a: an L2 cache of 1.25 MB holds it beside b
inline constexpr int64_t kPreparedBytes = 32 << 20;   // of prepared a in the workspace
inline constexpr int64_t kMinPartProducts = 1 << 20;  // multiplications worth a thread: a few microseconds

// Calls body(const Segment&) for every segment in order of k. Returns what would be the next one.
template <class Body>
QF_INLINE Segment for_each_segment(const Problem& p, const Blocking& blocking, const Body& body) {
  Segment s = {};
  while (s.begin < p.k) {
    s.a_group = s.begin / p.a_block.cols, s.b_group = s.begin / p.b_block.cols;
    const int64_t a_end = (s.a_group + 1) * p.a_block.cols, b_end = (s.b_group + 1) * p.b_block.cols;
    int64_t end = s.begin + blocking.segment;
    end = end < a_end ? end : a_end;
    end = end < b_end ? end : b_end;
    end = end < p.k ? end : p.k;
    s.count = end - s.begin;
    s.words = round_up(ceil_div(s.count, 4), blocking.step_units);
    body(static_cast<const Segment&>(s));
    s.unit += blocking.units(s.count);
    s.word += s.words;
    s.begin = end;
  }
  return s;
}

// Sizes of a call and its workspace.
struct Plan {
  int64_t num_segments;
  int64_t row_units, row_words;  // of prepared a and packed b
  int64_t num_panels;
  int64_t batch_rows;                                    // rows prepared at a time
  int64_t tile_rows, chunk_rows;                         // of a full batch
  int64_t segments, a, scales, sums, kept, total_bytes;  // offsets in the workspace
  int64_t kept_words;                                    // of all kept groups

  QF_INLINE bool has_kept_groups() const { return batch_rows > chunk_rows; }
};

// Rows for which a batch has room.
QF_INLINE int64_t padded_rows(const Blocking& blocking, int64_t rows) {
  return blocking.tile_rows ? round_up(rows, blocking.tile_rows) : rows;
}

// Rows of a chunk: whole tiles, as many as fit the cache, and about the same number in every chunk.
QF_INLINE int64_t chunk_rows_for(const Plan& plan, const Blocking& blocking, int64_t rows,
                                 int64_t tile_rows) {
  int64_t most = kChunkBytes / (plan.row_units * 4 + 1);
  most = most < blocking.min_rows ? blocking.min_rows : most > blocking.max_rows ? blocking.max_rows : most;
  const int64_t tiles = ceil_div(rows, tile_rows), chunks = ceil_div(tiles, most / tile_rows);
  return ceil_div(tiles, chunks) * tile_rows;
}

// Words that a kept group of panels takes. Rows of b are packed by whole vectors of words, which reach beyond
// the last words of a short segment: into the next panel or segment, which come later, or behind the group.
template <class S>
QF_INLINE int64_t group_words_for(const Plan& plan, int64_t group) {
  return group * plan.row_words * 2 * S::kLanes + 4 * S::kLanes * S::kLanes;
}

template <class S>
QF_INLINE Plan make_plan(const Problem& p, const Blocking& blocking) {
  Plan plan = {};
  const Segment end = for_each_segment(p, blocking, [&](const Segment&) { ++plan.num_segments; });
  plan.row_units = end.unit, plan.row_words = end.word;
  plan.num_panels = ceil_div(p.n, 2 * S::kLanes);
  int64_t rows = kPreparedBytes / (plan.row_units * 4 + 1);
  rows = rows < blocking.max_rows ? blocking.max_rows : rows;
  plan.batch_rows = p.m < rows ? p.m : rows;
  plan.tile_rows = blocking.tile_rows_of(plan.batch_rows);
  plan.chunk_rows = chunk_rows_for(plan, blocking, plan.batch_rows, plan.tile_rows);

  int64_t offset = 0;
  auto reserve = [&](int64_t bytes) {
    const int64_t at = offset;
    offset = round_up(offset + bytes, 64);
    return at;
  };
  plan.segments = reserve(plan.num_segments * static_cast<int64_t>(sizeof(Segment)));
  plan.a = reserve(padded_rows(blocking, plan.batch_rows) * plan.row_units * 4);
  plan.scales = reserve(plan.batch_rows * plan.num_segments * 4);
  plan.sums = reserve(plan.batch_rows * (plan.num_segments + 1) * 4);
  const int64_t groups = ceil_div(plan.num_panels, blocking.group);
  plan.kept_words = (groups < kMaxKeepers ? groups : kMaxKeepers) * group_words_for<S>(plan, blocking.group);
  plan.kept = reserve(plan.has_kept_groups() ? plan.kept_words * 4 : 0);
  plan.total_bytes = offset;
  return plan;
}

// A batch of prepared rows.
struct Batch {
  const Problem& p;
  const Plan& plan;
  const Segment* segments;
  int32_t* a;     // prepared, words of 4 codes or bits of floats
  float* scales;  // [segment][row]: of a
  int32_t* sums;  // [segment][row]: of the codes of a, and [row] over all k behind them
  int64_t first_row = 0, rows = 0, padded_rows = 0, tile_rows = 0, chunk_rows = 0;

  // Prepared rows of the tile that begins at `row`, with `units` in the segment.
  QF_INLINE int32_t* tile_at(const Segment& s, int64_t row, int64_t units) const {
    return a + s.unit * padded_rows + row * units;
  }
  QF_INLINE float* scales_at(int64_t segment) const { return scales + segment * rows; }
  QF_INLINE int32_t* sums_at(int64_t segment) const { return sums + segment * rows; }
  QF_INLINE int32_t* row_sums() const { return sums_at(plan.num_segments); }
  QF_INLINE int64_t rows_of_tile(int64_t row) const {
    return rows - row < tile_rows ? rows - row : tile_rows;
  }
};

// Rows [row0, row1) of a batch by panels [panel, panel + panels).
struct Block {
  int64_t row0, row1;
  int64_t panel, panels;
  int32_t* kept;  // where the packed group is kept from chunk to chunk, or null
};

// Runs every batch: prepare(batch, first row of a tile) for all tiles, then multiply(batch, block) for all
// blocks.
template <class S, class Prepare, class Multiply>
QF_INLINE void run_batches(const Problem& p, const Blocking& blocking, const Launch& launch,
                           const Prepare& prepare, const Multiply& multiply) {
  const Plan plan = make_plan<S>(p, blocking);
  char* workspace = static_cast<char*>(launch.workspace);
  auto* segments = reinterpret_cast<Segment*>(workspace + plan.segments);
  int64_t count = 0;
  for_each_segment(p, blocking, [&](const Segment& s) { segments[count++] = s; });
  Batch batch = {p,
                 plan,
                 segments,
                 reinterpret_cast<int32_t*>(workspace + plan.a),
                 reinterpret_cast<float*>(workspace + plan.scales),
                 reinterpret_cast<int32_t*>(workspace + plan.sums)};
  auto* kept = reinterpret_cast<int32_t*>(workspace + plan.kept);

  // Groups: smaller ones where there would be too few for all threads.
  const int64_t threads = num_threads(), share = plan.num_panels / threads;
  const int64_t group = share < 1 ? 1 : share < blocking.group ? share : blocking.group;
  const int64_t groups = ceil_div(plan.num_panels, group);

  for (int64_t first_row = 0; first_row < p.m; first_row += plan.batch_rows) {
    const int64_t rows = p.m - first_row < plan.batch_rows ? p.m - first_row : plan.batch_rows;
    const int64_t tile_rows = blocking.tile_rows_of(rows);
    const int64_t chunk_rows = chunk_rows_for(plan, blocking, rows, tile_rows);
    batch.first_row = first_row, batch.rows = rows, batch.padded_rows = padded_rows(blocking, rows);
    batch.tile_rows = tile_rows, batch.chunk_rows = chunk_rows;
    parallel_ranges(ceil_div(rows, tile_rows), ceil_div(kMinPartProducts / 16, tile_rows * (p.k + 1)),
                    [&](int64_t begin, int64_t end) {
                      for (int64_t tile = begin; tile < end; ++tile) prepare(batch, tile * tile_rows);
                    });

    // A block has all rows, unless there are too few groups for all threads.
    const int64_t chunks = ceil_div(rows, chunk_rows), wanted = ceil_div(threads, groups);
    const int64_t parts = chunks < wanted ? chunks : wanted;
    const int64_t part_rows = ceil_div(chunks, parts) * chunk_rows;
    const int64_t block_products = (rows < part_rows ? rows : part_rows) * group * 2 * S::kLanes * (p.k + 1);
    const int64_t blocks = ceil_div(rows, part_rows) * groups,
                  grain = ceil_div(kMinPartProducts, block_products);
    const int64_t workers = threads < ceil_div(blocks, grain) ? threads : ceil_div(blocks, grain);
    const int64_t group_words = group_words_for<S>(plan, group);
    const bool is_kept = plan.has_kept_groups() && workers * group_words <= plan.kept_words;
    parallel_ranges(workers, 1, [&](int64_t begin, int64_t end) {
      for (int64_t worker = begin; worker < end; ++worker) {
        int32_t* to_keep = is_kept ? kept + worker * group_words : nullptr;
        for (int64_t i = blocks * worker / workers; i < blocks * (worker + 1) / workers; ++i) {
          const int64_t row0 = i / groups * part_rows, panel = i % groups * group;
          const int64_t row1 = rows - row0 < part_rows ? rows : row0 + part_rows;
          const int64_t panels = plan.num_panels - panel < group ? plan.num_panels - panel : group;
          multiply(batch, Block{row0, row1, panel, panels, to_keep});
        }
      }
    });
  }
}

}  // namespace quantfuse::scaled_mm
