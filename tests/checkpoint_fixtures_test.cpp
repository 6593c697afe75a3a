// SPDX-License-Identifier: Apache-2.0
//
// Every set of fixtures, bit for bit against what the format's own tool makes of it. There is no set with
// wrong numbers of its own, and no tolerance.
#include <gtest/gtest.h>

#include <memory>

#include "checkpoint/dequantize.h"
#include "checkpoint/error.h"
#include "checkpoint_files.h"
#include "formats/codes.h"

namespace quantfuse::checkpoint {
namespace {

std::vector<fs::path> fixture_sets() {
  std::vector<fs::path> sets;
  for (const fs::path& root : fixture_roots()) {
    for (const auto& entry : fs::directory_iterator(root)) {
      if (fs::exists(entry.path() / "expected.safetensors")) sets.push_back(entry.path());
    }
  }
  std::sort(sets.begin(), sets.end());
  return sets;
}

class Fixture : public testing::TestWithParam<fs::path> {
 protected:
  Fixture()
      : checkpoint(GetParam()),
        import(import_checkpoint(checkpoint)),
        expected(GetParam() / "expected.safetensors") {}

  const Tensor* expected_part(const Layer& layer, const char* part) const {
    const std::string& name = layer.info().name;
    return expected.find(name.substr(0, name.size() - std::string_view("weight").size()) + part);
  }

