// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/packing.h"

#include <algorithm>

#include "checkpoint/layer.h"
#include "checkpoint/parallel.h"
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

constexpr int64_t kTile = 16;  // words of a cache line

struct TileArea {
  int64_t word, col, num_words, num_cols;
};

// Words [num_words, num_cols] of a matrix with n columns, their bits `flip` turned over, to the bytes of as
// many rows of codes.
void transpose_tile(const uint8_t* words, int64_t n, const TileArea& area, uint32_t flip, uint8_t* codes,
                    int64_t row_bytes) {
  uint32_t tile[kTile][kTile] = {};
  for (int64_t i = 0; i < area.num_words; ++i) {
    std::memcpy(tile[i], words + ((area.word + i) * n + area.col) * 4,
                static_cast<size_t>(area.num_cols * 4));
  }
  uint32_t turned[kTile][kTile];
  for (int64_t j = 0; j < kTile; ++j) {
    for (int64_t i = 0; i < kTile; ++i) turned[j][i] = tile[i][j] ^ flip;
  }
  const auto size = static_cast<size_t>(std::min(area.num_words * 4, row_bytes - area.word * 4));
  for (int64_t j = 0; j < area.num_cols; ++j) {
    std::memcpy(codes + (area.col + j) * row_bytes + area.word * 4, turned[j], size);
  }
}

// Canonical codes to 4- or 8-bit fields and back, which is the same: `size` bytes.
void flip_top_bits(const uint8_t* in, int64_t size, int bits, uint8_t* out) {
  const auto flip = static_cast<uint8_t>(top_bits(bits));
  for (int64_t i = 0; i < size; ++i) out[i] = in[i] ^ flip;
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
    flip_top_bits(words.bytes.data() + row * row_words * 4, row_bytes, bits, out);
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
  // A transposition of words. Tiles have whole cache lines on both sides; strips of them, whole pages.
  constexpr int64_t kStrip = 256;
  for_each_piece(ceil_div(n, kStrip), num_worker_threads(), [&](int, int64_t piece) {
    const int64_t strip = piece * kStrip, strip_end = std::min(strip + kStrip, n);
    for (int64_t i = 0; i < num_words; i += kTile) {
      for (int64_t col = strip; col < strip_end; col += kTile) {
        const TileArea area{i, col, std::min(kTile, num_words - i), std::min(kTile, strip_end - col)};
        transpose_tile(words.bytes.data(), n, area, top_bits(bits), codes.data(), row_bytes);
      }
    }
    for (int64_t col = strip; col < strip_end; ++col) clear_tail(format, k, codes.data() + col * row_bytes);
  });
  return codes;
}

std::span<const uint8_t> words_from_rows(std::vector<uint8_t>& codes, int64_t n, int64_t k, int bits,
                                         std::vector<uint8_t>& scratch) {
  const qf_format format = integer_format(bits);
  const int64_t row_bytes = quantfuse::row_bytes(format, k), word_bytes = packed_words(k, bits) * 4;
  if (row_bytes == word_bytes && k * bits % 32 == 0) {
    flip_top_bits(codes.data(), n * row_bytes, bits, codes.data());
    return codes;
  }
  scratch.assign(static_cast<size_t>(n * word_bytes), 0);
  for (int64_t row = 0; row < n; ++row) {
    uint8_t* out = scratch.data() + row * word_bytes;
    flip_top_bits(codes.data() + row * row_bytes, row_bytes, bits, out);
    clear_tail(format, k, out);
  }
  return scratch;
}

void words_from_columns(std::span<const int8_t> numbers, int64_t n, int64_t k, int bits,
                        std::vector<uint8_t>& words) {
  const int per_word = 32 / bits, offset = 1 << (bits - 1);
  words.assign(static_cast<size_t>(packed_words(n, bits) * k * 4), 0);
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t col = 0; col < k; ++col) {
      const auto field = static_cast<uint32_t>(numbers[static_cast<size_t>(row * k + col)] + offset);
      uint8_t* place = words.data() + (row / per_word * k + col) * 4;
      uint32_t word;
      std::memcpy(&word, place, sizeof(word));
      word |= field << row % per_word * bits;
      std::memcpy(place, &word, sizeof(word));
    }
  }
}

}  // namespace quantfuse::checkpoint
