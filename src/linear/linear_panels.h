// SPDX-License-Identifier: Apache-2.0
//
// What the CPU kernels of linear share: the plan of a call, the runs of k that have one scale, the loop over
// panels, and the epilogue.
//
// A call goes: prepare x (converted or quantized, in the packed order of k, interleaved by tiles of rows) ->
// every thread takes a range of panels for a chunk of rows:
//
//   for each pair of panels, whose totals are on the stack
//     for each segment of k, for each tile of rows: product of the tile, times the scale, added to the
//       totals. The first tile decodes the codes, into the L1 cache, on its way; the others are one call
//     epilogue of the pair
//
// Few rows go another way, the kernels' own: every tile decodes, in registers.
#pragma once

#include "cpu/output.h"
#include "cpu/panel_codes.h"
#include "cpu/threads.h"
#include "cpu/tile.h"
#include "linear/linear.h"

namespace quantfuse::linear {

// A run of k_padded within one group of the weight and one group of the activations.
struct Segment {
  int32_t begin, end;
  int32_t group;      // of the weight's scales
  int32_t act_group;  // of x_scale
  int32_t x_begin;    // begin, where every segment of x is padded to whole steps
};

inline constexpr int64_t kMinPartProducts = 48 * 1024;  // worth a thread, to start which takes 1 to 2 us
inline constexpr int64_t kMaxChunkRows = 288;           // totals of 64 floats each: 72 KB
inline constexpr int64_t kMinChunkRows = 128;           // fewer do not pay for decoding
inline constexpr int64_t kChunkBytes = 768 * 1024;  // of prepared x: an L2 cache of 1.25 MB holds it beside w
inline constexpr int64_t kPreparedBytes = 9 * 1024 * 1024;  // of prepared x: an L3 cache holds it

// How a kernel keeps x.
struct XShape {
  int64_t bytes;          // of a prepared number
  int64_t ordered_bytes;  // of one in a row that is copied for its columns to be gathered
  int64_t step = 1;       // a segment is padded to a multiple of this
  int64_t tile_rows = 1;  // and a batch of rows to one of this
};

// Sizes of a call and its workspace.
struct Plan {
  int64_t k_padded, num_panels, num_groups;
  int64_t max_segments;
  int64_t act_groups;                                                // scales per row of x
  int64_t batch_rows;                                                // rows prepared at a time
  int64_t segments, x, x_scale, x_sums, x_row, result, total_bytes;  // offsets in the workspace
};

struct Cuts {
  int64_t segments, x_columns;
};

// Cuts every group of the weight at multiples of `cap` from its begin, and at multiples of act_group (of
// columns that have something in common in x). `out` may be null.
QF_INLINE Cuts cut_segments(const Problem& p, int64_t cap, int64_t act_group, int64_t step, Segment* out) {
  const PackedHeader& h = *p.packed.header;
  const int32_t* bounds = p.packed.bounds();
  Cuts cuts = {};
  for (int64_t g = 0; g < h.num_groups; ++g) {
    for (int64_t begin = bounds[g]; begin < bounds[g + 1];) {
      int64_t end = begin + cap;
      const int64_t next_act = (begin / act_group + 1) * act_group;
      if (end > next_act) end = next_act;
      if (end > bounds[g + 1]) end = bounds[g + 1];
      if (out) {
        out[cuts.segments] = {static_cast<int32_t>(begin), static_cast<int32_t>(end), static_cast<int32_t>(g),
                              static_cast<int32_t>(begin / act_group), static_cast<int32_t>(cuts.x_columns)};
      }
      ++cuts.segments, cuts.x_columns += round_up(end - begin, step);
      begin = end;
    }
  }
  return cuts;
}

// Where segments end besides the ends of the weight's groups: with the groups of the activations, if they
// are quantized and sums are multiplied with their scales.
QF_INLINE int64_t act_group_of_segments(const Problem& p, bool scales_sums) {
  return scales_sums && p.has_act_quant() && !p.is_whole_row_act() ? p.act_group : int64_t{1} << 40;
}

// act_group: that of segments.
QF_INLINE Plan make_plan(const Problem& p, const XShape& shape, int64_t segment_cap, int64_t act_group) {
  Plan plan = {};
  const PackedHeader* h = p.packed.header;
  plan.k_padded = h ? h->k_padded : round_up(p.k, 8) + 8 * p.weight.num_groups;  // without data: an upper
                                                                                 // bound
  plan.num_panels = h ? h->num_panels : 0;
  plan.num_groups = h ? h->num_groups : p.weight.num_groups;
  plan.act_groups = p.has_act_quant() ? ceil_div(p.k, p.act_group) : 1;
  plan.max_segments = plan.num_groups + plan.k_padded / segment_cap + plan.act_groups + 1;

  int64_t x_columns = plan.k_padded;
  if (shape.step > 1) {
    x_columns = h ? cut_segments(p, segment_cap, act_group, shape.step, nullptr).x_columns
                  : x_columns + plan.max_segments * shape.step;
  }
  const int64_t row_bytes = x_columns * shape.bytes > 0 ? x_columns * shape.bytes : 1;
  int64_t rows = kPreparedBytes / row_bytes;
  rows = rows < kMaxChunkRows ? kMaxChunkRows : rows;
  plan.batch_rows = p.m < rows ? p.m : rows;

  int64_t offset = 0;
  auto reserve = [&](int64_t bytes) {
    const int64_t at = offset;
    offset = round_up(offset + bytes, 64);
    return at;
  };
  plan.segments = reserve(plan.max_segments * static_cast<int64_t>(sizeof(Segment)));
  plan.x = reserve(round_up(plan.batch_rows, shape.tile_rows) * row_bytes);
  plan.x_scale = reserve(plan.batch_rows * plan.act_groups * 4);
  plan.x_sums = reserve(plan.batch_rows * plan.max_segments * 4);
  // Columns in another order than x has them are gathered from a copy of the row.
  plan.x_row = reserve(!h || h->has_k_map ? plan.batch_rows * round_up(p.k, 16) * shape.ordered_bytes : 0);
  plan.result = reserve(p.out.is_quantized() && !p.out.is_static ? plan.batch_rows * p.n_out * 4 : 0);
  plan.total_bytes = offset;
  return plan;
}

// Whether the packed columns are in another order than those of x. Where only shapes are known (explain), as
// pack() will decide.
QF_INLINE bool has_k_map(const Problem& p) {
  const Weight& w = p.weight;
  if (p.packed.header) return p.packed.header->has_k_map;
  return w.num_groups > 1 && (w.g_idx || w.block.cols % 8 != 0);
}

// Whether segments of k can end with the groups of quantized activations.
QF_INLINE bool has_whole_act_groups(const Problem& p) {
  return p.is_whole_row_act() || (p.act_group % 8 == 0 && !has_k_map(p));
}
inline constexpr const char* kNoWholeActGroups =
    "activation groups must be multiples of 8 columns, over weight groups that are so too";

// Requirements that all kernels of packed weights have.
QF_INLINE Requirements packed_for(const Problem& p, int lanes) {
  Requirements r;
  r.require(!p.not_packed_reason, "the weight is not packed (qf_weight_pack)");
  const int packed_lanes = p.packed.header ? p.packed.header->lanes : packed_lanes_of_cpu();
  r.require(packed_lanes == lanes, "the weight is packed for another vector width");
  return r;
}

// Where finished values go: straight to y, or, for dynamic output scales that span panels, to a float32
// matrix first.
struct Destination {
  bool is_staged;
  float* result;      // [batch rows, n_out]
  int64_t first_row;  // of the batch
};

template <class S>
QF_INLINE typename S::F load_some(DType dtype, const void* data, int64_t offset, int64_t n) {
  switch (dtype) {
    case DType::f32: return S::load(static_cast<const float*>(data) + offset, n);
    case DType::f16: return S::load(static_cast<const f16*>(data) + offset, n);
    default: return S::load(static_cast<const bf16*>(data) + offset, n);
  }
}

// Scales of the groups of row r of x: given, or from its largest magnitudes (written to `scales`).
template <class S>
QF_INLINE const float* input_scales(const Problem& p, int64_t r, float* scales) {
  if (p.x_scale) return p.x_scale.row<const float>(r);
  choose_float(
      p.x.dtype, [&](auto type) __attribute__((always_inline)) {
        using T = typename decltype(type)::type;
        const T* row = p.x.row<const T>(r);
        for (int64_t k = 0, g = 0; k < p.k; k += p.act_group, ++g) {
          const int64_t n = p.k - k < p.act_group ? p.k - k : p.act_group;
          scales[g] = scale_from_amax(row_amax<S>(row + k, n), code_range(p.act_format).symmetric_max);
        }
      });
  return scales;
}

// The same, in memory of the call.
template <class S>
QF_INLINE void copy_input_scales(const Problem& p, int64_t r, int64_t act_groups, float* scales) {
  const float* given = input_scales<S>(p, r, scales);
  if (given == scales) return;
  for (int64_t g = 0; g < act_groups; ++g) scales[g] = given[g];
}

// Totals are [row][panel][2][lanes]: dense, or those of many rows would crowd in a part of the L1 cache.
template <class S>
constexpr int64_t totals_stride(int64_t panels) {
  return panels * 2 * S::kLanes;
}

// The most panels whose totals are computed together.
template <class S>
inline constexpr int64_t kMaxPanels = 2 * kMaxTilePanels<S>;

// The epilogue of rows [row, row + rows) of a few panels. sums_of(r)(i) is a vector of the sums of their
// columns from i on, in the r-th of these rows.
template <class S, class SumsOf>
QF_INLINE void finish_rows(const Problem& p, const Destination& to, int64_t row, int64_t rows, int64_t panel,
                           int64_t panels, const SumsOf& sums_of) {
  constexpr int64_t L = S::kLanes;
  const bool is_gated = p.weight.is_gated;
  const int64_t panel_cols = is_gated ? L : 2 * L, col = panel * panel_cols;  // of y
  const int64_t count = p.n_out - col < panels * panel_cols ? p.n_out - col : panels * panel_cols;
  if (p.is_plain_sum() && !p.out.is_quantized()) {
    return choose_float(
        p.out.y.dtype, [&](auto type) __attribute__((always_inline)) {
          for (int64_t r = 0; r < rows; ++r) {
            auto* out = p.out.y.row<typename decltype(type)::type>(row + r) + col;
            const auto sums = sums_of(r);
            int64_t i = 0;
            for (; i + L <= count; i += L) S::store(out + i, sums(i));
            if (i < count) S::store(out + i, sums(i), count - i);
          }
        });
  }
  alignas(64) float bias[kMaxPanels<S> * 2 * L];  // as sums are; without one -0, which changes no sum
  for (int64_t i = 0; i < panels * 2 * L; i += L) {
    const int64_t at = is_gated ? i / (2 * L) * L : i, up = is_gated && i % (2 * L) != 0 ? p.n_out : 0;
    S::store(bias + i,
             p.bias ? load_some<S>(p.bias.dtype, p.bias.data, up + col + at, count - at) : S::set1(-0.0f));
  }
  const auto choose_activation = [&](const auto& body) __attribute__((always_inline)) {
    choose_value<QF_IDENTITY, QF_RELU, QF_GELU, QF_GELU_TANH, QF_SILU>(p.activation, body);
  };
  // What belongs to column i of row r, whose sums these are.
  const auto value = [&](auto activation, const auto& sums, int64_t r, int64_t i)
      __attribute__((always_inline)) {
    const auto biased = [&](int64_t at) __attribute__((always_inline)) {
      return S::add(sums(at), S::load(bias + at));
    };
    auto y = activate<S>(activation.value, biased(is_gated ? 2 * i : i));
    if (is_gated) y = S::mul(y, biased(2 * i + L));
    if (!p.residual) return y;
    return S::add(y, load_some<S>(p.residual.dtype, p.residual.row_bytes_at(row + r), col + i, count - i));
  };
  if (!p.out.is_quantized()) {
    return choose_activation([&](auto activation) __attribute__((always_inline)) {
      choose_float(
          p.out.y.dtype, [&](auto type) __attribute__((always_inline)) {
            for (int64_t r = 0; r < rows; ++r) {
              auto* out = p.out.y.row<typename decltype(type)::type>(row + r) + col;
              const auto sums = sums_of(r);
              int64_t i = 0;
              for (; i + L <= count; i += L) S::store(out + i, value(activation, sums, r, i));
              if (i < count) S::store(out + i, value(activation, sums, r, i), count - i);
            }
          });
    });
  }
  alignas(64) float values[kMaxPanels<S> * 2 * L];
  for (int64_t r = 0; r < rows; ++r) {
    const auto sums = sums_of(r);
    choose_activation([&](auto activation) __attribute__((always_inline)) {
      for (int64_t i = 0; i < count; i += L) S::store(values + i, value(activation, sums, r, i));
    });
    if (to.is_staged) {
      float* out = to.result + (row + r - to.first_row) * p.n_out + col;
      for (int64_t i = 0; i < count; i += L) S::store(out + i, S::load(values + i), count - i);
    } else {
      store_output<S>(p.out, row + r, col, values, count);
    }
  }
}

// After the last panel: quantizes the staged rows.
template <class S>
QF_INLINE void finish_batch(const Problem& p, const Destination& to, int64_t rows) {
  if (!to.is_staged) return;
  parallel_ranges(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      store_output<S>(p.out, to.first_row + r, 0, to.result + r * p.n_out, p.n_out);
  });
}

