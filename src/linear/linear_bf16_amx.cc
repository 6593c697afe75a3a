// SPDX-License-Identifier: Apache-2.0
//
// Any weight format times activations of any type by products of tiles of BF16 numbers: see linear_amx.h.
// Codes, less integer zero points, are BF16 numbers, and so are the codes of quantized activations, whose
// scales are for the sums. FP16 activations are the sum of two BF16 numbers, float32 ones of three, each the
// upper half of what those before it leave:
//
//   x = x0 + x1 + x2,    x0 = the upper 16 bits of x, x1 = those of x - x0, x2 = x - x0 - x1
//
// so that nothing is rounded on the way to the products, which are exact in float32.
#include "linear/bf16_codes.h"
#include "linear/linear_amx.h"
#include "linear/linear_float.h"

namespace quantfuse::linear_bf16_amx {
using linear::Problem, linear::Segment;
namespace {

using S = Amx;
using Batch = linear::Batch<int32_t>;

constexpr int64_t kSegment = 256;  // of k: w of one is 16 KB

int parts_of(const Problem& p) {
  return p.has_act_quant() || p.x.dtype == DType::bf16 ? 1 : p.x.dtype == DType::f16 ? 2 : 3;
}

linear::XShape x_shape(const Problem& p) {
  return {2 * parts_of(p), static_cast<int64_t>(sizeof(float)), Bf16Tiles::kPerStep, kTileRows};
}

linear::Plan make_plan(const Problem& p) {
  return linear::make_plan(p, x_shape(p), kSegment, linear::act_group_of_segments(p, true));
}

// ---- x ----

// 32 k of a row, as the words of each part.
template <int kParts>
QF_INLINE void store_parts(const linear::PairOrder& order, const float* x, char* to) {
  // Of the 64 halves of 32 floats the upper ones, in the order of words.
  const auto columns =
      S::add(S::add(S::load_i(order.columns), S::load_i(order.columns)), S::set1(0x00010001));
  S::F rest[2] = {S::load(x), S::load(x + S::kLanes)};
  const auto upper = S::set1(static_cast<int32_t>(0xffff0000u)), quiet = S::set1(0x00400000);
  unrolled<kParts>([&](auto part) __attribute__((always_inline)) {
    S::I words[2];
    unrolled<2>([&](auto i) __attribute__((always_inline)) {
      // The payload of a NaN may be in the lower half alone; what an infinity leaves is nothing.
      const auto bits = S::bits(rest[i]);
      words[i] = S::and_(S::select(S::is_nan(rest[i]), S::or_(bits, quiet), bits), upper);
      const auto left = S::sub(rest[i], S::from_bits(words[i]));
      rest[i] = S::select(S::is_nan(left), S::zero(), left);
    });
    S::store_i(to + part * kTileBytes, S::lookup_u16(words[0], words[1], columns));
  });
}

// Rows [row, row + count) of a batch, of one tile. `ordered` has room for a row where columns are reordered.
template <int kParts>
void prepare_tile(const Batch& c, int64_t row, int64_t count, float* scales, float* ordered) {
  const Problem& p = c.p;
  const linear::XTiles<Bf16Tiles, kParts> x(c.x, c.rows);
  const int32_t* k_map = p.packed.k_map();
  const auto& order = p.weight.format == QF_BF16 ? linear::kOrderOfNeighbours : linear::kOrderOfCodes;
  const auto columns = S::load_i(order.columns);
  const bool is_bf16 = !p.has_act_quant() && p.x.dtype == DType::bf16 && !k_map;
  for (int64_t i = 0; i < kTileRows; ++i) {
    const int64_t r = c.to.first_row + row + i;
    float* own = scales + i * c.plan.act_groups;
    if (i < count && p.has_act_quant()) linear::copy_input_scales<S>(p, r, c.plan.act_groups, own);
    if (i < count && k_map) linear::load_inputs<S, false>(p, r, 0, p.k, own, ordered);
    for (int64_t s = 0; s < c.num_segments; ++s) {
      const Segment& segment = c.segments[s];
      const int64_t length = round_up(segment.end - segment.begin, Bf16Tiles::kPerStep);
      char* to = x.at(segment, row) + i * 64;
      int64_t from_x = segment.end < p.k ? segment.end : p.k;  // columns behind are padding
      from_x = i < count ? from_x - segment.begin : 0;
      if (is_bf16) {
        const auto* from = p.x.row<const bf16>(i < count ? r : 0) + segment.begin;
        for (int64_t k = 0; k < length; k += Bf16Tiles::kPerStep, to += x.kStepBytes)
          S::store_i(to, S::lookup_u16(S::load_bytes(from + k, 2 * (from_x - k)), columns));
        continue;
      }
      alignas(64) float run[kSegment] = {};
      if (k_map) {
        for (int64_t k = 0; i < count && k < segment.end - segment.begin; ++k) {
          const int32_t column = k_map[segment.begin + k];
          run[k] = column < 0 ? 0.0f : ordered[column];
        }
      } else if (from_x > 0) {
        linear::load_inputs<S, false>(p, r, segment.begin, segment.begin + from_x, own, run);
      }
      for (int64_t k = 0; k < length; k += Bf16Tiles::kPerStep, to += x.kStepBytes)
        store_parts<kParts>(order, run + k, to);
    }
  }
}

// ---- w ----

template <qf_format Format, bool HasZeros>
__attribute__((noinline)) void decode(const Problem& p, int64_t panel, const Segment& segment,
                                      const uint8_t* codes, int32_t* to) {
  const float* zeros = HasZeros ? p.packed.zeros(panel) + segment.group * kPanelColumns : nullptr;
  decode_panel<HasZeros>(linear::PairDecoder<S, Format>(p.weight.format), codes, zeros,
                         segment.end - segment.begin, to);
}

template <int kPartsOfX>
struct Work {
  using S = Amx;
  using Tiles = Bf16Tiles;
  static constexpr int kParts = kPartsOfX;
  static constexpr int64_t kMaxSegment = kSegment;
  const Batch& batch;

