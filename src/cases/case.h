// SPDX-License-Identifier: Apache-2.0
//
// One problem of one operation, which serves the tests, `quantfuse verify` and `quantfuse bench` alike. It is
// a user of the public C interface and nothing else: a kernel is run by its name, the oracle is the
// operation's reference kernel.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "quantfuse/quantfuse.h"

namespace quantfuse::cases {

class Case {
 public:
  virtual ~Case() = default;

  std::string op;      // "linear"
  std::string name;    // says what is special about it; unique within the operation
  std::string scheme;  // "int4 g128 bf16"
  int64_t m = 0, n = 0, k = 0;
  double flops = 0;                // 2 m n k for products, else the elements
  double bytes = 0;                // each input read once, each output written once
  qf_device device = {QF_CPU, 0};  // set by make(); set it by hand to explain() without making anything

  // Makes `copies` sets of inputs and outputs on `device` (a bench rotates through more of them than the
  // cache holds). Outputs are filled with NaN patterns between guard bands.
  virtual void make(qf_device device, uint64_t seed, int copies) = 0;
  // Outputs as make() left them, in every set.
  virtual void reset() = 0;
  // Runs `kernel` (null: the selected one) on one set. Asynchronous on a CUDA stream.
  virtual qf_status run(const char* kernel, int copy, void* stream) = 0;
  // After run() on set 0: compares with the reference on the CPU and looks at the guard bands.
  // "" if all is well, otherwise what is wrong. Knows its own derived bound.
  virtual std::string check() = 0;
  virtual std::string explain(const char* kernel) = 0;  // the library's JSON; works before make() too
  virtual std::vector<uint8_t> outputs(int copy) = 0;   // every byte that run() may have written in a set
};

// Numbers that a case draws its inputs from.
enum class Data { normal, outliers, tiny, huge, zeros, constant, with_nan_inf, nan_in_row_1 };

// How codes are drawn: evenly from all that stand for a finite number, or as quantizing normal numbers gives
// them. A GPU's power, and at its limit its speed, depends on which bits change.
enum class Codes { all, of_normal_numbers };

struct QuantizeSpec {
  std::string name;
  qf_format format = QF_INT8;
  qf_block block = {1, 0};
  qf_scale_mode mode = QF_SCALE_DYNAMIC;
  bool has_e8m0_scale = false, is_asymmetric = false, wants_row_sums = false;
  bool has_transposed_scale = false;
  int64_t hadamard = 0;
  qf_dtype dtype = {2, 32, 1};
  int64_t rows = 0, cols = 0, row_padding = 0;
  Data data = Data::normal;
};

struct DequantizeSpec {
  std::string name;
  qf_format format = QF_INT8;
  qf_block block = {1, 0};
  bool has_e8m0_scale = false, is_asymmetric = false, has_float_zero = false, has_g_idx = false;
  bool has_offset = false;
  qf_dtype dtype = {2, 32, 1};
  int64_t rows = 0, cols = 0, row_padding = 0;
};

struct DequantizeWordsSpec {
  std::string name;
  qf_word_layout layout = QF_WORDS_AWQ;
  int32_t bits = 4;
  int64_t group = 128;
  bool has_g_idx = false;
  qf_dtype scale_dtype = {2, 16, 1}, dtype = {2, 16, 1};
  int64_t k = 0, n = 0, row_padding = 0;
};

struct ScaledMmSpec {
  std::string name;
  qf_format a_format = QF_INT8, b_format = QF_INT8;
  qf_order b_order = QF_NK;
  qf_dtype out = {0, 32, 1};  // i32: exact, without scales
  qf_block a_block = {1, 0}, b_block = {1, 0};
  bool has_scales = false, has_a_zero = false, has_b_zero = false, has_bias = false;
  bool has_fast_accumulation = false;
  int64_t m = 0, n = 0, k = 0, row_padding = 0;
  Data data = Data::normal;  // or constant: the lowest codes throughout; or nan_in_row_1
  Codes codes = Codes::all;
};

struct WeightSpec {
  qf_format format = QF_INT4;
  qf_block block = {1, 128};
  bool has_e8m0_scale = false, is_asymmetric = false, has_float_zero = false, has_g_idx = false;
  bool is_gated = false, has_offset = false;
  Codes codes = Codes::all;
};

struct LinearSpec {
  std::string name;
  WeightSpec weight;
  qf_format act_format = QF_FORMAT_NONE;  // quantized on the way in
  int64_t act_group = 0;
  bool has_quantized_x = false;  // x comes as codes of act_format with x_scale
  qf_dtype dtype = {4, 16, 1};   // of x and y
  qf_activation activation = QF_IDENTITY;
  bool has_bias = false, has_residual = false;
  bool has_residual_in_y = false;  // the residual is y itself, which then has the type of x
  bool is_batch_invariant = false;
  bool has_x_gain = false;  // x is yet to be normalized
  bool has_fast_accumulation = false;
  qf_format out_format = QF_FORMAT_NONE;
  qf_scale_mode out_mode = QF_SCALE_DYNAMIC;
  int64_t out_group = 0;
  int64_t m = 0, n = 0, k = 0, row_padding = 0;
  Data data = Data::normal;
};

struct LinearBackwardSpec {
  std::string name;
  WeightSpec weight;
  qf_dtype dtype = {4, 16, 1};
  int64_t m = 0, n = 0, k = 0;
};

struct RmsNormSpec {
  std::string name;
  qf_dtype dtype = {4, 16, 1};
  bool has_residual = false, has_gain = true;
  qf_format out_format = QF_FORMAT_NONE;
  qf_scale_mode out_mode = QF_SCALE_DYNAMIC;
  int64_t out_group = 0, hadamard = 0;
  bool has_transposed_scale = false;
  int64_t m = 0, n = 0, row_padding = 0;
  Data data = Data::normal;
};

struct GatedActSpec {
  std::string name;
  qf_dtype dtype = {4, 16, 1};
  qf_activation activation = QF_SILU;
  bool is_ungated = false;
  qf_format out_format = QF_FORMAT_NONE;
  qf_scale_mode out_mode = QF_SCALE_DYNAMIC;
  int64_t out_group = 0, hadamard = 0;
  bool has_transposed_scale = false;
  int64_t m = 0, n = 0, row_padding = 0;
  Data data = Data::normal;
};

struct GptqQuantizeSpec {
  std::string name;
  qf_format format = QF_INT4;
  int32_t bits = 0;
  int64_t group = 128;
  qf_scale_mode mode = QF_SCALE_DYNAMIC;
  qf_act_order act_order = QF_ACT_ORDER_NONE;
  double damping = 0;
  bool is_asymmetric = false, has_unseen_columns = false;
  qf_dtype dtype = {2, 32, 1};
  int64_t n = 0, k = 0, row_padding = 0;
};

struct AwqSearchSpec {
  std::string name;
  qf_format format = QF_INT4;
  int32_t bits = 0;
  int64_t group = 128;
  bool is_asymmetric = false, has_act_scale = false, wants_clip = false;
  int32_t grid = 0;
  qf_dtype dtype = {2, 32, 1};
  int64_t t = 0, n = 0, k = 0, row_padding = 0;
};

using CasePtr = std::unique_ptr<Case>;
CasePtr make_case(const QuantizeSpec&);
CasePtr make_case(const DequantizeSpec&);
CasePtr make_case(const DequantizeWordsSpec&);
CasePtr make_case(const ScaledMmSpec&);
CasePtr make_case(const LinearSpec&);
CasePtr make_case(const LinearBackwardSpec&);
CasePtr make_case(const RmsNormSpec&);
CasePtr make_case(const GatedActSpec&);
CasePtr make_case(const GptqQuantizeSpec&);
CasePtr make_case(const AwqSearchSpec&);

// The small and nasty cases of an operation: 0, 1, tile +- 1, odd strides, outliers, every combination of
// options. A CPU is spared those that are large to fill a GPU, which show nothing new of it.
std::vector<CasePtr> test_cases(const std::string& op, qf_device device);

// The operations that have cases, in the order of qf_kernels().
std::vector<std::string> operations_with_cases();

}  // namespace quantfuse::cases
