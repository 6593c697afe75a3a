// SPDX-License-Identifier: Apache-2.0
//
// How far a kernel's result may be from the reference's, and why. u = 2^-24 is the unit roundoff of float32.
//
// The reference computes with doubles, so next to a float32 kernel its own error is nothing. A kernel
// computes in float32, in an order of its own choice. Three kinds of results follow:
//
//  1. Integer results, and everything quantize and dequantize write, are defined to the bit: they must be
//     equal. Only the sign and the payload of a NaN in f32, f16 or bf16 are nobody's business.
//
//  2. A real result v (a product, a norm, an activation) has an error bound B, derived below for each
//     operation. The kernel's output must be what rounding to the output's type makes of some real number in
//     [v - B, v + B]. Rounding is monotone, so that is: round(v - B) <= output <= round(v + B). No allowance
//     for the rounding itself is needed, and overflow to infinity, subnormals and saturation are judged by
//     the same two comparisons.
//
//  3. The same holds where the output is quantized again: encode(v - B) <= code <= encode(v + B), with the
//     scale that the kernel wrote. Its scale, max|v| / qmax, may be off by max B / qmax and by its own
//     rounding.
//
// Sums of n products. Each term t_i = x_i * w_i goes through c roundings before it is added (dequantization,
// the product, scales, bias), and each addition rounds once more:
//     worst case              |error| <= (n + c) * u * sum |t_i|
//     independent roundings   |error| <= (lambda * sqrt(n) + c) * u * sum |t_i|
// the latter (Higham and Mary, 2019) but for a probability of 2 exp(-lambda^2 / 2) at equality of all the
// factors that it bounds from above. Vector kernels keep many partial sums, so their errors stay far below
// either. We take the smaller of the two with lambda = 4 and c = 18: dequantizing (q - zero) * scale is 2,
// its offset 2 (a sum, or the zero point that it becomes part of, and that difference), the product 1, scales
// of groups and activations 4, the correction by zero * sum(x) 4, bias and the epilogue's additions 4, the
// reference's own rounding 1. In sum |t_i| a weight counts as (|q| + |zero|) * |scale| + |offset|, because a
// kernel may sum x * q, x * zero and x * offset apart.
//
// x in fixed point. Kernels of linear may multiply weights of integers, or integers times a unit, with
// 16-bit x as integers: of each 128 columns of a token, x is rounded to a multiple of 2^(e-20), where 2^e is
// the power of two at or below the largest magnitude of the 128. So each x is off by at most 2^(e-21) <=
// 2^-21 max |x|, and the sum by
//     |error| <= sum over tiles of 128 columns of 2^-21 max |x| * sum |w|
// Below 2^(e-20) = 2^-122 the steps get no finer. What follows is exact within a group of columns, so that
// the roundings are fewer than those counted above.
//
// FP8 on CUDA. Of Hopper's tensor cores it is published (DeepSeek-V3's report) that they keep about 14 bits
// when they add FP8 products; taken here as numbers that end 13 bits below the largest of them, which was not
// measured. The kernels promote sums of at most 256 columns to float32, so a sum of magnitude S = sum |t_i|
// of these goes through 8 such additions of 33 numbers, in the i-th of which, being i/8 of the way, they are
// cut by at most 2^-13 S i/8. With independent errors, and lambda = 4:
//     |error| <= 4 sqrt(33 * sum (i/8)^2) / 2 * 2^-13 S < 2^-8 S
// Where the caller allows sums to stay in the tensor cores, k columns go through s = k/32 additions:
//     |error| <= 4 sqrt(33 * sum (i/s)^2) / 2 * 2^-13 S < 4 sqrt(11 s + 33) / 2 * 2^-13 S
// A case has one bound for all kernels, so this also widens what mma.sync may do, which needs none of it.
//
// Packed NF4 on CUDA. 16-bit x is multiplied by the table's numbers rounded to its type, so that a sum is off
// by at most the largest relative error of the 16 times sum |t_i|. Numbers of every other format are exact.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "formats/codes.h"
#include "quantfuse/quantfuse.h"

namespace quantfuse::cases {

inline constexpr double kUnitRoundoff = 0x1p-24;

// B of a sum of `terms` products whose magnitudes add up to `sum_of_magnitudes`. The second part is for sums
// near the end of float32's range: a partial product below 2^-126 may lose all its bits (BF16 dot products
// flush subnormals).
inline double sum_bound(int64_t terms, double sum_of_magnitudes) {
  const double n = static_cast<double>(terms);
  return (std::min(n, 4 * std::sqrt(n)) + 18) * kUnitRoundoff * sum_of_magnitudes + n * 0x1p-126;
}

// What the tensor cores may add to it where both operands are FP8 codes, and k columns may stay in them
// (0: none that are not promoted).
inline double fp8_sum_bound(qf_device device, int64_t k_unpromoted, double sum_of_magnitudes) {
  if (device.type != QF_CUDA) return 0;
  const double additions = static_cast<double>(k_unpromoted) / 32;
  return std::max(0x1p-8, 2 * std::sqrt(11 * additions + 33) * 0x1p-13) * sum_of_magnitudes;
}

// The largest relative error of a packed NF4 weight's numbers in 16-bit x's type.
inline double codebook_rounding(qf_device device, qf_format format, DType x) {
  if (device.type != QF_CUDA || format != QF_NF4 || x == DType::f32) return 0;
  double largest = 0;
  for (const float number : values_of(format).values) {
    f16 half;
    bf16 brief;
    from_float(number, half), from_float(number, brief);
    const double rounded = x == DType::f16 ? to_float(half) : to_float(brief);
    if (number != 0) largest = std::max(largest, std::abs(rounded / number - 1));
  }
  return largest;
}

// How far x is off in fixed point where the largest of its tile is `largest`, and the columns of a tile.
inline double fixed_point_error(double largest) { return std::max(0x1p-21 * largest, 0x1p-123); }
inline constexpr int64_t kFixedPointTile = 128;

// Exact activation functions, and the largest slope of any of them (GELU's, near 1.41).
inline double activate(qf_activation activation, double x) {
  switch (activation) {
    case QF_RELU: return std::max(x, 0.0);
    case QF_GELU: return 0.5 * x * std::erfc(-x * 0.70710678118654752440);
    case QF_GELU_TANH: return 0.5 * x * (1 + std::tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x)));
    case QF_SILU: return x / (1 + std::exp(-x));
    default: return x;
  }
}
inline constexpr double kLargestSlope = 1.13;

// B of act(x) where x has bound `x_bound`. A curved activation is x times a factor in [0, 1] from a
// polynomial or rational approximation, whose absolute error is below 2e-6; the piecewise linear ones add
// nothing.
inline double activation_bound(qf_activation activation, double x, double x_bound) {
  const bool is_curved = activation != QF_IDENTITY && activation != QF_RELU;
  return is_curved ? kLargestSlope * x_bound + 2e-6 * (std::abs(x) + x_bound) : x_bound;
}

// B of a * b, and its rounding, where both have bounds.
inline double product_bound(double a, double a_bound, double b, double b_bound) {
  return std::abs(a) * b_bound + std::abs(b) * a_bound + a_bound * b_bound +
         2 * kUnitRoundoff * std::abs(a * b);
}

}  // namespace quantfuse::cases
