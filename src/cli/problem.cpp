// SPDX-License-Identifier: Apache-2.0
#include "problem.h"

#include <fmt/format.h>

#include <charconv>

#include "commands.h"
#include "tensor.h"

namespace quantfuse::cli {
namespace {

struct FormatWord {
  const char* word;
  qf_format format;
  bool has_e8m0_scale;
  int64_t group;  // where --group is not given; 0: one scale per row
};

constexpr FormatWord kFormats[] = {
    {"int4", QF_INT4, false, 128},       {"int8", QF_INT8, false, 0},         {"fp8", QF_FP8_E4M3, false, 0},
    {"fp8_e4m3", QF_FP8_E4M3, false, 0}, {"fp8_e5m2", QF_FP8_E5M2, false, 0}, {"fp4", QF_FP4_E2M1, false, 32},
    {"mxfp4", QF_FP4_E2M1, true, 32},    {"mxfp8", QF_FP8_E4M3, true, 32},    {"nf4", QF_NF4, false, 64},
    {"fp4_bnb", QF_FP4_BNB, false, 64},  {"iq4_nl", QF_IQ4_NL, false, 32},
};
// And those of weights that are not quantized.
constexpr FormatWord kPlainFormats[] = {
    {"f32", QF_F32, false, 0}, {"f16", QF_F16, false, 0}, {"bf16", QF_BF16, false, 0}};

const FormatWord& format_of(const std::string& word) {
  for (const FormatWord& row : kFormats) {
    if (word == row.word) return row;
  }
  for (const FormatWord& row : kPlainFormats) {
    if (word == row.word) return row;
  }
  throw UsageError("unknown format '" + word + "'");
}

qf_dtype dtype_of(const std::string& word) {
  if (word == "f32") return kF32;
  if (word == "f16") return kF16;
  if (word == "bf16") return kBf16;
  if (word == "i32") return kI32;
  throw UsageError("unknown type '" + word + "'");
}

qf_format quant_of(const std::string& word) {
  return word == "none" ? QF_FORMAT_NONE : format_of(word).format;
}

qf_activation activation_of(const std::string& word) {
  if (word == "none") return QF_IDENTITY;
  if (word == "relu") return QF_RELU;
  if (word == "gelu") return QF_GELU;
  if (word == "gelu_tanh") return QF_GELU_TANH;
  if (word == "silu") return QF_SILU;
  throw UsageError("unknown activation '" + word + "'");
}

int64_t number_of(const std::string& text, const char* what) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0 || text.empty()) {
    throw UsageError(fmt::format("{}: '{}' is not a number", what, text));
  }
  return value;
}

qf_block block_of(const ProblemOptions& o, int64_t group_of_format) {
  if (o.block.empty()) return {1, o.group >= 0 ? o.group : group_of_format};
  const size_t cross = o.block.find('x');
  if (cross == std::string::npos) throw UsageError("--block: expected ROWSxCOLS, as in 128x128");
  return {number_of(o.block.substr(0, cross), "--block"), number_of(o.block.substr(cross + 1), "--block")};
}

cases::WeightSpec weight_spec(const ProblemOptions& o) {
  const FormatWord& format = format_of(o.weight);
  cases::WeightSpec w;
  w.format = format.format;
  w.block = block_of(o, format.group);
  w.has_e8m0_scale = format.has_e8m0_scale;
  w.is_asymmetric = o.is_asymmetric;
  w.has_offset = o.has_offset;
  w.has_g_idx = o.has_g_idx;
  w.is_gated = o.is_gated;
  w.codes = cases::Codes::of_normal_numbers;
  return w;
}

std::string epilogue_text(const ProblemOptions& o) {
  std::string s;
  if (o.has_bias) s += " +bias";
  if (o.activation != "none") s += " +" + o.activation;
  if (o.has_residual) s += " +residual";
  if (o.out_quant != "none") s += " ->" + o.out_quant;
  if (o.is_batch_invariant) s += " batch_invariant";
  if (o.has_fast_accumulation) s += " fast_accumulation";
  if (o.has_x_gain) s += " normalized";
  if (o.has_codes) s += " codes";
  return s;
}

