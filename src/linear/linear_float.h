// SPDX-License-Identifier: Apache-2.0
//
// y = act(x w^T) in floating-point arithmetic on the true activations, for every weight format: codes are
// decoded to numbers on the way from memory to the multiplier. For weights of integers times INT8
// activations, linear_int.h is faster.
//
//   m <= 4   packed codes --load, decode--> registers --multiply--> totals   (the traffic is the codes)
//   m > 4    the same for a tile of 6 rows, and what is decoded --> 32 KB or less in L1 --multiply with
//            further tiles--> totals
//
// Either way a sum is one chain per 128 k, times the scale, added to the total: the same bits for every m.
//
// The numbers are those of an Arithmetic: float32 here, pairs of BF16 in linear_bf16_avx512_bf16.cc.
//
//   S, Dot                             vectors, and what a step of k multiplies (cpu/tile.h)
//   Decoder<Format>                    of packed codes (cpu/panel_codes.h)
//   prepare_tile(...)                  rows of x as words
//   kScalesSums                        whether words of quantized activations are their codes, and the scales
//                                      are for the sums; else they are what the codes mean
#pragma once

#include "linear/linear_panels.h"

namespace quantfuse::linear {

inline constexpr int64_t kFloatSegment = 128;

// ---- x: floats in the packed order ----

inline constexpr int64_t kInputRun = 256;

// v[i] = x[r, k + i] for a run of at most kInputRun columns, within one activation group where x is
// quantized: then the numbers are what their codes mean, or, for a scale that comes later, the codes' own.
template <class S, bool kIsScaled>
QF_INLINE void load_input(const Problem& p, int64_t r, int64_t k, int64_t n, const float* scales, float* v) {
  if (!p.x_scale) {
    choose_float(
        p.x.dtype, [&](auto type) __attribute__((always_inline)) {
          using T = typename decltype(type)::type;
          const T* row = p.x.row<const T>(r) + k;
          int64_t i = 0;
          for (; i + S::kLanes <= n; i += S::kLanes) S::store(v + i, S::load(row + i));
          if (i < n) S::store(v + i, S::load(row + i, n - i), n - i);
        });
  }
  if (!p.has_act_quant()) return;
  const float scale = scales[k / p.act_group];
  uint8_t encoded[kInputRun];
  if (!p.x_scale) encode_floats<S>(p.act_format, v, n, 1.0f / scale, encoded);
  const uint8_t* codes = p.x_scale ? reinterpret_cast<const uint8_t*>(p.x.row_bytes_at(r)) + k : encoded;
  choose_value<QF_INT8, QF_FP8_E4M3, QF_FP8_E5M2>(
      p.act_format, [&](auto format) __attribute__((always_inline)) {
        for (int64_t i = 0; i < n; i += S::kLanes) {
          const auto code =
              format.value == QF_INT8 ? S::load_i8(codes + i, n - i) : S::load_u8(codes + i, n - i);
          const auto value = decode_vector<S, format.value>(code);
          S::store(v + i, kIsScaled ? S::mul(value, S::set1(scale)) : value, n - i);
        }
      });
}

// v[i] = x[r, begin + i] up to `end`.
template <class S, bool kIsScaled = true>
QF_INLINE void load_inputs(const Problem& p, int64_t r, int64_t begin, int64_t end, const float* scales,
                           float* v) {
  for (int64_t k = begin; k < end;) {
    int64_t run_end = k + kInputRun < end ? k + kInputRun : end;
    if (p.has_act_quant()) {
      const int64_t group_end = (k / p.act_group + 1) * p.act_group;
      run_end = run_end < group_end ? run_end : group_end;
    }
    load_input<S, kIsScaled>(p, r, k, run_end - k, scales, v + k - begin);
    k = run_end;
  }
}

// Rows [row, row + rows) of a batch, a tile. `ordered` has room for them where columns are reordered.
template <class S>
QF_INLINE void prepare_float_tile(const Batch<float>& c, int64_t row, int64_t rows, float* scales,
                                  float* ordered, float* x) {
  const Problem& p = c.p;
  const int32_t* k_map = p.packed.k_map();
  const int64_t r0 = c.to.first_row + row, ordered_stride = round_up(p.k, 16);
  const float* row_scales[kMaxTileRows] = {};
  for (int64_t i = 0; i < rows; ++i) {
    if (p.has_act_quant()) row_scales[i] = input_scales<S>(p, r0 + i, scales + i * c.plan.act_groups);
    if (k_map) load_inputs<S>(p, r0 + i, 0, p.k, row_scales[i], ordered + i * ordered_stride);
  }
  for (int64_t s = 0; s < c.num_segments; ++s) {
    const int64_t begin = c.segments[s].begin, end = c.segments[s].end;
    alignas(64) float runs[kMaxTileRows][kFloatSegment];
    for (int64_t i = 0; i < rows; ++i) {
      if (k_map) {
        const float* from = ordered + i * ordered_stride;
        for (int64_t k = begin; k < end; ++k) runs[i][k - begin] = k_map[k] < 0 ? 0.0f : from[k_map[k]];
      } else {
        const int64_t last = end < p.k ? end : p.k;
        load_inputs<S>(p, r0 + i, begin, last, row_scales[i], runs[i]);
        for (int64_t k = last; k < end; ++k) runs[i][k - begin] = 0.0f;
      }
    }
    interleave_rows<S>(runs[0], kFloatSegment, rows, end - begin, x + begin * c.rows + row * (end - begin));
  }
}

template <class Simd>
struct FloatArithmetic {
  using S = Simd;
  using Dot = FloatDot<S>;
  static constexpr bool kScalesSums = false;

