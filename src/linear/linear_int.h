// SPDX-License-Identifier: Apache-2.0
//
// y = act(x w^T) in integer arithmetic: weights of integers times a unit (INT4, INT8, E2M1, IQ4_NL), x
// quantized to INT8 per row or per row and group.
//
//   codes, 4 k per lane (unsigned) --dot product with x broadcast (signed)--> int32, exact within a segment
//   of k
//     - offset * (sum of x's codes): the bytes of w have an offset to be unsigned (formats/integer_bytes.h)
//     --convert, zero points, scale--> float32 totals
//
// The unit is part of x's scales. For few rows codes go from memory to registers, in every tile. For more
// rows INT8 panels are multiplied as they lie in memory, and 4-bit panels become bytes by the first tile of a
// segment, into L1.
#pragma once

#include "linear/linear_panels.h"

namespace quantfuse::linear {

// Longest run of k in one int32 sum. 512 k of 255 * 128 stay below 2^24, so the conversion to float32 is
// exact.
inline constexpr int64_t kIntSegment = 512;

// The same where totals are int32, and codes of 8 bits are multiplied as they lie: the fewer segments, the
// fewer times a tile fetches its totals and puts them back. The L1 cache still holds the tile's x.
inline constexpr int64_t kLongIntSegment = 4096;

// k up to which an int32 holds the sum of 255 * 128.
inline constexpr int64_t kMaxIntLength = 65536;

struct IntBatch : Batch<int32_t> {
  const int32_t* sums;  // [segment][row]: of x's codes
  bool has_int_totals;  // one scale for all of k: int32 totals, and the sums of x are over all segments

