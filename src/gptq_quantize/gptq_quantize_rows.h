// SPDX-License-Identifier: Apache-2.0
//
// gptq_quantize over either vector type S. R comes from one Cholesky factorisation in double, of H with its
// columns in reverse. Then the columns are rounded block by block (128 of them, or as many whole groups):
//
//   errors so far [rows, begin] x G[0:begin, block] --add_product, 256 rows of G at a time--> sums
//   each row alone: round a column, add its error times its row of G to the sums of the columns to come
//
// Rows are divided among the threads. A row's results depend on nothing but itself and the order of sums in a
// row, so they are the same for every number of threads.
#pragma once

#include "core/element.h"
#include "cpu/cholesky.h"
#include "gptq_quantize/gptq_quantize.h"
#include "quantize/round_group.h"

namespace quantfuse::gptq_quantize {

inline constexpr int64_t kColumnBlock = 128;

// Whole groups, so that a group's range can be found where it begins.
QF_INLINE int64_t block_columns(const Problem& p) {
  if (p.has_static_groups()) return kColumnBlock;
  return p.group >= kColumnBlock ? p.group : kColumnBlock / p.group * p.group;
}

template <class S>
struct Workspace {
  double* triangle;  // [k][cholesky_stride(k)]: R, both indices reversed
  double* pivots;    // [k]
  double* scratch;   // of the factorisation
  float* errors;     // [n][error_stride]
  float* sums;       // [n][width]
  float* panel;      // [k][width]: the columns of G of one block
  int32_t* order;    // [k]
  int64_t width, error_stride;

  QF_INLINE explicit Workspace(const Problem& p)
      : width(round_up(block_columns(p), kProductCols<S>)), error_stride(round_up(p.k, 16) + 16) {}

  // Lays the arrays out behind `base`; with null, only counts.
  QF_INLINE size_t place(const Problem& p, char* base) {
    size_t used = 0;
    auto take = [&](auto*& array, int64_t count) {
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(base + used);
      used += static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(*array)), 64));
    };
    take(triangle, p.k * cholesky_stride(p.k));
    take(pivots, p.k);
    take(scratch, cholesky_scratch(p.k));
    take(errors, p.n * error_stride);
    take(sums, p.n * width);
    take(panel, p.k * width);
    take(order, p.k);
    return used;
  }
};

template <class S>
class RowsGptq {
 public:
  QF_INLINE RowsGptq(const Problem& p, const Launch& launch) : p_(p), w_(p) {
    w_.place(p, static_cast<char*>(launch.workspace));
  }

  QF_INLINE void run() {
    find_order(p_, w_.order);
    fill_triangle();
    const int64_t failed = cholesky<typename S::Double>(w_.triangle, p_.k, w_.pivots, w_.scratch);
    if (failed >= 0) fail_not_positive_definite(p_, w_.order[p_.k - 1 - failed]);

    write_g_idx(p_, w_.order);
    parallel_ranges(p_.n, 4, [&](int64_t r0, int64_t r1) { begin_rows(r0, r1); });
    const int64_t step = block_columns(p_);
    for (int64_t begin = 0; begin < p_.k; begin += step) {
      const int64_t end = begin + step < p_.k ? begin + step : p_.k;
      parallel_ranges(end, 64, [&](int64_t j0, int64_t j1) { fill_panel(begin, end, j0, j1); });
      parallel_ranges(p_.n, 4, [&](int64_t r0, int64_t r1) {
        add_errors(begin, r0, r1);
        for (int64_t r = r0; r < r1; ++r) round_block(begin, end, r);
      });
    }
  }

 private:
  QF_INLINE double& triangle(int64_t position, int64_t later) const {
    return w_.triangle[(p_.k - 1 - position) * cholesky_stride(p_.k) + (p_.k - 1 - later)];
  }

  QF_INLINE void fill_triangle() {
    const Diagonal diagonal = diagonal_of(p_);
    parallel_ranges(p_.k, 16, [&](int64_t i0, int64_t i1) {
      for (int64_t i = i0; i < i1; ++i) {
        const int64_t column = w_.order[i];
        const float* row = p_.hessian.row<const float>(column);
        const bool is_unseen = diagonal.is_unseen(p_, column);
        for (int64_t j = i + 1; j < p_.k; ++j) {
          const bool is_apart = is_unseen || diagonal.is_unseen(p_, w_.order[j]);
          triangle(i, j) = is_apart ? 0.0 : row[w_.order[j]];
        }
        triangle(i, i) = diagonal.at(p_, column);
        w_.pivots[p_.k - 1 - i] = kSmallestPivot * triangle(i, i);
      }
    });
  }

  // Scales of static groups; codes cleared, because nibbles are put into their bytes one by one.
  __attribute__((noinline)) void begin_rows(int64_t r0, int64_t r1) const {
    for (int64_t r = r0; r < r1; ++r) {
      __builtin_memset(p_.q.row_bytes_at(r), 0, static_cast<size_t>(row_bytes(p_.format, p_.k)));
      if (p_.loss) p_.loss.as<float>()[r] = 0;
      if (!p_.has_static_groups()) continue;
      // The row of errors is free until the first block.
      float* row = w_.errors + r * w_.error_stride;
      const bool is_by_position = p_.act_order != QF_ACT_ORDER_STATIC;
      for (int64_t i = 0; i < p_.k; ++i) row[i] = float_at(p_.weight, r, is_by_position ? w_.order[i] : i);
      for (int64_t g = 0; g < p_.groups; ++g) {
        const int64_t first = g * p_.group, count = p_.k - first < p_.group ? p_.k - first : p_.group;
        store_quantizer(r, g,
                        quantize::group_quantizer<S>(row + first, count, p_.kind(), p_.range, p_.is_mse));
      }
    }
  }

