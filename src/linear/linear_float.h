// SPDX-License-Identifier: Apache-2.0
//
// y = act(x w^T) in float32 arithmetic on the true activations, for every weight format: codes are decoded to
// float32 on the way from memory to the multiplier. For weights of integers times INT8 activations,
// linear_int.h is faster.
//
//   m <= 4   packed codes --load, decode--> registers --fma--> totals   (the traffic is the codes)
//   m > 4    packed codes --load, decode--> 16 KB in L1 --fma with tiles of 12 (6) rows--> totals in L1
//
// Either way a sum is one fma chain per 128 k, times the scale, added to the total: the same bits for every
// m.
#pragma once

#include "linear/linear_panels.h"

namespace quantfuse::linear {

inline constexpr int64_t kFloatSegment = 128;

template <class S>
struct FloatCall {
  const Problem& p;
  const Plan& plan;
  const Segment* segments;
  int64_t num_segments;
  const float* x;  // prepared batch
  int64_t rows, tile_rows;
  Destination to;
};

// ---- x: floats in the packed order, [tile][k_padded][rows of the tile] ----

inline constexpr int64_t kInputRun = 256;

// v[i] = x[r, k + i] for a run of at most kInputRun columns, within one activation group where x is
// quantized: then the numbers are what their codes mean.
template <class S>
QF_INLINE void load_input(const Problem& p, int64_t r, int64_t k, int64_t n, const float* scales, float* v) {
  if (p.x_scale) {
    const float scale = scales[k / p.act_group];
    for (int64_t i = 0; i < n; ++i) v[i] = decode_at(p.act_format, p.x.row_bytes_at(r), k + i) * scale;
    return;
  }
  choose_float(
      p.x.dtype, [&](auto type) __attribute__((always_inline)) {
        using T = typename decltype(type)::type;
        const T* row = p.x.row<const T>(r) + k;
        for (int64_t i = 0; i < n; i += S::kLanes) S::store(v + i, S::load(row + i, n - i), n - i);
      });
  if (p.has_act_quant()) {
    const float scale = scales[k / p.act_group];
    uint8_t codes[kInputRun];
    encode_floats<S>(p.act_format, v, n, 1.0f / scale, codes);
    for (int64_t i = 0; i < n; ++i) v[i] = decode_at(p.act_format, codes, i) * scale;
  }
}

template <class S>
QF_INLINE void prepare_float_tile(const Problem& p, const Plan& plan, int64_t first_row, int64_t rows,
                                  float* scales, float* ordered, float* tile) {
  const int32_t* k_map = p.packed.k_map();
  for (int64_t r = 0; r < rows; ++r) {
    const float* row_scales = p.has_act_quant() ? input_scales<S>(p, first_row + r, scales) : nullptr;
    float run[kInputRun];
    for (int64_t k = 0; k < p.k;) {
      int64_t end = k + kInputRun < p.k ? k + kInputRun : p.k;
      if (p.has_act_quant()) {
        const int64_t group_end = (k / p.act_group + 1) * p.act_group;
        end = end < group_end ? end : group_end;
      }
      if (k_map) {
        load_input<S>(p, first_row + r, k, end - k, row_scales, ordered + k);
      } else {
        load_input<S>(p, first_row + r, k, end - k, row_scales, run);
        for (int64_t i = k; i < end; ++i) tile[i * rows + r] = run[i - k];
      }
      k = end;
    }
    if (k_map) {
      for (int64_t i = 0; i < plan.k_padded; ++i)
        tile[i * rows + r] = k_map[i] < 0 ? 0.0f : ordered[k_map[i]];
    } else {
      for (int64_t i = p.k; i < plan.k_padded; ++i) tile[i * rows + r] = 0.0f;
    }
  }
}

// ---- m <= kDirectRows ----

// NP panels at once: with one row there must be 8 independent sums in flight to keep two fma units of latency
// 4 busy.
template <class S, int MT>
inline constexpr int kDirectPanels = S::kRegisters == 32 ? (MT == 1   ? 4
                                                            : MT == 2 ? 2
                                                                      : 1)
                                                         : (MT == 1 ? 2 : 1);

template <class S, qf_format Format, bool HasZeros, int MT, int NP>
__attribute__((noinline)) void direct_panels(const FloatCall<S>& c, int64_t panel) {
  using F = typename S::F;
  using Decoder = PanelDecoder<S, Format>;
  constexpr int64_t L = S::kLanes;
  constexpr int64_t kWordBytes = 8 * L;  // of a panel: two vectors of words
  const Decoder decoder;
  const uint8_t* codes[NP];
  for (int q = 0; q < NP; ++q) codes[q] = c.p.packed.codes(panel + q);

  alignas(64) float totals[NP][MT][2 * L] = {};
  for (int64_t s = 0; s < c.num_segments; ++s) {
    const Segment& segment = c.segments[s];
    F acc[NP][2][MT], zero[NP][2];
    unrolled<NP * 2>([&](auto i) __attribute__((always_inline)) {
      constexpr int q = i / 2, v = i % 2;
      if constexpr (HasZeros) zero[q][v] = S::load(c.p.packed.zeros(panel + q) + (segment.group * 2 + v) * L);
      unrolled<MT>([&](auto m) __attribute__((always_inline)) { acc[q][v][m] = S::zero(); });
    });
    const float* x = c.x + static_cast<int64_t>(segment.begin) * MT;
    const int64_t first = segment.begin / Decoder::kPerWord, last = segment.end / Decoder::kPerWord;
    for (int64_t word = first; word < last; ++word, x += MT * Decoder::kPerWord) {
      typename S::I words[NP][2];
      unrolled<NP>([&](auto q) __attribute__((always_inline)) {
        const uint8_t* at = codes[q] + word * kWordBytes;
        words[q][0] = S::load_i(at);
        words[q][1] = S::load_i(at + 4 * L);
        __builtin_prefetch(at + 2048);
        if constexpr (L == 16) __builtin_prefetch(at + 2048 + 64);
      });
      unrolled<Decoder::kPerWord>([&](auto position) __attribute__((always_inline)) {
        constexpr int kPosition = position.value;
        unrolled<NP * 2>([&](auto i) __attribute__((always_inline)) {
          constexpr int q = i / 2, v = i % 2;
          F w = decoder.template value<kPosition>(words[q][v]);
          if constexpr (HasZeros) w = S::sub(w, zero[q][v]);
          unrolled<MT>([&](auto m) __attribute__((always_inline)) {
            acc[q][v][m] = S::fma(S::set1(x[kPosition * MT + m]), w, acc[q][v][m]);
          });
        });
      });
    }
    unrolled<NP * 2>([&](auto i) __attribute__((always_inline)) {
      constexpr int q = i / 2, v = i % 2;
      const auto scale = S::load(c.p.packed.scales(panel + q) + (segment.group * 2 + v) * L);
      unrolled<MT>([&](auto m) __attribute__((always_inline)) {
        float* total = totals[q][m] + v * L;
        S::store(total, S::fma(acc[q][v][m], scale, S::load(total)));
      });
    });
  }
  for (int q = 0; q < NP; ++q) {
    for (int m = 0; m < MT; ++m) finish_row<S>(c.p, c.to, c.to.first_row + m, panel + q, totals[q][m], 1.0f);
  }
}

template <class S, qf_format Format, bool HasZeros>
QF_INLINE void multiply_direct(const FloatCall<S>& c, int64_t begin, int64_t end) {
  auto run = [&](auto rows) __attribute__((always_inline)) {
    constexpr int MT = rows.value, NP = kDirectPanels<S, MT>;
    int64_t panel = begin;
    for (; panel + NP <= end; panel += NP) direct_panels<S, Format, HasZeros, MT, NP>(c, panel);
    if constexpr (NP > 1) {
      for (; panel < end; ++panel) direct_panels<S, Format, HasZeros, MT, 1>(c, panel);
    }
  };
  switch (c.rows) {
    case 1: return run(std::integral_constant<int, 1>{});
    case 2: return run(std::integral_constant<int, 2>{});
    case 3: return run(std::integral_constant<int, 3>{});
    case 4: return run(std::integral_constant<int, 4>{});
  }
}

// ---- m > kDirectRows ----

template <class S, int MT>
__attribute__((noinline)) void add_float_tile(const float* x, const float* w, int64_t k, const float* scales,
                                              float* totals) {
  FloatTile<S, MT> tile;
  tile.clear();
  tile.add(x, w, k);
  const auto scale0 = S::load(scales), scale1 = S::load(scales + S::kLanes);
  unrolled<MT>([&](auto m) __attribute__((always_inline)) {
    float* total = totals + m * 2 * S::kLanes;
    S::store(total, S::fma(tile.acc[m][0], scale0, S::load(total)));
    S::store(total + S::kLanes, S::fma(tile.acc[m][1], scale1, S::load(total + S::kLanes)));
  });
}

template <class S, qf_format Format>
__attribute__((noinline)) void multiply_staged(const FloatCall<S>& c, int64_t begin, int64_t end) {
  constexpr int64_t L = S::kLanes;
  alignas(64) float decoded[kFloatSegment * 2 * L];
  alignas(64) float totals[kMaxChunkRows * 2 * L];
  const int64_t chunk_rows = chunk_rows_for(c.tile_rows, c.plan.k_padded, sizeof(float));
  constexpr int64_t kPerWord = PanelDecoder<S, Format>::kPerWord;

  for (int64_t row0 = 0; row0 < c.rows; row0 += chunk_rows) {
    const int64_t row1 = row0 + chunk_rows < c.rows ? row0 + chunk_rows : c.rows;
    const int64_t tiles = ceil_div(row1 - row0, c.tile_rows);
    for (int64_t panel = begin; panel < end; ++panel) {
      const uint8_t* codes = c.p.packed.codes(panel);
      const float* scales = c.p.packed.scales(panel);
      const float* zeros = c.p.packed.zeros(panel);
      __builtin_memset(totals, 0, static_cast<size_t>((row1 - row0) * 2 * L) * sizeof(float));
      for (int64_t s = 0; s < c.num_segments; ++s) {
        const Segment& segment = c.segments[s];
        const int64_t k = segment.end - segment.begin, group = segment.group * 2 * L;
        decode_panel<S, Format>(codes + segment.begin / kPerWord * 8 * L, zeros ? zeros + group : nullptr, k,
                                decoded);
        NextCodes next(codes + segment.begin / kPerWord * 8 * L, k / kPerWord * 8 * L, tiles);
        for (int64_t row = row0; row < row1; row += c.tile_rows) {
          next.fetch_share();
          const int64_t rows = row + c.tile_rows < row1 ? c.tile_rows : row1 - row;
          const float* x = c.x + row * c.plan.k_padded + segment.begin * rows;
          choose_tile_rows<S>(
              rows, [&](auto mt) __attribute__((always_inline)) {
                add_float_tile<S, mt.value>(x, decoded, k, scales + group, totals + (row - row0) * 2 * L);
              });
        }
      }
      for (int64_t row = row0; row < row1; ++row) {
        finish_row<S>(c.p, c.to, c.to.first_row + row, panel, totals + (row - row0) * 2 * L, 1.0f);
      }
    }
  }
}

// ---- The call ----

template <class S, qf_format Format>
QF_INLINE void multiply_float(const FloatCall<S>& c) {
  parallel_ranges(c.plan.num_panels, 1, [&](int64_t begin, int64_t end) {
    if (c.rows > kDirectRows) return multiply_staged<S, Format>(c, begin, end);
    if constexpr (is_integer(Format)) {
      if (c.p.packed.header->has_zeros) return multiply_direct<S, Format, true>(c, begin, end);
    }
    multiply_direct<S, Format, false>(c, begin, end);
  });
}

template <class S>
QF_INLINE void launch_float(const Problem& p, const Launch& launch) {
  const Plan plan = make_plan(p, sizeof(float), kFloatSegment);
  char* workspace = static_cast<char*>(launch.workspace);
  auto* segments = reinterpret_cast<Segment*>(workspace + plan.segments);
  const int64_t num_segments = cut_segments(p, kFloatSegment, plan.k_padded + 1, segments);
  auto* x = reinterpret_cast<float*>(workspace + plan.x);
  auto* x_scales = reinterpret_cast<float*>(workspace + plan.x_scale);
  auto* x_rows = reinterpret_cast<float*>(workspace + plan.x_row);

  for (int64_t first_row = 0; first_row < p.m; first_row += plan.batch_rows) {
    const int64_t rows = p.m - first_row < plan.batch_rows ? p.m - first_row : plan.batch_rows;
    const int64_t tile_rows = rows <= kDirectRows ? rows : tile_rows_for<S>(rows);
    const Destination to = {p.out.is_quantized() && !p.out.is_static,
                            reinterpret_cast<float*>(workspace + plan.result), first_row};
    parallel_ranges(ceil_div(rows, tile_rows), 1, [&](int64_t begin, int64_t end) {
      for (int64_t tile = begin; tile < end; ++tile) {
        const int64_t row = tile * tile_rows, count = rows - row < tile_rows ? rows - row : tile_rows;
        prepare_float_tile<S>(p, plan, first_row + row, count, x_scales + row * plan.act_groups,
                              x_rows + row * round_up(p.k, 16), x + row * plan.k_padded);
      }
    });
    const FloatCall<S> call = {p, plan, segments, num_segments, x, rows, tile_rows, to};
    choose_value<QF_INT4, QF_FP4_E2M1, QF_INT8, QF_FP8_E4M3, QF_FP8_E5M2>(
        p.weight.format, [&](auto format)
                             __attribute__((always_inline)) { multiply_float<S, format.value>(call); });
    finish_batch<S>(p, to, rows);
  }
}

}  // namespace quantfuse::linear