  bool has_group_scales() const { return plan.act_groups > 1; }
  int64_t sums_at(int64_t segment, int64_t row) const { return (has_int_totals ? 0 : segment) * rows + row; }
};

inline constexpr int64_t kLineWords = 16;  // of a line of the cache

// Rows of a tile whose codes go from memory to registers.
template <class S>
inline constexpr int64_t kDirectTileRows = S::kRegisters == 32 ? 12 : 4;
template <class S>
inline constexpr int64_t kMostTileRows =
    kDirectTileRows<S> > kMaxTileRows ? kDirectTileRows<S> : int64_t{kMaxTileRows};

// Up to how many rows there are such tiles. Of 4-bit codes several, where there are registers for large ones:
// each of them decodes anew, which costs less than to store what is decoded (on a Zen 5 15% less time with 24
// rows, 3% with 48).
inline constexpr int64_t kMostDirectRows = 48;
template <class S>
QF_INLINE bool is_direct(qf_format format, int64_t rows) {
  return rows <= (code_bits(format) == 4 && S::kRegisters == 32 ? kMostDirectRows : kDirectTileRows<S>);
}

inline constexpr const char* kNoIntegers = "the weight's numbers are not integers times one unit";

QF_INLINE Verdict accepts_int(const Problem& p, int lanes) {
  const PackedHeader* h = p.packed.header;
  const bool has_float_zeros = h ? h->has_float_zeros : p.weight.has_float_zeros();
  return packed_for(p, lanes)
      .require(has_integer_numbers(p.weight.format), kNoIntegers)
      .require(p.act_format == QF_INT8, "the activations are not quantized to INT8")
      .require(!has_float_zeros, "the weight's zero points are not integers")
      .require(has_whole_act_groups(p), kNoWholeActGroups);
}

// ---- x: codes in the packed order, 4 in a word ----

// codes[i] = the INT8 code of x[r, k + i], within one activation group. Returns their sum. Fetches the same
// columns `rows` rows below: the scales of those will be wanted first, from all columns at once.
template <class S>
QF_INLINE int32_t load_codes(const Problem& p, int64_t r, int64_t k, int64_t n, float scale, int8_t* codes,
                             int64_t rows) {
  int32_t sum = 0;
  if (p.x_scale) {
    const auto* row = reinterpret_cast<const int8_t*>(p.x.row_bytes_at(r)) + k;
    for (int64_t i = 0; i < n; ++i) sum += codes[i] = row[i];
    return sum;
  }
  choose_float(
      p.x.dtype, [&](auto type) __attribute__((always_inline)) {
        using T = typename decltype(type)::type;
        const T* from = p.x.row<const T>(r) + k;
        sum = row_encode<S, QF_INT8>(from, n, 1.0f / scale, 0, reinterpret_cast<uint8_t*>(codes),
                                     r + rows < p.m ? from + rows * p.x.row_stride : from);
      });
  return sum;
}

// Rows [row, row + rows) of a batch, a tile. `ordered` has room for them where columns are reordered.
// place(segment, words, stride) puts their words of a segment where they belong.
template <class S, class Place>
QF_INLINE void prepare_int_rows(const IntBatch& c, int64_t row, int64_t rows, float* scales, int32_t* sums,
                                int8_t* ordered, const Place& place) {
  const Problem& p = c.p;
  const int32_t* k_map = p.packed.k_map();
  const int64_t r0 = c.to.first_row + row, ordered_stride = round_up(p.k, 16);
  for (int64_t i = 0; i < rows; ++i) {
    float* own = scales + i * c.plan.act_groups;
    copy_input_scales<S>(p, r0 + i, c.plan.act_groups, own);
    // One scale: accepts() sees to that.
    if (k_map) load_codes<S>(p, r0 + i, 0, p.k, own[0], ordered + i * ordered_stride, rows);
  }
  for (int64_t s = 0; s < c.num_segments; ++s) {
    const Segment& segment = c.segments[s];
    const int64_t length = segment.end - segment.begin;
    // A line more than a row needs: each row at places of L1 of its own.
    alignas(64) int32_t words[kMostTileRows<S> * (kLongIntSegment / 4 + kLineWords)];
    const int64_t stride = round_up(length / 4, kLineWords) + kLineWords;
    for (int64_t i = 0; i < rows; ++i) {
      auto* codes = reinterpret_cast<int8_t*>(words + i * stride);
      int32_t sum = 0;
      if (k_map) {
        for (int64_t k = 0; k < length; ++k) {
          const int32_t from = k_map[segment.begin + k];
          sum += codes[k] = from < 0 ? 0 : ordered[i * ordered_stride + from];
        }
      } else {
        const int64_t count = segment.end < p.k ? length : p.k - segment.begin;
        const float scale = scales[i * c.plan.act_groups + segment.act_group];
        sum = load_codes<S>(p, r0 + i, segment.begin, count, scale, codes, rows);
        for (int64_t k = count; k < length; ++k) codes[k] = 0;
      }
      int32_t& to = sums[c.sums_at(s, row + i)];
      to = c.has_int_totals && s > 0 ? to + sum : sum;
    }
    place(segment, words, stride);
  }
  const float unit = byte_unit_of(p.weight.format);
  for (int64_t i = 0; unit != 1.0f && i < rows * c.plan.act_groups; ++i) scales[i] *= unit;
}

// ---- Products ----

// What a batch does with integer codes, whatever its x: IntWork here, LimbWork in linear_limbs.h.
template <class Simd, qf_format kCodes, class BatchOfX>
struct CodeWork {
  using S = Simd;
  using Dot = ByteDot<S>;
  static constexpr qf_format kFormat = kCodes;
  static constexpr int64_t L = S::kLanes;
  using Decoder = ByteDecoder<S, kFormat>;
  const BatchOfX& batch;

  // Format is the code path; only the weight's own format tells what is looked up.
  QF_INLINE int32_t offset() const {
    return byte_offset_of(Decoder::kIsLookedUp ? batch.p.weight.format : kFormat);
  }
  QF_INLINE Decoder decoder() const { return Decoder(batch.p.weight.format); }

  QF_INLINE const uint8_t* codes_at(int64_t panel, const Segment& segment) const {
    return batch.p.packed.codes(panel) + code_bytes(segment.begin);
  }
  QF_INLINE static int64_t code_bytes(int64_t k) { return k * 2 * L * code_bits(kFormat) / 8; }

