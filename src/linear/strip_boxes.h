// SPDX-License-Identifier: Apache-2.0
//
// The packed weight of packed_strips.h in boxes: one copy brings a tile of each of several strips, where
// copies of their own would be as many, and starting one takes a thread some 100 cycles.
#pragma once

#include "cuda/tensor_map.h"
#include "linear/packed_strips.h"

namespace quantfuse::linear {

// A tile's bytes are pieces, of up to 256 numbers of 8 bytes and multiples of 16 bytes: what a row of a box
// can have.
inline int tile_pieces(const StripLayout& w) {
  int pieces = 1;
  while (w.tile_bytes % (16 * pieces) != 0 || w.tile_bytes / pieces > 2048) ++pieces;
  return pieces;
}

// Boxes of a tile of each of `strips`, one after the other; zeros beyond the last strip. Tile k of strip s is
// at {0, k * tile_pieces, s}.
inline CUtensorMap strip_boxes(const StripView& view, int strips) {
  const StripLayout& w = view.layout;
  const int pieces = tile_pieces(w), bytes = w.tile_bytes / pieces;
  return tensor_map<3>(CU_TENSOR_MAP_DATA_TYPE_INT64, view.data, {bytes / 8, pieces * w.tiles, w.strips},
                       {bytes, w.tiles * w.tile_bytes}, {bytes / 8, pieces, strips},
                       CU_TENSOR_MAP_SWIZZLE_NONE);
}

}  // namespace quantfuse::linear