// The scales of one group of k, for the columns of a tile.
template <class S, int NP>
struct PanelScales {
  const float* first;
  int64_t panel_stride;

  QF_INLINE PanelScales(const PackedView& packed, int64_t panel, int64_t group)
      : first(packed.scales(panel) + group * 2 * S::kLanes),
        panel_stride(packed.header->num_groups * 2 * S::kLanes) {}
  QF_INLINE typename S::F at(int vector) const {
    return S::load(first + vector / 2 * panel_stride + vector % 2 * S::kLanes);
  }
};

// Rows of a chunk: whole tiles, about the same number in every chunk, `most` at most.
QF_INLINE int64_t even_chunk_rows(int64_t rows, int64_t most, int64_t tile_rows) {
  const int64_t tiles = ceil_div(rows, tile_rows), chunks = ceil_div(tiles, most / tile_rows);
  return chunks == 0 ? tile_rows : ceil_div(tiles, chunks) * tile_rows;
}

// As many rows as the L2 cache holds, if these are enough; else x streams past every pair of panels, and the
// more rows, the less decoding.
QF_INLINE int64_t chunk_rows_for(int64_t rows, int64_t row_bytes, int64_t tile_rows) {
  const int64_t held = kChunkBytes / (row_bytes + 1);
  return even_chunk_rows(rows, held < kMinChunkRows || held > kMaxChunkRows ? kMaxChunkRows : held,
                         tile_rows);
}