cases::LinearSpec linear_spec(const ProblemOptions& o) {
  cases::LinearSpec s;
  s.weight = weight_spec(o);
  s.act_format = quant_of(o.act_quant);
  s.act_group = o.act_group;
  s.has_quantized_x = o.has_codes;
  if (o.has_codes && s.act_format == QF_FORMAT_NONE) throw UsageError("--codes needs --act-quant");
  s.dtype = dtype_of(o.act);
  s.activation = activation_of(o.activation);
  s.has_bias = o.has_bias;
  s.has_residual = o.has_residual;
  s.out_format = quant_of(o.out_quant);
  s.out_mode = o.has_static_scale ? QF_SCALE_STATIC : QF_SCALE_DYNAMIC;
  s.out_group = o.out_group;
  s.is_batch_invariant = o.is_batch_invariant;
  s.has_fast_accumulation = o.has_fast_accumulation;
  s.has_x_gain = o.has_x_gain;
  s.m = o.m, s.n = o.n, s.k = o.k;
  s.name = size_text(o.m, o.n, o.k) + epilogue_text(o);
  return s;
}

cases::LinearBackwardSpec linear_backward_spec(const ProblemOptions& o) {
  cases::LinearBackwardSpec s;
  s.weight = weight_spec(o);
  s.dtype = dtype_of(o.act);
  s.m = o.m, s.n = o.n, s.k = o.k;
  s.name = size_text(o.m, o.n, o.k);
  return s;
}

cases::ScaledMmSpec scaled_mm_spec(const ProblemOptions& o) {
  cases::ScaledMmSpec s;
  const FormatWord& format = format_of(o.format);
  s.a_format = s.b_format = format.format;
  s.b_order = o.is_b_kn ? QF_KN : QF_NK;
  s.out = dtype_of(o.out);
  s.has_scales = o.out != "i32";
  s.a_block = {1, o.act_group};
  s.b_block = block_of(o, 0);
  s.has_a_zero = o.is_asymmetric;
  s.has_bias = o.has_bias;
  s.has_fast_accumulation = o.has_fast_accumulation;
  s.codes = cases::Codes::of_normal_numbers;
  s.m = o.m, s.n = o.n, s.k = o.k;
  s.name = size_text(o.m, o.n, o.k) + (o.is_b_kn ? " kn" : "") + (o.has_bias ? " +bias" : "") +
           (o.has_fast_accumulation ? " fast_accumulation" : "");
  return s;
}

std::string hadamard_text(const ProblemOptions& o) {
  return o.hadamard > 0 ? fmt::format(" hadamard={}", o.hadamard) : "";
}

cases::QuantizeSpec quantize_spec(const ProblemOptions& o) {
  const FormatWord& format = format_of(o.format);
  cases::QuantizeSpec s;
  s.format = format.format;
  s.block = block_of(o, format.group);
  s.mode = o.has_static_scale ? QF_SCALE_STATIC : o.has_mse_scale ? QF_SCALE_MSE : QF_SCALE_DYNAMIC;
  s.has_e8m0_scale = format.has_e8m0_scale;
  s.is_asymmetric = o.is_asymmetric;
  s.wants_row_sums = o.wants_row_sums;
  s.dtype = dtype_of(o.act);
  s.hadamard = o.hadamard;
  s.rows = o.m, s.cols = o.n;
  s.name = size_text(o.m, o.n, 0) + hadamard_text(o);
  return s;
}

cases::DequantizeSpec dequantize_spec(const ProblemOptions& o) {
  const FormatWord& format = format_of(o.format);
  cases::DequantizeSpec s;
  s.format = format.format;
  s.block = block_of(o, format.group);
  s.has_e8m0_scale = format.has_e8m0_scale;
  s.is_asymmetric = o.is_asymmetric;
  s.has_offset = o.has_offset;
  s.has_g_idx = o.has_g_idx;
  s.dtype = dtype_of(o.act);
  s.rows = o.m, s.cols = o.n;
  s.name = size_text(o.m, o.n, 0);
  return s;
}

