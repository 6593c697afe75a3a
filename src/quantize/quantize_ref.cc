// SPDX-License-Identifier: Apache-2.0
//
// The formula as written, one block at a time. The oracle of every other quantize kernel, which match it bit
// for bit (under the MSE search: whose choice is as good as its own).
#include <algorithm>
#include <vector>

#include "cpu/scalar.h"
#include "formats/hadamard.h"
#include "quantize/quantize.h"

namespace quantfuse::quantize_ref {
using quantize::Extent;
using quantize::Problem;
using quantize::Quantizer;
namespace {

Quantizer from_range(const Problem& p, float low, float high) {
  return quantize::quantizer_from_range(p.scale_kind(), code_range(p.format), low, high);
}

uint8_t encode(const Problem& p, const Quantizer& z, float x) {
  return encode_value(p.format, x * (1.0f / z.scale), z.zero);
}

double squared_error(const Problem& p, const Extent& e, const Quantizer& z) {
  double sum = 0;
  for (int64_t r = e.r0; r < e.r1; ++r) {
    for (int64_t c = e.c0; c < e.c1; ++c) {
      const float x = float_at(p.x, r, c);
      if (!is_finite(x)) continue;
      const uint8_t code = encode(p, z, x);
      const double error = (decode_at(p.format, &code, 0) - z.zero) * static_cast<double>(z.scale) - x;
      sum += error * error;
    }
  }
  return sum;
}

struct BlockIndex {
  int64_t scale, zero;
};

Quantizer quantizer_of_block(const Problem& p, const Extent& e, const BlockIndex& block) {
  if (p.is_static()) {
    Quantizer z;
    z.scale = p.has_e8m0_scale() ? E8m0::decode(static_cast<const uint8_t*>(p.scale.data)[block.scale])
                                 : static_cast<const float*>(p.scale.data)[block.scale];
    if (p.zero) z.zero = static_cast<const int8_t*>(p.zero.data)[block.zero];
    return z;
  }
  float low = 0, high = 0;
  for (int64_t r = e.r0; r < e.r1; ++r) {
    for (int64_t c = e.c0; c < e.c1; ++c) {
      const float x = float_at(p.x, r, c);
      if (x < low) low = x;  // false for NaN
      if (x > high) high = x;
    }
  }
  Quantizer best = from_range(p, low, high);
  if (p.mode == QF_SCALE_MSE) {
    double best_error = squared_error(p, e, best);
    for (int step = 1; step < quantize::kSearchSteps; ++step) {
      const float shrink = quantize::shrink_factor(step);
      const Quantizer z = from_range(p, low * shrink, high * shrink);
      const double error = squared_error(p, e, z);
      if (error < best_error) best = z, best_error = error;
    }
  }
  return best;
}

Verdict accepts(const Problem&) { return kYes; }

// x rotated, as a problem of float32 numbers in `values`.
Problem rotated(const Problem& p, std::vector<float>& values) {
  values.resize(static_cast<size_t>(p.rows * p.cols));
  Problem q = p;
  q.x = {values.data(), p.rows, p.cols, p.cols, DType::f32};
  for (int64_t r = 0; r < p.rows; ++r) {
    for (int64_t c = 0; c < p.cols; ++c) q.x.row<float>(r)[c] = float_at(p.x, r, c);
    rotate_scalar(q.x.row<float>(r), p.cols, p.hadamard);
  }
  q.hadamard = 0;
  return q;
}

void launch(const Problem& given, const Launch&) {
  std::vector<float> values;
  const Problem p = given.hadamard > 0 ? rotated(given, values) : given;
  for (int64_t r0 = 0; r0 < p.rows; r0 += p.block.rows) {
    for (int64_t c0 = 0; c0 < p.cols; c0 += p.block.cols) {
      const Extent e = {r0, std::min(r0 + p.block.rows, p.rows), c0, std::min(c0 + p.block.cols, p.cols)};
      const int64_t col_block = c0 / p.block.cols;
      const int64_t row_block = r0 / p.block.rows;
      const BlockIndex block = {p.scale_index(row_block, col_block), row_block * p.col_blocks() + col_block};
      const Quantizer z = quantizer_of_block(p, e, block);
      if (!p.is_static()) {
        if (p.has_e8m0_scale()) static_cast<uint8_t*>(p.scale.data)[block.scale] = z.e8m0;
        else static_cast<float*>(p.scale.data)[block.scale] = z.scale;
        if (p.zero) static_cast<int8_t*>(p.zero.data)[block.zero] = static_cast<int8_t>(z.zero);
      }
      for (int64_t r = e.r0; r < e.r1; ++r) {
        char* row = p.q.row_bytes_at(r);
        int32_t sum = 0;
        for (int64_t c = e.c0; c < e.c1; ++c) {
          const uint8_t code = encode(p, z, float_at(p.x, r, c));
          store_code(p.format, row, c, code);
          if (p.row_sums) sum += static_cast<int32_t>(decode_at(p.format, &code, 0));
        }
        if (p.row_sums) p.row_sums.row<int32_t>(r)[col_block] = sum;
      }
    }
  }
}

}  // namespace

extern const Kernel<Problem> entry = {"quantize_ref", Target::reference, accepts, no_workspace<Problem>,
                                      launch};

}  // namespace quantfuse::quantize_ref
