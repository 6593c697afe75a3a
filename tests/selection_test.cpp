// SPDX-License-Identifier: Apache-2.0
//
// Which kernel runs for which problem. A change here is a change of speed for somebody: it should be meant.
// ctest runs this once per instruction set (QUANTFUSE_ISA).
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cases/tensor.h"
#include "cases/verify.h"

namespace quantfuse::cases {
namespace {

struct Row {
  const char* name;
  std::function<CasePtr()> make;
  std::string family;  // the kernel's name without its instruction set; it has one kernel for each
  bool is_for_bf16 = false;
  std::string on_tiles = "";  // the kernel on a CPU with AMX, where it is another than without
};

template <class Spec>
Row row(const char* name, const char* family, Spec spec) {
  spec.name = name;
  return {name, [spec] { return make_case(spec); }, family};
}

// The same, by dot products of BF16 pairs where the CPU has them.
template <class Spec>
Row bf16_row(const char* name, const char* family, Spec spec) {
  Row r = row(name, family, spec);
  r.is_for_bf16 = true;
  return r;
}

Row on_tiles(const char* kernel, Row r) {
  r.on_tiles = kernel;
  return r;
}

LinearSpec linear(WeightSpec weight, qf_format act, int64_t m, int64_t act_group = 0) {
  LinearSpec s;
  s.weight = weight, s.act_format = act, s.act_group = act_group;
  s.m = m, s.n = 64, s.k = 256;
  return s;
}

LinearSpec batch_invariant(LinearSpec s) {
  s.is_batch_invariant = true;
  return s;
}

ScaledMmSpec product(qf_format format, qf_dtype out, int64_t m, qf_order order = QF_NK) {
  ScaledMmSpec s;
  s.a_format = s.b_format = format, s.out = out, s.b_order = order;
  s.has_scales = out.code != kI32.code;
  s.m = m, s.n = 64, s.k = 256;
  return s;
}

QuantizeSpec quantize(qf_format format, qf_block block, qf_scale_mode mode = QF_SCALE_DYNAMIC) {
  QuantizeSpec s;
  s.format = format, s.block = block, s.mode = mode;
  s.rows = 8, s.cols = 256;
  return s;
}

std::vector<Row> rows() {
  DequantizeSpec dequantize;
  dequantize.rows = 8, dequantize.cols = 256;
  DequantizeWordsSpec words;
  words.k = 256, words.n = 64;
  LinearBackwardSpec backward;
  backward.m = 4, backward.n = 64, backward.k = 256;
  RmsNormSpec norm;
  norm.m = 4, norm.n = 256, norm.out_format = QF_INT8;
  GatedActSpec gated;
  gated.m = 4, gated.n = 256, gated.out_format = QF_FP8_E4M3;
  GatedActSpec gelu = gated;
  gelu.is_ungated = true, gelu.activation = QF_GELU;
  QuantizeSpec rotated = quantize(QF_INT4, {1, 128});
  rotated.hadamard = 256;
  GptqQuantizeSpec gptq_int4;
  gptq_int4.n = 4, gptq_int4.k = 256;
  AwqSearchSpec awq;
  awq.n = 4, awq.k = 256, awq.t = 16;

  const WeightSpec int4 = {QF_INT4, {1, 128}}, int8 = {QF_INT8, {1, 0}}, fp8 = {QF_FP8_E4M3, {128, 128}};
  const WeightSpec mxfp4 = {QF_FP4_E2M1, {1, 32}, true}, e2m1 = {QF_FP4_E2M1, {1, 64}};
  const WeightSpec small_groups = {QF_INT4, {1, 32}};
  const WeightSpec nf4 = {QF_NF4, {1, 64}}, iq4_nl = {QF_IQ4_NL, {1, 32}};
  WeightSpec float_zero = int4, act_order = int4, gptq = int4, offsets = int4;
  offsets.has_offset = true;
  float_zero.is_asymmetric = float_zero.has_float_zero = true;
  act_order.has_g_idx = true;
  gptq.is_asymmetric = true;

  return {
      row("int8 per token", "quantize", quantize(QF_INT8, {1, 0})),
      row("int4 per group, searched", "quantize", quantize(QF_INT4, {1, 128}, QF_SCALE_MSE)),
      row("e4m3 in 128x128 blocks", "quantize", quantize(QF_FP8_E4M3, {128, 128})),
      row("int8 per column, searched", "", quantize(QF_INT8, {0, 1}, QF_SCALE_MSE)),
      row("int4 per group, rotated", "quantize", rotated),
      row("int8 to f32", "dequantize", dequantize),
      row("awq to f16", "dequantize_words", words),

      row("int8 vector to int32", "scaled_mm_int_dot", product(QF_INT8, kI32, 1)),
      on_tiles("scaled_mm_int_amx", row("int8 matrix to int32", "scaled_mm_int", product(QF_INT8, kI32, 64))),
      on_tiles("scaled_mm_int_amx",
               row("int8 vector, b by columns", "scaled_mm_int", product(QF_INT8, kI32, 1, QF_KN))),
      on_tiles("scaled_mm_int_amx", row("int4 vector to int32", "scaled_mm_int", product(QF_INT4, kI32, 1))),
      on_tiles("scaled_mm_int_amx", row("int8 with scales", "scaled_mm_int", product(QF_INT8, kBf16, 16))),
      row("e4m3 with scales", "scaled_mm_float", product(QF_FP8_E4M3, kBf16, 16)),

      bf16_row("int4 weight", "linear_limbs", linear(int4, QF_FORMAT_NONE, 1)),
      on_tiles("linear_bf16_amx",
               bf16_row("int4 weight, many rows", "linear_limbs", linear(int4, QF_FORMAT_NONE, 64))),
      bf16_row("int4 weight, asymmetric", "linear_limbs", linear(gptq, QF_FORMAT_NONE, 1)),
      row("int4 weight, float zeros", "linear_limbs", linear(float_zero, QF_FORMAT_NONE, 1)),
      row("int4 weight, offsets", "linear_limbs", linear(offsets, QF_FORMAT_NONE, 1)),
      bf16_row("int4 weight, act-order", "linear_float", linear(act_order, QF_FORMAT_NONE, 1)),
      bf16_row("int8 weight", "linear_limbs", linear(int8, QF_FORMAT_NONE, 1)),
      bf16_row("fp8 weight", "linear_float", linear(fp8, QF_FORMAT_NONE, 1)),
      bf16_row("mxfp4 weight", "linear_float", linear(mxfp4, QF_FORMAT_NONE, 1)),
      bf16_row("iq4_nl weight", "linear_float", linear(iq4_nl, QF_FORMAT_NONE, 1)),
      bf16_row("e2m1 weight", "linear_limbs", linear(e2m1, QF_FORMAT_NONE, 1)),
      bf16_row("int4 weight in small groups", "linear_float", linear(small_groups, QF_FORMAT_NONE, 1)),
      row("nf4 weight", "linear_float", linear(nf4, QF_FORMAT_NONE, 1)),
      row("f32 weight", "linear_float", linear({QF_F32, {}}, QF_FORMAT_NONE, 1)),
      on_tiles("linear_bf16_amx",
               bf16_row("bf16 weight, many rows", "linear_float", linear({QF_BF16, {}}, QF_FORMAT_NONE, 64))),
      bf16_row("int4 weight, batch-invariant", "linear_limbs",
               batch_invariant(linear(int4, QF_FORMAT_NONE, 1))),
      bf16_row("int4 weight, batch-invariant, many rows", "linear_limbs",
               batch_invariant(linear(int4, QF_FORMAT_NONE, 64))),
      row("int4 weight, int8 activations", "linear_int", linear(int4, QF_INT8, 1)),
      on_tiles("linear_int_amx",
               row("int4 weight, asymmetric, int8 activations", "linear_int", linear(gptq, QF_INT8, 16))),
      on_tiles("linear_int_amx",
               row("int4 weight, act-order, int8 activations", "linear_int", linear(act_order, QF_INT8, 16))),
      on_tiles("linear_int_amx",
               row("int8 weight, int8 activations", "linear_int", linear(int8, QF_INT8, 16))),
      on_tiles("linear_int_amx",
               row("int8 weight, int8 activations by groups", "linear_int", linear(int8, QF_INT8, 16, 64))),
      row("int4 weight, float zeros, int8 activations", "linear_float", linear(float_zero, QF_INT8, 16)),
      row("int4 weight, offsets, int8 activations", "linear_float", linear(offsets, QF_INT8, 16)),
      on_tiles("linear_int_amx",
               row("mxfp4 weight, int8 activations", "linear_int", linear(mxfp4, QF_INT8, 16))),
      on_tiles("linear_int_amx",
               row("iq4_nl weight, int8 activations", "linear_int", linear(iq4_nl, QF_INT8, 16))),
      row("nf4 weight, int8 activations", "linear_float", linear(nf4, QF_INT8, 16)),
      on_tiles("linear_bf16_amx",
               bf16_row("fp8 weight, fp8 activations", "linear_float", linear(fp8, QF_FP8_E4M3, 16))),
      on_tiles("linear_bf16_amx", bf16_row("fp8 weight, int8 activations by groups", "linear_float",
                                           linear(fp8, QF_INT8, 16, 64))),
      row("fp8 weight, int8 activations by odd groups", "linear_float", linear(fp8, QF_INT8, 16, 60)),

      row("gradient", "linear_backward", backward),
      row("norm to int8", "rms_norm", norm),
      row("silu-and-multiply to e4m3", "gated_act", gated),
      row("gelu to e4m3", "gated_act", gelu),
      row("gptq to int4", "gptq_quantize", gptq_int4),
      row("awq for int4", "awq_search", awq),
  };
}

std::string expected_kernel(const Case& c, const Row& r) {
  const std::string& family = r.family;
  std::string info(qf_info(nullptr, 0) + 1, '\0');
  info.resize(qf_info(info.data(), info.size()));
  const std::string isa = nlohmann::json::parse(info).at("cpu").at("isa");
  if (isa == "scalar" || family.empty()) return c.op + "_ref";
  if (isa == "avx2") return (family == "linear_limbs" ? "linear_float" : family) + "_avx2";
  if (isa == "avx_vnni") {
    const bool is_of_bytes = family == "linear_limbs" || family.find("_int") != std::string::npos;
    return family + (is_of_bytes ? "_avx_vnni" : "_avx2");
  }
  if (isa == "amx" && !r.on_tiles.empty()) return r.on_tiles;
  return isa == "avx512_bf16" && r.is_for_bf16 ? "linear_bf16_avx512_bf16" : family + "_avx512";
}

TEST(Selection, OnTheCpu) {
  for (const Row& r : rows()) {
    const CasePtr c = r.make();
    c->make({QF_CPU, 0}, 1, 2);
    const std::string chosen = verdicts_on(*c).chosen;
    EXPECT_EQ(chosen, expected_kernel(*c, r)) << c->op << ": " << r.name;

    // What explain says is what runs.
    ASSERT_EQ(c->run(nullptr, 0, nullptr), QF_OK) << qf_last_error();
    ASSERT_EQ(c->run(chosen.c_str(), 1, nullptr), QF_OK) << qf_last_error();
    EXPECT_EQ(c->outputs(0), c->outputs(1)) << c->op << ": " << r.name;
  }
}

TEST(Selection, OnCuda) {
  if (!has_cuda_device()) GTEST_SKIP() << "there is no CUDA device here";
  const std::vector<std::pair<QuantizeSpec, std::string>> table = {
      {quantize(QF_INT8, {1, 0}), "quantize_rows_sm75"},
      {quantize(QF_INT8, {1, 128}), "quantize_rows_sm75"},
      {quantize(QF_FP8_E4M3, {1, 128}), "quantize_rows_sm75"},
      {quantize(QF_FP8_E4M3, {0, 0}, QF_SCALE_STATIC), "quantize_rows_sm75"},
      {quantize(QF_INT4, {1, 128}), "quantize_rows_sm75"},
      {quantize(QF_INT4, {1, 128}, QF_SCALE_MSE), ""},  // never moved to the CPU in silence
  };
  for (const auto& [spec, kernel] : table) {
    const CasePtr c = make_case(spec);
    c->make({QF_CUDA, 0}, 1, 1);
    EXPECT_EQ(verdicts_on(*c).chosen, kernel) << c->name;
    EXPECT_EQ(c->run(nullptr, 0, nullptr), kernel.empty() ? QF_UNSUPPORTED : QF_OK) << c->name;
  }
}

// That of these kernels which can run here is the first.
template <class Spec>
void expect_chosen(const Spec& spec, const std::vector<std::string>& names) {
  const std::vector<KernelRow> kernels = list_kernels();
  const auto is_available = [&](const std::string& name) {
    return std::any_of(kernels.begin(), kernels.end(),
                       [&](const KernelRow& row) { return row.kernel == name && row.is_available; });
  };
  const auto first = std::find_if(names.begin(), names.end(), is_available);
  const CasePtr c = make_case(spec);
  c->make({QF_CUDA, 0}, 1, 1);
  EXPECT_EQ(verdicts_on(*c).chosen, first == names.end() ? "" : *first) << c->name;
}

// A weight that is packed and an x that is as it came: streamed where the GPU can, else by the newest tensor
// cores that it has.
TEST(Selection, OfLinearOnCuda) {
  if (!has_cuda_device()) GTEST_SKIP() << "there is no CUDA device here";
  LinearSpec s;
  s.m = 1, s.n = 64, s.k = 256, s.dtype = kF16;
  expect_chosen(s, {"linear_stream_sm90", "linear_mma_sm80", "linear_mma_sm75"});
  s.weight.has_g_idx = true;
  expect_chosen(s, {"linear_gather_first_sm75"});
  s.weight = {QF_INT8, {1, 0}}, s.m = 2;
  expect_chosen(s, {"linear_stream_sm90", "linear_mma_sm80", "linear_mma_sm75"});
  for (const int64_t m : {3, 16}) {
    s.m = m;
    expect_chosen(s, {"linear_batch_sm90", "linear_mma_sm80", "linear_mma_sm75"});
  }
  for (const int64_t m : {17, 64}) {
    s.m = m;
    expect_chosen(s, {"linear_quads_sm90", "linear_mma_sm80", "linear_mma_sm75"});
  }
  s.m = 65;
  expect_chosen(s, {"linear_turns_sm90", "linear_mma_sm80", "linear_mma_sm75"});
  LinearSpec long_rows = s;
  long_rows.m = 10, long_rows.k = 16384;
  expect_chosen(long_rows, {"linear_quads_sm90", "linear_mma_sm80", "linear_mma_sm75"});
  LinearSpec many_rows = s;
  many_rows.n = 16384;
  for (const int64_t m : {32, 33}) {
    many_rows.m = m;
    expect_chosen(many_rows, {m == 32 ? "linear_quads_sm90" : "linear_wgmma_sm90", "linear_mma_sm80",
                              "linear_mma_sm75"});
  }
  s.row_padding = 1;  // rows of x at other than multiples of 16 bytes
  expect_chosen(s, {"linear_mma_sm80", "linear_mma_sm75"});
  s.weight = {QF_FP8_E4M3, {128, 128}}, s.m = 1, s.row_padding = 0;
  expect_chosen(s, {"linear_batch_sm90", "linear_mma_sm80", "linear_mma_sm75"});
  s.dtype = kBf16;
  expect_chosen(s, {"linear_batch_sm90", "linear_mma_sm80", "linear_rows_sm75"});
  s.m = 65;
  expect_chosen(s, {"linear_turns_sm90", "linear_mma_sm80", "linear_tiles_sm75"});
  s.dtype = kF32, s.m = 1;
  expect_chosen(s, {"linear_rows_sm75"});

  // MXFP4, whose scales bf16 numbers can have in them; f16 ones cannot.
  LinearSpec mxfp4;
  mxfp4.weight = {QF_FP4_E2M1, {1, 32}, true}, mxfp4.n = 64, mxfp4.k = 256, mxfp4.dtype = kBf16;
  const auto of_bf16 = [](const char* first, bool is_few) {
    return std::vector<std::string>{first, "linear_mma_sm80",
                                    is_few ? "linear_rows_sm75" : "linear_tiles_sm75"};
  };
  for (const auto& [m, kernel] : {std::pair<int64_t, const char*>{1, "linear_stream_sm90"},
                                  {2, "linear_stream_sm90"},
                                  {3, "linear_batch_sm90"},
                                  {16, "linear_batch_sm90"},
                                  {17, "linear_quads_sm90"},
                                  {64, "linear_quads_sm90"},
                                  {65, "linear_turns_sm90"}}) {
    mxfp4.m = m;
    expect_chosen(mxfp4, of_bf16(kernel, m <= 8));
  }
  mxfp4.dtype = kF16, mxfp4.m = 1;
  expect_chosen(mxfp4, {"linear_batch_sm90", "linear_mma_sm80", "linear_mma_sm75"});
  mxfp4.m = 17;
  expect_chosen(mxfp4, {"linear_wgmma_sm90", "linear_mma_sm80", "linear_mma_sm75"});

  // Offsets are multiplied with sums of x: few tokens have all of x in a block, for more they are made first.
  LinearSpec offsets = mxfp4;
  offsets.weight = {QF_INT4, {1, 32}}, offsets.weight.has_offset = true;
  for (const auto& [m, kernel] : {std::pair<int64_t, const char*>{1, "linear_stream_sm90"},
                                  {3, "linear_batch_sm90"},
                                  {17, "linear_sums_first_sm75"},
                                  {65, "linear_sums_first_sm75"}}) {
    offsets.m = m;
    expect_chosen(offsets, {kernel, "linear_sums_first_sm75"});
  }

  // Codebooks, and groups of one step of the tensor cores.
  LinearSpec others = mxfp4;
  for (const WeightSpec& weight : {WeightSpec{QF_NF4, {1, 64}}, WeightSpec{QF_IQ4_NL, {1, 32}},
                                   WeightSpec{QF_INT8, {1, 16}}, WeightSpec{QF_INT4, {1, 48}}}) {
    for (const auto& [m, kernel] : {std::pair<int64_t, const char*>{1, "linear_batch_sm90"},
                                    {16, "linear_batch_sm90"},
                                    {17, "linear_wgmma_sm90"},
                                    {64, "linear_wgmma_sm90"},
                                    {65, "linear_turns_sm90"}}) {
      others.weight = weight, others.m = m, others.dtype = kF16;
      expect_chosen(others, {kernel, "linear_mma_sm80", "linear_mma_sm75"});
      others.dtype = kBf16;
      expect_chosen(others, of_bf16(kernel, m <= 8));
    }
  }

  LinearSpec normalized = s;
  normalized.weight = {QF_INT4, {1, 128}}, normalized.dtype = kBf16, normalized.has_x_gain = true;
  expect_chosen(normalized, {"linear_stream_sm90", "linear_norm_first_sm75"});
  normalized.m = 17;
  expect_chosen(normalized, {"linear_norm_first_sm75"});

  s.weight = {QF_BF16, {}}, s.m = 100;  // not quantized, of another type than x
  expect_chosen(s, {"linear_tiles_sm75"});

  s = {};
  s.n = 64, s.k = 256, s.dtype = kF16, s.is_batch_invariant = true;
  for (const int64_t m : {1, 300}) {
    s.m = m;
    s.weight = {QF_INT4, {1, 128}};
    expect_chosen(s, {"linear_mma_sm80", "linear_mma_sm75"});
    s.weight = {QF_F16, {}};
    expect_chosen(s, {"linear_halves_sm90", "linear_tiles_sm75"});
    s.weight = {QF_NF4, {1, 64}};
    expect_chosen(s, {"linear_mma_sm80", "linear_mma_sm75"});
    s.weight = {QF_INT4, {1, 24}};  // has no packed form
    expect_chosen(s, {"linear_tiles_sm75"});
  }
}

// Products of codes: by tensor cores, whatever the formats, groups and strides.
TEST(Selection, OfProductsOnCuda) {
  if (!has_cuda_device()) GTEST_SKIP() << "there is no CUDA device here";
  const std::vector<std::string> of_matrices = {"scaled_mm_mma_sm80", "scaled_mm_mma_sm75"};
  for (const qf_format format : {QF_INT8, QF_INT4, QF_FP8_E4M3, QF_FP8_E5M2}) {
    for (const qf_order order : {QF_NK, QF_KN}) {
      for (const int64_t m : {1, 300}) {
        ScaledMmSpec s = product(format, kBf16, m, order);
        s.row_padding = 1;
        expect_chosen(s, of_matrices);
      }
    }
  }
  const std::vector<std::string> of_layers = {"linear_product_sm80", "linear_product_sm75"};
  const WeightSpec int4 = {QF_INT4, {1, 128}}, int8 = {QF_INT8, {1, 0}}, fp8 = {QF_FP8_E4M3, {128, 128}};
  for (const WeightSpec& weight : {int4, int8, fp8}) {
    for (const qf_format act : {QF_INT8, QF_FP8_E4M3}) {
      for (const int64_t m : {1, 300}) {
        LinearSpec s = linear(weight, act, m, 33);
        s.row_padding = 1;
        expect_chosen(s, of_layers);
      }
    }
  }
  // Formats and scales that wgmma takes, rows at multiples of 16 bytes: few tokens and many.
  const std::vector<std::string> of_few = {"scaled_mm_stream_sm90", "scaled_mm_mma_sm80",
                                           "scaled_mm_mma_sm75"};
  const std::vector<std::string> of_many = {"scaled_mm_wgmma_sm90", "scaled_mm_mma_sm80",
                                            "scaled_mm_mma_sm75"};
  const std::vector<std::string> of_few_tokens = {"linear_product_stream_sm90", "linear_product_sm80",
                                                  "linear_product_sm75"};
  const std::vector<std::string> of_many_tokens = {"linear_product_sm90", "linear_product_sm80",
                                                   "linear_product_sm75"};
  for (const qf_format format : {QF_INT8, QF_FP8_E4M3}) {
    for (const int64_t m : {1, 128, 1000}) {
      const int64_t n = m > 128 ? 16384 : 64;  // for many tiles, even of many SMs
      ScaledMmSpec matrices = product(format, kBf16, m, QF_NK);
      matrices.n = n, matrices.k = 256;
      expect_chosen(matrices, m > 128 ? of_many : of_few);
      for (const WeightSpec& weight : {WeightSpec{format, {1, 0}}, WeightSpec{format, {128, 128}}}) {
        LinearSpec layer = linear(weight, format, m, weight.block.cols);
        layer.n = n, layer.k = 256, layer.dtype = kBf16;
        expect_chosen(layer, m > 128 ? of_many_tokens : of_few_tokens);
      }
    }
  }
  // INT4 weights by INT8 activations, any number of tokens; by others without wgmma.
  for (const int64_t m : {1, 64, 1000}) {
    for (const WeightSpec& weight : {int4, WeightSpec{QF_INT4, {1, 0}}}) {
      expect_chosen(linear(weight, QF_INT8, m), of_few_tokens);
      expect_chosen(linear(weight, QF_FP8_E4M3, m), of_layers);
      expect_chosen(linear(weight, QF_INT8, m, 128), of_layers);
    }
    expect_chosen(linear({QF_INT4, {1, 32}}, QF_INT8, m), of_layers);
  }
  // Many of both, for tiles that keep the SMs busy.
  for (const WeightSpec& weight : {int4, WeightSpec{QF_INT4, {1, 0}}}) {
    LinearSpec layer = linear(weight, QF_INT8, 1000);
    layer.n = 33 * 512, layer.k = 256;
    expect_chosen(layer, {"linear_product_int4_sm90", "linear_product_sm80", "linear_product_sm75"});
    layer.m = 64;  // as many tiles, of which most would be empty
    expect_chosen(layer, of_few_tokens);
  }
  // What is no product of codes.
  WeightSpec act_order = int4, offsets = int4;
  act_order.has_g_idx = offsets.has_offset = true;
  for (const WeightSpec& weight : {act_order, offsets, WeightSpec{QF_NF4, {1, 64}}}) {
    expect_chosen(linear(weight, QF_INT8, 8), {"linear_rows_sm75"});
    expect_chosen(linear(weight, QF_INT8, 9), {"linear_tiles_sm75"});
  }
}

// Questions need no data: what explain() says of shapes alone is what it says of the tensors.
TEST(Selection, IsTheSameWithoutData) {
  for (const std::string& op : operations_with_cases()) {
    for (const CasePtr& c : test_cases(op, {QF_CPU, 0})) {
      const Verdicts without = verdicts_on(*c);
      c->make({QF_CPU, 0}, 1, 1);
      const Verdicts with = verdicts_on(*c);
      EXPECT_EQ(without.chosen, with.chosen) << op << ": " << c->name;
      EXPECT_EQ(without.accepting, with.accepting) << op << ": " << c->name;
    }
  }
}

}  // namespace
}  // namespace quantfuse::cases
