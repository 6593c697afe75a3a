// SPDX-License-Identifier: Apache-2.0
//
// Codes packed into 32-bit words, and their way into rows of canonical codes. In every packing a stream of
// words holds fields of `bits` bits, field 0 in the lowest bits of word 0; a field may straddle two words.
//
// A stored field is an unsigned number; less 2^(bits-1) it is the signed code that the canonical form holds.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "checkpoint/tensor.h"

namespace quantfuse::checkpoint {

inline int64_t packed_words(int64_t count, int bits) { return (count * bits + 31) / 32; }

// A stream in the words first, first + stride, first + 2 stride, ... of an int32 tensor.
struct FieldStream {
  const Tensor& tensor;
  int64_t first, stride;
  int bits;

  uint32_t word(int64_t i) const { return load<uint32_t>(tensor, first + i * stride); }
  uint32_t at(int64_t i) const {
    const int64_t bit = i * bits;
    const int shift = static_cast<int>(bit % 32);
    uint32_t value = word(bit / 32) >> shift;
    if (shift + bits > 32) value |= word(bit / 32 + 1) << (32 - shift);
    return value & ((1u << bits) - 1);
  }
};

// Canonical codes [n, k] from words [n, ceil(k * bits / 32)]: each row is a stream.
std::vector<uint8_t> codes_from_rows(const Tensor& words, int64_t n, int64_t k, int bits);
// Canonical codes [n, k] from words [ceil(k * bits / 32), n]: each column is a stream.
std::vector<uint8_t> codes_from_columns(const Tensor& words, int64_t n, int64_t k, int bits);

// The ways back, at 4 and 8 bits. Words [n, ceil(k * bits / 32)] from canonical codes [n, k]: the codes' own
// memory, changed in place, where rows end with a word, and `scratch` where they do not. Fields behind a row
// are 0.
std::span<const uint8_t> words_from_rows(std::vector<uint8_t>& codes, int64_t n, int64_t k, int bits,
                                         std::vector<uint8_t>& scratch);
// Words [ceil(n * bits / 32), k] from numbers [n, k]: each column is a stream.
void words_from_columns(std::span<const int8_t> numbers, int64_t n, int64_t k, int bits,
                        std::vector<uint8_t>& words);

}  // namespace quantfuse::checkpoint