  template <qf_format Format>
  using Decoder = FloatDecoder<S, Format>;

  QF_INLINE static void prepare_tile(const Batch<float>& c, int64_t row, int64_t rows, float* scales,
                                     void* ordered, float* x) {
    prepare_float_tile<S>(c, row, rows, scales, static_cast<float*>(ordered), x);
  }
};

template <class S, class Word>
__attribute__((noinline, noclone)) void finish_floats(const Batch<Word>& c, int64_t row, int64_t rows,
                                                      int64_t panel, int64_t panels, const float* totals) {
  const int64_t stride = totals_stride<S>(panels);
  finish_rows<S>(
      c.p, c.to, c.to.first_row + row, rows, panel, panels, [&](int64_t r) __attribute__((always_inline)) {
        const float* of_row = totals + r * stride;
        return [of_row](int64_t i) __attribute__((always_inline)) { return S::load(of_row + i); };
      });
}

// ---- Few rows: codes go from memory to registers ----

template <class S>
inline constexpr int kDirectFloatRows = S::kRegisters == 32 ? 6 : 4;

// NP panels at once: with one row there must be 8 independent sums in flight to keep two fma units of latency
// 4 busy. Dot products of BF16 take longer: with 3 and 4 rows 12 and 16 sums take up to a fifth less time
// than 6 and 8.
template <class S, int MT>
inline constexpr int kDirectPanels = S::kRegisters == 32 ? (MT == 1 ? 4 : 2) : (MT == 1 ? 2 : 1);

template <class A, qf_format Format, bool HasZeros, int MT, int NP>
__attribute__((noinline)) void direct_panels(const Batch<typename A::Dot::Word>& c, int64_t panel) {
  using S = typename A::S;
  using Dot = typename A::Dot;
  using Decoder = typename A::template Decoder<Format>;
  constexpr int64_t L = S::kLanes;
  constexpr int64_t kWordBytes = 8 * L;  // of a panel: two vectors of words
  const Decoder decoder(c.p.weight.format);
  const uint8_t* codes[NP];
  for (int q = 0; q < NP; ++q) codes[q] = c.p.packed.codes(panel + q);
  constexpr int64_t kAhead = kBytesAhead * (MT > 4 ? 2 : 1) / NP;

  alignas(64) float totals[MT][NP][2 * L] = {};
  for (int64_t s = 0; s < c.num_segments; ++s) {
    const Segment& segment = c.segments[s];
    typename S::F zero[NP][2];
    Tile<Dot, MT, NP> tile;
    tile.clear();
    unrolled<NP * 2>([&](auto i) __attribute__((always_inline)) {
      constexpr int q = i / 2, v = i % 2;
      if constexpr (HasZeros) zero[q][v] = S::load(c.p.packed.zeros(panel + q) + (segment.group * 2 + v) * L);
    });
    const auto* x = c.x + segment.begin / Dot::kPerWord * MT;
    const int64_t first = segment.begin / Decoder::kPerWord, last = segment.end / Decoder::kPerWord;
    for (int64_t word = first; word < last; ++word, x += MT * Decoder::kSteps) {
      typename S::I words[NP][2];
      unrolled<NP>([&](auto q) __attribute__((always_inline)) {
        const uint8_t* at = codes[q] + word * kWordBytes;
        words[q][0] = S::load_i(at);
        words[q][1] = S::load_i(at + 4 * L);
        __builtin_prefetch(at + kAhead, 0, 2);
        if constexpr (L == 16) __builtin_prefetch(at + kAhead + 64, 0, 2);
      });
      unrolled<Decoder::kSteps>([&](auto step) __attribute__((always_inline)) {
        constexpr int kStep = step.value;
        unrolled<NP * 2>([&](auto i) __attribute__((always_inline)) {
          constexpr int q = i / 2, v = i % 2;
          const auto w = decoder.template step<kStep, HasZeros>(words[q][v], zero[q][v]);
          unrolled<MT>([&](auto m) __attribute__((always_inline)) {
            tile.acc[m][i] = Dot::add(tile.acc[m][i], w, S::set1(x[kStep * MT + m]));
          });
        });
      });
    }
    const PanelScales<S, NP> scales(c.p.packed, panel, segment.group);
    const float* const x_scales = A::kScalesSums ? c.x_scales_at(s, 0) : nullptr;
    tile.each([&](auto& sum, auto m, auto v) __attribute__((always_inline)) {
      float* total = totals[m][0] + v * L;
      if (x_scales) sum = S::mul(sum, S::set1(x_scales[m * c.plan.act_groups]));
      S::store(total, S::fma(sum, scales.at(v), S::load(total)));
    });
  }
  finish_floats<S>(c, 0, MT, panel, NP, totals[0][0]);
}

template <class A, qf_format Format, bool HasZeros>
QF_INLINE void multiply_direct(const Batch<typename A::Dot::Word>& c, int64_t begin, int64_t end) {
  auto run = [&](auto rows) __attribute__((always_inline)) {
    constexpr int MT = rows.value, NP = kDirectPanels<typename A::S, MT>;
    int64_t panel = begin;
    for (; panel + NP <= end; panel += NP) direct_panels<A, Format, HasZeros, MT, NP>(c, panel);
    if constexpr (NP > 1) {
      for (; panel < end; ++panel) direct_panels<A, Format, HasZeros, MT, 1>(c, panel);
    }
  };
  choose_rows<kDirectFloatRows<typename A::S>>(c.rows, run);
}

// ---- More rows ----

// totals += sum * scale for every sum of a tile.
template <class A, int MT, int NP>
QF_INLINE void flush_tile(const Batch<typename A::Dot::Word>& c, const PanelScales<typename A::S, NP>& scales,
                          const TilesOfWork<typename A::Dot::Word>& t,
                          const LastSteps<typename A::Dot::Word>& last, Tile<typename A::Dot, MT, NP>& tile) {
  using S = typename A::S;
  const float* const before = t.totals_before(kNoTotals<S>);
  float* const totals = t.totals;
  const auto flush = [&](auto has_x_scales, const float* x_scales) __attribute__((always_inline)) {
    tile.finish(
        last, [&](auto& sum, auto m, auto v) __attribute__((always_inline)) {
          const int64_t at = m * totals_stride<S>(NP) + v * S::kLanes;
          if constexpr (has_x_scales.value) sum = S::mul(sum, S::set1(x_scales[m * c.plan.act_groups]));
          S::store(totals + at, S::fma(sum, scales.at(v), S::load(before + at)));
        });
  };
  if constexpr (A::kScalesSums) {
    if (c.x_scales) return flush(std::true_type{}, c.x_scales_at(t.s, t.row));
  }
  flush(std::false_type{}, nullptr);
}

template <class A, int MT, int NP>
__attribute__((noinline)) void add_tiles(const Batch<typename A::Dot::Word>& c,
                                         TilesOfWork<typename A::Dot::Word> t) {
  const PanelScales<typename A::S, NP> scales(c.p.packed, t.panel, c.segments[t.s].group);
  for (int64_t i = 0; i < t.count; ++i, t.next(MT, totals_stride<typename A::S>(NP))) {
    Tile<typename A::Dot, MT, NP> tile;
    tile.clear();
    flush_tile<A>(c, scales, t, tile.add(t.x, t.w, t.w_stride, t.steps, t.ahead), tile);
  }
}

template <class A, qf_format Format, bool HasZeros>
struct FloatWork {
  using Dot = typename A::Dot;
  using S = typename A::S;
  using Word = typename Dot::Word;
  static constexpr int64_t kRowsOfToken = 1;
  static constexpr int64_t kMaxDecoded = kFloatSegment;
  const Batch<Word>& batch;

