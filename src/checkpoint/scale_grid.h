// SPDX-License-Identifier: Apache-2.0
//
// The scales of a weight [n, k], one per block: their shape, and a weight made of codes that are stored as
// they are with such a grid beside them.
#pragma once

#include <string>

#include "checkpoint/layer.h"

namespace quantfuse::checkpoint {

// Rows and columns of the grid; a block size of 0 is the whole dimension.
struct ScaleGrid {
  int64_t rows, cols;
};
ScaleGrid scale_grid(int64_t n, int64_t k, const qf_block& block);

// Fails, naming the tensor, where it has another shape. A dimension of 1 may be left out.
void expect_grid(const Tensor& scale, int64_t n, int64_t k, const qf_block& block, const std::string& why);

// A weight without its codes: sizes, block, and the scales, E8M0 where the tensor holds those (F8_E8M0 or
// U8).
CanonicalWeight load_scaled(const Tensor& scale, qf_format format, int64_t n, int64_t k,
                            const qf_block& block);

// Canonical codes from int8 ones; fails, naming the tensor, at the first that `bits` bits cannot hold.
std::vector<uint8_t> codes_from_int8(const Tensor& codes, int64_t n, int64_t k, int bits);

// The way back from INT4: one int8 per code.
void int8_from_codes(std::span<const uint8_t> codes, int64_t n, int64_t k, std::vector<uint8_t>& out);

// Zero points from an int8 tensor; empty where all are 0.
std::vector<int8_t> load_zeros_int8(const Tensor& zero);

}  // namespace quantfuse::checkpoint