// A batch of prepared rows: words of x as its kernel multiplies them, [segment][tile][step of k][rows of the
// tile], so that what the tiles of a segment read is one stream.
template <class Word>
struct Batch {
  const Problem& p;
  const Plan& plan;
  const Segment* segments;
  int64_t num_segments;
  const Word* x;
  int64_t rows, tile_rows;
  Destination to;
  const float* x_scales = nullptr;  // [row][act groups], where sums are multiplied with them and not x

  // Those of a row and the ones behind it, plan.act_groups apart.
  const float* x_scales_at(int64_t segment, int64_t row) const {
    return x_scales ? x_scales + row * plan.act_groups + segments[segment].act_group : nullptr;
  }
};

// Fetches what tokens [token, token + count) have of y in a few panels, to be written after the tile that is
// about to be multiplied: rows are far apart, and the stores would wait for one line after the other.
template <class S>
QF_INLINE void fetch_y(const Problem& p, const Destination& to, int64_t token, int64_t count, int64_t panel,
                       int64_t panels) {
  if (to.is_staged) return;
  const int64_t panel_cols = p.weight.is_gated ? S::kLanes : 2 * S::kLanes;
  const int64_t bytes = dtype_bytes(p.out.y.dtype), first = panel * panel_cols * bytes;
  const int64_t last = first + panels * panel_cols * bytes;
  for (int64_t t = 0; t < count; ++t) {
    const char* row = p.out.y.row_bytes_at(to.first_row + token + t);
    for (int64_t at = first; at < last; at += 64) __builtin_prefetch(row + at, 1, 3);
  }
}

