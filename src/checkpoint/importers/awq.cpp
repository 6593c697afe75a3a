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
#include "checkpoint/parallel.h"
#include "checkpoint/vectors.h"
#include "core/dtype.h"

namespace quantfuse::checkpoint {
namespace {

constexpr int kBits = 4;
constexpr int kNibbleOf[8] = {0, 4, 1, 5, 2, 6, 3, 7};  // where output j of the eight lies

struct Parts {
  const Tensor &qweight, &qzeros, &scales;
  int64_t n, k, group, num_groups;
};

constexpr int kLanes = 8;  // squares that are turned side by side
using Lanes = uint32_t __attribute__((vector_size(kLanes * sizeof(uint32_t))));

// Of every square of 2 kDistance x 2 kDistance nibbles, the upper right quarter and the lower left one change
// places. `low` has the left halves' bits.
template <int kDistance>
QF_VECTORIZED inline void swap_quarters(Lanes (&rows)[8], uint32_t low) {
  for (int i = 0; i < 8; ++i) {
    if (i & kDistance) continue;
    Lanes &upper = rows[i], &lower = rows[i + kDistance];
    const Lanes moved = ((upper >> 4 * kDistance) ^ lower) & low;
    lower ^= moved;
    upper ^= moved << 4 * kDistance;
  }
}

// Rows of matrices of 8 x 8 nibbles, one per lane, become their columns.
QF_VECTORIZED inline void transpose_nibbles(Lanes (&rows)[8]) {
  swap_quarters<4>(rows, 0x0000ffffu);
  swap_quarters<2>(rows, 0x00ff00ffu);
  swap_quarters<1>(rows, 0x0f0f0f0fu);
}

constexpr int64_t kInputs = 128;  // codes of a cache line

// Codes of eight words of outputs for 128 inputs, fewer of both at the edges.
struct Tile {
  Lanes codes[kInputs / 8][8];  // eight inputs' codes of each output, by its nibble and its word

  QF_VECTORIZED void load(const Parts& p, int64_t first, int64_t word) {
    const int64_t num_words = p.n / 8, num_inputs = std::min(kInputs, p.k - first);
    const bool is_whole = num_words - word >= kLanes;
    const auto lane_bytes = static_cast<size_t>(std::min<int64_t>(kLanes, num_words - word) * 4);
    for (int64_t i = 0; i < num_inputs; i += 8) {
      Lanes words[8] = {};
      for (int64_t j = 0; j < std::min<int64_t>(8, num_inputs - i); ++j) {
        const uint8_t* in = p.qweight.bytes.data() + ((first + i + j) * num_words + word) * 4;
        if (is_whole) std::memcpy(&words[j], in, sizeof(Lanes));
        else std::memcpy(&words[j], in, lane_bytes);
        words[j] ^= 0x88888888u;  // less 8
      }
      transpose_nibbles(words);
      for (int64_t j = 0; j < 8; ++j) codes[i / 8][j] = words[j];
    }
  }

  // A cache line of the codes of one output.
  QF_VECTORIZED void store(int64_t output, uint8_t* out, size_t size) const {
    uint32_t line[kInputs / 8];
    for (int64_t i = 0; i < kInputs / 8; ++i) line[i] = codes[i][kNibbleOf[output % 8]][output / 8];
    if (size == sizeof(line)) std::memcpy(out, line, sizeof(line));
    else std::memcpy(out, line, size);
  }
};

std::vector<uint8_t> load_codes(const Parts& p) {
  const int64_t row_bytes = quantfuse::row_bytes(QF_INT4, p.k), num_words = p.n / 8;
  std::vector<uint8_t> codes(static_cast<size_t>(p.n * row_bytes));
  const auto load_tile = [&](Tile& tile, int64_t first, int64_t word) QF_VECTORIZED {
    tile.load(p, first, word);
    // Whole lines at once: rows are often a power of two apart, and few such lines fit into the first cache.
    const auto size = static_cast<size_t>((std::min(kInputs, p.k - first) + 1) / 2);
    for (int64_t output = 0; output < std::min<int64_t>(kLanes * 8, p.n - word * 8); ++output) {
      tile.store(output, codes.data() + (word * 8 + output) * row_bytes + first / 2, size);
    }
  };
  // Down strips of 512 outputs, whose pages the processor keeps at hand.
  constexpr int64_t kStrip = 64;
  for_each_piece(ceil_div(num_words, kStrip), num_worker_threads(), [&](int, int64_t piece) {
    const int64_t strip = piece * kStrip, end = std::min(strip + kStrip, num_words);
    with_vectors([&]() QF_VECTORIZED {
      Tile tile;
      for (int64_t first = 0; first < p.k; first += kInputs) {
        for (int64_t word = strip; word < end; word += kLanes) load_tile(tile, first, word);
      }
    });
  });
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
