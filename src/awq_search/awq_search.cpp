// SPDX-License-Identifier: Apache-2.0
#include "awq_search/awq_search.h"

#include <algorithm>
#include <cmath>

#include "core/block.h"
#include "core/element.h"
#include "quantize/integer_range.h"

namespace quantfuse::awq_search {
namespace {

constexpr int32_t kDefaultGrid = 20, kLargestGrid = 1000;

void check_act_scale(const Arguments& arg, const Problem& p) {
  if (arg.device().type != QF_CPU || !arg.needs_data() || !p.act_scale) return;
  for (int64_t c = 0; c < p.k; ++c) {
    const float value = p.act_scale.as<const float>()[c];
    if (std::isfinite(value) && value >= 0) continue;
    arg.fail("act_scale has the value " + std::to_string(value) + " at index " + std::to_string(c) +
             ", expected finite numbers of 0 or more");
  }
}

}  // namespace

Problem Op::parse(const Args& a, Arguments& arg) {
  Problem p = {};
  Dim n{"n"}, k{"k"}, t{"t"};
  p.weight = arg.expect("weight", a.weight).shape(n, k).dtype(kFloats).matrix();
  p.x = arg.expect("x", a.x).shape(t, k).dtype(kFloats).matrix();
  if (a.act_scale) p.act_scale = arg.expect("act_scale", a.act_scale).shape(k).dtype({DType::f32}).vector();
  p.n = n, p.k = k, p.t = t;
  p.range = quantize::parse_integer_range(arg, a.format, a.bits);
  const qf_block block = resolve_block(arg, "group", {1, a.group}, p.n, p.k);
  p.group = block.cols, p.groups = ceil_div(p.k, p.group);
  p.is_asymmetric = a.is_asymmetric != 0;
  if (a.grid < 0 || a.grid > kLargestGrid) {
    arg.fail("grid is " + std::to_string(a.grid) + ", expected 0 (the default) to " +
             std::to_string(kLargestGrid));
  }
  p.grid = a.grid == 0 ? kDefaultGrid : a.grid;

  p.channel_scale = arg.expect("channel_scale", a.channel_scale).shape(k).dtype({DType::f32}).vector();
  if (a.clip) p.clip = expect_scale(arg, "clip", a.clip, block, p.n, p.k, {DType::f32});
  Dim alphas{"grid + 1", p.grid + 1};
  if (a.loss) p.loss = arg.expect("loss", a.loss).shape(alphas).dtype({DType::f32}).vector();
  arg.writes("channel_scale");
  if (a.clip) arg.writes("clip");
  if (a.loss) arg.writes("loss");

  quantize::check_finite(arg, "weight", p.weight);
  quantize::check_finite(arg, "x", p.x);
  check_act_scale(arg, p);
  return p;
}

void find_magnitudes(const Problem& p, float* magnitudes) {
  if (p.k == 0) return;
  if (p.act_scale) {
    std::copy_n(p.act_scale.as<const float>(), p.k, magnitudes);
  } else {
    std::fill_n(magnitudes, p.k, 0.0f);
    const float share = 1.0f / static_cast<float>(std::max<int64_t>(p.t, 1));
    for (int64_t t = 0; t < p.t; ++t) {
      for (int64_t c = 0; c < p.k; ++c) magnitudes[c] += share * std::abs(float_at(p.x, t, c));
    }
  }
  const float largest = *std::max_element(magnitudes, magnitudes + p.k);
  const float floor = largest > 0 ? 1e-4f * largest : 1.0f;
  for (int64_t c = 0; c < p.k; ++c) magnitudes[c] = std::max(magnitudes[c], floor);
}

void find_channel_scale(const Problem& p, const float* magnitudes, int32_t i, float* scale) {
  if (p.k == 0) return;
  const float alpha = static_cast<float>(i) / static_cast<float>(p.grid);
  const auto [low, high] = std::minmax_element(magnitudes, magnitudes + p.k);
  const float middle = std::sqrt(*low) * std::sqrt(*high);
  for (int64_t c = 0; c < p.k; ++c) scale[c] = std::pow(magnitudes[c] / middle, alpha);
}

}  // namespace quantfuse::awq_search

using namespace quantfuse;
QF_DEFINE_OPERATION(qf_awq_search, awq_search::Op)
