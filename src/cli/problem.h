// SPDX-License-Identifier: Apache-2.0
//
// From the words of the command line (`linear --weight int4 --group 128 --m 1 ...`) to a problem of one
// operation, in the form that explain, bench and the cases share: the specs of cases/case.h.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "cases/case.h"
#include "quantfuse/quantfuse.h"

namespace quantfuse::cli {

struct ProblemOptions {
  std::string device = "cpu";  // cpu, cuda or cuda:ID
  int64_t m = 1, n = 4096, k = 4096;
  std::string weight = "int4";     // of a linear layer's weight
  std::string format = "int8";     // of codes: quantize, dequantize, scaled_mm
  int64_t group = -1;              // -1: the format's custom
  std::string block;               // "128x128"; overrides group
  std::string act = "bf16";        // type of the floating tensors
  std::string act_quant = "none";  // activations quantized on the way in
  int64_t act_group = 0;
  std::string out_quant = "none";  // outputs quantized on the way out
  int64_t out_group = 0;
  std::string out = "bf16";  // type of scaled_mm's result
  std::string activation = "none";
  bool is_asymmetric = false, is_gated = false, has_bias = false, has_residual = false, has_g_idx = false;
  bool has_offset = false;
  bool has_static_scale = false, has_mse_scale = false, wants_row_sums = false, is_b_kn = false;
  int64_t hadamard = 0;
  bool is_ungated = false;
  bool is_batch_invariant = false;
  bool has_fast_accumulation = false;
  bool has_x_gain = false;
  bool has_codes = false;  // linear: x is quantized before the call, not in it
};

using Spec =
    std::variant<cases::LinearSpec, cases::LinearBackwardSpec, cases::ScaledMmSpec, cases::QuantizeSpec,
                 cases::DequantizeSpec, cases::RmsNormSpec, cases::GatedActSpec>;

// The words that the options above take.
const std::vector<std::string>& operation_words();  // with aliases: gemm, norm
const std::vector<std::string>& weight_words();
const std::vector<std::string>& format_words();
const std::vector<std::string>& dtype_words();
const std::vector<std::string>& quant_words();
const std::vector<std::string>& activation_words();

std::string operation_name(const std::string& word);  // "gemm" -> "scaled_mm"
qf_device device_from_word(const std::string& word);
std::string size_text(int64_t m, int64_t n, int64_t k);  // "m=1 n=4096 k=4096"; a size of 0 is left out

// The problem of operation `op`. Its name is its sizes and whatever the scheme does not tell.
Spec spec_from_options(const std::string& op, const ProblemOptions&);
cases::CasePtr case_from_spec(const Spec&);

// {"chosen": NAME or null, "candidates": [...]}, asked of the library without any data. Throws UsageError
// with the library's message where the problem itself is wrong.
std::string explain_spec(const Spec&, qf_device device, const char* kernel, bool is_strict);

}  // namespace quantfuse::cli