  Checkpoint checkpoint;
  Import import;
  Checkpoint expected;
};

// The first place where the bits differ; -1 where none does.
int64_t first_difference(std::span<const float> got, const Tensor& want) {
  for (size_t i = 0; i < got.size(); ++i) {
    if (float_bits(got[i]) != float_bits(load_float(want, static_cast<int64_t>(i))))
      return static_cast<int64_t>(i);
  }
  return -1;
}

std::vector<float> numbers_of(const Layer& layer) {
  std::vector<float> numbers(static_cast<size_t>(layer.info().numel()), NAN);
  layer.dequantize(numbers);
  return numbers;
}

TEST_P(Fixture, DequantizesAsTheToolDoes) {
  ASSERT_FALSE(import.layers.empty());
  size_t num_compared = 0;
  for (const auto& layer : import.layers) {
    const Tensor* want = expected.find(layer->info().name);
    ASSERT_NE(want, nullptr) << layer->info().name;
    EXPECT_EQ(layer->info().shape, want->shape) << layer->info().name;
    EXPECT_EQ(first_difference(numbers_of(*layer), *want), -1) << layer->info().name;
    ++num_compared;
  }
  for (const Tensor& want : expected.tensors()) {
    if (!want.name.ends_with(".weight")) continue;
    if (const Tensor* plain = checkpoint.find(want.name);
        plain && checkpoint.container() == Container::gguf) {
      num_compared += !is_block_quantized(plain->type);
    }
  }
  const auto is_weight = [](const Tensor& tensor) { return tensor.name.ends_with(".weight"); };
  EXPECT_EQ(num_compared, std::count_if(expected.tensors().begin(), expected.tensors().end(), is_weight));
}

// Codes, zero points and groups where the set has them. Those of the AWQ and GPTQ sets are unsigned.
TEST_P(Fixture, CanonicalPartsAreTheTools) {
  for (const auto& layer : import.layers) {
    const auto w = layer->canonical();
    const Tensor *codes = expected_part(*layer, "codes"), *zeros = expected_part(*layer, "zeros"),
                 *scales = expected_part(*layer, "scales"), *g_idx = expected_part(*layer, "g_idx");
    if (!w || !codes) continue;
    const int offset = codes->type == Type::u8 ? 1 << (layer->info().bits - 1) : 0;
    const auto value_of = [&](const Tensor& t, int64_t i) {
      return t.type == Type::u8 ? load<uint8_t>(t, i) - offset : load<int8_t>(t, i);
    };
    for (int64_t row = 0; row < w->n; ++row) {
      for (int64_t col = 0; col < w->k; ++col) {
        const float code = decode_at(w->format, w->codes.data() + row * w->row_bytes(), col);
        ASSERT_EQ(code, static_cast<float>(value_of(*codes, row * w->k + col))) << layer->info().name;
      }
    }
    for (int64_t i = 0; zeros && i < zeros->numel(); ++i) {
      ASSERT_EQ(w->zero.empty() ? 0 : w->zero[static_cast<size_t>(i)], value_of(*zeros, i))
          << layer->info().name;
    }
    for (int64_t i = 0; scales && i < scales->numel(); ++i) {
      ASSERT_EQ(w->scale[static_cast<size_t>(i)], load<float>(*scales, i)) << layer->info().name;
    }
    for (int64_t i = 0; g_idx && i < w->k; ++i) {
      const int64_t group = w->g_idx.empty() ? i / w->block_cols() : w->g_idx[static_cast<size_t>(i)];
      ASSERT_EQ(group, load<int32_t>(*g_idx, i)) << layer->info().name;
    }
  }
}

// What linear() is given: the library takes it, and its numbers are those of the layer.
TEST_P(Fixture, CanonicalFormIsTheLibrarys) {
  for (const auto& layer : import.layers) {
    auto w = layer->canonical();
    if (!w) {  // a block of bitsandbytes may have parts of two rows; all the rest must have one
      EXPECT_NE(layer->info().shape.back() % layer->info().block.cols, 0) << layer->info().name;
      continue;
    }
    make_scales_positive(*w);
    const auto tensor = [](const void* data, qf_dtype dtype, std::vector<int64_t>& shape) {
      return qf_tensor{const_cast<void*>(data),
                       {QF_CPU, 0},
                       static_cast<int32_t>(shape.size()),
                       dtype,
                       shape.data(),
                       nullptr,
                       0};
    };
    const bool is_e8m0 = w->scale.empty();
    const auto num_scales = static_cast<int64_t>(w->scale.size() + w->scale_e8m0.size());
    std::vector<int64_t> code_shape = {w->n, w->row_bytes()},
                         scale_shape = {num_scales / w->num_groups, w->num_groups}, shape = {w->n, w->k},
                         g_shape = {w->k};
    const uint8_t code_type = w->format == QF_INT8 ? 0 : 1;
    const qf_tensor codes = tensor(w->codes.data(), {code_type, 8, 1}, code_shape);
    const qf_tensor scale = is_e8m0 ? tensor(w->scale_e8m0.data(), {14, 8, 1}, scale_shape)
                                    : tensor(w->scale.data(), {2, 32, 1}, scale_shape);
    const qf_tensor zero = tensor(w->zero.data(), {0, 8, 1}, scale_shape);
    const qf_tensor offset = tensor(w->offset.data(), {2, 32, 1}, scale_shape);
    const qf_tensor g_idx = tensor(w->g_idx.data(), {0, 32, 1}, g_shape);
    std::vector<float> numbers(static_cast<size_t>(w->n * w->k), NAN);
    const qf_tensor x = tensor(numbers.data(), {2, 32, 1}, shape);
    qf_dequantize_args args = {};
    args.q = &codes, args.format = w->format, args.block = w->block, args.scale = &scale, args.x = &x;
    if (!w->zero.empty()) args.zero = &zero;
    if (!w->offset.empty()) args.offset = &offset;
    if (!w->g_idx.empty()) args.g_idx = &g_idx;
    ASSERT_EQ(qf_dequantize(&args, nullptr), QF_OK) << layer->info().name << ": " << qf_last_error();
    const std::vector<float> want = numbers_of(*layer);
    for (size_t i = 0; i < want.size(); ++i) {
      ASSERT_EQ(round_to(layer->info().rounding, numbers[i]), want[i]) << layer->info().name << " at " << i;
    }
  }
}

TEST_P(Fixture, WritesEveryTensor) {
  TemporaryFolder folder;
  for (const Type type : {Type::f32, Type::bf16}) {
    NewFile file(folder / "out.safetensors");
    write_dequantized(import, file, type, [](const std::string&) {});
    const Checkpoint out(folder / "out.safetensors");
    EXPECT_EQ(out.tensors().size(), import.layers.size() + import.plain.size());
    for (const auto& layer : import.layers) {
      const Tensor *got = out.find(layer->info().name), *want = expected.find(layer->info().name);
      ASSERT_NE(got, nullptr) << layer->info().name;
      EXPECT_EQ(got->type, type);
      EXPECT_EQ(got->shape, want->shape);
      for (int64_t i = 0; i < want->numel(); ++i) {
        ASSERT_EQ(float_bits(load_float(*got, i)), float_bits(round_to(type, load_float(*want, i))))
            << got->name;
      }
    }
    for (const Tensor* plain : import.plain) {
      const Tensor* got = out.find(plain->name);
      ASSERT_NE(got, nullptr) << plain->name;
      EXPECT_EQ(got->type, plain->type);
      EXPECT_EQ(got->shape, plain->shape);
      EXPECT_TRUE(std::ranges::equal(got->bytes, plain->bytes)) << plain->name;
    }
  }
  EXPECT_EQ(folder.num_files(), 1);
}

TEST_P(Fixture, ValuesAreWithinReason) {
  for (const auto& layer : import.layers) {
    const LayerValues values = layer->values();
    EXPECT_EQ(values.num_codes, layer->info().numel());
    EXPECT_LE(values.scale_min, values.scale_max);
    EXPECT_TRUE(is_finite(values.scale_min) && is_finite(values.scale_max));
    EXPECT_GE(values.num_saturated, 0);
    EXPECT_LE(values.num_saturated, values.num_codes);
  }
}

INSTANTIATE_TEST_SUITE_P(Sets, Fixture, testing::ValuesIn(fixture_sets()),
                         [](const auto& info) { return test_name(info.param, info.index); });

TEST(Fixtures, HaveEverySetOfTheTable) { EXPECT_GE(fixture_sets().size(), 37u); }

}  // namespace
}  // namespace quantfuse::checkpoint
