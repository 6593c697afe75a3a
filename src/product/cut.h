// SPDX-License-Identifier: Apache-2.0
//
// How the columns of a product are cut into tiles, and a tile into parts that each have one scale for a row
// of a and one for a row of b.
//
//   groups that fill parts:  | tile 0    | tile 1         other groups:  | tile 0 | 1  | tile 2 | 3  |
//                            |p0|p1|p2|p3|p0|p1|                         | group 0     | group 1     |
//   parts are a quarter, half or all of a tile            here of 1 1/2 tiles, which none reaches across
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "product/product.h"

namespace quantfuse::product {

struct Cut {
  int k, tile;      // columns: of all, of a whole tile
  int unit;         // tiles do not reach across its multiples; 0: any may
  int per_unit;     // tiles of a unit
  int part, parts;  // columns of a part, parts of a tile
  int tiles;        // of all columns

  QF_HD int first(int t) const { return unit ? t / per_unit * unit + t % per_unit * tile : t * tile; }
  // Columns of tile t, which begins at `first`.
  QF_HD int count(int t, int first) const {
    const int unit_end = unit ? (t / per_unit + 1) * unit : k, end = unit_end < k ? unit_end : k;
    return end - first < tile ? end - first : tile;
  }
};

// `step`: the columns that the tensor cores take at once, which parts are multiples of.
inline Cut cut_columns(const Product& p, int tile, int step) {
  Cut cut = {static_cast<int>(p.k), tile, 0, 0, tile, 1, 0};
  int64_t group = 0;
  for (const Operand* operand : {&p.a, &p.b}) {
    if (operand->block.cols < p.k) group = std::gcd(group, operand->block.cols);
  }
  const int64_t part = std::gcd(group, static_cast<int64_t>(tile));  // of no groups: the tile
  if (part >= step) {
    cut.part = static_cast<int>(part), cut.parts = tile / cut.part;
    cut.tiles = static_cast<int>(ceil_div(p.k, tile));
  } else {
    cut.unit = static_cast<int>(group), cut.per_unit = static_cast<int>(ceil_div(group, tile));
    cut.tiles = static_cast<int>(p.k / group * cut.per_unit + ceil_div(p.k % group, tile));
  }
  return cut;
}

}  // namespace quantfuse::product