// The two producers differ in what comes before the quantization.
template <class ProducerSpec>
ProducerSpec producer_spec(const ProblemOptions& o) {
  ProducerSpec s;
  s.dtype = dtype_of(o.act);
  s.out_format = quant_of(o.out_quant);
  s.out_mode = o.has_static_scale ? QF_SCALE_STATIC : QF_SCALE_DYNAMIC;
  s.out_group = o.out_group;
  s.hadamard = o.hadamard;
  s.m = o.m, s.n = o.n;
  s.name = size_text(o.m, o.n, 0) + (o.has_residual ? " +residual" : "") +
           (o.has_static_scale ? " static" : "") + (o.is_ungated ? " ungated" : "") + hadamard_text(o);
  return s;
}

}  // namespace

const std::vector<std::string>& operation_words() {
  static const std::vector<std::string> words = {"linear",   "linear_backward", "scaled_mm", "gemm",
                                                 "quantize", "dequantize",      "rms_norm",  "norm",
                                                 "gated_act"};
  return words;
}

const std::vector<std::string>& format_words() {
  static const std::vector<std::string> words = [] {
    std::vector<std::string> list;
    for (const FormatWord& row : kFormats) list.emplace_back(row.word);
    return list;
  }();
  return words;
}

const std::vector<std::string>& weight_words() {
  static const std::vector<std::string> words = [] {
    std::vector<std::string> list = format_words();
    for (const FormatWord& row : kPlainFormats) list.emplace_back(row.word);
    return list;
  }();
  return words;
}

const std::vector<std::string>& dtype_words() {
  static const std::vector<std::string> words = {"bf16", "f16", "f32"};
  return words;
}

const std::vector<std::string>& quant_words() {
  static const std::vector<std::string> words = {"none", "int8", "fp8", "fp8_e4m3", "fp8_e5m2"};
  return words;
}

const std::vector<std::string>& activation_words() {
  static const std::vector<std::string> words = {"none", "relu", "gelu", "gelu_tanh", "silu"};
  return words;
}

std::string operation_name(const std::string& word) {
  if (word == "gemm") return "scaled_mm";
  if (word == "norm") return "rms_norm";
  return word;
}

qf_device device_from_word(const std::string& word) {
  if (word == "cpu") return {QF_CPU, 0};
  if (word == "cuda") return {QF_CUDA, 0};
  if (word.rfind("cuda:", 0) == 0)
    return {QF_CUDA, static_cast<int32_t>(number_of(word.substr(5), "--device"))};
  throw UsageError("--device: '" + word + "' is not cpu, cuda or cuda:ID");
}

std::string size_text(int64_t m, int64_t n, int64_t k) {
  return fmt::format("m={} n={}", m, n) + (k != 0 ? fmt::format(" k={}", k) : "");
}

Spec spec_from_options(const std::string& op, const ProblemOptions& o) {
  if (op == "linear") return linear_spec(o);
  if (op == "linear_backward") return linear_backward_spec(o);
  if (op == "scaled_mm") return scaled_mm_spec(o);
  if (op == "quantize") return quantize_spec(o);
  if (op == "dequantize") return dequantize_spec(o);
  if (op == "rms_norm") {
    auto s = producer_spec<cases::RmsNormSpec>(o);
    s.has_residual = o.has_residual;
    return s;
  }
  if (op == "gated_act") {
    auto s = producer_spec<cases::GatedActSpec>(o);
    s.activation = o.activation == "none" ? QF_SILU : activation_of(o.activation);
    s.is_ungated = o.is_ungated;
    return s;
  }
  throw UsageError("unknown operation '" + op + "'");
}

cases::CasePtr case_from_spec(const Spec& spec) {
  return std::visit([](const auto& s) { return cases::make_case(s); }, spec);
}

}  // namespace quantfuse::cli
