// SPDX-License-Identifier: Apache-2.0
//
// Importers on checkpoints made here, from known codes: shapes that no tool happened to save, what a config
// may leave out, and every way in which config and tensors can disagree.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "checkpoint/error.h"
#include "checkpoint/import.h"
#include "checkpoint_files.h"
#include "formats/codes.h"

namespace quantfuse::checkpoint {
namespace {

using Config = nlohmann::json;

std::mt19937& rng() {
  static std::mt19937 engine(7);
  return engine;
}

std::vector<uint32_t> random_fields(int64_t count, int bits) {
  std::vector<uint32_t> fields(static_cast<size_t>(count));
  for (uint32_t& field : fields) field = rng()() & ((1u << bits) - 1);
  return fields;
}

// Powers of two, so that any product with a small integer is exact in every type.
std::vector<float> random_scales(int64_t count) {
  std::vector<float> scales(static_cast<size_t>(count));
  for (float& scale : scales) scale = std::ldexp(1.0f, static_cast<int>(rng()() % 7) - 3);
  return scales;
}

std::vector<f16> to_f16(const std::vector<float>& values) {
  std::vector<f16> result(values.size());
  for (size_t i = 0; i < values.size(); ++i) from_float(values[i], result[i]);
  return result;
}

template <class T>
std::vector<T> transposed(const std::vector<T>& matrix, int64_t rows, int64_t cols) {
  std::vector<T> result(matrix.size());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c)
      result[static_cast<size_t>(c * rows + r)] = matrix[static_cast<size_t>(r * cols + c)];
  }
  return result;
}

// Every row of `fields` [rows, cols] packed by itself: [rows, ceil(cols * bits / 32)].
std::vector<uint32_t> packed_rows(const std::vector<uint32_t>& fields, int64_t rows, int64_t cols, int bits) {
  std::vector<uint32_t> words;
  for (int64_t r = 0; r < rows; ++r) {
    const auto begin = fields.begin() + r * cols;
    const auto row = packed({begin, begin + cols}, bits);
    words.insert(words.end(), row.begin(), row.end());
  }
  return words;
}

int64_t words(int64_t count, int bits) { return (count * bits + 31) / 32; }

// A layer that is known: (code - zero) * scale, codes and zeros unsigned.
struct Known {
  int64_t n, k, groups;
  int bits;
  std::vector<uint32_t> codes, zeros;  // [n, k], [n, groups]
  std::vector<float> scales;           // [n, groups]
  std::vector<int32_t> g_idx;          // [k]

  Known(int64_t n, int64_t k, int64_t group, int bits)
      : n(n),
        k(k),
        groups((k + group - 1) / group),
        bits(bits),
        codes(random_fields(n * k, bits)),
        zeros(random_fields(n * groups, bits)),
        scales(random_scales(n * groups)) {
    for (int64_t i = 0; i < k; ++i) g_idx.push_back(static_cast<int32_t>(i / group));
  }

  float value(int64_t row, int64_t col) const {
    const auto g = static_cast<size_t>(row * groups + g_idx[static_cast<size_t>(col)]);
    const auto code = static_cast<int>(codes[static_cast<size_t>(row * k + col)]);
    return static_cast<float>(code - static_cast<int>(zeros[g])) * scales[g];
  }
};

void expect_values(const Layer& layer, const Known& known) {
  ASSERT_EQ(layer.info().shape, (std::vector<int64_t>{known.n, known.k}));
  std::vector<float> got(static_cast<size_t>(known.n * known.k), NAN);
  layer.dequantize(got);
  for (int64_t row = 0; row < known.n; ++row) {
    for (int64_t col = 0; col < known.k; ++col) {
      ASSERT_EQ(got[static_cast<size_t>(row * known.k + col)], known.value(row, col)) << row << ", " << col;
    }
  }
}

void expect_error(const fs::path& path, const std::vector<std::string>& expected,
                  const StatedFields& stated = {}) {
  try {
    const Checkpoint checkpoint(path);
    const Import import = import_checkpoint(checkpoint, stated);
    for (const auto& layer : import.layers) layer->values();
    FAIL() << "accepted; expected an error with " << expected[0];
  } catch (const CheckpointError& e) {
    for (const std::string& word : expected) {
      EXPECT_NE(std::string(e.what()).find(word), std::string::npos)
          << "'" << word << "' is not in: " << e.what();
    }
  }
}

// ---- GPTQ ----

