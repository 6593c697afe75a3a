// SPDX-License-Identifier: Apache-2.0
//
// The weights of linear_int.h times INT8 activations by products of tiles of bytes: see linear_amx.h. The
// same sums, scaled in the same order, so the same bits.
#include "linear/linear_amx.h"
#include "linear/linear_int.h"

namespace quantfuse::linear_int_amx {
using linear::IntBatch, linear::Problem, linear::Segment;
namespace {

using S = Amx;
using XTiles = linear::XTiles<ByteTiles, 1>;

// Where totals are integers: the fewer segments, the fewer times they go to tiles and back. w of one is
// 32 KB.
constexpr int64_t kLongSegment = 1024;

constexpr linear::XShape kXShape = {1, 1, ByteTiles::kPerStep, kTileRows};

int64_t segment_cap(bool has_int_totals) { return has_int_totals ? kLongSegment : linear::kIntSegment; }

struct Work {
  using S = Amx;
  using Tiles = ByteTiles;
  static constexpr int kParts = 1;
  static constexpr int64_t kMaxSegment = kLongSegment;
  const IntBatch& batch;

  int32_t offset() const { return byte_offset_of(batch.p.weight.format); }
  bool keeps_sums() const { return batch.has_int_totals; }
  int64_t code_bytes(int64_t k) const { return k * kPanelColumns * code_bits(batch.p.weight.format) / 8; }
  const uint8_t* codes_at(int64_t panel, const Segment& segment) const {
    return batch.p.packed.codes(panel) + code_bytes(segment.begin);
  }

  const void* columns(int64_t panel, const Segment& segment, char* decoded) const {
    const uint8_t* codes = codes_at(panel, segment);
    const int64_t k = segment.end - segment.begin;
    const bool is_whole = k % Tiles::kPerStep == 0;
    const qf_format format = batch.p.weight.format;
    if (format == QF_INT8 && is_whole) return codes;
    choose_value<QF_INT4, QF_FP4_E2M1, QF_INT8>(
        code_path(format), [&](auto path) __attribute__((always_inline)) {
          decode_panel<false>(ByteDecoder<S, path.value>(format), codes, nullptr, k,
                              reinterpret_cast<int32_t*>(decoded));
        });
    if (!is_whole) {
      const int64_t bytes = k * kPanelColumns;
      __builtin_memset(decoded + bytes, 0,
                       static_cast<size_t>(linear::tile_bytes_of_panel<Tiles>(k) - bytes));
    }
    return decoded;
  }

  // -offset * (sum of x's codes), since codes are multiplied as they are stored.
  void begin_totals(int64_t row, int64_t rows, float* totals) const {
    for (int64_t r = 0; r < round_up(rows, kTileRows); ++r) {
      const auto sum = S::set1(r < rows ? -offset() * batch.sums[row + r] : 0);
      for (int64_t i = 0; i < kPanelColumns; i += S::kLanes) S::store_i(totals + r * kPanelColumns + i, sum);
    }
  }

  // totals += scale * (sums - offset * sum of x - zero * sum of x)
  QF_INLINE void add(int64_t panel, int64_t s, int64_t row, int64_t rows, const int32_t* sums,
                     float* totals) const {
    const Segment& segment = batch.segments[s];
    const int64_t group = segment.group * kPanelColumns;
    const float *scales = batch.p.packed.scales(panel) + group, *zeros = batch.p.packed.zeros(panel);
    const int32_t* x_sums = batch.sums + batch.sums_at(s, row);
    const float* x_scales = batch.has_group_scales() ? batch.x_scales_at(s, row) : nullptr;
    choose_bool(
        zeros != nullptr, [&](auto has_zeros) __attribute__((always_inline)) {
          for (int64_t r = 0; r < rows; ++r) {
            const auto x_sum = S::set1(static_cast<float>(x_sums[r]));
            const auto start = S::set1(-offset() * x_sums[r]);
            for (int64_t i = 0; i < kPanelColumns; i += S::kLanes) {
              const int64_t at = r * kPanelColumns + i;
              auto value = S::to_float(S::add(S::load_i(sums + at), start));
              if constexpr (has_zeros.value) value = S::fnma(S::load(zeros + group + i), x_sum, value);
              if (x_scales) value = S::mul(value, S::set1(x_scales[r * batch.plan.act_groups]));
              S::store(totals + at,
                       S::fma(value, S::load(scales + i), s == 0 ? S::zero() : S::load(totals + at)));
            }
          }
        });
  }

