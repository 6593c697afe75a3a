// SPDX-License-Identifier: Apache-2.0
//
// AutoAWQ, version gemm. Codes and zero points are packed along the outputs, eight to a word and interleaved:
//
//   nibble i of a word     7 6 5 4 3 2 1 0      (bits 28-31 ... bits 0-3)
//   output, of the eight   7 5 3 1 6 4 2 0
//
//   qweight  I32 [in, out/8]     qzeros  I32 [groups, out/8]     scales  F16 [groups, out]
//
//   w[o,i] = (q - z) * scale, in float16; zero points as they are
#include <fmt/format.h>

#include <algorithm>

#include "checkpoint/error.h"
#include "checkpoint/import.h"
#include "core/dtype.h"

namespace quantfuse::checkpoint {
namespace {

constexpr int kBits = 4;
constexpr int kNibbleOf[8] = {0, 4, 1, 5, 2, 6, 3, 7};  // where output j of the eight lies

struct Parts {
  const Tensor &qweight, &qzeros, &scales;
  int64_t n, k, group, num_groups;
};

// Rows of a matrix of 8 x 8 nibbles become its columns: blocks of 4 nibbles change places, then of 2, then of
// 1.
void transpose_nibbles(uint32_t (&rows)[8]) {
  constexpr uint32_t kLow[] = {0x0000ffffu, 0x00ff00ffu, 0x0f0f0f0fu};
  for (int step = 0, distance = 4; distance > 0; ++step, distance /= 2) {
    for (int i = 0; i < 8; ++i) {
      if (i & distance) continue;
      uint32_t &upper = rows[i], &lower = rows[i + distance];
      const uint32_t moved = ((upper >> 4 * distance) ^ lower) & kLow[step];
      lower ^= moved;
      upper ^= moved << 4 * distance;
    }
  }
}

// Eight inputs of eight outputs, so that words become words.
void load_square(const Parts& p, int64_t first, int64_t word, uint8_t* codes, int64_t row_bytes) {
  const int64_t num_words = p.n / 8, count = std::min<int64_t>(8, p.k - first);
  uint32_t words[8] = {};
  for (int64_t i = 0; i < count; ++i) {
    words[i] = load<uint32_t>(p.qweight, (first + i) * num_words + word) ^ 0x88888888u;
  }
  transpose_nibbles(words);
  uint8_t* out = codes + word * 8 * row_bytes + first / 2;
  for (int j = 0; j < 8; ++j, out += row_bytes) {
    const uint32_t eight = words[kNibbleOf[j]];
    if (count == 8) {
      std::memcpy(out, &eight, 4);  // of a size that the compiler knows
    } else {
      std::memcpy(out, &eight, static_cast<size_t>((count + 1) / 2));
    }
  }
}

std::vector<uint8_t> load_codes(const Parts& p) {
  const int64_t row_bytes = quantfuse::row_bytes(QF_INT4, p.k), num_words = p.n / 8;
  std::vector<uint8_t> codes(static_cast<size_t>(p.n * row_bytes));
  // By tiles of 128 inputs, a cache line of the output, and 64 words, four of the input: 32 KB on either
  // side.
  constexpr int64_t kInputs = 128, kWords = 64;
  for (int64_t k0 = 0; k0 < p.k; k0 += kInputs) {
    for (int64_t word0 = 0; word0 < num_words; word0 += kWords) {
      for (int64_t word = word0; word < std::min(word0 + kWords, num_words); ++word) {
        for (int64_t first = k0; first < std::min(k0 + kInputs, p.k); first += 8) {
          load_square(p, first, word, codes.data(), row_bytes);
        }
      }
    }
  }
  return codes;
}

std::vector<int8_t> load_zeros(const Parts& p) {
  std::vector<int8_t> zeros(static_cast<size_t>(p.n * p.num_groups));
  for (int64_t group = 0; group < p.num_groups; ++group) {
    for (int64_t row = 0; row < p.n; ++row) {
      const auto word = load<uint32_t>(p.qzeros, group * (p.n / 8) + row / 8);
      const int zero = static_cast<int>(word >> (kBits * kNibbleOf[row % 8]) & 15);
      zeros[static_cast<size_t>(row * p.num_groups + group)] = static_cast<int8_t>(zero - 8);
    }
  }
  return zeros;
}

CanonicalWeight load(const Parts& p) {
  CanonicalWeight w;
  w.format = QF_INT4;
  w.n = p.n, w.k = p.k;
  w.block = {1, p.group};
  w.num_groups = p.num_groups;
  w.codes = load_codes(p);
  w.scale = load_scales_transposed(p.scales);
  w.zero = load_zeros(p);
  return w;
}

void add_layer(Plan& plan, const std::string& module, int64_t group_size) {
  const Tensor& qweight = plan.need(module + ".qweight");
  const Tensor& qzeros = plan.need(module + ".qzeros", qweight.name);
  const Tensor& scales = plan.need(module + ".scales", qweight.name);
  expect_type(qweight, {Type::i32});
  expect_type(qzeros, {Type::i32});
  expect_type(scales, {Type::f16, Type::bf16, Type::f32});
  expect_rank(qweight, 2);
  const int64_t k = qweight.size(0), n = qweight.size(1) * 8;
  const int64_t group = group_size == -1 ? 0 : group_size;
  const int64_t num_groups = ceil_div(k, group ? group : std::max<int64_t>(k, 1));
  const std::string why = fmt::format("qweight {} packs {} outputs of {} inputs, and group_size is {}",
                                      shape_text(qweight.shape), n, k, group_size);
  expect_shape(scales, {num_groups, n}, why);
  expect_shape(qzeros, {num_groups, n / 8}, why);

  LayerInfo info;
  info.name = module + ".weight";
  info.shape = {n, k};
  info.format = "int4";
  info.bits = kBits;
  info.block = {1, group};
  info.is_asymmetric = true;
  info.rounding = scales.type;
  info.tensors = {&qweight, &qzeros, &scales};
  plan.add(std::make_unique<CanonicalLayer>(
      std::move(info),
      [parts = Parts{qweight, qzeros, scales, n, k, group, num_groups}] { return load(parts); }));
}

void plan_awq(Plan& plan) {
  const Settings& settings = plan.settings;
  for (const char* key : {"version", "checkpoint_format", "format"}) {
    const std::string version = settings.find_text(key).value_or("gemm");
    if (version != "gemm" && version != "GEMM") settings.refuse(key, "gemm: the others are not supported");
  }
  if (settings.integer("bits") != kBits) settings.refuse("bits", "4");
  const int64_t group_size = settings.integer("group_size");
  if (group_size != -1 && group_size <= 0) settings.refuse("group_size", "-1 or more than 0");
  const auto unconverted = settings.texts("modules_to_not_convert");

  plan.format = "awq gemm";
  for (const std::string& module : plan.modules_with(".qweight")) {
    if (is_listed(unconverted, module)) {
      settings.refuse("modules_to_not_convert",
                      "a list without " + printable(module) + ", which is quantized");
    }
    add_layer(plan, module, group_size);
  }
}

}  // namespace

extern const Importer awq_importer;
const Importer awq_importer{"awq", {".qweight"}, {".qzeros", ".scales"}, plan_awq};

}  // namespace quantfuse::checkpoint
