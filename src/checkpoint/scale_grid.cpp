// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/scale_grid.h"

#include <fmt/format.h>

#include <algorithm>

#include "checkpoint/error.h"
#include "formats/codes.h"

namespace quantfuse::checkpoint {

ScaleGrid scale_grid(int64_t n, int64_t k, const qf_block& block) {
  const auto parts = [](int64_t size, int64_t part) { return part ? ceil_div(size, part) : int64_t{1}; };
  return {parts(n, block.rows), parts(k, block.cols)};
}

void expect_grid(const Tensor& scale, int64_t n, int64_t k, const qf_block& block, const std::string& why) {
  const ScaleGrid grid = scale_grid(n, k, block);
  std::vector<int64_t> given = scale.shape, expected = {grid.rows, grid.cols};
  if (given == expected) return;
  for (std::vector<int64_t>* shape : {&given, &expected}) std::erase(*shape, 1);
  if (given != expected) expect_shape(scale, {grid.rows, grid.cols}, why);
}

CanonicalWeight load_scaled(const Tensor& scale, qf_format format, int64_t n, int64_t k,
                            const qf_block& block) {
  CanonicalWeight w;
  w.format = format;
  w.n = n, w.k = k;
  w.block = block;
  w.num_groups = scale_grid(n, k, block).cols;
  w.scale = load_scales(scale);
  if (scale.type == Type::u8 || scale.type == Type::e8m0) {
    w.scale.clear();
    w.scale_e8m0.assign(scale.bytes.begin(), scale.bytes.end());
  }
  return w;
}

std::vector<uint8_t> codes_from_int8(const Tensor& codes, int64_t n, int64_t k, int bits) {
  const int lowest = -(1 << (bits - 1)), highest = (1 << (bits - 1)) - 1;
  const auto* in = reinterpret_cast<const int8_t*>(codes.bytes.data());
  const auto* end = in + codes.bytes.size();
  const auto* outside = std::find_if(in, end, [&](int8_t code) { return code < lowest || code > highest; });
  if (outside != end) {
    fail(fmt::format("{} has the code {} at index {}, outside of {} bits", printable(codes.name), *outside,
                     outside - in, bits));
  }
  const qf_format format = integer_format(bits);
  if (format == QF_INT8) return {codes.bytes.begin(), codes.bytes.end()};
  const int64_t row_bytes = quantfuse::row_bytes(format, k);
  std::vector<uint8_t> packed(static_cast<size_t>(n * row_bytes));
  for (int64_t row = 0; row < n && k > 0; ++row) {
    for (int64_t col = 0; col < k; ++col) {
      store_code(format, packed.data() + row * row_bytes, col, static_cast<uint8_t>(in[row * k + col] & 15));
    }
  }
  return packed;
}

void int8_from_codes(std::span<const uint8_t> codes, int64_t n, int64_t k, std::vector<uint8_t>& out) {
  const int64_t row_bytes = quantfuse::row_bytes(QF_INT4, k);
  out.resize(static_cast<size_t>(n * k));
  for (int64_t row = 0; row < n; ++row) {
    const uint8_t* in = codes.data() + row * row_bytes;
    for (int64_t col = 0; col < k; ++col) {
      out[static_cast<size_t>(row * k + col)] = static_cast<uint8_t>((nibble_at(in, col) ^ 8) - 8);
    }
  }
}

std::vector<int8_t> load_zeros_int8(const Tensor& zero) {
  const auto* begin = reinterpret_cast<const int8_t*>(zero.bytes.data());
  std::vector<int8_t> zeros(begin, begin + zero.bytes.size());
  if (std::all_of(zeros.begin(), zeros.end(), [](int8_t z) { return z == 0; })) zeros.clear();
  return zeros;
}

}  // namespace quantfuse::checkpoint
