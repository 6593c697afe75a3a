// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/packing.h"

#include <algorithm>

#include "checkpoint/layer.h"
#include "formats/codes.h"

namespace quantfuse::checkpoint {
namespace {

// 2^(bits-1) in every field of a word: subtracting it from 4- and 8-bit fields is flipping their top bits.
constexpr uint32_t top_bits(int bits) { return bits == 4 ? 0x88888888u : 0x80808080u; }

// A 4- or 8-bit field has the place and, but for its top bit, the value of the canonical code.
constexpr bool is_byte_order(int bits) { return bits == 4 || bits == 8; }

void unpack_row(const FieldStream& stream, qf_format format, int64_t k, uint8_t* row) {
  const int offset = 1 << (stream.bits - 1);
  const int mask = is_packed_4bit(format) ? 0x0f : 0xff;
  for (int64_t i = 0; i < k; ++i) {
    store_code(format, row, i, static_cast<uint8_t>((static_cast<int>(stream.at(i)) - offset) & mask));
  }
}

// The high nibble behind an odd row is zero.
void clear_tail(qf_format format, int64_t k, uint8_t* row) {
  if (is_packed_4bit(format) && k % 2) row[k / 2] &= 0x0f;
}

}  // namespace

std::vector<uint8_t> codes_from_rows(const Tensor& words, int64_t n, int64_t k, int bits) {
  const qf_format format = integer_format(bits);
  const int64_t row_bytes = quantfuse::row_bytes(format, k), row_words = packed_words(k, bits);
  std::vector<uint8_t> codes(static_cast<size_t>(n * row_bytes));
  for (int64_t row = 0; row < n && k > 0; ++row) {
    uint8_t* out = codes.data() + row * row_bytes;
    if (!is_byte_order(bits)) {
      unpack_row({words, row * row_words, 1, bits}, format, k, out);
      continue;
    }
    const uint8_t* in = words.bytes.data() + row * row_words * 4;
    const auto flip = static_cast<uint8_t>(top_bits(bits));
    for (int64_t i = 0; i < row_bytes; ++i) out[i] = in[i] ^ flip;
    clear_tail(format, k, out);
  }
  return codes;
}

std::vector<uint8_t> codes_from_columns(const Tensor& words, int64_t n, int64_t k, int bits) {
  const qf_format format = integer_format(bits);
  const int64_t row_bytes = quantfuse::row_bytes(format, k), num_words = packed_words(k, bits);
  std::vector<uint8_t> codes(static_cast<size_t>(n * row_bytes));
  if (k == 0) return codes;
  if (!is_byte_order(bits)) {
    for (int64_t col = 0; col < n; ++col) {
      unpack_row({words, col, n, bits}, format, k, codes.data() + col * row_bytes);
    }
    return codes;
  }
  // A transposition of words. 16 columns at a time: one cache line of the input goes to 16 rows of the
  // output.
  constexpr int64_t kColumns = 16;
  for (int64_t first = 0; first < n; first += kColumns) {
    const int64_t last = std::min(first + kColumns, n);
    for (int64_t i = 0; i < num_words; ++i) {
      const auto size = static_cast<size_t>(std::min<int64_t>(4, row_bytes - i * 4));
      for (int64_t col = first; col < last; ++col) {
        const uint32_t word = load<uint32_t>(words, i * n + col) ^ top_bits(bits);
        std::memcpy(codes.data() + col * row_bytes + i * 4, &word, size);
      }
    }
    for (int64_t col = first; col < last; ++col) clear_tail(format, k, codes.data() + col * row_bytes);
  }
  return codes;
}

}  // namespace quantfuse::checkpoint
