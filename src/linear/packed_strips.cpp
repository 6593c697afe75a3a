// SPDX-License-Identifier: Apache-2.0
#include "linear/packed_strips.h"

#include "linear/mxfp4_strips.h"

namespace quantfuse::linear {

const char* not_in_strips(const Weight& w) {
  const int64_t group = w.block.cols;
  if (is_plain(w.format)) return "the packed form for CUDA is of quantized weights";
  if (group % StripLayout::kStepCols != 0 && group < w.k)
    return "the packed form for CUDA has groups of multiples of 16 columns, or whole rows";
  if (w.g_idx && w.num_groups != ceil_div(w.k, group))
    return "the packed form for CUDA has no groups of g_idx that differ in size";
  if (w.n >= 1ll << 31 || w.k >= 1ll << 31) return "n or k is 2^31 or more";
  if (w.n == 0 || w.k == 0) return "the weight is empty";
  return nullptr;
}

namespace {

enum class Zeros { none, bytes, offsets };

// As few groups of a tile as the weight's are made of.
int32_t groups_of_tile(const Weight& w) {
  int32_t groups = 1;
  while (w.block.cols < w.k && w.block.cols % (StripLayout::kCols / groups) != 0) groups *= 2;
  return groups;
}

StripLayout plan(const Weight& w, Zeros zeros, bool has_k_map) {
  StripLayout s = {};
  s.n = w.n, s.k = w.k;
  s.format = w.format;
  s.is_gated = w.is_gated;
  s.has_zeros = zeros == Zeros::bytes;
  s.has_offsets = zeros == Zeros::offsets;
  s.has_k_map = has_k_map;
  s.strips = w.is_gated ? ceil_div(w.n / 2, StripLayout::kRows / 2) : ceil_div(w.n, StripLayout::kRows);
  s.tiles = ceil_div(w.k, StripLayout::kCols);
  s.groups = groups_of_tile(w);
  s.code_bytes = StripLayout::kRows * StripLayout::kCols / (is_packed_4bit(w.format) ? 2 : 1);
  const int zero_bytes = s.has_zeros ? 1 : s.has_offsets ? 4 : 0;
  s.tile_bytes = s.code_bytes + s.groups * StripLayout::kRows * (4 + zero_bytes);
  return s;
}

StripLayout with_byte_scales(StripLayout s) {
  s.tile_bytes = s.code_bytes + s.groups * StripLayout::kRows;
  return s;
}

}  // namespace

StripLayout plan_strips(const Weight& w) {
  const Zeros zeros = w.has_float_zeros() ? Zeros::offsets : w.zero ? Zeros::bytes : Zeros::none;
  const StripLayout s = plan(w, zeros, static_cast<bool>(w.g_idx));
  const bool has_bytes = may_have_byte_scales(w) && w.scale && w.scale.dtype != DType::f32 && !w.g_idx;
  return has_bytes ? with_byte_scales(s) : s;
}

StripView view_strips(const Arguments& arg, const Weight& w) {
  if (!w.packed) return {};
  if (const char* reason = not_in_strips(w)) arg.fail(std::string("weight.packed is given, but ") + reason);
  StripLayout layout = plan_strips(w);
  if (!w.codes) {
    const auto take_if_as_large = [&](const StripLayout& other) {
      if (w.packed.size == other.total_bytes()) layout = other;
    };
    for (const bool has_k_map : {false, true}) {
      for (const Zeros zeros : {Zeros::none, Zeros::bytes, Zeros::offsets})
        if (zeros == Zeros::none || is_integer(w.format)) take_if_as_large(plan(w, zeros, has_k_map));
    }
    if (may_have_byte_scales(w)) take_if_as_large(with_byte_scales(plan(w, Zeros::none, false)));
  }
  if (w.packed.size != layout.total_bytes()) {
    arg.fail("weight.packed has " + std::to_string(w.packed.size) + " bytes, expected " +
             std::to_string(layout.total_bytes()) +
             ": it holds another weight, or one packed for another device");
  }
  return {w.packed.as<const uint8_t>(), layout, !layout.has_k_map};
}

}  // namespace quantfuse::linear
