// SPDX-License-Identifier: Apache-2.0
//
// A range of columns of a canonical weight, decoded row by row into vectors along k, on either vector type S.
//
// Columns are taken in panels of two vectors. Of the 8-bit formats these are the first and the second half of
// the panel; of the 4-bit formats its even and its odd columns, because that is what the low and the high
// nibbles of a vector of bytes are. unpack_panel() brings results back into order.
#pragma once

#include <type_traits>

#include "cpu/vector_math.h"
#include "linear/weight.h"

namespace quantfuse::linear_backward {

// A row's codes from the first column of the range, and its scales, zero points and offsets by group.
struct WeightRow {
  const uint8_t* codes;
  const float* scales;
  const float* zeros;    // null: symmetric
  const float* offsets;  // null: none
};

template <class S>
inline constexpr int64_t kPanelColumns = 2 * S::kLanes;

// How many scales one row of a range of at most `columns` columns can have.
QF_INLINE int64_t max_groups(const Weight& w, int64_t columns) {
  return w.g_idx || w.num_groups < columns ? w.num_groups : columns;
}

template <class S, qf_format Format>
class WeightColumns {
 public:
  static constexpr int64_t kPanel = kPanelColumns<S>;
  static constexpr bool kIs4Bit = is_packed_4bit(Format);

  // Columns [begin, end), begin even. `groups` has room for kPanel + 1 numbers per panel, `converted` for 2 *
  // max_groups per row that is held at a time.
  QF_INLINE WeightColumns(const Weight& w, int64_t begin, int64_t end, int32_t* groups, float* converted)
      : w_(w), begin_(begin), columns_(end - begin), lane_groups_(groups), converted_(converted) {
    panel_groups_ = groups + num_panels() * kPanel;
    first_group_ = w.g_idx ? 0 : begin / w.block.cols;
    num_groups_ = w.g_idx ? w.num_groups : (end - 1) / w.block.cols - first_group_ + 1;
    for (int64_t panel = 0; panel < num_panels(); ++panel) lay_out_groups(panel);
    if constexpr (Format == QF_INT4) table_ = S::table16(kValuesOf<QF_INT4>.values);
    if constexpr (Format == QF_FP4_E2M1) table_ = S::table16(codebook_of(w.format));
  }

  QF_INLINE int64_t num_panels() const { return ceil_div(columns_, kPanel); }
  QF_INLINE int64_t panel_columns(int64_t panel) const {
    return columns_ - panel * kPanel < kPanel ? columns_ - panel * kPanel : kPanel;
  }

  // Row n. Rows with different `slot` may be held at the same time.
  QF_INLINE WeightRow row(int64_t n, int slot = 0) {
    float* scales = converted_ + 2 * slot * num_groups_;
    float* zeros = scales + num_groups_;
    WeightRow r = {codes(n), scales, w_.zero ? zeros : nullptr,
                   w_.offset ? static_cast<const float*>(group_at(w_.offset, n)) : nullptr};
    if (w_.scale.dtype == DType::f32) {
      r.scales = static_cast<const float*>(group_at(w_.scale, n));
    } else {
      const auto* exponents = static_cast<const uint8_t*>(group_at(w_.scale, n));
      for (int64_t g = 0; g < num_groups_; ++g) scales[g] = E8m0::decode(exponents[g]);
    }
    if (w_.zero && w_.zero.dtype == DType::f32) {
      r.zeros = static_cast<const float*>(group_at(w_.zero, n));
    } else if (w_.zero) {
      const auto* integers = static_cast<const int8_t*>(group_at(w_.zero, n));
      for (int64_t g = 0; g < num_groups_; ++g) zeros[g] = integers[g];
    }
    return r;
  }

  // Calls the lines of row n that decode() will read into the cache.
  QF_INLINE void prefetch(int64_t n) const {
    if (n >= w_.n) return;
    prefetch_lines(codes(n), row_bytes(Format, columns_));
    prefetch_lines(group_at(w_.scale, n), num_groups_ * dtype_bytes(w_.scale.dtype));
    if (w_.zero) prefetch_lines(group_at(w_.zero, n), num_groups_ * dtype_bytes(w_.zero.dtype));
    if (w_.offset) prefetch_lines(group_at(w_.offset, n), num_groups_ * dtype_bytes(w_.offset.dtype));
  }

  // Calls body(panel, is_whole) for every panel; is_whole is a type, so that only the last panel can pay for
  // its edge.
  template <class Body>
  QF_INLINE void each_panel(const Body& body) const {
    const int64_t num_whole = columns_ / kPanel;
    for (int64_t panel = 0; panel < num_whole; ++panel) body(panel, std::true_type{});
    if (num_whole < num_panels()) body(num_whole, std::false_type{});
  }