std::vector<NewTensor> gptq_tensors(const Known& layer, int version, const std::string& module = "m.q_proj") {
  const auto zeros = transposed(layer.zeros, layer.n, layer.groups);  // [groups, n]
  std::vector<uint32_t> stored = zeros;
  if (version == 1 && layer.bits == 3) {
    for (uint32_t& zero : stored) zero = (zero - 1) & 7;
  }
  auto qzeros = packed_rows(stored, layer.groups, layer.n, layer.bits);
  if (version == 1 && layer.bits != 3) {
    for (uint32_t& word : qzeros) word -= 0xffffffffu / ((1u << layer.bits) - 1);  // 1 in every field
  }
  const int64_t rows = words(layer.k, layer.bits);
  const auto qweight = transposed(packed_rows(layer.codes, layer.n, layer.k, layer.bits), layer.n, rows);
  const auto scales = to_f16(transposed(layer.scales, layer.n, layer.groups));
  return {{{module + ".qweight", Type::i32, {rows, layer.n}}, bytes_of(qweight)},
          {{module + ".qzeros", Type::i32, {layer.groups, words(layer.n, layer.bits)}}, bytes_of(qzeros)},
          {{module + ".scales", Type::f16, {layer.groups, layer.n}}, bytes_of(scales)},
          {{module + ".g_idx", Type::i32, {layer.k}}, bytes_of(layer.g_idx)}};
}

Config gptq_config(int bits, int64_t group, const char* format = "gptq") {
  Config config = {
      {"quant_method", "gptq"}, {"bits", bits}, {"group_size", group}, {"sym", false}, {"desc_act", false}};
  if (format) config["checkpoint_format"] = format;
  return config;
}

TEST(Gptq, ReadsEveryWidthAndShape) {
  for (const int bits : {2, 3, 4, 8}) {
    for (const int version : {1, 2}) {
      for (const auto& [n, k, group] :
           {std::tuple{1, 1, 1}, {5, 37, 16}, {32, 64, 32}, {33, 100, 64}, {40, 96, 7}, {17, 352, 128}}) {
        const Known known(n, k, group, bits);
        TemporaryFolder folder;
        write_checkpoint(folder, gptq_config(bits, group, version == 1 ? "gptq" : "gptq_v2"),
                         gptq_tensors(known, version));
        const Checkpoint checkpoint(folder.path());
        SCOPED_TRACE(testing::Message()
                     << bits << " bits, v" << version << ", " << n << "x" << k << " g" << group);
        expect_values(*import_checkpoint(checkpoint).layers[0], known);
      }
    }
  }
}

TEST(Gptq, ReadsActOrder) {
  Known known(24, 96, 32, 4);
  std::shuffle(known.g_idx.begin(), known.g_idx.end(), rng());
  TemporaryFolder folder;
  Config config = gptq_config(4, 32);
  config["desc_act"] = true;
  write_checkpoint(folder, config, gptq_tensors(known, 1));
  const Checkpoint checkpoint(folder.path());
  const Import import = import_checkpoint(checkpoint);
  expect_values(*import.layers[0], known);
  EXPECT_EQ(import.layers[0]->canonical()->g_idx, known.g_idx);
}

TEST(Gptq, NeedsNoGroupIndexWithoutActOrder) {
  const Known known(8, 64, 32, 4);
  auto tensors = gptq_tensors(known, 1);
  tensors.pop_back();
  TemporaryFolder folder;
  write_checkpoint(folder, gptq_config(4, 32), tensors);
  const Checkpoint checkpoint(folder.path());
  expect_values(*import_checkpoint(checkpoint).layers[0], known);
  expect_error(folder.path(), {"m.q_proj.g_idx is missing"}, {{"desc_act", "true"}});
}

TEST(Gptq, TellsVersionsBySymmetricZeros) {
  Known known(8, 64, 32, 4);
  std::fill(known.zeros.begin(), known.zeros.end(), 8u);
  for (const int version : {1, 2}) {
    TemporaryFolder folder;
    Config config = gptq_config(4, 32, nullptr);
    config["sym"] = true;
    write_checkpoint(folder, config, gptq_tensors(known, version));
    const Checkpoint checkpoint(folder.path());
    const Import import = import_checkpoint(checkpoint);
    EXPECT_EQ(import.format, "gptq v" + std::to_string(version));
    expect_values(*import.layers[0], known);
    EXPECT_TRUE(import.layers[0]->canonical()->zero.empty());
    // A label that lies is found by the same rule.
    expect_error(folder.path(), {"m.q_proj.qzeros", "symmetric", version == 1 ? "=gptq" : "=gptq_v2"},
                 {{"checkpoint_format", version == 1 ? "gptq_v2" : "gptq"}});
  }
}

TEST(Gptq, RefusesWhatIsAmbiguous) {
  const Known known(8, 64, 32, 4);
  TemporaryFolder folder;
  write_checkpoint(folder, gptq_config(4, 32, nullptr), gptq_tensors(known, 2));
  expect_error(folder.path(), {"checkpoint_format", "gptq_v2"});
  const Checkpoint checkpoint(folder.path());
  expect_values(*import_checkpoint(checkpoint, {{"checkpoint_format", "gptq_v2"}}).layers[0], known);
  expect_error(folder.path(), {"checkpoint_format", "marlin"}, {{"checkpoint_format", "marlin"}});
  expect_error(folder.path(), {"format", "gptq_v2"}, {{"checkpoint_format", "gptq"}, {"format", "gptq_v2"}});
  expect_error(folder.path(), {"bits"}, {{"bits", "5"}});
  expect_error(folder.path(), {"bits is missing"}, {{"bits", "null"}});
  expect_error(folder.path(), {"group_size is missing"}, {{"group_size", "null"}});
  expect_error(folder.path(), {"pack_dtype"}, {{"pack_dtype", "int16"}});
}