  static bool keeps_sums() { return false; }
  static void begin_totals(int64_t, int64_t, float*) {}
  int64_t code_bytes(int64_t k) const { return k * kPanelColumns * code_bits(batch.p.weight.format) / 8; }
  const uint8_t* codes_at(int64_t panel, const Segment& segment) const {
    return batch.p.packed.codes(panel) + code_bytes(segment.begin);
  }

  const void* columns(int64_t panel, const Segment& segment, char* decoded) const {
    const Problem& p = batch.p;
    const uint8_t* codes = codes_at(panel, segment);
    const int64_t k = segment.end - segment.begin;
    const bool is_whole = k % Tiles::kPerStep == 0;
    if (p.weight.format == QF_BF16 && is_whole) return codes;
    auto* to = reinterpret_cast<int32_t*>(decoded);
    choose_value<QF_INT4, QF_FP4_E2M1, QF_INT8, QF_FP8_E4M3, QF_FP8_E5M2, QF_BF16>(
        code_path(p.weight.format), [&](auto format) __attribute__((always_inline)) {
          if constexpr (is_integer(format.value)) {
            if (p.packed.header->has_zeros) return decode<format.value, true>(p, panel, segment, codes, to);
          }
          decode<format.value, false>(p, panel, segment, codes, to);
        });
    if (!is_whole) {
      const int64_t bytes = k * kPanelColumns * 2;
      __builtin_memset(decoded + bytes, 0,
                       static_cast<size_t>(linear::tile_bytes_of_panel<Tiles>(k) - bytes));
    }
    return decoded;
  }