  QF_INLINE void store_quantizer(int64_t r, int64_t g, const quantize::Quantizer& z) const {
    p_.scale.row<float>(r)[g] = z.scale;
    if (p_.zero) p_.zero.row<int8_t>(r)[g] = static_cast<int8_t>(z.zero);
  }
  QF_INLINE quantize::Rounding rounding(int64_t r, int64_t g) const {
    quantize::Quantizer z;
    z.scale = p_.scale.row<const float>(r)[g];
    if (p_.zero) z.zero = p_.zero.row<const int8_t>(r)[g];
    return quantize::Rounding(z, p_.range);
  }

  // Rows [j0, j1) of G's columns [begin, end).
  __attribute__((noinline)) void fill_panel(int64_t begin, int64_t end, int64_t j0, int64_t j1) const {
    for (int64_t j = j0; j < j1; ++j) {
      float* row = w_.panel + j * w_.width;
      for (int64_t c = 0; c < w_.width; ++c) {
        const int64_t i = begin + c;
        row[c] = i < end && j < i ? static_cast<float>(triangle(j, i) / triangle(i, i)) : 0.0f;
      }
    }
  }

  __attribute__((noinline)) void add_errors(int64_t begin, int64_t r0, int64_t r1) const {
    __builtin_memset(w_.sums + r0 * w_.width, 0, static_cast<size_t>((r1 - r0) * w_.width) * sizeof(float));
    constexpr int64_t kDepth = 256;  // 128 KB of G beside the rows' errors
    for (int64_t j = 0; j < begin; j += kDepth) {
      add_product<S>({w_.errors + r0 * w_.error_stride + j, w_.error_stride, w_.panel + j * w_.width,
                      w_.width, w_.sums + r0 * w_.width, w_.width, r1 - r0, w_.width,
                      begin - j < kDepth ? begin - j : kDepth});
    }
  }

  // sums[c] += e * G[j, c] for the columns behind j. G is zero up to j, so whole vectors may be added.
  QF_INLINE void add_error(float* sums, int64_t begin, int64_t j, float e) const {
    const float* row = w_.panel + j * w_.width;
    const auto x = S::set1(e);
    for (int64_t c = (j - begin) / S::kLanes * S::kLanes; c < w_.width; c += S::kLanes)
      S::store(sums + c, S::fma(x, S::load(row + c), S::load(sums + c)));
  }

  // The group [first, last) as it stands when its first column is to be rounded, all columns before it done.
  QF_INLINE quantize::Quantizer changed_group_quantizer(const float* weights, const float* sums,
                                                        int64_t begin, int64_t first, int64_t last) const {
    alignas(64) float trial[Problem::kWidestGroup], changed[Problem::kWidestGroup];
    __builtin_memcpy(trial, sums, static_cast<size_t>(w_.width) * sizeof(float));
    for (int64_t i = first; i < last; ++i) {
      const float change = trial[i - begin];
      changed[i - first] = weights[i - begin] + change;
      add_error(trial, begin, i, -change);
    }
    return quantize::group_quantizer<S>(changed, last - first, p_.kind(), p_.range, p_.is_mse);
  }

  __attribute__((noinline)) void round_block(int64_t begin, int64_t end, int64_t r) const {
    float* sums = w_.sums + r * w_.width;
    float* errors = w_.errors + r * w_.error_stride + begin;
    auto* codes = reinterpret_cast<uint8_t*>(p_.q.row_bytes_at(r));
    float weights[Problem::kWidestGroup];
    for (int64_t i = begin; i < end; ++i) weights[i - begin] = float_at(p_.weight, r, w_.order[i]);

    int64_t group = -1;
    quantize::Rounding round;
    double loss = 0;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t c = i - begin;
      if (const int64_t g = p_.group_of(i, w_.order); g != group) {
        group = g;
        if (!p_.has_static_groups()) {
          const int64_t last = end - i < p_.group ? end : i + p_.group;
          store_quantizer(r, g, changed_group_quantizer(weights, sums, begin, i, last));
        }
        round = rounding(r, g);
      }
      const float target = weights[c] + sums[c];
      const float steps = round.steps(target), value = steps * round.scale;
      const int code = static_cast<int>(steps + round.zero);
      const int64_t column = w_.order[i];
      if (p_.format == QF_INT4) {
        codes[column / 2] = static_cast<uint8_t>(codes[column / 2] | (code & 15) << (column % 2 * 4));
      } else {
        codes[column] = static_cast<uint8_t>(code);
      }
      const double miss = triangle(i, i) * (target - value);
      loss += miss * miss;
      errors[c] = weights[c] - value;
      add_error(sums, begin, i, errors[c]);
    }
    if (p_.loss) p_.loss.as<float>()[r] += static_cast<float>(loss);
  }

  const Problem& p_;
  Workspace<S> w_;
};

template <class S>
QF_INLINE size_t rows_workspace_bytes(const Problem& p) {
  return Workspace<S>(p).place(p, nullptr);
}

template <class S>
QF_INLINE void launch_rows(const Problem& p, const Launch& launch) {
  RowsGptq<S>(p, launch).run();
}

}  // namespace quantfuse::gptq_quantize