  QF_INLINE const uint8_t* codes_at(int64_t panel, const Segment& segment) const {
    return batch.p.packed.codes(panel) + code_bytes(segment.begin);
  }
  QF_INLINE static int64_t code_bytes(int64_t k) {
    return k / PanelDecoder<S, Format>::kPerWord * 8 * S::kLanes;
  }

  template <int MT, int NP>
  QF_INLINE void add(const TilesOfWork<Word>& t) const {
    t.decode_to ? add_decoding<MT, NP>(t) : add_tiles<A, MT, NP>(batch, t);
  }
  template <int MT, int NP>
  __attribute__((noinline)) void add_decoding(const TilesOfWork<Word>& t) const {
    using Decoder = typename A::template Decoder<Format>;
    const Segment& segment = batch.segments[t.s];
    const PackedView& packed = batch.p.packed;
    PackedRun run = {codes_at(t.panel, segment), packed.panel_code_bytes(), nullptr, 0};
    if constexpr (HasZeros) {
      run.zeros = packed.zeros(t.panel) + segment.group * 2 * S::kLanes;
      run.panel_zeros = batch.plan.num_groups * 2 * S::kLanes;
    }
    Tile<Dot, MT, NP> tile;
    tile.clear();
    tile.template add_decoding<HasZeros>(Decoder(batch.p.weight.format), run,
                                         (segment.end - segment.begin) / Decoder::kPerWord, t.x, t.decode_to,
                                         t.w_stride, t.ahead);
    flush_tile<A>(batch, PanelScales<S, NP>(packed, t.panel, segment.group), t, {}, tile);
  }
  QF_INLINE void finish(int64_t row, int64_t rows, int64_t panel, int64_t panels, const float* totals) const {
    finish_floats<S>(batch, row, rows, panel, panels, totals);
  }
};

// ---- The call ----

template <class A, qf_format Format, bool HasZeros>
QF_INLINE void multiply_float(const Batch<typename A::Dot::Word>& c) {
  if (c.rows > kDirectFloatRows<typename A::S>) return multiply_batch(FloatWork<A, Format, HasZeros>{c});
  parallel_ranges(c.plan.num_panels, panel_grain<typename A::S>(c.plan, c.rows),
                  [&](int64_t begin, int64_t end) { multiply_direct<A, Format, HasZeros>(c, begin, end); });
}

template <class A>
QF_INLINE Plan make_float_plan(const Problem& p) {
  constexpr int64_t kBytes = static_cast<int64_t>(sizeof(typename A::Dot::Word)) / A::Dot::kPerWord;
  return make_plan(p, {kBytes, kBytes}, kFloatSegment, act_group_of_segments(p, A::kScalesSums));
}

template <class A>
QF_INLINE void launch_float(const Problem& p, const Launch& launch) {
  using Word = typename A::Dot::Word;
  const Plan plan = make_float_plan<A>(p);
  char* workspace = static_cast<char*>(launch.workspace);
  auto* segments = reinterpret_cast<Segment*>(workspace + plan.segments);
  const bool has_x_scales = A::kScalesSums && p.has_act_quant();
  const int64_t num_segments =
      cut_segments(p, kFloatSegment, act_group_of_segments(p, A::kScalesSums), 1, segments).segments;
  auto* x = reinterpret_cast<Word*>(workspace + plan.x);
  auto* x_scales = reinterpret_cast<float*>(workspace + plan.x_scale);
  const int64_t x_row_bytes = round_up(p.k, 16) * static_cast<int64_t>(sizeof(Word)) / A::Dot::kPerWord;

  for (int64_t first_row = 0; first_row < p.m; first_row += plan.batch_rows) {
    const int64_t rows = p.m - first_row < plan.batch_rows ? p.m - first_row : plan.batch_rows;
    const int64_t tile_rows = rows <= kDirectFloatRows<typename A::S> ? rows : tile_rows_for(rows);
    const Destination to = {p.out.is_quantized() && !p.out.is_static,
                            reinterpret_cast<float*>(workspace + plan.result), first_row};
    const Batch<Word> batch = {
        p, plan, segments, num_segments, x, rows, tile_rows, to, has_x_scales ? x_scales : nullptr};
    parallel_ranges(ceil_div(rows, tile_rows), 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin * tile_rows; row < end * tile_rows && row < rows; row += tile_rows) {
        A::prepare_tile(batch, row, rows - row < tile_rows ? rows - row : tile_rows,
                        x_scales + row * plan.act_groups, workspace + plan.x_row + row * x_row_bytes, x);
      }
    });
    choose_value<QF_INT4, QF_FP4_E2M1, QF_INT8, QF_FP8_E4M3, QF_FP8_E5M2, QF_F32, QF_F16, QF_BF16>(
        code_path(p.weight.format), [&](auto format) __attribute__((always_inline)) {
          if constexpr (is_integer(format.value)) {
            if (p.packed.header->has_zeros) return multiply_float<A, format.value, true>(batch);
          }
          multiply_float<A, format.value, false>(batch);
        });
    finish_batch<typename A::S>(p, to, rows);
  }
}

}  // namespace quantfuse::linear