  // The sums of a tile, but for its last steps.
  template <int MT, int NP>
  QF_INLINE LastSteps<int32_t> multiply(Tile<Dot, MT, NP>& tile, const TilesOfWork<int32_t>& t) const {
    if constexpr (Decoder::kIs4Bit) {
      if (t.decode_to) {
        const PackedRun run = {codes_at(t.panel, batch.segments[t.s]), batch.p.packed.panel_code_bytes(),
                               nullptr, 0};
        tile.template add_decoding<false>(decoder(), run, t.steps / 2, t.x, t.decode_to, t.w_stride, t.ahead);
        return {};
      }
    }
    return tile.add(t.x, t.w, t.w_stride, t.steps, t.ahead);
  }
};

template <class S>
__attribute__((noinline, noclone)) void finish_ints(const IntBatch& c, int64_t row, int64_t rows,
                                                    int64_t panel, int64_t panels, const float* totals) {
  const int64_t stride = totals_stride<S>(panels), first = c.to.first_row + row;
  // There is no scale of x where k is 0.
  const auto x_scale = [&](int64_t r) __attribute__((always_inline)) {
    return S::set1(c.plan.act_groups == 1 ? c.x_scales[row + r] : 1.0f);
  };
  if (!c.has_int_totals) {
    return finish_rows<S>(
        c.p, c.to, first, rows, panel, panels, [&](int64_t r) __attribute__((always_inline)) {
          const float* of_row = totals + r * stride;
          return [ of_row, scale = x_scale(r) ](int64_t i) __attribute__((always_inline)) {
            return S::mul(S::load(of_row + i), scale);
          };
        });
  }
  const float *scales = c.p.packed.scales(panel), *zeros = c.p.packed.zeros(panel);  // one group
  finish_rows<S>(
      c.p, c.to, first, rows, panel, panels, [&](int64_t r) __attribute__((always_inline)) {
        const float* of_row = totals + r * stride;
        const auto x_sum = S::set1(static_cast<float>(c.sums[row + r]));
        return [ of_row, scales, zeros, x_sum, scale = x_scale(r) ](int64_t i)
            __attribute__((always_inline)) {
          auto value = S::to_float(S::load_i(of_row + i));
          if (zeros) value = S::fnma(S::load(zeros + i), x_sum, value);
          return S::mul(S::mul(value, S::load(scales + i)), scale);
        };
      });
}

template <class Simd, qf_format Format>
struct IntWork : CodeWork<Simd, Format, IntBatch> {
  using Base = CodeWork<Simd, Format, IntBatch>;
  using Base::batch, Base::L;
  using typename Base::Dot, typename Base::S;
  static constexpr int64_t kRowsOfToken = 1;
  static constexpr int64_t kMaxDecoded = Base::Decoder::kIs4Bit ? kIntSegment : 0;