TEST(Gptq, TakesLayersWithSettingsOfTheirOwn) {
  const Known first(8, 64, 32, 4), second(16, 64, 64, 8);
  auto tensors = gptq_tensors(first, 1, "m.0.up");
  const auto more = gptq_tensors(second, 1, "m.0.down");
  tensors.insert(tensors.end(), more.begin(), more.end());
  TemporaryFolder folder;
  Config config = gptq_config(4, 32);
  config["dynamic"] = {{"+:.*\\.down", {{"bits", 8}, {"group_size", 64}}}, {"-:.*gate", Config::object()}};
  write_checkpoint(folder, config, tensors);
  const Checkpoint checkpoint(folder.path());
  const Import import = import_checkpoint(checkpoint);
  expect_values(*import.layers[0], first);
  expect_values(*import.layers[1], second);
}

TEST(Gptq, ReadsTheConfigOfOlderTools) {
  const Known known(8, 64, 32, 4);
  TemporaryFolder folder;
  write_safetensors(folder / "model.safetensors", gptq_tensors(known, 1));
  folder.write("config.json", R"({"model_type": "llama"})");
  folder.write("quantize_config.json",
               R"({"bits": 4, "group_size": 32, "sym": false, "checkpoint_format": "gptq"})");
  const Checkpoint checkpoint(folder.path());
  expect_values(*import_checkpoint(checkpoint).layers[0], known);
}

// ---- AWQ ----

constexpr int kAwqOutput[8] = {0, 2, 4, 6, 1, 3, 5, 7};  // of nibble i

std::vector<uint32_t> awq_packed(const std::vector<uint32_t>& fields, int64_t rows, int64_t cols) {
  std::vector<uint32_t> ordered(fields.size());
  for (int64_t i = 0; i < rows * cols; ++i) {
    ordered[static_cast<size_t>(i)] = fields[static_cast<size_t>(i / 8 * 8 + kAwqOutput[i % 8])];
  }
  return packed_rows(ordered, rows, cols, 4);
}

TEST(Awq, ReadsEveryShape) {
  for (const auto& [n, k, group] :
       {std::tuple{8, 1, 1}, {8, 13, 4}, {32, 64, 32}, {40, 100, 64}, {136, 31, 31}}) {
    const Known known(n, k, group, 4);
    const auto qweight = awq_packed(transposed(known.codes, n, k), k, n);
    const auto qzeros = awq_packed(transposed(known.zeros, n, known.groups), known.groups, n);
    TemporaryFolder folder;
    write_checkpoint(folder, {{"quant_method", "awq"}, {"bits", 4}, {"group_size", group == 31 ? -1 : group}},
                     {{{"m.qweight", Type::i32, {k, n / 8}}, bytes_of(qweight)},
                      {{"m.qzeros", Type::i32, {known.groups, n / 8}}, bytes_of(qzeros)},
                      {{"m.scales", Type::f16, {known.groups, n}},
                       bytes_of(to_f16(transposed(known.scales, n, known.groups)))}});
    const Checkpoint checkpoint(folder.path());
    SCOPED_TRACE(testing::Message() << n << "x" << k << " g" << group);
    expect_values(*import_checkpoint(checkpoint).layers[0], known);
    expect_error(folder.path(), {"modules_to_not_convert", "m"}, {{"modules_to_not_convert", R"(["m"])"}});
  }
}

// ---- compressed-tensors ----

Config ct_group(const Config& targets, const Config& weights) {
  return {{"targets", targets}, {"weights", weights}};
}

Config ct_config(const char* format, const Config& groups) {
  return {{"quant_method", "compressed-tensors"},
          {"format", format},
          {"ignore", {"lm_head"}},
          {"config_groups", groups}};
}

Config int_weights(int bits, const char* strategy, int64_t group, bool is_symmetric) {
  return {{"num_bits", bits},
          {"type", "int"},
          {"strategy", strategy},
          {"group_size", group},
          {"symmetric", is_symmetric}};
}

std::vector<NewTensor> ct_packed(const Known& layer, const std::string& module, bool is_symmetric) {
  // Zero points are packed along the outputs: a stream for each group.
  const auto zeros = transposed(
      packed_rows(transposed(layer.zeros, layer.n, layer.groups), layer.groups, layer.n, layer.bits),
      layer.groups, words(layer.n, layer.bits));
  std::vector<NewTensor> tensors = {
      {{module + ".weight_packed", Type::i32, {layer.n, words(layer.k, layer.bits)}},
       bytes_of(packed_rows(layer.codes, layer.n, layer.k, layer.bits))},
      {{module + ".weight_scale", Type::f32, {layer.n, layer.groups}}, bytes_of(layer.scales)},
      {{module + ".weight_shape", Type::i64, {2}}, bytes_of(std::vector<int64_t>{layer.n, layer.k})}};
  if (!is_symmetric) {
    tensors.push_back({{module + ".weight_zero_point", Type::i32, {words(layer.n, layer.bits), layer.groups}},
                       bytes_of(zeros)});
  }
  return tensors;
}