  // totals += scale * sums
  QF_INLINE void add(int64_t panel, int64_t s, int64_t row, int64_t rows, const float* sums,
                     float* totals) const {
    const float* scales = batch.p.packed.scales(panel) + batch.segments[s].group * kPanelColumns;
    const float* x_scales = batch.x_scales_at(s, row);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < kPanelColumns; i += S::kLanes) {
        const int64_t at = r * kPanelColumns + i;
        auto sum = S::load(sums + at);
        if (x_scales) sum = S::mul(sum, S::set1(x_scales[r * batch.plan.act_groups]));
        S::store(totals + at, S::fma(sum, S::load(scales + i), s == 0 ? S::zero() : S::load(totals + at)));
      }
    }
  }

  void finish(int64_t row, int64_t rows, int64_t panel, int64_t panels, const float* totals) const {
    linear::finish_floats<S>(batch, row, rows, panel, panels, totals);
  }
};

// ---- The call ----

Verdict accepts(const Problem& p) {
  const linear::PackedHeader* h = p.packed.header;
  const bool has_float_zeros = h ? h->has_float_zeros : p.weight.has_float_zeros();
  const bool has_infinities = p.weight.format == QF_FP8_E5M2 || p.weight.format == QF_BF16;
  return linear::packed_for(p, S::kLanes)
      .require(p.m > linear::kMostFewRows, linear::kFewRows)
      .require(!p.has_act_quant() || linear::has_whole_act_groups(p), linear::kNoWholeActGroups)
      .require(!has_float_zeros, "the weight's zero points are not integers")
      .require(linear::has_bf16_codes(p.weight), "the weight's numbers are not BF16 numbers")
      // 0 is a part of most x, and infinity times 0 is not infinity.
      .require(parts_of(p) == 1 || !has_infinities, "x has parts, and the weight's format has infinities");
}

size_t workspace_bytes(const Problem& p) { return static_cast<size_t>(make_plan(p).total_bytes); }

template <int kParts>
void run(const Problem& p, const Launch& launch) {
  const linear::Plan plan = make_plan(p);
  char* workspace = static_cast<char*>(launch.workspace);
  auto* segments = reinterpret_cast<Segment*>(workspace + plan.segments);
  const linear::Cuts cuts = linear::cut_segments(p, kSegment, linear::act_group_of_segments(p, true),
                                                 Bf16Tiles::kPerStep, segments);
  auto* scales = reinterpret_cast<float*>(workspace + plan.x_scale);
  auto* ordered = reinterpret_cast<float*>(workspace + plan.x_row);

  for (int64_t first_row = 0; first_row < p.m; first_row += plan.batch_rows) {
    const int64_t rows = p.m - first_row < plan.batch_rows ? p.m - first_row : plan.batch_rows;
    const linear::Destination to = {p.out.is_quantized() && !p.out.is_static,
                                    reinterpret_cast<float*>(workspace + plan.result), first_row};
    const Batch batch = {p,
                         plan,
                         segments,
                         cuts.segments,
                         reinterpret_cast<int32_t*>(workspace + plan.x),
                         rows,
                         kTileRows,
                         to,
                         p.has_act_quant() ? scales : nullptr};
    parallel_ranges(ceil_div(rows, kTileRows), 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin * kTileRows; row < end * kTileRows && row < rows; row += kTileRows) {
        prepare_tile<kParts>(batch, row, rows - row < kTileRows ? rows - row : kTileRows,
                             scales + row * plan.act_groups, ordered + row * round_up(p.k, 16));
      }
    });
    linear::multiply_batch_on_tiles(Work<kParts>{batch});
    linear::finish_batch<S>(p, to, rows);
  }
}

void launch(const Problem& p, const Launch& launch) {
  choose_value<1, 2, 3>(
      parts_of(p), [&](auto parts) __attribute__((always_inline)) { run<parts.value>(p, launch); });
}

}  // namespace

extern const Kernel<Problem> entry = {"linear_bf16_amx", Target::amx, accepts, workspace_bytes, launch};

}  // namespace quantfuse::linear_bf16_amx