// Neighbouring tiles of a segment of k and a pair of panels (or one), by one call: with all that they share
// found once, the sums of a tile are still on their way to the totals when the next one begins.
template <class Word>
struct TilesOfWork {
  int64_t count, steps;  // tiles, and steps of k
  const Word* x;         // [tile][step][row]
  const Word* w;
  int64_t w_stride;  // words from panel to panel
  Word* decode_to;   // where w is to be decoded to, by one tile; null where it lies there already
  int64_t s;         // segment
  int64_t row, panel;
  float* totals;  // [row][NP][2][lanes]: set by the first segment, whatever they were
  ShareAhead ahead;

  // What the totals of a tile are before the segment's products are added.
  QF_INLINE const float* totals_before(const float* none) const { return s == 0 ? none : totals; }
  QF_INLINE void next(int64_t tile_rows, int64_t stride) {
    x += tile_rows * steps, row += tile_rows, totals += tile_rows * stride;
    ahead.at += ahead.step * (steps / 2);
  }
};

// Totals of a tile that has none yet.
template <class S>
alignas(64) inline constexpr float kNoTotals[kMaxTileRows * kMaxPanels<S> * 2 * S::kLanes] = {};

// What a batch does with a pair of panels (or one) is the work of its kernel:
//
//   Work::Dot                              of its tiles
//   Work::kRowsOfToken                     of x, as it is multiplied
//   Work::kMaxDecoded                      longest run of k that is decoded; 0 where codes are multiplied as
//                                          they lie
//   codes_at(panel, segment)               where the packed codes of a segment are
//   code_bytes(k)                          of a panel
//   add<MT, NP>(tiles)                     totals += product of each tile, times the scale
//   finish(row, rows, panel, panels, totals)  the epilogue

