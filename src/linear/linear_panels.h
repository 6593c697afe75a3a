// SPDX-License-Identifier: Apache-2.0
//
// What the CPU kernels of linear share: the plan of a call, the runs of k that have one scale, and the
// epilogue.
//
// A call goes: prepare x (converted or quantized, in the packed order of k, interleaved by tiles of rows) ->
// every thread takes a range of panels; for a chunk of rows that fits the L2 cache, for each panel, for each
// segment of k, for each tile of rows: product of the tile, times the scale, added to the panel's totals ->
// epilogue of the panel.
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
};

// Rows up to which codes are decoded in registers, for one tile; with more rows a decoded segment is shared
// from L1.
inline constexpr int64_t kDirectRows = 4;
inline constexpr int64_t kMaxChunkRows = 96;                 // totals of a chunk: 96 x 32 floats, 12 KB
inline constexpr int64_t kChunkBytes = 512 * 1024;           // of prepared x: less than half of an L2 cache
inline constexpr int64_t kPreparedBytes = 32 * 1024 * 1024;  // of prepared x in the workspace

// Sizes of a call and its workspace. XBytes is the size of one prepared number.
struct Plan {
  int64_t k_padded, num_panels, num_groups;
  int64_t max_segments;
  int64_t act_groups;                                                // scales per row of x
  int64_t batch_rows;                                                // rows prepared at a time
  int64_t segments, x, x_scale, x_sums, x_row, result, total_bytes;  // offsets in the workspace
};

QF_INLINE Plan make_plan(const Problem& p, int x_bytes, int64_t segment_cap) {
  Plan plan = {};
  const PackedHeader* h = p.packed.header;
  plan.k_padded = h ? h->k_padded : round_up(p.k, 8) + 8 * p.weight.num_groups;  // without data: an upper
                                                                                 // bound
  plan.num_panels = h ? h->num_panels : 0;
  plan.num_groups = h ? h->num_groups : p.weight.num_groups;
  plan.act_groups = p.has_act_quant() ? ceil_div(p.k, p.act_group) : 1;
  plan.max_segments = plan.num_groups + plan.k_padded / segment_cap + plan.act_groups + 1;

  const int64_t row_bytes = plan.k_padded * x_bytes > 0 ? plan.k_padded * x_bytes : 1;
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
  plan.x = reserve(plan.batch_rows * plan.k_padded * x_bytes);
  plan.x_scale = reserve(plan.batch_rows * plan.act_groups * 4);
  plan.x_sums = reserve(plan.batch_rows * plan.max_segments * 4);
  // Columns in another order than x has them are gathered from a copy of the row.
  plan.x_row = reserve(!h || h->has_k_map ? plan.batch_rows * round_up(p.k, 16) * x_bytes : 0);
  plan.result = reserve(p.out.is_quantized() && !p.out.is_static ? plan.batch_rows * p.n_out * 4 : 0);
  plan.total_bytes = offset;
  return plan;
}

// Cuts every group of the weight at multiples of `cap` from its begin, and at multiples of act_group.
QF_INLINE int64_t cut_segments(const Problem& p, int64_t cap, int64_t act_group, Segment* out) {
  const PackedHeader& h = *p.packed.header;
  const int32_t* bounds = p.packed.bounds();
  int64_t count = 0;
  for (int64_t g = 0; g < h.num_groups; ++g) {
    for (int64_t begin = bounds[g]; begin < bounds[g + 1];) {
      int64_t end = begin + cap;
      const int64_t next_act = (begin / act_group + 1) * act_group;
      if (end > next_act) end = next_act;
      if (end > bounds[g + 1]) end = bounds[g + 1];
      out[count++] = {static_cast<int32_t>(begin), static_cast<int32_t>(end), static_cast<int32_t>(g),
                      static_cast<int32_t>(begin / act_group)};
      begin = end;
    }
  }
  return count;
}

// Requirements that both kernels have.
QF_INLINE Requirements packed_for(const Problem& p, int lanes) {
  Requirements r;
  r.require(!p.not_packed_reason, "the weight is not packed (qf_weight_pack)");
  r.require(!p.packed.header || p.packed.header->lanes == lanes,
            "the weight is packed for another vector width");
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

// The epilogue of one row of one panel: totals are sums of 2 * lanes columns, times x_scale.
template <class S>
__attribute__((noinline)) void finish_row(const Problem& p, const Destination& to, int64_t row, int64_t panel,
                                          const float* totals, float x_scale) {
  constexpr int64_t L = S::kLanes;
  const auto scale = S::set1(x_scale);
  typename S::F v[2] = {S::mul(S::load(totals), scale), S::mul(S::load(totals + L), scale)};
  alignas(64) float values[2 * L];
  int64_t col, count;  // of y
  if (p.weight.is_gated) {
    col = panel * L;
    count = p.n_out - col < L ? p.n_out - col : L;
    if (p.bias) {
      v[0] = S::add(v[0], load_some<S>(p.bias.dtype, p.bias.data, col, count));
      v[1] = S::add(v[1], load_some<S>(p.bias.dtype, p.bias.data, p.n_out + col, count));
    }
    auto y = S::mul(activate<S>(p.activation, v[0]), v[1]);
    if (p.residual) y = S::add(y, load_some<S>(p.residual.dtype, p.residual.row_bytes_at(row), col, count));
    S::store(values, y);
  } else {
    col = panel * 2 * L;
    count = p.n_out - col < 2 * L ? p.n_out - col : 2 * L;
    for (int i = 0; i < 2; ++i) {
      auto y = v[i];
      if (p.bias) y = S::add(y, load_some<S>(p.bias.dtype, p.bias.data, col + i * L, count - i * L));
      y = activate<S>(p.activation, y);
      if (p.residual) {
        y = S::add(y,
                   load_some<S>(p.residual.dtype, p.residual.row_bytes_at(row), col + i * L, count - i * L));
      }
      S::store(values + i * L, y);
    }
  }
  if (to.is_staged) {
    float* out = to.result + (row - to.first_row) * p.n_out + col;
    for (int64_t i = 0; i < count; i += L) S::store(out + i, S::load(values + i), count - i);
  } else {
    store_output<S>(p.out, row, col, values, count);
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

// Fetches the codes behind a segment, one share per tile of rows, while the segment is multiplied: it is used
// so often that the hardware has long stopped to look ahead when the next one is wanted.
struct NextCodes {
  const uint8_t* at;
  int64_t bytes_per_tile;

  QF_INLINE NextCodes(const uint8_t* segment, int64_t bytes, int64_t tiles)
      : at(segment + bytes), bytes_per_tile(round_up(ceil_div(bytes, tiles), 64)) {}
  QF_INLINE void fetch_share() {
    for (const uint8_t* end = at + bytes_per_tile; at < end; at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// Rows of a chunk: whole tiles, as many as fit the cache.
QF_INLINE int64_t chunk_rows_for(int64_t tile_rows, int64_t k_padded, int x_bytes) {
  const int64_t tile_bytes = tile_rows * k_padded * x_bytes;
  int64_t tiles = tile_bytes > 0 ? kChunkBytes / tile_bytes : kMaxChunkRows;
  if (tiles * tile_rows > kMaxChunkRows) tiles = kMaxChunkRows / tile_rows;
  return (tiles < 1 ? 1 : tiles) * tile_rows;
}

}  // namespace quantfuse::linear
