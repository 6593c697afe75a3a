// SPDX-License-Identifier: Apache-2.0
//
// y = act(x w^T) in integer arithmetic: weights of INT4 or INT8 codes, x quantized to INT8 per row or per row
// and group.
//
//   codes, 4 k per lane (unsigned) --dot product with x broadcast (signed)--> int32, exact within a segment
//   of k
//     - offset * (sum of x's codes): the weights are stored with an offset of 8 or 128 to be unsigned
//     --convert, zero points, scale--> float32 totals
//
// INT8 panels are multiplied as they lie in memory. INT4 panels are spread to bytes in registers for m <= 4,
// and once per segment into L1 for more rows.
#pragma once

#include "linear/linear_panels.h"

namespace quantfuse::linear {

// Longest run of k in one int32 sum. 512 k of 255 * 128 stay below 2^24, so the conversion to float32 is
// exact.
inline constexpr int64_t kIntSegment = 512;

struct IntCall {
  const Problem& p;
  const Plan& plan;
  const Segment* segments;
  int64_t num_segments;
  const int32_t* x;     // prepared batch: words of 4 codes
  const float* scales;  // [row][act groups]
  const int32_t* sums;  // [row][segments]: of x's codes
  int64_t rows, tile_rows;
  Destination to;

  bool has_group_scales() const { return plan.act_groups > 1; }
};

QF_INLINE Verdict accepts_int(const Problem& p, int lanes) {
  // Where only shapes are known (explain), as pack() will decide.
  const Weight& w = p.weight;
  const PackedHeader* h = p.packed.header;
  const bool has_k_map = h ? h->has_k_map : w.num_groups > 1 && (w.g_idx || w.block.cols % 8 != 0);
  const bool has_float_zeros = h ? h->has_float_zeros : w.zero.dtype == DType::f32;
  return packed_for(p, lanes)
      .require(is_integer(p.weight.format), "the weight's codes are not integers")
      .require(p.act_format == QF_INT8, "the activations are not quantized to INT8")
      .require(!has_float_zeros, "the weight's zero points are not integers")
      .require(p.is_whole_row_act() || (p.act_group % 8 == 0 && !has_k_map),
               "activation groups must be multiples of 8 columns, over weight groups that are so too");
}

// ---- x: codes in the packed order, [tile][k_padded / 4][rows of the tile] words ----

// codes[i] = the INT8 code of x[r, k + i], within one activation group. Returns their sum.
template <class S>
QF_INLINE int32_t load_codes(const Problem& p, int64_t r, int64_t k, int64_t n, float scale, int8_t* codes) {
  int32_t sum = 0;
  if (p.x_scale) {
    const auto* row = reinterpret_cast<const int8_t*>(p.x.row_bytes_at(r)) + k;
    for (int64_t i = 0; i < n; ++i) sum += codes[i] = row[i];
    return sum;
  }
  choose_float(
      p.x.dtype, [&](auto type) __attribute__((always_inline)) {
        using T = typename decltype(type)::type;
        sum = row_encode<S, QF_INT8>(p.x.row<const T>(r) + k, n, 1.0f / scale, 0,
                                     reinterpret_cast<uint8_t*>(codes));
      });
  return sum;
}

template <class S>
QF_INLINE void prepare_int_row(const IntCall& c, int64_t row, int64_t lane, int64_t tile_rows, float* scales,
                               int32_t* sums, int8_t* ordered, int32_t* tile) {
  const Problem& p = c.p;
  const int32_t* k_map = p.packed.k_map();
  const float* row_scales = input_scales<S>(p, row, scales);
  if (row_scales != scales) {
    for (int64_t g = 0; g < c.plan.act_groups; ++g) scales[g] = row_scales[g];
  }
  if (k_map) load_codes<S>(p, row, 0, p.k, row_scales[0], ordered);  // one scale: accepts() sees to that
  for (int64_t s = 0; s < c.num_segments; ++s) {
    const Segment& segment = c.segments[s];
    alignas(64) int8_t codes[kIntSegment] = {};
    const int64_t length = segment.end - segment.begin;
    int32_t sum = 0;
    if (k_map) {
      for (int64_t i = 0; i < length; ++i) {
        const int32_t k = k_map[segment.begin + i];
        sum += codes[i] = k < 0 ? 0 : ordered[k];
      }
    } else {
      const int64_t count = segment.end < p.k ? length : p.k - segment.begin;
      sum = load_codes<S>(p, row, segment.begin, count, row_scales[segment.act_group], codes);
      for (int64_t i = count; i < length; ++i) codes[i] = 0;
    }
    sums[s] = sum;
    int32_t* out = tile + segment.begin / 4 * tile_rows + lane;
    for (int64_t i = 0; i < length / 4; ++i) {
      int32_t word;
      __builtin_memcpy(&word, codes + 4 * i, 4);
      out[i * tile_rows] = word;
    }
  }
}

// ---- Products ----

// totals += scale * (acc - (offset + zero) * sum of x) for one segment. `x_scales` where they differ between
// groups.
template <class S, int MT>
QF_INLINE void flush_int_tile(const IntCall& c, const typename S::Sums (&acc)[MT][2], int64_t row, int64_t s,
                              int32_t offset, const float* scales, const float* zeros, float* totals) {
  constexpr int64_t L = S::kLanes;
  const bool has_group_scales = c.has_group_scales();
  unrolled<MT>([&](auto m) __attribute__((always_inline)) {
    const int32_t sum = c.sums[(row + m) * c.plan.max_segments + s];
    const float x_scale =
        has_group_scales ? c.scales[(row + m) * c.plan.act_groups + c.segments[s].act_group] : 1.0f;
    unrolled<2>([&](auto v) __attribute__((always_inline)) {
      float* total = totals + (m * 2 + v) * L;
      auto t = S::to_float(S::sub(S::ints(acc[m][v]), S::set1(offset * sum)));
      if (zeros) t = S::fnma(S::load(zeros + v * L), S::set1(static_cast<float>(sum)), t);
      auto scale = S::load(scales + v * L);
      if (has_group_scales) scale = S::mul(scale, S::set1(x_scale));
      S::store(total, S::fma(t, scale, S::load(total)));
    });
  });
}

template <class S, int MT>
__attribute__((noinline)) void add_int_tile(const IntCall& c, const int32_t* x, const uint32_t* w,
                                            int64_t row, int64_t s, int32_t offset, const float* scales,
                                            const float* zeros, float* totals) {
  IntTile<S, MT> tile;
  tile.clear();
  tile.add(x, w, (c.segments[s].end - c.segments[s].begin) / 4);
  flush_int_tile<S, MT>(c, tile.acc, row, s, offset, scales, zeros, totals);
}

// As add_int_tile, from nibbles: low ones are the first 4 k of a word, high ones the next 4.
template <class S, int MT>
__attribute__((noinline)) void add_nibble_tile(const IntCall& c, const int32_t* x, const uint8_t* w,
                                               int64_t row, int64_t s, const float* scales,
                                               const float* zeros, float* totals) {
  constexpr int64_t L = S::kLanes;
  IntTile<S, MT> tile;
  tile.clear();
  const auto low = S::set1(0x0f0f0f0f);
  const int64_t words = (c.segments[s].end - c.segments[s].begin) / 8;
  for (int64_t i = 0; i < words; ++i, x += 2 * MT, w += 8 * L) {
    __builtin_prefetch(w + 2048);
    if constexpr (L == 16) __builtin_prefetch(w + 2048 + 64);
    unrolled<2>([&](auto v) __attribute__((always_inline)) {
      const auto word = S::load_i(w + 4 * L * v);
      const auto first = S::and_(word, low), second = S::and_(S::template shr<4>(word), low);
      unrolled<MT>([&](auto m) __attribute__((always_inline)) {
        tile.acc[m][v] = S::dot4(tile.acc[m][v], first, S::set1(x[m]));
        tile.acc[m][v] = S::dot4(tile.acc[m][v], second, S::set1(x[MT + m]));
      });
    });
  }
  flush_int_tile<S, MT>(c, tile.acc, row, s, 8, scales, zeros, totals);
}

template <class S>
__attribute__((noinline)) void multiply_int(const IntCall& c, int64_t begin, int64_t end) {
  constexpr int64_t L = S::kLanes;
  alignas(64) uint32_t spread[kIntSegment / 4 * 2 * L];
  alignas(64) float totals[kMaxChunkRows * 2 * L];
  const bool is_4bit = c.p.weight.format == QF_INT4, is_direct = is_4bit && c.rows <= kDirectRows;
  const int32_t offset = is_4bit ? 8 : 128;
  const int64_t chunk_rows = chunk_rows_for(c.tile_rows, c.plan.k_padded, 1);

  for (int64_t row0 = 0; row0 < c.rows; row0 += chunk_rows) {
    const int64_t row1 = row0 + chunk_rows < c.rows ? row0 + chunk_rows : c.rows;
    const int64_t tiles = ceil_div(row1 - row0, c.tile_rows);
    for (int64_t panel = begin; panel < end; ++panel) {
      const uint8_t* codes = c.p.packed.codes(panel);
      const float *scales = c.p.packed.scales(panel), *zeros = c.p.packed.zeros(panel);
      __builtin_memset(totals, 0, static_cast<size_t>((row1 - row0) * 2 * L) * sizeof(float));
      for (int64_t s = 0; s < c.num_segments; ++s) {
        const Segment& segment = c.segments[s];
        const int64_t group = segment.group * 2 * L;
        const float* zero = zeros ? zeros + group : nullptr;
        const uint8_t* run = codes + segment.begin * 2 * L / (is_4bit ? 2 : 1);
        const auto* words = reinterpret_cast<const uint32_t*>(run);
        if (is_4bit && !is_direct) {
          spread_nibbles<S>(run, segment.end - segment.begin, spread);
          words = spread;
        }
        NextCodes next(run, (segment.end - segment.begin) * 2 * L / (is_4bit ? 2 : 1), tiles);
        for (int64_t row = row0; row < row1; row += c.tile_rows) {
          if (!is_direct) next.fetch_share();
          const int64_t rows = row + c.tile_rows < row1 ? c.tile_rows : row1 - row;
          const int32_t* x = c.x + row * (c.plan.k_padded / 4) + segment.begin / 4 * rows;
          float* total = totals + (row - row0) * 2 * L;
          choose_tile_rows<S>(
              rows, [&](auto mt) __attribute__((always_inline)) {
                if constexpr (mt.value <= kDirectRows) {
                  if (is_direct)
                    return add_nibble_tile<S, mt.value>(c, x, run, row, s, scales + group, zero, total);
                }
                add_int_tile<S, mt.value>(c, x, words, row, s, offset, scales + group, zero, total);
              });
        }
      }
      for (int64_t row = row0; row < row1; ++row) {
        const float x_scale = c.plan.act_groups == 1 ? c.scales[row] : 1.0f;  // there is none where k is 0
        finish_row<S>(c.p, c.to, c.to.first_row + row, panel, totals + (row - row0) * 2 * L, x_scale);
      }
    }
  }
}

// ---- The call ----

template <class S>
QF_INLINE void launch_int(const Problem& p, const Launch& launch) {
  const Plan plan = make_plan(p, 1, kIntSegment);
  char* workspace = static_cast<char*>(launch.workspace);
  auto* segments = reinterpret_cast<Segment*>(workspace + plan.segments);
  const int64_t act_group = p.is_whole_row_act() ? plan.k_padded + 1 : p.act_group;
  const int64_t num_segments = cut_segments(p, kIntSegment, act_group, segments);
  auto* x = reinterpret_cast<int32_t*>(workspace + plan.x);
  auto* scales = reinterpret_cast<float*>(workspace + plan.x_scale);
  auto* sums = reinterpret_cast<int32_t*>(workspace + plan.x_sums);
  auto* ordered = reinterpret_cast<int8_t*>(workspace + plan.x_row);

  for (int64_t first_row = 0; first_row < p.m; first_row += plan.batch_rows) {
    const int64_t rows = p.m - first_row < plan.batch_rows ? p.m - first_row : plan.batch_rows;
    const int64_t tile_rows = rows <= kDirectRows ? rows : tile_rows_for<S>(rows);
    const Destination to = {p.out.is_quantized() && !p.out.is_static,
                            reinterpret_cast<float*>(workspace + plan.result), first_row};
    const IntCall call = {p, plan, segments, num_segments, x, scales, sums, rows, tile_rows, to};
    parallel_ranges(rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t first = row / tile_rows * tile_rows,
                      count = rows - first < tile_rows ? rows - first : tile_rows;
        prepare_int_row<S>(call, first_row + row, row - first, count, scales + row * plan.act_groups,
                           sums + row * plan.max_segments, ordered + row * round_up(p.k, 16),
                           x + first * (plan.k_padded / 4));
      }
    });
    parallel_ranges(plan.num_panels, 1,
                    [&](int64_t begin, int64_t end) { multiply_int<S>(call, begin, end); });
    finish_batch<S>(p, to, rows);
  }
}

}  // namespace quantfuse::linear