void make_symmetric(Known& known) {
  std::fill(known.zeros.begin(), known.zeros.end(), 1u << (known.bits - 1));
}

TEST(CompressedTensors, ReadsEveryWidthAndShape) {
  for (int bits = 1; bits <= 8; ++bits) {
    for (const auto& [n, k, group] : {std::tuple{1, 1, 1}, {5, 37, 16}, {33, 132, 132}, {40, 96, 32}}) {
      for (const bool is_symmetric : {false, true}) {
        Known known(n, k, group, bits);
        if (is_symmetric) make_symmetric(known);
        TemporaryFolder folder;
        const char* strategy = group == k ? "channel" : "group";
        write_checkpoint(
            folder,
            ct_config("pack-quantized",
                      {{"g", ct_group({"Linear"}, int_weights(bits, strategy, group, is_symmetric))}}),
            ct_packed(known, "m", is_symmetric));
        const Checkpoint checkpoint(folder.path());
        SCOPED_TRACE(testing::Message() << bits << " bits, " << n << "x" << k << " g" << group);
        expect_values(*import_checkpoint(checkpoint).layers[0], known);
      }
    }
  }
}

TEST(CompressedTensors, FindsTheGroupOfAModule) {
  Known up(8, 64, 32, 4), down(8, 64, 64, 8), last(8, 64, 16, 3);
  for (Known* known : {&up, &down, &last}) make_symmetric(*known);
  std::vector<NewTensor> tensors;
  for (const auto& [known, module] : {std::pair{&up, "m.0.up"}, {&down, "m.0.down"}, {&last, "m.1.down"}}) {
    const auto more = ct_packed(*known, module, true);
    tensors.insert(tensors.end(), more.begin(), more.end());
  }
  const Config any = ct_group({"Linear"}, int_weights(4, "group", 32, true));
  const Config pattern = ct_group({"re:.*down$"}, int_weights(8, "channel", -1, true));
  const Config exact = ct_group({"m.1.down"}, int_weights(3, "group", 16, true));
  TemporaryFolder folder;
  write_checkpoint(folder, ct_config("pack-quantized", {{"a", any}, {"b", pattern}, {"c", exact}}), tensors);
  const Checkpoint checkpoint(folder.path());
  const Import import = import_checkpoint(checkpoint);
  expect_values(*import.layers[0], up);
  expect_values(*import.layers[1], down);
  expect_values(*import.layers[2], last);

  const std::string ignore = R"(["re:m.0.*"])";
  expect_error(folder.path(), {"ignore", "m.0.up"}, {{"ignore", ignore}});
  expect_error(folder.path(), {"pattern", "(("}, {{"ignore", R"(["re:(("])"}});
  write_checkpoint(folder, ct_config("pack-quantized", {{"b", pattern}}), tensors);
  expect_error(folder.path(), {"m.0.up", "target of no group"});
}

TEST(CompressedTensors, PatternsTakePolynomialTime) {
  const Known known(8, 32, 32, 4);
  TemporaryFolder folder;
  const Config group = ct_group({"re:(a+)+$"}, int_weights(4, "group", 32, false));
  write_checkpoint(folder, ct_config("pack-quantized", {{"g", group}}),
                   ct_packed(known, std::string(60, 'a') + "b", false));
  expect_error(folder.path(), {"target of no group"});
}

TEST(CompressedTensors, ReadsPlainIntegers) {
  const std::vector<int8_t> codes = {-4, 3, 0, 1, 2, -1};
  const std::vector<float> scales = {0.5f, 2.0f};
  const Config weights = int_weights(3, "channel", -1, false);
  const auto write = [&](const TemporaryFolder& folder, const std::vector<int8_t>& values) {
    write_checkpoint(folder, ct_config("naive-quantized", {{"g", ct_group({"Linear"}, weights)}}),
                     {{{"m.weight", Type::i8, {2, 3}}, bytes_of(values)},
                      {{"m.weight_scale", Type::f32, {2, 1}}, bytes_of(scales)},
                      {{"m.weight_zero_point", Type::i8, {2, 1}}, bytes_of(std::vector<int8_t>{1, -2})}});
  };
  TemporaryFolder folder;
  write(folder, codes);
  const Checkpoint checkpoint(folder.path());
  std::vector<float> got(6);
  import_checkpoint(checkpoint).layers[0]->dequantize(got);
  EXPECT_EQ(got, (std::vector<float>{-2.5f, 1.0f, -0.5f, 6.0f, 8.0f, 2.0f}));
  TemporaryFolder outside;
  write(outside, {-4, 3, 0, 1, 2, 4});
  expect_error(outside.path(), {"m.weight", "code 4", "3 bits"});
}

TEST(CompressedTensors, NamesWhatDisagrees) {
  const Known known(8, 64, 32, 4);
  TemporaryFolder folder;
  write_checkpoint(
      folder, ct_config("pack-quantized", {{"g", ct_group({"Linear"}, int_weights(4, "group", 32, false))}}),
      ct_packed(known, "m", false));
  expect_error(folder.path(), {"m.weight_shape", "8 bits"}, {{"config_groups.g.weights.num_bits", "8"}});
  expect_error(folder.path(), {"m.weight_scale", "[8, 2]"}, {{"config_groups.g.weights.group_size", "64"}});
  expect_error(folder.path(), {"strategy"}, {{"config_groups.g.weights.strategy", "other"}});
  expect_error(folder.path(), {"marlin-24", "not supported"}, {{"format", "marlin-24"}});
  expect_error(folder.path(), {"m.weight_g_idx is missing"}, {{"config_groups.g.weights.actorder", "group"}});
  TemporaryFolder symmetric;
  write_checkpoint(
      symmetric,
      ct_config("pack-quantized", {{"g", ct_group({"Linear"}, int_weights(4, "group", 32, false))}}),
      ct_packed(known, "m", true));
  expect_error(symmetric.path(), {"m.weight_zero_point is missing"});
}

TEST(CompressedTensors, DividesByTheGlobalScaleOfNvfp4) {
  const std::vector<uint8_t> nibbles = {0x21, 0x43, 0x65, 0x87, 0xa9, 0xcb, 0xed, 0x0f};
  const Config weights = {
      {"num_bits", 4}, {"type", "float"}, {"strategy", "tensor_group"}, {"group_size", 16}};
  const auto write = [&](const TemporaryFolder& folder, float global) {
    write_checkpoint(folder, ct_config("nvfp4-pack-quantized", {{"g", ct_group({"Linear"}, weights)}}),
                     {{{"m.weight_packed", Type::u8, {1, 8}}, bytes_of(nibbles)},
                      {{"m.weight_scale", Type::e4m3, {1, 1}}, {E4m3::encode(3.0f)}},
                      {{"m.weight_global_scale", Type::f32, {1}}, bytes_of(std::vector<float>{global})}});
  };
  TemporaryFolder folder;
  write(folder, 0.5f);
  const Checkpoint checkpoint(folder.path());
  std::vector<float> got(16);
  import_checkpoint(checkpoint).layers[0]->dequantize(got);
  const float values[16] = {0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6, 0};
  for (size_t i = 0; i < 16; ++i) EXPECT_EQ(float_bits(got[i]), float_bits(values[i] * 6.0f)) << i;
  TemporaryFolder zero;
  write(zero, 0.0f);
  expect_error(zero.path(), {"m.weight_global_scale", "0"});
}

// ---- FP8 blocks ----

TEST(Fp8, ReadsOtherBlocksAndPowersOfTwo) {
  const int64_t n = 70, k = 130;
  std::vector<uint8_t> codes(static_cast<size_t>(n * k));
  for (uint8_t& code : codes) code = static_cast<uint8_t>(rng()() & 0xf7);  // no NaN
  const std::vector<uint8_t> scales = {127, 126, 130, 120, 128, 125};
  const Config config = {
      {"quant_method", "fp8"}, {"weight_block_size", {64, 64}}, {"modules_to_not_convert", {"lm_head"}}};
  TemporaryFolder folder;
  write_checkpoint(
      folder, config,
      {{{"m.weight", Type::e4m3, {n, k}}, codes}, {{"m.weight_scale_inv", Type::e8m0, {2, 3}}, scales}});
  const Checkpoint checkpoint(folder.path());
  std::vector<float> got(codes.size());
  import_checkpoint(checkpoint).layers[0]->dequantize(got);
  for (int64_t i = 0; i < n * k; ++i) {
    const float scale = E8m0::decode(scales[static_cast<size_t>(i / k / 64 * 3 + i % k / 64)]);
    ASSERT_EQ(float_bits(got[static_cast<size_t>(i)]),
              float_bits(E4m3::decode(codes[static_cast<size_t>(i)]) * scale));
  }
  expect_error(folder.path(), {"m.weight_scale_inv", "[2, 3]", "[1, 2]"},
               {{"weight_block_size", "[128, 128]"}});
  expect_error(folder.path(), {"weight_block_size"}, {{"weight_block_size", "null"}});
  expect_error(folder.path(), {"weight_block_size"}, {{"weight_block_size", "[0, 128]"}});
  expect_error(folder.path(), {"modules_to_not_convert", "m"}, {{"modules_to_not_convert", R"(["m"])"}});
}

// ---- bitsandbytes ----

// A block may be a part of a row or a whole number of rows.
TEST(Bitsandbytes, HasACanonicalFormWhereNoBlockHasPartsOfTwoRows) {
  const float* table = codebook_of(QF_NF4);
  for (const auto& [n, k, rows] :
       {std::tuple<int64_t, int64_t, int64_t>{2, 128, 1}, {7, 16, 4}, {3, 96, 0}}) {
    const int64_t numel = n * k, blocks = (numel + 63) / 64;
    const nlohmann::json state = {
        {"quant_type", "nf4"}, {"blocksize", 64}, {"dtype", "float32"}, {"shape", {n, k}}};
    std::vector<uint8_t> bytes(static_cast<size_t>(numel / 2));
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(rng()());
    std::vector<float> absmax(static_cast<size_t>(blocks));
    for (size_t i = 0; i < absmax.size(); ++i) absmax[i] = static_cast<float>(i) * 0.75f;  // and one of 0
    TemporaryFolder folder;
    write_checkpoint(
        folder, {{"quant_method", "bitsandbytes"}, {"load_in_4bit", true}},
        {{{"m.weight", Type::u8, {numel / 2, 1}}, bytes},
         {{"m.weight.absmax", Type::f32, {blocks}}, bytes_of(absmax)},
         {{"m.weight.quant_map", Type::f32, {16}}, bytes_of(std::vector<float>(table, table + 16))},
         {{"m.weight.quant_state.bitsandbytes__nf4", Type::u8, {static_cast<int64_t>(state.dump().size())}},
          bytes_of(state.dump())}});
    const Checkpoint checkpoint(folder.path());
    const Import import = import_checkpoint(checkpoint);
    const auto w = import.layers[0]->canonical();
    ASSERT_EQ(w.has_value(), rows > 0) << k;
    if (!w) continue;
    EXPECT_EQ(w->block_rows(), rows);
    std::vector<float> want(static_cast<size_t>(numel));
    import.layers[0]->dequantize(want);
    for (int64_t i = 0; i < numel; ++i) {
      const int64_t row = i / k, col = i % k;
      const float code = decode_at(w->format, w->codes.data() + row * w->row_bytes(), col);
      ASSERT_EQ(code * w->scale_at(row / w->block_rows() * w->num_groups + col / w->block_cols()),
                want[static_cast<size_t>(i)]);
    }
  }
}

TEST(Bitsandbytes, ReadsOddSizesAndWideStorage) {
  std::vector<float> map(16);
  for (size_t i = 0; i < 16; ++i) map[i] = static_cast<float>(i) / 8 - 1;
  const std::string state = R"({"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [3, 25]})";
  std::vector<uint8_t> bytes(38);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(rng()());
  for (const Type storage : {Type::u8, Type::bf16}) {
    const int64_t count = storage == Type::u8 ? 38 : 19;
    TemporaryFolder folder;
    write_checkpoint(
        folder, {{"quant_method", "bitsandbytes"}, {"load_in_4bit", true}},
        {{{"m.weight", storage, {count, 1}}, bytes},
         {{"m.weight.absmax", Type::f32, {2}}, bytes_of(std::vector<float>{0.5f, 4.0f})},
         {{"m.weight.quant_map", Type::f32, {16}}, bytes_of(map)},
         {{"m.weight.quant_state.bitsandbytes__nf4", Type::u8, {static_cast<int64_t>(state.size())}},
          bytes_of(state)}});
    const Checkpoint checkpoint(folder.path());
    const Import import = import_checkpoint(checkpoint);
    ASSERT_EQ(import.layers[0]->info().shape, (std::vector<int64_t>{3, 25}));
    EXPECT_FALSE(import.layers[0]->canonical());  // blocks have parts of two rows, and the map is no format's
    std::vector<float> got(75);
    import.layers[0]->dequantize(got);
    for (size_t i = 0; i < 75; ++i) {
      const int code = i % 2 ? bytes[i / 2] & 15 : bytes[i / 2] >> 4;
      ASSERT_EQ(got[i], map[static_cast<size_t>(code)] * (i < 64 ? 0.5f : 4.0f));
    }
    expect_error(folder.path(), {"bnb_4bit_quant_type", "nf4"}, {{"bnb_4bit_quant_type", "fp4"}});
    expect_error(folder.path(), {"bnb_4bit_use_double_quant"}, {{"bnb_4bit_use_double_quant", "true"}});
    expect_error(folder.path(), {"load_in_8bit", "not supported"}, {{"load_in_8bit", "true"}});
  }
}

