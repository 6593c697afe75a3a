// SPDX-License-Identifier: Apache-2.0
//
// INT8 or INT4 codes in either operand, any scales, by products of tiles of bytes (cpu/tiles_amx.h). The
// sums and the epilogue are those of scaled_mm_int.h; packed panels of b are what tiles read.
//
//   prepared a   [segment][16 rows][64 k][row][64 bytes], zero where the last 64 k or the last rows are not
//                whole: a tile is one run of 1 KB
//   for each panel of a packed segment, 32 KB that stay in the L1 cache:
//     for each block of 32 rows: a, from the L2 cache, times b -> totals, or sums that are scaled and added
//     to them while the next block is multiplied
#include "cpu/tiles_amx.h"
#include "scaled_mm/scaled_mm_int.h"

namespace quantfuse::scaled_mm_int_amx {
using scaled_mm::Batch, scaled_mm::Block, scaled_mm::Problem, scaled_mm::Segment;
namespace {

using S = Amx;

constexpr int64_t kStepWords = ByteTiles::kPerStep / 4;
// By qf_order, as in scaled_mm_int.h.
constexpr scaled_mm::Blocking kBlocking[] = {{4, 1024, 4, 96, 192, kBlockRows, kStepWords},
                                             {4, 512, 8, 96, 96, kBlockRows, kStepWords}};
static_assert(kBlocking[0].max_rows % kBlockRows == 0 && kBlocking[1].max_rows % kBlockRows == 0);

// Prepared a from `row` on, the first of a tile.
QF_INLINE char* tiles_at(const Batch& batch, const Segment& segment, int64_t row) {
  return reinterpret_cast<char*>(batch.tile_at(segment, row, segment.words));
}

void prepare_block(const Batch& batch, int64_t row) {
  const int64_t count = batch.rows_of_tile(row);
  for (int64_t s = 0; s < batch.plan.num_segments && count < kBlockRows; ++s) {
    const Segment& segment = batch.segments[s];
    __builtin_memset(tiles_at(batch, segment, row), 0, static_cast<size_t>(kBlockRows * segment.words * 4));
  }
  for (int64_t done = 0; done < count; done += kMaxTileRows) {
    const int64_t rows = count - done < kMaxTileRows ? count - done : kMaxTileRows;
    scaled_mm::prepare_int_rows<S>(
        batch, row + done, rows,
        [&](const Segment& segment, const int32_t* words, int64_t stride) __attribute__((always_inline)) {
          for (int64_t i = done; i < done + rows; ++i, words += stride) {
            char* to = tiles_at(batch, segment, row + i / kTileRows * kTileRows) + i % kTileRows * 64;
            for (int64_t word = 0; word < segment.words; word += kStepWords, to += kTileBytes)
              S::store_i(to, S::load_i(words + word));
          }
        });
  }
}

class TilePanels : public scaled_mm::IntTotals<S, kBlockRows> {
 public:
  using IntTotals::IntTotals;

  template <int NP>
  QF_INLINE void add(int64_t s, int64_t i, const int32_t* b) {
    begin_segment(batch_.segments[s], i, NP, b);
    for (int64_t q = 0; q < NP; ++q) add_panel(s, i + q, b + q * batch_.segments[s].words * kPanelColumns);
  }

 private:
  __attribute__((noinline)) void add_panel(int64_t s, int64_t i, const int32_t* b) {
    const Segment& segment = batch_.segments[s];
    const int64_t steps = segment.words / kStepWords, col = columns_[i].col;
    const int64_t blocks = panel_rows_ / kBlockRows, waiting_rows = ceil_div(kBlockRows, steps);
    auto ahead = scaled_mm::b_ahead<S, 1>(batch_, s + 1, col);
    const int64_t lines = ceil_div(ahead.last, blocks * steps);
    alignas(64) int32_t sums[kBlockRows * kPanelColumns];
    int64_t waiting_row = chunk_.row0, waiting_end = chunk_.row0;  // rows that are in `sums`
    const auto add_waiting = [&](int64_t most) __attribute__((always_inline)) {
      for (; most > 0 && waiting_row < waiting_end; --most, ++waiting_row)
        add_scaled(s, i, waiting_row, sums + (waiting_row - chunk_.row0) % kBlockRows * kPanelColumns);
    };
    for (int64_t row = chunk_.row0; row < chunk_.row1; row += kBlockRows) {
      const int64_t rows = chunk_.row1 - row < kBlockRows ? chunk_.row1 - row : kBlockRows;
      if (s + 1 == batch_.plan.num_segments) fetch_c(row, col, col);
      const auto beside = [&](int64_t) __attribute__((always_inline)) {
        for (int64_t line = 0; line < lines; ++line) ahead.template fetch<1>(nullptr, 0);
        add_waiting(waiting_rows);
      };
      multiply_block<ByteTiles, 1>(rows, tiles_at(batch_, segment, row), kTileRows * segment.words * 4, b,
                                   steps, is_int_ && s > 0, is_int_ ? totals_.ints + at(i, row) : sums,
                                   beside);
      if (!is_int_) waiting_row = row, waiting_end = row + rows;
    }
    add_waiting(kBlockRows);
  }

  // totals of a row += its sums without zero points, scaled.
  QF_INLINE void add_scaled(int64_t s, int64_t i, int64_t row, const int32_t* sums) {
    const scaled_mm::IntColumns<S>& columns = columns_[i];
    float* total = totals_.floats + at(i, row);
    const int32_t a_zero = p_.a_zero_at(batch_.first_row + row), a_sum = batch_.sums_at(s)[row];
    const auto a_scale = S::set1(batch_.scales_at(s)[row]);
    for (int half = 0; half < 2; ++half, sums += L, total += L) {
      const auto sum = subtract_zeros<S>(p_, columns, half, a_zero, a_sum, S::load_i(sums));
      const auto scale = S::mul(S::load(columns.scale + half * L), a_scale);
      S::store(total, S::fma(S::to_float(sum), scale, S::load(total)));
    }
  }

  TileRegisters registers_;
};

__attribute__((noinline)) void multiply(const Batch& batch, const Block& block) {
  choose_value<QF_INT8, QF_INT4>(
      batch.p.b_format, [&](auto format) __attribute__((always_inline)) {
        scaled_mm::multiply_segments<S, TilePanels, format.value>(batch, block);
      });
}

Verdict accepts(const Problem& p) { return scaled_mm::accepts_int(p); }
size_t workspace_bytes(const Problem& p) {
  return static_cast<size_t>(scaled_mm::make_plan<S>(p, kBlocking[p.b_order]).total_bytes);
}
void launch(const Problem& p, const Launch& launch) {
  scaled_mm::run_batches<S>(p, kBlocking[p.b_order], launch, prepare_block, multiply);
}

}  // namespace

extern const Kernel<Problem> entry = {"scaled_mm_int_amx", Target::amx, accepts, workspace_bytes, launch};

}  // namespace quantfuse::scaled_mm_int_amx
