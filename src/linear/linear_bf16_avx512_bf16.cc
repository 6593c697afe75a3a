// SPDX-License-Identifier: Apache-2.0
//
// Any weight format times BF16 activations by dot products of BF16 pairs, at twice the rate of float32: see
// linear_float.h. Every code, less its integer zero point, is a BF16 number, so nothing is rounded on the way
// to the products, which are exact in float32. So are the codes of quantized activations, INT8 and FP8: the
// sums are multiplied with their scales. A word of x and of w is two k (bf16_codes.h).
#include "cpu/simd_avx512_bf16.h"
#include "linear/bf16_codes.h"
#include "linear/linear_float.h"

namespace quantfuse::linear_bf16_avx512_bf16 {
using linear::Problem;
namespace {

using S = Avx512Bf16;

struct Bf16Arithmetic {
  using S = Avx512Bf16;
  using Dot = linear::PairDot<S>;
  static constexpr bool kScalesSums = true;

  template <qf_format Format>
  using Decoder = linear::PairDecoder<S, Format>;

  // The codes of x[r, begin .. end) as BF16 numbers.
  QF_INLINE static void load_codes(const Problem& p, int64_t r, int64_t begin, int64_t end,
                                   const float* scales, bf16* to) {
    alignas(64) float values[linear::kFloatSegment];
    for (int64_t k = begin; k < end; k += linear::kFloatSegment) {
      const int64_t count = end - k < linear::kFloatSegment ? end - k : linear::kFloatSegment;
      linear::load_inputs<S, false>(p, r, k, k + count, scales, values);
      for (int64_t i = 0; i < count; i += S::kLanes)
        S::store(to + k - begin + i, S::load(values + i), count - i);
    }
  }

  QF_INLINE static void prepare_tile(const linear::Batch<int32_t>& c, int64_t row, int64_t rows,
                                     float* scales, void* ordered, int32_t* x) {
    const int32_t* k_map = c.p.packed.k_map();
    const linear::PairOrder& order =
        c.p.weight.format == QF_BF16 ? linear::kOrderOfNeighbours : linear::kOrderOfCodes;
    const auto columns = S::load_i(order.columns);
    const bool is_quantized = c.p.has_act_quant();
    const int64_t r0 = c.to.first_row + row, ordered_stride = round_up(c.p.k, 16);
    auto* codes = static_cast<bf16*>(ordered);  // of whole rows, where columns are reordered
    for (int64_t i = 0; is_quantized && i < rows; ++i) {
      float* own = scales + i * c.plan.act_groups;
      linear::copy_input_scales<S>(c.p, r0 + i, c.plan.act_groups, own);
      if (k_map) load_codes(c.p, r0 + i, 0, c.p.k, own, codes + i * ordered_stride);
    }
    for (int64_t s = 0; s < c.num_segments; ++s) {
      const int64_t begin = c.segments[s].begin, length = c.segments[s].end - begin;
      alignas(64) int32_t words[kMaxTileRows][linear::kFloatSegment / 2];
      for (int64_t i = 0; i < rows; ++i) {
        alignas(64) bf16 run[linear::kFloatSegment] = {};
        const int64_t count = c.p.k - begin < length ? c.p.k - begin : length;
        if (k_map) {
          const bf16* from = is_quantized ? codes + i * ordered_stride : c.p.x.row<const bf16>(r0 + i);
          for (int64_t k = 0; k < length; ++k)
            run[k] = k_map[begin + k] < 0 ? bf16{} : from[k_map[begin + k]];
        } else if (is_quantized) {
          load_codes(c.p, r0 + i, begin, begin + count, scales + i * c.plan.act_groups, run);
        } else {
          __builtin_memcpy(run, c.p.x.row<const bf16>(r0 + i) + begin, static_cast<size_t>(count) * 2);
        }
        for (int64_t k = 0; k < length; k += 2 * S::kLanes) {
          S::store_i(words[i] + k / 2, S::lookup_u16(S::load_i(run + k), columns));
        }
      }
      interleave_rows<S>(words[0], linear::kFloatSegment / 2, rows, length / 2,
                         x + begin / 2 * c.rows + row * (length / 2));
    }
  }
};

Verdict accepts(const Problem& p) {
  const linear::PackedHeader* h = p.packed.header;
  const bool has_float_zeros = h ? h->has_float_zeros : p.weight.has_float_zeros();
  return linear::packed_for(p, S::kLanes)
      .require(p.has_act_quant() || p.x.dtype == DType::bf16, "the activations are neither BF16 nor codes")
      .require(!p.has_act_quant() || linear::has_whole_act_groups(p), linear::kNoWholeActGroups)
      .require(!has_float_zeros, "the weight's zero points are not integers")
      .require(linear::has_bf16_codes(p.weight), "the weight's numbers are not BF16 numbers");
}

size_t workspace_bytes(const Problem& p) {
  return static_cast<size_t>(linear::make_float_plan<Bf16Arithmetic>(p).total_bytes);
}

void launch(const Problem& p, const Launch& launch) { linear::launch_float<Bf16Arithmetic>(p, launch); }

}  // namespace

extern const Kernel<Problem> entry = {
    "linear_bf16_avx512_bf16",  Target::avx512_bf16, accepts, workspace_bytes, launch,
    /*is_batch_invariant=*/true};

}  // namespace quantfuse::linear_bf16_avx512_bf16
