// SPDX-License-Identifier: Apache-2.0
#include "linear/packed_strips.h"

namespace quantfuse::linear {

const char* not_in_strips(const Weight& w) {
  const int64_t group = w.block.cols;
  if (w.g_idx) return "the packed form for CUDA has no g_idx";
  if (w.zero && w.zero.dtype != DType::i8) return "the packed form for CUDA has no floating zero points";
  if (w.offset) return "the packed form for CUDA has no offsets";
  if (is_plain(w.format)) return "the packed form for CUDA is of quantized weights";
  if (is_codebook(w.format)) return "the packed form for CUDA has no codebooks";
  if (group != 32 && group != 64 && group % StripLayout::kCols != 0 && group < w.k)
    return "the packed form for CUDA has groups of 32, 64, a multiple of 128, or whole rows";
  if (w.n >= 1ll << 31 || w.k >= 1ll << 31) return "n or k is 2^31 or more";
  if (w.n == 0 || w.k == 0) return "the weight is empty";
  return nullptr;
}

StripLayout plan_strips(const Weight& w, bool has_zeros) {
  StripLayout s = {};
  s.n = w.n, s.k = w.k;
  s.format = w.format;
  s.is_gated = w.is_gated;
  s.has_zeros = has_zeros;
  s.strips = w.is_gated ? ceil_div(w.n / 2, StripLayout::kRows / 2) : ceil_div(w.n, StripLayout::kRows);
  s.tiles = ceil_div(w.k, StripLayout::kCols);
  s.groups = w.block.cols < w.k && w.block.cols < StripLayout::kCols
                 ? static_cast<int32_t>(StripLayout::kCols / w.block.cols)
                 : 1;
  s.code_bytes = StripLayout::kRows * StripLayout::kCols / (is_packed_4bit(w.format) ? 2 : 1);
  s.tile_bytes = s.code_bytes + s.groups * StripLayout::kRows * (has_zeros ? 5 : 4);
  return s;
}

StripView view_strips(const Arguments& arg, const Weight& w) {
  if (!w.packed) return {};
  if (const char* reason = not_in_strips(w)) arg.fail(std::string("weight.packed is given, but ") + reason);
  StripLayout layout = plan_strips(w, static_cast<bool>(w.zero));
  if (!w.codes && w.packed.size != layout.total_bytes()) layout = plan_strips(w, is_integer(w.format));
  if (w.packed.size != layout.total_bytes()) {
    arg.fail("weight.packed has " + std::to_string(w.packed.size) + " bytes, expected " +
             std::to_string(layout.total_bytes()) +
             ": it holds another weight, or one packed for another device");
  }
  return {w.packed.as<const uint8_t>(), layout, true};
}

}  // namespace quantfuse::linear