// ---- torchao ----

// A checkpoint of one weight "m.weight" that __metadata__ describes.
void write_torchao(const TemporaryFolder& folder, const Config& description,
                   const std::vector<NewTensor>& tensors) {
  write_safetensors(folder / "plain.safetensors", tensors);
  std::ifstream stream(folder / "plain.safetensors", std::ios::binary);
  const std::string plain((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
  uint64_t length;
  std::memcpy(&length, plain.data(), sizeof(length));
  Config header = Config::parse(plain.substr(8, length));
  header["__metadata__"]["m.weight"] = description.dump();
  const std::string text = header.dump();
  const uint64_t new_length = text.size();
  std::string file(reinterpret_cast<const char*>(&new_length), sizeof(new_length));
  folder.write("model.safetensors", file + text + plain.substr(8 + length));
  folder.write("config.json", R"({"quantization_config": {"quant_method": "torchao"}})");
}

Config torchao_description(const char* type, const Config& block_size, const char* target = nullptr) {
  Config data = {{"block_size", block_size}, {"dtype", {{"_type", "torch.dtype"}, {"_data", "float32"}}}};
  if (target) data["target_dtype"] = {{"_type", "torch.dtype"}, {"_data", target}};
  return {{"_type", type}, {"_data", data}, {"_tensor_data_names", {"qdata", "scale", "zero_point"}}};
}

TEST(Torchao, ReadsGroupsWithZeroPoints) {
  const std::vector<int8_t> codes = {1, -2, 3, -4, 5, -6};
  const std::vector<NewTensor> tensors = {
      {{"m._weight_qdata", Type::i8, {2, 3}}, bytes_of(codes)},
      {{"m._weight_scale", Type::f32, {2, 2}}, bytes_of(std::vector<float>{1, 2, 0.5f, 4})},
      {{"m._weight_zero_point", Type::i8, {2, 2}}, bytes_of(std::vector<int8_t>{0, 1, -2, 3})}};
  const std::vector<float> expected = {1, -2, 4, -1, 3.5f, -36};
  for (const Config& description : {torchao_description("Int8Tensor", {1, 2}),
                                    torchao_description("IntxUnpackedToInt8Tensor", {1, 2}, "int4")}) {
    TemporaryFolder folder;
    write_torchao(folder, description, tensors);
    const Checkpoint checkpoint(folder.path());
    const Import import = import_checkpoint(checkpoint);
    std::vector<float> got(6);
    import.layers[0]->dequantize(got);
    EXPECT_EQ(got, expected);
    EXPECT_EQ(import.layers[0]->info().name, "m.weight");
  }
  const auto expect_refused = [&](const Config& description, const std::vector<std::string>& words) {
    TemporaryFolder folder;
    write_torchao(folder, description, tensors);
    expect_error(folder.path(), words);
  };
  expect_refused(torchao_description("IntxUnpackedToInt8Tensor", {1, 2}, "int3"),
                 {"m._weight_qdata", "code 5", "3 bits"});
  expect_refused(torchao_description("IntxUnpackedToInt8Tensor", {1, 2}, "uint4"), {"target_dtype"});
  expect_refused(torchao_description("Int8Tensor", {1, 3}), {"m._weight_scale", "[2, 2]"});
  expect_refused(torchao_description("Int8Tensor", {0, 3}), {"block_size"});
  expect_refused(torchao_description("Int4Tensor", {1, 2}), {"Int4Tensor", "not supported"});
  expect_refused(torchao_description("Tensor", {1, 2}), {"torchao", "no tensor is quantized"});
  TemporaryFolder folder;  // a zero point that the description names
  write_torchao(folder, torchao_description("Int8Tensor", {1, 2}), {tensors[0], tensors[1]});
  expect_error(folder.path(), {"m._weight_zero_point"});
}

TEST(Torchao, ReadsOneScalePerTensor) {
  TemporaryFolder folder;
  write_torchao(folder, torchao_description("Float8Tensor", {2, 2}),
                {{{"m._weight_qdata", Type::e4m3, {2, 2}},
                  {E4m3::encode(1), E4m3::encode(-2), E4m3::encode(448), 0x80}},
                 {{"m._weight_scale", Type::f32, {1, 1}}, bytes_of(std::vector<float>{0.5f})}});
  const Checkpoint checkpoint(folder.path());
  std::vector<float> got(4);
  import_checkpoint(checkpoint).layers[0]->dequantize(got);
  EXPECT_EQ(got, (std::vector<float>{0.5f, -1, 224, -0.0f}));
  EXPECT_TRUE(std::signbit(got[3]));
}

TEST(Torchao, NeedsTheMetadata) {
  TemporaryFolder folder;
  write_checkpoint(folder, {{"quant_method", "torchao"}},
                   {{{"m._weight_qdata", Type::i8, {2, 2}}, {1, 2, 3, 4}}});
  expect_error(folder.path(), {"torchao"});
}

// ---- quantfuse: the states of layers ----

TEST(Quantfuse, ReadsTheStatesOfLayers) {
  const auto tensors = [](int64_t format, int64_t rows) -> std::vector<NewTensor> {
    return {{{"m.codes", Type::u8, {2, 2}}, {0x21, 0x43, 0xfe, 0xdc}},
            {{"m.scales", Type::f32, {2, 1}}, bytes_of(std::vector<float>{1, 0.5f})},
            {{"m.layout", Type::i64, {6}}, bytes_of(std::vector<int64_t>{format, rows, 4, 1, 0, 0})}};
  };
  TemporaryFolder folder;
  write_checkpoint(folder, {{"quant_method", "quantfuse"}}, tensors(QF_INT4, 2));
  const Checkpoint checkpoint(folder.path());
  const Import import = import_checkpoint(checkpoint);
  ASSERT_EQ(import.layers.size(), 1u);
  EXPECT_EQ(import.layers[0]->info().name, "m.weight");
  EXPECT_EQ(import.layers[0]->info().format, "int4");
  EXPECT_TRUE(import.plain.empty());
  std::vector<float> got(8);
  import.layers[0]->dequantize(got);
  EXPECT_EQ(got, (std::vector<float>{1, 2, 3, 4, -1, -0.5f, -2, -1.5f}));

  const auto expect_refused = [](std::vector<NewTensor> given, const std::vector<std::string>& words) {
    TemporaryFolder folder;
    write_checkpoint(folder, {{"quant_method", "quantfuse"}}, given);
    expect_error(folder.path(), words);
  };
  expect_refused(tensors(QF_INT4, 3), {"m.codes", "[2, 2]", "[3, 2]", "int4 of shape [3, 4]"});
  expect_refused(tensors(99, 2), {"m.layout", "format 99"});
  expect_refused(tensors(QF_INT4, -2), {"m.layout", "-2"});
  auto without = tensors(QF_INT4, 2);
  without.pop_back();
  expect_refused(without, {"m.layout", "missing"});
}

// ---- Accounting ----

TEST(Accounting, NamesWhatIsLeftOver) {
  const Known known(8, 64, 32, 4);
  const auto with = [&](const NewTensor& extra, const std::vector<std::string>& expected) {
    auto tensors = gptq_tensors(known, 1);
    tensors.push_back(extra);
    TemporaryFolder folder;
    write_checkpoint(folder, gptq_config(4, 32), tensors);
    expect_error(folder.path(), expected);
  };
  with({{"x.scales", Type::f16, {1}}, {0, 0}}, {"x.scales", "belongs to no layer"});
  with({{"x.weight_packed", Type::i32, {1}}, {0, 0, 0, 0}},
       {"x.weight_packed", "compressed-tensors", "gptq"});
  with({{"x.weight", Type::e4m3, {1}}, {0}}, {"x.weight", "belongs to no layer"});
  with({{"m.q_proj.weight", Type::f16, {1}}, {0, 0}}, {"m.q_proj.weight", "both"});
}

TEST(Accounting, RefusesQuantizedTensorsWithoutAConfig) {
  const Known known(8, 64, 32, 4);
  TemporaryFolder folder;
  write_safetensors(folder / "model.safetensors", gptq_tensors(known, 1));
  expect_error(folder.path(), {"m.q_proj.qweight", "awq or gptq", "no quantization_config"});
  const Checkpoint checkpoint(folder.path());
  const StatedFields stated = {
      {"quant_method", "gptq"}, {"bits", "4"}, {"group_size", "32"}, {"checkpoint_format", "gptq"}};
  expect_values(*import_checkpoint(checkpoint, stated).layers[0], known);
}

TEST(Accounting, RefusesAConfigWithoutQuantizedTensors) {
  TemporaryFolder folder;
  write_checkpoint(folder, gptq_config(4, 32), {{{"m.weight", Type::f16, {1}}, {0, 0}}});
  expect_error(folder.path(), {"gptq", "no tensor is quantized"});
}

TEST(Accounting, TakesPlainCheckpoints) {
  TemporaryFolder folder;
  write_safetensors(folder / "model.safetensors", {{{"m.weight", Type::f16, {1}}, {0, 0}}});
  const Checkpoint checkpoint(folder.path());
  const Import import = import_checkpoint(checkpoint);
  EXPECT_EQ(import.format, "");
  EXPECT_EQ(import.plain.size(), 1u);
}

// ---- Scales for the kernels ----

TEST(PositiveScales, KeepTheNumbers) {
  for (const qf_format format : {QF_INT4, QF_INT8, QF_FP4_E2M1, QF_FP8_E4M3}) {
    CanonicalWeight w;
    w.format = format;
    w.n = 3, w.k = 7;
    w.block = {1, 4};
    w.num_groups = 2;
    w.scale = {1.0f, -2.0f, 0.0f, 0.5f, -1.0f, 0.0f};
    if (is_integer(format)) w.zero = {0, 3, -2, 1, -8, 5};
    w.codes.resize(static_cast<size_t>(w.n * w.row_bytes()));
    for (int64_t row = 0; row < w.n; ++row) {
      for (int64_t col = 0; col < w.k; ++col) {
        const auto code = static_cast<uint8_t>(rng()() & (is_packed_4bit(format) ? 15 : 0x77));
        store_code(format, w.codes.data() + row * w.row_bytes(), col, code);
      }
    }
    const auto numbers = [&] {
      std::vector<float> result(21);
      CanonicalLayer(LayerInfo(), [&] { return w; }).dequantize(result);
      return result;
    };
    const auto before = numbers();
    make_scales_positive(w);
    EXPECT_EQ(numbers(), before);
    for (const float scale : w.scale) EXPECT_GT(scale, 0);
  }
}

}  // namespace
}  // namespace quantfuse::checkpoint
