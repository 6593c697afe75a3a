// SPDX-License-Identifier: Apache-2.0
//
// dx[m,k] = sum_n dy[m,n] * w[n,k] on either vector type S. Vectors run along k, as the codes of a row of w
// do.
//
// Up to 4 rows of dy: w is streamed once, row by row, and added into accumulators in the L1 cache:
//   codes --> 2 vectors of w in registers --fma by dy--> accumulators [columns] --> dx
// More rows: a block of w is decoded once into a cache and serves every row of dy, in register tiles:
//   codes --> block of w [panel][n][2][lanes] --tile of dy [n][MT]--> accumulators [panel][m][2][lanes] -->
//   dx
//
// Threads take columns, and rows as well where the columns are few. Every number of dx is one chain of fma in
// order of n, whatever the path, the thread and the vector length: the same bits for a row in any batch.
#pragma once

#include "cpu/output.h"
#include "cpu/threads.h"
#include "cpu/tile.h"
#include "linear_backward/linear_backward.h"
#include "linear_backward/weight_columns.h"

namespace quantfuse::linear_backward {

// Rows of dy that are streamed past; with more of them the accumulators cost more than the decoding.
inline constexpr int64_t kMaxStreamRows = 4;
QF_INLINE constexpr int64_t stream_rows(int64_t m) {
  return m == 3 ? 4 : m;
}  // there are streams of 1, 2 and 4
// Rows of w that a stream adds per load of its accumulators, and their number: 16 KB, half of an L1 cache.
inline constexpr int64_t kRowsAtOnce = 4;
inline constexpr int64_t kStreamSums = 4096;
// Columns are divided by the cache line of 4-bit codes. A tile's slice has up to four such units, because
// rows of w lie in different pages: a longer stretch of each row costs fewer misses of the TLB.
inline constexpr int64_t kUnitColumns = 128;
inline constexpr int64_t kMaxSliceUnits = 4;
// Rows of a decoded block. A panel of it takes 8 KB and stays in an L1 cache while the tiles of dy go by.
inline constexpr int64_t kBlockRows = 64;
// Rows of dy that share a decoded block: decoding is then a twentieth of the work.
inline constexpr int64_t kMaxBatch = 192;
inline constexpr int64_t kMaxThreads = 64;

// The workspace: dy of one batch, rearranged for the tiles, then what the threads need for the columns in
// their hands. Its size does not depend on the number of threads, which may change between the query and the
// call.
template <class S>
struct Plan {
  bool is_stream;
  int64_t batch;  // rows of dy at a time
  int64_t units;  // of columns
  int64_t max_threads;
  int64_t packed_dy, block, sums, groups, converted;  // floats

  QF_INLINE explicit Plan(const Problem& p) {
    is_stream = p.m <= kMaxStreamRows;
    const int64_t num_batches = ceil_div(p.m, kMaxBatch);
    batch = is_stream ? stream_rows(p.m) : round_up(ceil_div(p.m, num_batches), kMaxTileRows);
    units = ceil_div(p.k, kUnitColumns);
    const int64_t parts = is_stream ? units : units * ceil_div(batch, kMaxTileRows);
    max_threads = parts < kMaxThreads ? parts : kMaxThreads;
    // In the hands of all threads: a stream's share is rounded up to units, a tile's is one unit at least.
    const int64_t tile_units = units > max_threads ? units : max_threads;
    const int64_t columns = kUnitColumns * (is_stream ? units + max_threads : tile_units);
    packed_dy = is_stream ? 0 : round_up(batch * p.n, 16);
    block = is_stream ? 0 : columns * kBlockRows;
    sums = columns * batch;
    groups = columns / kPanelColumns<S> * (kPanelColumns<S> + 1);
    converted =
        max_threads * converted_of_thread(p, is_stream ? kStreamSums / batch : kMaxSliceUnits * kUnitColumns);
  }