  // w0 and w1: the two vectors of a panel of the row.
  template <bool kIsWhole>
  QF_INLINE void decode(const WeightRow& row, int64_t panel, std::bool_constant<kIsWhole>, typename S::F& w0,
                        typename S::F& w1) const {
    decode_codes<kIsWhole>(row.codes + row_bytes(Format, panel * kPanel), panel_columns(panel), w0, w1);
    if (const int32_t group = panel_groups_[panel]; group != kSeveral) {
      if (row.zeros) {
        const auto zero = S::set1(row.zeros[group]);
        w0 = S::sub(w0, zero), w1 = S::sub(w1, zero);
      }
      const auto scale = S::set1(row.scales[group]);
      w0 = S::mul(w0, scale), w1 = S::mul(w1, scale);
      if (row.offsets) {
        const auto offset = S::set1(row.offsets[group]);
        w0 = S::add(w0, offset), w1 = S::add(w1, offset);
      }
    } else {
      const int32_t* groups = lane_groups_ + panel * kPanel;
      const auto groups0 = S::load_i(groups), groups1 = S::load_i(groups + S::kLanes);
      if (row.zeros) {
        w0 = S::sub(w0, S::gather(row.zeros, groups0)), w1 = S::sub(w1, S::gather(row.zeros, groups1));
      }
      w0 = S::mul(w0, S::gather(row.scales, groups0)), w1 = S::mul(w1, S::gather(row.scales, groups1));
      if (row.offsets) {
        w0 = S::add(w0, S::gather(row.offsets, groups0)), w1 = S::add(w1, S::gather(row.offsets, groups1));
      }
    }
  }

  // Columns of a panel from its two vectors at `vectors`.
  QF_INLINE static void unpack_panel(const float* vectors, float* columns) {
    for (int64_t i = 0; i < S::kLanes; ++i) {
      columns[kIs4Bit ? 2 * i : i] = vectors[i];
      columns[kIs4Bit ? 2 * i + 1 : S::kLanes + i] = vectors[S::kLanes + i];
    }
  }

 private:
  static constexpr int32_t kSeveral = -1;

  QF_INLINE const uint8_t* codes(int64_t n) const {
    return reinterpret_cast<const uint8_t*>(w_.codes.row_bytes_at(n)) + row_bytes(Format, begin_);
  }

  // The first group of the range in row n of the scales or the zero points.
  QF_INLINE const void* group_at(const Matrix& values, int64_t n) const {
    return values.row_bytes_at(n / w_.block.rows) + first_group_ * dtype_bytes(values.dtype);
  }
  QF_INLINE static void prefetch_lines(const void* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(p) + i);
  }

  // Groups are counted from the first of the range; lanes beyond the last column take its group.
  QF_INLINE void lay_out_groups(int64_t panel) {
    int32_t* groups = lane_groups_ + panel * kPanel;
    panel_groups_[panel] = group_of(panel * kPanel);
    for (int64_t c = 0; c < kPanel; ++c) {
      const int64_t column = panel * kPanel + c < columns_ ? panel * kPanel + c : columns_ - 1;
      const int32_t group = group_of(column);
      groups[kIs4Bit ? c / 2 + c % 2 * S::kLanes : c] = group;
      if (group != panel_groups_[panel]) panel_groups_[panel] = kSeveral;
    }
  }
  QF_INLINE int32_t group_of(int64_t column) const {
    const int64_t c = begin_ + column;
    return static_cast<int32_t>((w_.g_idx ? w_.g_idx.as<const int32_t>()[c] : c / w_.block.cols) -
                                first_group_);
  }

  // n codes, all of a panel or less.
  template <bool kIsWhole>
  QF_INLINE void decode_codes(const uint8_t* p, int64_t n, typename S::F& w0, typename S::F& w1) const {
    if constexpr (kIs4Bit) {
      const auto bytes = kIsWhole ? S::load_u8(p) : S::load_u8(p, (n + 1) / 2);
      w0 = S::lookup(table_, bytes);
      w1 = S::lookup(table_, S::template shr<4>(bytes));
    } else if constexpr (Format == QF_INT8) {
      w0 = S::to_float(kIsWhole ? S::load_i8(p) : S::load_i8(p, n));
      w1 = S::to_float(kIsWhole ? S::load_i8(p + S::kLanes) : S::load_i8(p + S::kLanes, n - S::kLanes));
    } else {
      w0 = decode_fp8<S, Format>(kIsWhole ? S::load_u8(p) : S::load_u8(p, n));
      w1 = decode_fp8<S, Format>(kIsWhole ? S::load_u8(p + S::kLanes)
                                          : S::load_u8(p + S::kLanes, n - S::kLanes));
    }
  }

  const Weight& w_;
  int64_t begin_, columns_;
  int64_t first_group_, num_groups_;
  int32_t* lane_groups_;       // [panel][2][lanes]
  int32_t* panel_groups_;      // [panel] the group of all its lanes, or kSeveral
  float* converted_;           // [slot][scales, zeros][groups], where the tensors are not float32
  typename S::Table16 table_;  // of the 4-bit formats
};

}  // namespace quantfuse::linear_backward