  void finish(int64_t row, int64_t rows, int64_t panel, int64_t panels, const float* totals) const {
    linear::finish_ints<S>(batch, row, rows, panel, panels, totals);
  }
};

linear::Plan make_plan(const Problem& p) {
  return linear::make_plan(p, kXShape, linear::kIntSegment, linear::act_group_of_segments(p, true));
}

// Rows [row, row + count) of a batch, of one tile.
void prepare_tile(const IntBatch& c, int64_t row, int64_t count, float* scales, int32_t* sums,
                  int8_t* ordered) {
  const XTiles x(c.x, c.rows);
  for (int64_t s = 0; s < c.num_segments && count < kTileRows; ++s) {
    const Segment& segment = c.segments[s];
    __builtin_memset(x.at(segment, row), 0, static_cast<size_t>(x.steps(segment) * x.kStepBytes));
  }
  for (int64_t done = 0; done < count; done += kMaxTileRows) {
    const int64_t rows = count - done < kMaxTileRows ? count - done : kMaxTileRows;
    linear::prepare_int_rows<S>(
        c, row + done, rows, scales + done * c.plan.act_groups, sums, ordered + done * round_up(c.p.k, 16),
        [&](const Segment& segment, const int32_t* words, int64_t stride) __attribute__((always_inline)) {
          const int64_t bytes = segment.end - segment.begin;
          for (int64_t r = 0; r < rows; ++r) {
            const char* from = reinterpret_cast<const char*>(words + r * stride);
            char* to = x.at(segment, row) + (done + r) * 64;
            for (int64_t k = 0; k < bytes; k += 64, to += x.kStepBytes) {
              const int64_t run = bytes - k < 64 ? bytes - k : 64;
              S::store_i(to, S::load_bytes(from + k, run));
            }
          }
        });
  }
}

Verdict accepts(const Problem& p) {
  if (p.m <= linear::kMostFewRows) return no(linear::kFewRows);
  return linear::accepts_int(p, S::kLanes);
}

size_t workspace_bytes(const Problem& p) { return static_cast<size_t>(make_plan(p).total_bytes); }

void launch(const Problem& p, const Launch& launch) {
  const linear::Plan plan = make_plan(p);
  const bool has_int_totals = linear::has_int_totals(plan);
  char* workspace = static_cast<char*>(launch.workspace);
  auto* segments = reinterpret_cast<Segment*>(workspace + plan.segments);
  const linear::Cuts cuts = linear::cut_segments(
      p, segment_cap(has_int_totals), linear::act_group_of_segments(p, true), ByteTiles::kPerStep, segments);
  auto* scales = reinterpret_cast<float*>(workspace + plan.x_scale);
  auto* sums = reinterpret_cast<int32_t*>(workspace + plan.x_sums);
  auto* ordered = reinterpret_cast<int8_t*>(workspace + plan.x_row);

  for (int64_t first_row = 0; first_row < p.m; first_row += plan.batch_rows) {
    const int64_t rows = p.m - first_row < plan.batch_rows ? p.m - first_row : plan.batch_rows;
    const linear::Destination to = {p.out.is_quantized() && !p.out.is_static,
                                    reinterpret_cast<float*>(workspace + plan.result), first_row};
    const IntBatch batch = {{p, plan, segments, cuts.segments, reinterpret_cast<int32_t*>(workspace + plan.x),
                             rows, kTileRows, to, scales},
                            sums,
                            has_int_totals};
    parallel_ranges(ceil_div(rows, kTileRows), 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin * kTileRows; row < end * kTileRows && row < rows; row += kTileRows) {
        prepare_tile(batch, row, rows - row < kTileRows ? rows - row : kTileRows,
                     scales + row * plan.act_groups, sums, ordered + row * round_up(p.k, 16));
      }
    });
    linear::multiply_batch_on_tiles(Work{batch});
    linear::finish_batch<S>(p, to, rows);
  }
}

}  // namespace

extern const Kernel<Problem> entry = {
    "linear_int_amx",           Target::amx, accepts, workspace_bytes, launch,
    /*is_batch_invariant=*/true};

}  // namespace quantfuse::linear_int_amx