// Rows [row0, row1) of a batch by panels [begin, end).
template <class Work>
__attribute__((noinline)) void multiply_chunk(const Work& work, int64_t row0, int64_t row1, int64_t begin,
                                              int64_t end) {
  using Dot = typename Work::Dot;
  using S = typename Dot::S;
  using Word = typename Dot::Word;
  constexpr int64_t kPanels = kMaxTilePanels<S>;
  constexpr bool kDecodes = Work::kMaxDecoded > 0;
  alignas(64) Word decoded[kDecodes ? Work::kMaxDecoded / Dot::kPerWord * kPanels * 2 * S::kLanes : 1];
  alignas(64) float totals[kMaxChunkRows * totals_stride<S>(kPanels)];
  const auto& c = work.batch;
  const int64_t rows = row1 - row0, tiles = ceil_div(rows, c.tile_rows);
  // Then a tile's sums are complete at its end, and its totals still in the L1 cache.
  const bool has_one_segment = c.num_segments == 1;

  for (int64_t panel = begin; panel < end; panel += kPanels) {
    const int64_t panels = end - panel < kPanels ? end - panel : kPanels, stride = totals_stride<S>(panels);
    if (c.num_segments == 0) __builtin_memset(totals, 0, static_cast<size_t>(rows * stride) * sizeof(float));
    for (int64_t s = 0; s < c.num_segments; ++s) {
      const Segment& segment = c.segments[s];
      const int64_t steps = (segment.end - segment.begin) / Dot::kPerWord;
      const int64_t code_bytes = work.code_bytes(segment.end - segment.begin);
      const bool is_last = s + 1 == c.num_segments;
      TilesOfWork<Word> run = {};
      run.s = s, run.panel = panel, run.steps = steps;
      if constexpr (kDecodes) {
        run.w = decoded, run.w_stride = steps * 2 * S::kLanes;
      } else {
        run.w = reinterpret_cast<const Word*>(work.codes_at(panel, segment));
        run.w_stride = c.p.packed.panel_code_bytes() / static_cast<int64_t>(sizeof(Word));
      }
      const uint8_t* next =
          is_last ? work.codes_at(panel + kPanels, c.segments[0]) : work.codes_at(panel, c.segments[s + 1]);
      run.ahead = {next, c.p.packed.panel_code_bytes(), ceil_div(2 * code_bytes, steps * tiles)};
      for (int64_t row = row0; row < row1; row += run.count * c.tile_rows) {
        // One by one: a tile that decodes, that has fewer rows, or whose sums are complete at its end.
        const int64_t count = row + c.tile_rows < row1 ? c.tile_rows : row1 - row;
        const bool decodes = kDecodes && row == row0;
        run.count = decodes || is_last || count < c.tile_rows ? 1 : (row1 - row) / c.tile_rows;
        run.x = c.x + segment.begin / Dot::kPerWord * c.rows + row * steps;
        run.row = row;
        run.decode_to = decodes ? decoded : nullptr;
        run.totals = totals + (has_one_segment ? 0 : row - row0) * stride;
        if (is_last) {
          fetch_y<S>(c.p, c.to, row / Work::kRowsOfToken, count / Work::kRowsOfToken, panel, panels);
        }
        choose_rows<kMaxTileRows>(
            count, [&](auto mt) __attribute__((always_inline)) {
              if (kPanels == 2 && panels == 2) {
                work.template add<mt.value, kPanels>(run);
              } else {
                work.template add<mt.value, 1>(run);
              }
            });
        run.ahead.at += run.ahead.step * (steps / 2) * run.count;
        if (has_one_segment) work.finish(row, count, panel, panels, totals);
      }
    }
    if (!has_one_segment) work.finish(row0, rows, panel, panels, totals);
  }
}