  template <int MT, int NP>
  __attribute__((noinline)) void add(TilesOfWork<int32_t> t) const {
    for (int64_t i = 0; i < t.count; ++i, t.next(MT, totals_stride<S>(NP))) {
      Tile<Dot, MT, NP> tile;
      begin(tile, t);
      end(tile, this->multiply(tile, t), t);
    }
  }
  // A sum begins at -offset * (sum of x), so that codes may be multiplied as they are stored.
  template <int MT, int NP>
  QF_INLINE void begin(Tile<Dot, MT, NP>& tile, const TilesOfWork<int32_t>& t) const {
    const int32_t* x_sums = batch.sums + batch.sums_at(t.s, t.row);
    const int32_t* totals = int_totals(t);
    if (batch.has_int_totals && t.s > 0) {
      tile.each([&](auto& sum, auto m, auto v) __attribute__((always_inline)) {
        sum = S::sums(S::load_i(totals + m * totals_stride<S>(NP) + v * L));
      });
    } else {
      const int32_t offset = this->offset();
      tile.each([&](auto& sum, auto m, auto)
                    __attribute__((always_inline)) { sum = S::sums(S::set1(-offset * x_sums[m])); });
    }
  }
  template <int MT, int NP>
  QF_INLINE void end(Tile<Dot, MT, NP>& tile, const LastSteps<int32_t>& last,
                     const TilesOfWork<int32_t>& t) const {
    if (!batch.has_int_totals) {
      return choose_bool(
          batch.p.packed.zeros(t.panel) != nullptr, [&](auto has_zeros) __attribute__((always_inline)) {
            choose_bool(
                batch.has_group_scales(), [&](auto has_group_scales) __attribute__((always_inline)) {
                  flush<has_zeros.value, has_group_scales.value>(tile, last, t);
                });
          });
    }
    int32_t* const totals = int_totals(t);
    tile.finish(
        last, [&](auto& sum, auto m, auto v) __attribute__((always_inline)) {
          S::store_i(totals + m * totals_stride<S>(NP) + v * L, S::ints(sum));
        });
  }
  QF_INLINE static int32_t* int_totals(const TilesOfWork<int32_t>& t) {
    return reinterpret_cast<int32_t*>(t.totals);
  }
  // totals += scale * (sums - zero * sum of x)
  template <bool HasZeros, bool HasGroupScales, int MT, int NP>
  QF_INLINE void flush(Tile<Dot, MT, NP>& tile, const LastSteps<int32_t>& last,
                       const TilesOfWork<int32_t>& t) const {
    const Segment& segment = batch.segments[t.s];
    const int64_t group = segment.group * 2 * L, panel_stride = batch.plan.num_groups * 2 * L;
    const float* scales = batch.p.packed.scales(t.panel) + group;
    [[maybe_unused]] const float* zeros = HasZeros ? batch.p.packed.zeros(t.panel) + group : nullptr;
    [[maybe_unused]] const int32_t* x_sums = batch.sums + batch.sums_at(t.s, t.row);
    const int64_t act_groups = batch.plan.act_groups;
    [[maybe_unused]] const float* x_scales = batch.x_scales_at(t.s, t.row);
    const float* const before = t.totals_before(kNoTotals<S>);
    float* const totals = t.totals;
    tile.finish(
        last, [&](auto& sum, auto m, auto v) __attribute__((always_inline)) {
          const int64_t at = v / 2 * panel_stride + v % 2 * L, to = m * totals_stride<S>(NP) + v * L;
          auto value = S::to_float(S::ints(sum));
          if constexpr (HasZeros) {
            value = S::fnma(S::load(zeros + at), S::set1(static_cast<float>(x_sums[m])), value);
          }
          if constexpr (HasGroupScales) value = S::mul(value, S::set1(x_scales[m * act_groups]));
          S::store(totals + to, S::fma(value, S::load(scales + at), S::load(before + to)));
        });
  }

