// SPDX-License-Identifier: Apache-2.0
#include "cases/describe.h"

#include "core/dtype.h"

namespace quantfuse::cases {

std::string format_word(qf_format format) {
  switch (format) {
    case QF_INT8: return "int8";
    case QF_INT4: return "int4";
    case QF_FP8_E4M3: return "e4m3";
    case QF_FP8_E5M2: return "e5m2";
    case QF_FP4_E2M1: return "fp4";
    case QF_NF4: return "nf4";
    case QF_FP4_BNB: return "fp4_bnb";
    case QF_IQ4_NL: return "iq4_nl";
    case QF_F32: return "f32";
    case QF_F16: return "f16";
    case QF_BF16: return "bf16";
    default: return "none";
  }
}

std::string dtype_word(qf_dtype dtype) { return dtype_name(dtype_of(dtype)); }

std::string block_word(qf_block block) {
  if (block.rows == 0 && block.cols == 0) return "tensor";
  if (block.rows == 1) return group_word(block.cols);
  if (block.rows == 0 && block.cols == 1) return "column";
  auto size = [](int64_t n) { return n == 0 ? std::string("all") : std::to_string(n); };
  return size(block.rows) + "x" + size(block.cols);
}

std::string group_word(int64_t group) { return group == 0 ? "row" : "g" + std::to_string(group); }

std::string activation_word(qf_activation activation) {
  switch (activation) {
    case QF_RELU: return "relu";
    case QF_GELU: return "gelu";
    case QF_GELU_TANH: return "gelu_tanh";
    case QF_SILU: return "silu";
    default: return "";
  }
}

std::string data_word(Data data) {
  switch (data) {
    case Data::outliers: return "outliers";
    case Data::tiny: return "tiny";
    case Data::huge: return "huge";
    case Data::zeros: return "zeros";
    case Data::constant: return "constant";
    case Data::with_nan_inf: return "nan_inf";
    case Data::nan_in_row_1: return "nan_in_row_1";
    default: return "";
  }
}

std::string weight_word(const WeightSpec& weight) {
  return Words()
      .add(weight.has_e8m0_scale && weight.block.cols == 32 ? "mx" + format_word(weight.format)
                                                            : format_word(weight.format))
      .add_if(!is_plain(weight.format), block_word(weight.block))
      .add_if(weight.has_e8m0_scale, "e8m0")
      .add_if(weight.is_asymmetric, weight.has_float_zero ? "float_zero" : "asym")
      .add_if(weight.has_offset, "offset")
      .add_if(weight.has_g_idx, "g_idx")
      .add_if(weight.is_gated, "gated")
      .text();
}

std::string out_word(qf_format format, qf_scale_mode mode, int64_t group) {
  if (format == QF_FORMAT_NONE) return "";
  return "out " + format_word(format) + " " + (mode == QF_SCALE_STATIC ? "static" : group_word(group));
}

Words& Words::add(const std::string& word) {
  if (!word.empty()) text_ += (text_.empty() ? "" : " ") + word;
  return *this;
}

}  // namespace quantfuse::cases