  QF_INLINE int64_t bytes() const { return 4 * (packed_dy + block + sums + groups + converted); }
  QF_INLINE int64_t converted_of_thread(const Problem& p, int64_t columns) const {
    return round_up((is_stream ? kRowsAtOnce : 1) * 2 * max_groups(p.weight, columns), 16);
  }
};

struct Scratch {
  float* block;
  float* sums;
  int32_t* groups;
  float* converted;
};

// The scratch of a thread that holds at most `columns` columns at a time.
template <class S>
QF_INLINE Scratch scratch_at(const Problem& p, const Plan<S>& plan, void* workspace, int64_t thread,
                             int64_t columns) {
  float* blocks = static_cast<float*>(workspace) + plan.packed_dy;
  float* sums = blocks + plan.block;
  float* groups = sums + plan.sums;
  float* converted = groups + plan.groups;
  int32_t* groups_of_thread =
      reinterpret_cast<int32_t*>(groups) + thread * (columns / kPanelColumns<S> * (kPanelColumns<S> + 1));
  return {blocks + thread * columns * kBlockRows, sums + thread * columns * plan.batch, groups_of_thread,
          converted + thread * plan.converted_of_thread(p, columns)};
}

// Two vectors of finished sums --> the columns of dx.
template <class S, qf_format Format>
QF_INLINE void store_panel(const Problem& p, int64_t row, int64_t col, int64_t count, const float* vectors) {
  alignas(64) float columns[kPanelColumns<S>];
  WeightColumns<S, Format>::unpack_panel(vectors, columns);
  store_floats<S>(p.dx, row, col, columns, count);
}

// ---- Up to 4 rows ----

template <class S, qf_format Format, int M, int Rows>
QF_INLINE void add_rows(const WeightColumns<S, Format>& w, const WeightRow* rows, const float* dy,
                        float* all_sums) {
  constexpr int64_t kLanes = S::kLanes;
  w.each_panel([&](int64_t panel, auto is_whole) __attribute__((always_inline)) {
    float* sums = all_sums + panel * 2 * M * kLanes;
    typename S::F acc[M][2];
    for (int m = 0; m < M; ++m) {
      acc[m][0] = S::load(sums + 2 * m * kLanes), acc[m][1] = S::load(sums + (2 * m + 1) * kLanes);
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      typename S::F w0, w1;
      w.decode(rows[r], panel, is_whole, w0, w1);
      for (int m = 0; m < M; ++m) {
        const auto factor = S::set1(dy[m * kBlockRows + r]);
        acc[m][0] = S::fma(factor, w0, acc[m][0]), acc[m][1] = S::fma(factor, w1, acc[m][1]);
      }
    }
    for (int m = 0; m < M; ++m) {
      S::store(sums + 2 * m * kLanes, acc[m][0]), S::store(sums + (2 * m + 1) * kLanes, acc[m][1]);
    }
  });
}

// dy[m][n .. n + count) as floats, M rows of kBlockRows, zero where there is no row.
template <class S, int M>
QF_INLINE void load_dy(const Problem& p, int64_t n, int64_t count, float* out) {
  choose_float(
      p.dy.dtype, [&](auto type) __attribute__((always_inline)) {
        for (int64_t m = 0; m < M; ++m) {
          for (int64_t i = 0; i < count; i += S::kLanes) {
            const auto* from = p.dy.row<typename decltype(type)::type>(m < p.m ? m : 0) + n + i;
            S::store(out + m * kBlockRows + i, m < p.m ? S::load(from, count - i) : S::zero());
          }
        }
      });
}

template <class S, qf_format Format, int M>
void stream_columns(const Problem& p, int64_t begin, int64_t end, const Scratch& scratch) {
  WeightColumns<S, Format> w(p.weight, begin, end, scratch.groups, scratch.converted);
  const int64_t panel_sums = 2 * M * S::kLanes;
  for (int64_t i = 0; i < w.num_panels() * panel_sums; i += S::kLanes) S::store(scratch.sums + i, S::zero());

  alignas(64) float dy[M * kBlockRows];
  WeightRow rows[kRowsAtOnce];
  for (int64_t n0 = 0; n0 < p.n; n0 += kBlockRows) {
    const int64_t count = p.n - n0 < kBlockRows ? p.n - n0 : kBlockRows;
    load_dy<S, M>(p, n0, count, dy);
    int64_t n = 0;
    for (; n + kRowsAtOnce <= count; n += kRowsAtOnce) {
      for (int r = 0; r < kRowsAtOnce; ++r) rows[r] = w.row(n0 + n + r, r);
      add_rows<S, Format, M, kRowsAtOnce>(w, rows, dy + n, scratch.sums);
    }
    for (; n < count; ++n) {
      rows[0] = w.row(n0 + n);
      add_rows<S, Format, M, 1>(w, rows, dy + n, scratch.sums);
    }
  }
  for (int64_t panel = 0; panel < w.num_panels(); ++panel) {
    for (int64_t m = 0; m < p.m; ++m) {
      const float* vectors = scratch.sums + panel * panel_sums + 2 * m * S::kLanes;
      store_panel<S, Format>(p, m, begin + panel * kPanelColumns<S>, w.panel_columns(panel), vectors);
    }
  }
}

template <class S, qf_format Format, int M>
void stream(const Problem& p, const Plan<S>& plan, void* workspace) {
  // Below some 32k numbers of w a thread is done before another one has woken up.
  const int64_t grain = ceil_div(32768, (p.n + 1) * kUnitColumns);
  int64_t threads = ceil_div(plan.units, grain);
  if (threads > num_threads()) threads = num_threads();
  if (threads > plan.max_threads) threads = plan.max_threads;
  int64_t columns = ceil_div(plan.units, threads) * kUnitColumns;
  if (columns > kStreamSums / M) columns = kStreamSums / M;
  parallel_ranges(threads, 1, [&](int64_t first, int64_t last) {
    const Scratch scratch = scratch_at(p, plan, workspace, first, columns);
    int64_t end = plan.units * last / threads * kUnitColumns;
    if (end > p.k) end = p.k;
    for (int64_t col = plan.units * first / threads * kUnitColumns; col < end; col += columns) {
      stream_columns<S, Format, M>(p, col, end - col < columns ? end : col + columns, scratch);
    }
  });
}

// ---- More rows ----

// Rows [m0, m0 + rows) of dy, cut into tiles: [tile][n][rows of the tile].
template <class S>
struct Batch {
  int64_t m0, rows, tile_rows, num_tiles;
  float* packed;