  QF_INLINE void finish(int64_t row, int64_t rows, int64_t panel, int64_t panels, const float* totals) const {
    finish_ints<S>(batch, row, rows, panel, panels, totals);
  }
};

// ---- Few rows: codes go from memory to registers ----

// All of k for `tiles` tiles of MT rows from `row` on: of each segment one after the other, so that only the
// first finds its codes in memory. One call, because while sums are scaled the next products can begin.
template <class Work, int MT, int NP>
__attribute__((noinline)) void add_direct(const Work& work, int64_t panel, int64_t row, int64_t tiles,
                                          float* totals) {
  using S = typename Work::S;
  constexpr int64_t kWordBytes = 8 * S::kLanes;        // of a panel: two vectors of words
  constexpr int kSteps = Work::Base::Decoder::kSteps;  // of 4 k
  // The compiler keeps in registers what several products share: let that be the fewer, codes or rows of x.
  constexpr int kVectors = NP * 2, kTogether = MT > kVectors ? kVectors : 1;
  // Twice as far as where memory is all that is waited for.
  constexpr int64_t kAhead = kBytesAhead * (MT > 4 ? 2 : 1) / NP;
  const auto& c = work.batch;
  const int64_t panel_bytes = c.p.packed.panel_code_bytes();
  const auto decoder = work.decoder();
  TilesOfWork<int32_t> t = {};
  t.panel = panel;
  for (t.s = 0; t.s < c.num_segments; ++t.s) {
    const Segment& segment = c.segments[t.s];
    t.steps = (segment.end - segment.begin) / 4;
    t.x = c.x + segment.begin / 4 * c.rows + row * t.steps;
    t.row = row, t.totals = totals;
    for (int64_t i = 0; i < tiles; ++i, t.next(MT, totals_stride<S>(NP))) {
      const uint8_t* w = work.codes_at(panel, segment);
      const int32_t* x = t.x;
      Tile<ByteDot<S>, MT, NP> tile;
      work.begin(tile, t);
      for (int64_t word = 0; word < t.steps / kSteps; ++word, x += kSteps * MT, w += kWordBytes) {
        unrolled<kVectors / kTogether>([&](auto run) __attribute__((always_inline)) {
          constexpr int v0 = run * kTogether;
          typename S::I words[kTogether];
          unrolled<kTogether>([&](auto i) __attribute__((always_inline)) {
            constexpr int v = v0 + i;
            const uint8_t* at = w + v / 2 * panel_bytes + v % 2 * 4 * S::kLanes;
            if constexpr (v % 2 == 0 || S::kLanes == 16) __builtin_prefetch(at + kAhead, 0, 2);
            words[i] = S::load_i(at);
          });
          unrolled<kSteps>([&](auto step) __attribute__((always_inline)) {
            typename S::I codes[kTogether];
            unrolled<kTogether>([&](auto i) __attribute__((always_inline)) {
              codes[i] = decoder.template step<step.value, false>(words[i], S::zero());
            });
            unrolled<MT>([&](auto m) __attribute__((always_inline)) {
              const auto x_of_row = S::set1(x[step * MT + m]);
              unrolled<kTogether>([&](auto i) __attribute__((always_inline)) {
                tile.acc[m][v0 + i] = S::dot4(tile.acc[m][v0 + i], codes[i], x_of_row);
              });
            });
          });
        });
      }
      work.end(tile, {}, t);
    }
  }
}

// Tiles of MT rows, and what is left.
template <class Work, int MT, int NP>
QF_INLINE void direct_panels(const Work& work, int64_t panel) {
  using S = typename Work::S;
  constexpr int64_t stride = totals_stride<S>(NP), kMost = NP == 1 ? kMostDirectRows : MT;
  const int64_t rows = work.batch.rows, tiles = rows / MT;
  alignas(64) float totals[kMost * stride];
  if (work.batch.num_segments == 0)
    __builtin_memset(totals, 0, static_cast<size_t>(rows * stride) * sizeof(float));
  add_direct<Work, MT, NP>(work, panel, 0, tiles, totals);
  if constexpr (NP == 1) {
    choose_rows<MT - 1>(
        rows % MT, [&](auto rest) __attribute__((always_inline)) {
          if constexpr (rest % Work::kRowsOfToken == 0)
            add_direct<Work, rest.value, NP>(work, panel, tiles * MT, 1, totals + tiles * MT * stride);
        });
  }
  work.finish(0, rows, panel, NP, totals);
}

// NP panels at once where one tile has all rows: the more streams from memory the better, as far as there are
// registers.
template <int MT, class Work>
QF_INLINE void multiply_direct(const Work& work) {
  using S = typename Work::S;
  constexpr int kMostSums = S::kRegisters == 32 ? 24 : 8;
  constexpr int kMostPanels = MT * 8 <= kMostSums ? 4 : MT * 4 <= kMostSums ? 2 : 1;
  constexpr int NP = kMostPanels < 2 * kMaxTilePanels<S> ? kMostPanels : 2 * kMaxTilePanels<S>;
  const auto& c = work.batch;
  parallel_ranges(c.plan.num_panels, panel_grain<S>(c.plan, c.rows), [&](int64_t begin, int64_t end) {
    int64_t panel = begin;
    for (; panel + NP <= end; panel += NP) direct_panels<Work, MT, NP>(work, panel);
    if constexpr (NP > 1) {
      for (; panel < end; ++panel) direct_panels<Work, MT, 1>(work, panel);
    }
  });
}

template <class S, qf_format Format>
QF_INLINE void multiply_codes(const IntBatch& c) {
  const IntWork<S, Format> work = {{c}};
  if (!is_direct<S>(c.p.weight.format, c.rows)) return multiply_batch(work);
  choose_rows<kDirectTileRows<S>>(
      c.tile_rows, [&](auto rows) __attribute__((always_inline)) { multiply_direct<rows.value>(work); });
}

template <class S>
QF_INLINE void multiply_int(const IntBatch& c) {
  choose_value<QF_INT4, QF_FP4_E2M1, QF_INT8>(
      code_path(c.p.weight.format), [&](auto format) __attribute__((always_inline)) {
        multiply_codes<S, format.value>(c);
      });
}

// ---- The call ----

// One scale for all of k.
QF_INLINE bool has_int_totals(const Plan& plan) {
  return plan.num_groups == 1 && plan.act_groups == 1 && plan.k_padded <= kMaxIntLength;
}

QF_INLINE Plan make_int_plan(const Problem& p) {
  return make_plan(p, {1, 1}, kIntSegment, act_group_of_segments(p, true));
}

template <class S>
QF_INLINE void launch_int(const Problem& p, const Launch& launch) {
  const Plan plan = make_int_plan(p);
  char* workspace = static_cast<char*>(launch.workspace);
  auto* segments = reinterpret_cast<Segment*>(workspace + plan.segments);
  const bool is_long = has_int_totals(plan) && p.weight.format == QF_INT8;
  const int64_t num_segments =
      cut_segments(p, is_long ? kLongIntSegment : kIntSegment, act_group_of_segments(p, true), 1, segments)
          .segments;
  auto* x = reinterpret_cast<int32_t*>(workspace + plan.x);
  auto* scales = reinterpret_cast<float*>(workspace + plan.x_scale);
  auto* sums = reinterpret_cast<int32_t*>(workspace + plan.x_sums);
  auto* ordered = reinterpret_cast<int8_t*>(workspace + plan.x_row);

  for (int64_t first_row = 0; first_row < p.m; first_row += plan.batch_rows) {
    const int64_t rows = p.m - first_row < plan.batch_rows ? p.m - first_row : plan.batch_rows;
    const int64_t tile_rows =
        is_direct<S>(p.weight.format, rows) ? tile_rows_for(rows, kDirectTileRows<S>) : tile_rows_for(rows);
    const Destination to = {p.out.is_quantized() && !p.out.is_static,
                            reinterpret_cast<float*>(workspace + plan.result), first_row};
    const IntBatch batch = {
        {p, plan, segments, num_segments, x, rows, tile_rows, to, scales}, sums, has_int_totals(plan)};
    parallel_ranges(ceil_div(rows, tile_rows), 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin * tile_rows; row < end * tile_rows && row < rows; row += tile_rows) {
        const int64_t count = rows - row < tile_rows ? rows - row : tile_rows;
        prepare_int_rows<S>(
            batch, row, count, scales + row * plan.act_groups, sums, ordered + row * round_up(p.k, 16),
            [&](const Segment& segment, const int32_t* words, int64_t stride) __attribute__((always_inline)) {
              const int64_t steps = (segment.end - segment.begin) / 4;
              interleave_rows<S>(words, stride, count, steps, x + segment.begin / 4 * rows + row * steps);
            });
      }
    });
    multiply_int<S>(batch);
    finish_batch<S>(p, to, rows);
  }
}

}  // namespace quantfuse::linear