// The panels that a thread should have at least, of products with `rows` rows.
template <class S>
QF_INLINE int64_t panel_grain(const Plan& plan, int64_t rows) {
  return ceil_div(kMinPartProducts, rows * (plan.k_padded + 1) * 2 * S::kLanes);
}

// multiply(row0, row1, first, last) for chunks of rows and ranges of panels, all of them together. Threads
// divide the runs of kPanels panels, each of which is as many shares as there are chunks of rows: the ranges
// are equal, and what a thread has of a chunk comes before the next chunk.
template <class S, int64_t kPanels, class Multiply>
QF_INLINE void divide_batch(const Plan& plan, int64_t rows, int64_t chunk_rows, const Multiply& multiply) {
  const int64_t panels = plan.num_panels, chunks = ceil_div(rows, chunk_rows);
  const int64_t grain = ceil_div(panel_grain<S>(plan, chunk_rows), kPanels);
  parallel_ranges(ceil_div(panels, kPanels) * chunks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      // Shares [begin, end) with share % chunks == chunk.
      const int64_t first = (begin + chunks - 1 - chunk) / chunks * kPanels;
      const int64_t last = (end + chunks - 1 - chunk) / chunks * kPanels;
      const int64_t row = chunk * chunk_rows;
      multiply(row, row + chunk_rows < rows ? row + chunk_rows : rows, first, last < panels ? last : panels);
    }
  });
}

// All rows of a batch by all panels.
template <class Work>
QF_INLINE void multiply_batch(const Work& work) {
  using S = typename Work::Dot::S;
  const auto& c = work.batch;
  const int64_t x_row_bytes = c.plan.k_padded * static_cast<int64_t>(sizeof(*c.x)) / Work::Dot::kPerWord;
  const int64_t chunk_rows = chunk_rows_for(c.rows, x_row_bytes, c.tile_rows);
  divide_batch<S, kMaxTilePanels<S>>(c.plan, c.rows, chunk_rows,
                                     [&](int64_t row0, int64_t row1, int64_t first, int64_t last) {
                                       multiply_chunk(work, row0, row1, first, last);
                                     });
}

}  // namespace quantfuse::linear