  QF_INLINE Batch(int64_t begin, int64_t end, float* packed_dy)
      : m0(begin), rows(end - begin), packed(packed_dy) {
    tile_rows = tile_rows_for(rows);
    num_tiles = ceil_div(rows, tile_rows);
  }
  QF_INLINE int64_t rows_of(int64_t tile) const {
    return rows - tile * tile_rows < tile_rows ? rows - tile * tile_rows : tile_rows;
  }
  QF_INLINE float* tile(int64_t tile, int64_t n) const { return packed + tile * tile_rows * n; }
};

template <class S>
void pack_tile(const Problem& p, const Batch<S>& batch, int64_t tile) {
  const int64_t rows = batch.rows_of(tile);
  float* out = batch.tile(tile, p.n);
  choose_float(
      p.dy.dtype, [&](auto type) __attribute__((always_inline)) {
        using T = typename decltype(type)::type;
        for (int64_t n = 0; n < p.n; n += S::kLanes) {
          const int64_t count = p.n - n < S::kLanes ? p.n - n : S::kLanes;
          alignas(64) float values[kMaxTileRows][S::kLanes];
          for (int64_t r = 0; r < rows; ++r) {
            S::store(values[r], S::load(p.dy.row<T>(batch.m0 + tile * batch.tile_rows + r) + n, count));
          }
          interleave_rows<S>(values[0], S::kLanes, rows, count, out + n * rows);
        }
      });
}

// Rows [n0, n0 + count) of w --> block [panel][count][2][lanes].
template <class S, qf_format Format>
QF_INLINE void decode_block(WeightColumns<S, Format>& w, int64_t n0, int64_t count, float* block) {
  constexpr int64_t kAhead = 16;  // rows of codes on their way from memory: their lines are far apart
  for (int64_t r = 0; r < count; ++r) {
    w.prefetch(n0 + r + kAhead);
    const WeightRow row = w.row(n0 + r);
    w.each_panel([&](int64_t panel, auto is_whole) __attribute__((always_inline)) {
      typename S::F w0, w1;
      w.decode(row, panel, is_whole, w0, w1);
      float* out = block + (panel * count + r) * 2 * S::kLanes;
      S::store(out, w0), S::store(out + S::kLanes, w1);
    });
  }
}

// sums [row][2][lanes] of NP panels += the product of a tile of dy and these panels of the block.
template <class S, int MT, int NP>
__attribute__((noinline)) void add_tile(const float* dy, const float* w, int64_t count, float* sums,
                                        int64_t panel_sums) {
  constexpr int64_t L = S::kLanes;
  Tile<FloatDot<S>, MT, NP> tile;
  tile.each([&](auto& sum, auto m, auto v) __attribute__((always_inline)) {
    sum = S::load(sums + v / 2 * panel_sums + (m * 2 + v % 2) * L);
  });
  const auto last = tile.add(dy, w, count * 2 * L, count, NothingAhead{});
  tile.finish(
      last, [&](auto& sum, auto m, auto v) __attribute__((always_inline)) {
        S::store(sums + v / 2 * panel_sums + (m * 2 + v % 2) * L, sum);
      });
}

// Columns [begin, end) of tiles [first, last) of a batch.
template <class S, qf_format Format>
void multiply_slice(const Problem& p, const Batch<S>& batch, int64_t first, int64_t last, int64_t begin,
                    int64_t end, const Scratch& scratch) {
  WeightColumns<S, Format> w(p.weight, begin, end, scratch.groups, scratch.converted);
  const int64_t row_sums = 2 * S::kLanes, panel_sums = batch.rows * row_sums;
  for (int64_t i = 0; i < w.num_panels() * panel_sums; i += S::kLanes) S::store(scratch.sums + i, S::zero());

  for (int64_t n0 = 0; n0 < p.n; n0 += kBlockRows) {
    const int64_t count = p.n - n0 < kBlockRows ? p.n - n0 : kBlockRows;
    decode_block(w, n0, count, scratch.block);
    for (int64_t panel = 0; panel < w.num_panels(); panel += kMaxTilePanels<S>) {
      const float* block = scratch.block + panel * count * 2 * S::kLanes;
      for (int64_t tile = first; tile < last; ++tile) {
        float* sums = scratch.sums + panel * panel_sums + tile * batch.tile_rows * row_sums;
        choose_rows<kMaxTileRows>(
            batch.rows_of(tile), [&](auto rows) __attribute__((always_inline)) {
              const float* dy = batch.tile(tile, p.n) + n0 * rows.value;
              if (w.num_panels() - panel >= kMaxTilePanels<S>) {
                add_tile<S, rows.value, kMaxTilePanels<S>>(dy, block, count, sums, panel_sums);
              } else {
                add_tile<S, rows.value, 1>(dy, block, count, sums, panel_sums);
              }
            });
      }
    }
  }
  const int64_t last_row = last == batch.num_tiles ? batch.rows : last * batch.tile_rows;
  for (int64_t row = first * batch.tile_rows; row < last_row; ++row) {
    for (int64_t panel = 0; panel < w.num_panels(); ++panel) {
      store_panel<S, Format>(p, batch.m0 + row, begin + panel * kPanelColumns<S>, w.panel_columns(panel),
                             scratch.sums + panel * panel_sums + row * row_sums);
    }
  }
}

template <class S, qf_format Format>
void multiply(const Problem& p, const Plan<S>& plan, void* workspace) {
  for (int64_t m0 = 0; m0 < p.m; m0 += plan.batch) {
    const Batch<S> batch(m0, p.m - m0 < plan.batch ? p.m : m0 + plan.batch, static_cast<float*>(workspace));
    parallel_ranges(batch.num_tiles, ceil_div(4096, p.n + 1), [&](int64_t first, int64_t last) {
      for (int64_t tile = first; tile < last; ++tile) pack_tile<S>(p, batch, tile);
    });

    // Rows are divided too where there are fewer units than threads, at the price of decoding a slice more
    // than once.
    const int64_t threads = num_threads() < plan.max_threads ? num_threads() : plan.max_threads;
    int64_t slice_units = plan.units / threads;
    slice_units = slice_units < 1 ? 1 : slice_units > kMaxSliceUnits ? kMaxSliceUnits : slice_units;
    const int64_t columns = slice_units * kUnitColumns, slices = ceil_div(plan.units, slice_units);
    int64_t splits = ceil_div(threads, slices);
    if (splits > batch.num_tiles) splits = batch.num_tiles;
    const int64_t parts = slices * splits;
    parallel_ranges(threads, 1, [&](int64_t first, int64_t last) {
      const Scratch scratch = scratch_at(p, plan, workspace, first, columns);
      for (int64_t part = parts * first / threads; part < parts * last / threads; ++part) {
        const int64_t begin = part / splits * columns, split = part % splits;
        multiply_slice<S, Format>(p, batch, batch.num_tiles * split / splits,
                                  batch.num_tiles * (split + 1) / splits, begin,
                                  p.k - begin < columns ? p.k : begin + columns, scratch);
      }
    });
  }
}

template <class S>
size_t workspace_bytes(const Problem& p) {
  return static_cast<size_t>(Plan<S>(p).bytes());
}

template <class S>
void launch(const Problem& p, const Launch& launch) {
  const Plan<S> plan(p);
  choose_value<QF_INT8, QF_INT4, QF_FP8_E4M3, QF_FP8_E5M2, QF_FP4_E2M1>(
      code_path(p.weight.format), [&](auto format) __attribute__((always_inline)) {
        switch (stream_rows(p.m)) {
          case 1: return stream<S, format.value, 1>(p, plan, launch.workspace);
          case 2: return stream<S, format.value, 2>(p, plan, launch.workspace);
          case 4: return stream<S, format.value, 4>(p, plan, launch.workspace);
          default: return multiply<S, format.value>(p, plan, launch.workspace);
        }
      });
}

}  // namespace quantfuse::linear_backward
