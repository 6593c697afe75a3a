// SPDX-License-Identifier: Apache-2.0
//
// Bad input through the C interface. Every call below is right but for one thing; it must return
// QF_BAD_ARGUMENT with a message that names what is wrong, and write nothing.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <utility>

#include "call.h"

namespace quantfuse {
namespace {

// ---- A right call of every operation, with every optional tensor ----

constexpr int64_t kM = 4, kN = 6, kK = 10;  // all different, none 1: every mix-up shows

struct QuantizeCall : Call<qf_quantize_args> {
  QuantizeCall() : Call(qf_quantize, qf_quantize_workspace) {
    args.format = QF_INT8;
    args.block = {1, 4};
    input("x", args.x, kF32, {kM, kK});
    output("q", args.q, kI8, {kM, kK});
    output("scale", args.scale, kF32, {kM, 3});
    output("zero", args.zero, kI8, {kM, 3}).is_optional = true;
    output("row_sums", args.row_sums, kI32, {kM, 3}).is_optional = true;
  }
};

struct StaticQuantizeCall : Call<qf_quantize_args> {
  StaticQuantizeCall() : Call(qf_quantize, qf_quantize_workspace) {
    args.format = QF_INT4;
    args.block = {1, 4};
    args.scale_mode = QF_SCALE_STATIC;
    input("x", args.x, kBf16, {kM, 9});
    output("q", args.q, kU8, {kM, 5});
    input("scale", args.scale, kF32, {kM, 3});
    input("zero", args.zero, kI8, {kM, 3}).is_optional = true;
  }
};

struct DequantizeCall : Call<qf_dequantize_args> {
  DequantizeCall() : Call(qf_dequantize, qf_dequantize_workspace) {
    args.format = QF_INT8;
    args.block = {1, 4};
    input("q", args.q, kI8, {kM, kK});
    input("scale", args.scale, kF32, {kM, 3});
    input("zero", args.zero, kF32, {kM, 3}).is_optional = true;
    input("offset", args.offset, kF32, {kM, 3}).is_optional = true;
    input("g_idx", args.g_idx, kI32, {kK}).is_optional = true;
    output("x", args.x, kF16, {kM, kK});
  }
};

// 24 rows in 3 groups of 8 words, and words of zero points for 5 columns.
struct DequantizeWordsCall : Call<qf_dequantize_words_args> {
  DequantizeWordsCall() : Call(qf_dequantize_words, qf_dequantize_words_workspace) {
    args.layout = QF_WORDS_GPTQ;
    args.bits = 8;
    args.group = 8;
    input("qweight", args.qweight, kI32, {6, kN});
    input("qzeros", args.qzeros, kI32, {3, 2});
    input("scales", args.scales, kF16, {3, kN});
    input("g_idx", args.g_idx, kI32, {24}).is_optional = true;
    output("x", args.x, kF16, {24, kN});
  }
};

struct ScaledMmCall : Call<qf_scaled_mm_args> {
  ScaledMmCall() : Call(qf_scaled_mm, qf_scaled_mm_workspace) {
    args.a_format = args.b_format = QF_INT8;
    args.a_block = {1, 4};
    args.b_block = {2, 4};
    input("a", args.a, kI8, {kM, kK});
    input("b", args.b, kI8, {kN, kK});
    output("c", args.c, kF32, {kM, kN});
    input("a_scale", args.a_scale, kF32, {kM, 3}).is_optional = true;
    input("b_scale", args.b_scale, kF32, {3, 3}).is_optional = true;
    input("a_zero", args.a_zero, kI32, {kM}).is_optional = true;
    input("b_zero", args.b_zero, kI32, {kN}).is_optional = true;
    operand("a_zero").may_be_scalar = operand("b_zero").may_be_scalar = true;  // one for all
    input("bias", args.bias, kF32, {kN}).is_optional = true;
  }
};

template <class CallType>
void add_weight(CallType& call, qf_weight& weight, int64_t n, int64_t k) {
  weight.format = QF_INT8;
  weight.n = n, weight.k = k;
  weight.block = {1, 4};
  call.input("weight.codes", weight.codes, kI8, {n, k}).is_optional = true;  // where there is a packed form
  call.input("weight.scale", weight.scale, kF32, {n, (k + 3) / 4});
  call.input("weight.zero", weight.zero, kF32, {n, (k + 3) / 4}).is_optional = true;
  call.input("weight.offset", weight.offset, kF32, {n, (k + 3) / 4}).is_optional = true;
  call.input("weight.g_idx", weight.g_idx, kI32, {k}).is_optional = true;
}

struct LinearCall : Call<qf_linear_args> {
  LinearCall() : Call(qf_linear, qf_linear_workspace) {
    input("x", args.x, kF32, {kM, kK});
    add_weight(*this, args.weight, kN, kK);
    input("bias", args.bias, kF32, {kN}).is_optional = true;
    input("residual", args.residual, kF32, {kM, kN}).is_optional = true;
    input("x_gain", args.x_gain, kF32, {kK}).is_optional = true;
    output("y", args.y, kF32, {kM, kN});
  }
};

// A weight that is not quantized.
struct PlainLinearCall : Call<qf_linear_args> {
  PlainLinearCall() : Call(qf_linear, qf_linear_workspace) {
    args.weight.format = QF_F32;
    args.weight.n = kN, args.weight.k = kK;
    input("x", args.x, kF32, {kM, kK});
    input("weight.codes", args.weight.codes, kF32, {kN, kK}).is_optional = true;  // with a packed form
    output("y", args.y, kF32, {kM, kN});
  }
};

// Codes in and codes out, through a packed weight where this CPU has one.
struct QuantizedLinearCall : Call<qf_linear_args> {
  QuantizedLinearCall() : Call(qf_linear, qf_linear_workspace) {
    args.act_format = args.out_format = QF_INT8;
    args.act_group = 4, args.out_group = 3;
    input("x", args.x, kI8, {kM, kK});
    input("x_scale", args.x_scale, kF32, {kM, 3}).is_optional = true;  // where x holds floats
    add_weight(*this, args.weight, kN, kK);
    args.weight.g_idx = nullptr;
    operands.pop_back();
    output("y", args.y, kI8, {kM, kN});
    output("out_scale", args.out_scale, kF32, {kM, 2});
    uint64_t bytes = 0;
    if (qf_weight_packed_bytes(&args.weight, {QF_CPU, 0}, &bytes) == QF_OK) {
      input("weight.packed", args.weight.packed, kU8, {static_cast<int64_t>(bytes)}).is_optional = true;
      EXPECT_EQ(qf_weight_pack(&args.weight, nullptr), QF_OK) << qf_last_error();
    }
  }
};

struct LinearBackwardCall : Call<qf_linear_backward_args> {
  LinearBackwardCall() : Call(qf_linear_backward, qf_linear_backward_workspace) {
    input("dy", args.dy, kF32, {kM, kN});
    add_weight(*this, args.weight, kN, kK);
    output("dx", args.dx, kF32, {kM, kK});
  }
};

struct RmsNormCall : Call<qf_rms_norm_args> {
  RmsNormCall() : Call(qf_rms_norm, qf_rms_norm_workspace) {
    args.eps = 1e-5;
    args.out_format = QF_FP8_E4M3;
    args.out_group = 3;
    input("x", args.x, kBf16, {kM, kN});
    output("residual", args.residual, kBf16, {kM, kN}).is_optional = true;
    input("gain", args.gain, kF32, {kN}).is_optional = true;
    output("y", args.y, kU8, {kM, kN});
    output("out_scale", args.out_scale, kF32, {kM, 2});
  }
};

struct GatedActCall : Call<qf_gated_act_args> {
  GatedActCall() : Call(qf_gated_act, qf_gated_act_workspace) {
    args.activation = QF_SILU;
    args.out_format = QF_INT8;
    args.out_mode = QF_SCALE_STATIC;
    input("x", args.x, kF16, {kM, 2 * kN});
    output("y", args.y, kI8, {kM, kN});
    input("out_scale", args.out_scale, kF32, {1}).may_be_scalar = true;
  }
};

struct GptqQuantizeCall : Call<qf_gptq_quantize_args> {
  GptqQuantizeCall() : Call(qf_gptq_quantize, qf_gptq_quantize_workspace) {
    args.format = QF_INT4;
    args.group = 4;
    args.act_order = QF_ACT_ORDER_GROUP;
    input("weight", args.weight, kBf16, {kN, kK});
    input("hessian", args.hessian, kF32, {kK, kK});  // of ones: positive definite with its damping
    output("q", args.q, kU8, {kN, (kK + 1) / 2});
    output("scale", args.scale, kF32, {kN, 3});
    output("zero", args.zero, kI8, {kN, 3}).is_optional = true;
    output("g_idx", args.g_idx, kI32, {kK});
    output("loss", args.loss, kF32, {kN}).is_optional = true;
  }
};

struct AwqSearchCall : Call<qf_awq_search_args> {
  AwqSearchCall() : Call(qf_awq_search, qf_awq_search_workspace) {
    args.format = QF_INT8;
    args.group = 4;
    args.grid = 4;
    input("weight", args.weight, kF32, {kN, kK});
    input("x", args.x, kF16, {kM, kK}).has_own_rows = true;
    input("act_scale", args.act_scale, kF32, {kK}).is_optional = true;
    output("channel_scale", args.channel_scale, kF32, {kK});
    output("clip", args.clip, kF32, {kN, 3}).is_optional = true;
    output("loss", args.loss, kF32, {5}).is_optional = true;
  }
};

// ---- What is the same for every tensor of every operation ----

struct Spoil {
  const char* what;
  std::function<bool(Operand&)> apply;  // false: does not apply to this tensor
  bool names_operand = true;  // a wrong size may also show in the next tensor that has the same dimension
};

int64_t huge_shape[] = {int64_t{1} << 40, int64_t{1} << 40, 1};
int64_t one_more_dimension[] = {kM, kN, kK};
int64_t strides_of_a_column[] = {2, 1 << 20};

const std::vector<Spoil> kSpoils = {
    {"no tensor", [](Operand& o) { return o.is_optional ? false : (*o.slot = nullptr, true); }},
    {"no data", [](Operand& o) { return o.view.data = nullptr, true; }},
    {"no shape", [](Operand& o) { return o.view.shape = nullptr, true; }},
    {"rank of 3",
     [](Operand& o) {
       return o.view.shape = one_more_dimension, o.view.strides = nullptr, o.view.ndim = 3, true;
     }},
    {"rank of 0", [](Operand& o) { return o.may_be_scalar ? false : (o.view.ndim = 0, true); }},
    {"rank of -1", [](Operand& o) { return o.view.ndim = -1, true; }},
    {"rank of 100", [](Operand& o) { return o.view.ndim = 100, true; }},
    {"one row more",
     [](Operand& o) { return o.name == "weight.packed" || o.has_own_rows ? false : (o.shape[0] += 1, true); },
     false},
    {"one column less", [](Operand& o) { return o.shape.back() -= 1, true; }, false},
    {"negative size", [](Operand& o) { return o.shape[0] = -o.shape[0], true; }},
    {"huge size", [](Operand& o) { return o.view.shape = huge_shape, o.view.strides = nullptr, true; },
     false},
    {"type of 64 bits", [](Operand& o) { return o.view.dtype.bits = 64, true; }},
    {"two lanes", [](Operand& o) { return o.view.dtype.lanes = 2, true; }},
    {"complex type", [](Operand& o) { return o.view.dtype.code = 5, true; }},
    {"unknown device", [](Operand& o) { return o.view.device.type = 99, true; }},
    {"other device",
     [](Operand& o) {
       return o.view.device = {QF_CUDA, 0}, true;
     }},
    {"columns apart",
     [](Operand& o) {
       if (o.shape.back() == 1) return false;
       o.view.strides = o.shape.size() == 2 ? strides_of_a_column : strides_of_a_column + 1;
       return true;
     }},
    {"rows that overlap", [](Operand& o) { return o.shape.size() == 2 ? (o.strides[0] = 1, true) : false; }},
    {"odd address",
     [](Operand& o) {
       o.view.byte_offset = 1;
       return o.view.dtype.bits > 8 || o.name == "weight.packed";
     }},
    {"huge offset", [](Operand& o) { return o.view.byte_offset = UINT64_MAX - 63, true; }},
};

template <class CallType>
class EveryOperation : public testing::Test {};
using Calls = testing::Types<QuantizeCall, StaticQuantizeCall, DequantizeCall, DequantizeWordsCall,
                             ScaledMmCall, LinearCall, PlainLinearCall, QuantizedLinearCall,
                             LinearBackwardCall, RmsNormCall, GatedActCall, GptqQuantizeCall, AwqSearchCall>;
TYPED_TEST_SUITE(EveryOperation, Calls);

// Otherwise the errors below would prove nothing.
TYPED_TEST(EveryOperation, RunsWhenNothingIsWrong) {
  TypeParam call;
  EXPECT_EQ(call.run(), QF_OK) << qf_last_error();
  EXPECT_FALSE(call.outputs_are_untouched());
}

TYPED_TEST(EveryOperation, RefusesEverySpoiledTensor) {
  const size_t count = TypeParam().operands.size();
  for (size_t i = 0; i < count; ++i) {
    for (const Spoil& spoil : kSpoils) {
      TypeParam call;
      Operand& operand = call.operands[i];
      if (!spoil.apply(operand)) continue;
      const std::string where = operand.name + ": " + spoil.what;
      EXPECT_EQ(call.run(), QF_BAD_ARGUMENT) << where << ": " << qf_last_error();
      const std::string message = qf_last_error();
      EXPECT_TRUE(!spoil.names_operand || message.find(operand.name) != std::string::npos)
          << where << ": " << message;
      EXPECT_TRUE(call.outputs_are_untouched()) << where;
    }
  }
}

TYPED_TEST(EveryOperation, RefusesOutputsThatOverlapOtherTensors) {
  const size_t count = TypeParam().operands.size();
  for (size_t i = 0; i < count; ++i) {
    for (size_t j = 0; j < count; ++j) {
      TypeParam call;
      Operand &output = call.operands[i], &other = call.operands[j];
      if (i == j || !output.is_output) continue;
      if (output.name == "y" && other.name == "residual")
        continue;  // linear allows it, and rms_norm is seen from residual
      // The last element of the other tensor is the first of the output: the least overlap there is.
      const size_t each = output.view.dtype.bits / 8;
      output.view.data = other.memory.get();
      output.view.byte_offset = (other.bytes - 1) / each * each;
      EXPECT_EQ(call.run(), QF_BAD_ARGUMENT) << output.name << " over " << other.name;
      const std::string message = qf_last_error();
      EXPECT_NE(message.find("overlaps"), std::string::npos)
          << output.name << " over " << other.name << ": " << message;
    }
  }
}

TYPED_TEST(EveryOperation, RefusesKernelsItDoesNotHave) {
  TypeParam call;
  qf_call how = {};
  how.kernel = "quick_sort_avx512";
  EXPECT_EQ(call.run(&how), QF_BAD_ARGUMENT);
  EXPECT_NE(std::string(qf_last_error()).find("quick_sort_avx512"), std::string::npos) << qf_last_error();
  EXPECT_TRUE(call.outputs_are_untouched());
}

TYPED_TEST(EveryOperation, RefusesWorkspacesThatAreShortOrOdd) {
  TypeParam call;
  const uint64_t needed = call.workspace_bytes();
  if (needed == 0) GTEST_SKIP() << "the kernel that runs here needs no workspace";
  std::vector<uint8_t> memory(needed + 128);
  auto* aligned = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
  for (const qf_call& how :
       {qf_call{nullptr, nullptr, needed, nullptr, 0}, qf_call{nullptr, aligned, needed - 1, nullptr, 0},
        qf_call{nullptr, aligned + 4, needed, nullptr, 0}}) {
    EXPECT_EQ(call.run(&how), QF_BAD_ARGUMENT);
    EXPECT_NE(std::string(qf_last_error()).find("workspace"), std::string::npos) << qf_last_error();
    EXPECT_TRUE(call.outputs_are_untouched());
  }
}

TYPED_TEST(EveryOperation, StrictIsAnErrorOrAFastKernel) {
  TypeParam call;
  qf_call how = {};
  how.strict = 1;
  std::vector<uint8_t> memory(call.workspace_bytes(&how) + 64);
  how.workspace = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
  how.workspace_bytes = memory.size() - 64;
  const qf_status status = call.run(&how);
  EXPECT_TRUE(status == QF_OK || status == QF_UNSUPPORTED) << qf_last_error();
  if (status == QF_UNSUPPORTED) {
    EXPECT_NE(std::string(qf_last_error()).find("strict calls do not fall back"), std::string::npos)
        << qf_last_error();
    EXPECT_TRUE(call.outputs_are_untouched());
  }
}

TEST(NullArguments, AreRefused) {
  uint64_t bytes = 0;
  EXPECT_EQ(qf_quantize(nullptr, nullptr), QF_BAD_ARGUMENT);
  EXPECT_EQ(qf_dequantize(nullptr, nullptr), QF_BAD_ARGUMENT);
  EXPECT_EQ(qf_scaled_mm(nullptr, nullptr), QF_BAD_ARGUMENT);
  EXPECT_EQ(qf_linear(nullptr, nullptr), QF_BAD_ARGUMENT);
  EXPECT_EQ(qf_linear_backward(nullptr, nullptr), QF_BAD_ARGUMENT);
  EXPECT_EQ(qf_rms_norm(nullptr, nullptr), QF_BAD_ARGUMENT);
  EXPECT_EQ(qf_gated_act(nullptr, nullptr), QF_BAD_ARGUMENT);
  EXPECT_EQ(qf_weight_pack(nullptr, nullptr), QF_BAD_ARGUMENT);
  EXPECT_EQ(qf_weight_packed_bytes(nullptr, {QF_CPU, 0}, &bytes), QF_BAD_ARGUMENT);
  EXPECT_STREQ(qf_last_error(), "weight_pack: weight is null");
  EXPECT_EQ(qf_linear_explain(nullptr, nullptr, nullptr, 0), 0u);
  char text[] = "before";
  EXPECT_EQ(qf_linear_explain(nullptr, nullptr, text, sizeof text), 0u);
  EXPECT_STREQ(text, "");
  const LinearCall call;
  EXPECT_EQ(qf_linear_workspace(&call.args, nullptr, nullptr), QF_BAD_ARGUMENT);
}

// ---- Options and values ----

template <class CallType>
void expect_bad(CallType& call, const char* what) {
  EXPECT_EQ(call.run(), QF_BAD_ARGUMENT) << what;
  EXPECT_NE(std::string(qf_last_error()).find(what), std::string::npos)
      << "no '" << what << "' in: " << qf_last_error();
  EXPECT_TRUE(call.outputs_are_untouched()) << what;
}

// Sets one option of a call and expects an error that says `what`.
template <class CallType, class Change>
void expect_bad_option(const char* what, Change change) {
  CallType call;
  change(call.args);
  expect_bad(call, what);
}

constexpr auto kUnknownFormat = static_cast<qf_format>(99);

TEST(Options, OfQuantize) {
  expect_bad_option<QuantizeCall>("format", [](auto& a) { a.format = kUnknownFormat; });
  expect_bad_option<QuantizeCall>("format", [](auto& a) { a.format = QF_FORMAT_NONE; });
  expect_bad_option<QuantizeCall>("scale_mode",
                                  [](auto& a) { a.scale_mode = static_cast<qf_scale_mode>(7); });
  expect_bad_option<QuantizeCall>("block", [](auto& a) { a.block = {-1, 0}; });
  expect_bad_option<QuantizeCall>("q", [](auto& a) { a.format = QF_INT4; });
  for (const int64_t size : {int64_t{-2}, int64_t{3}, int64_t{1} << 40}) {
    expect_bad_option<QuantizeCall>("hadamard", [&](auto& a) { a.hadamard = size; });
    expect_bad_option<RmsNormCall>("hadamard", [&](auto& a) { a.hadamard = size; });
    expect_bad_option<GatedActCall>("hadamard", [&](auto& a) { a.hadamard = size; });
  }
}

// Scales [m, groups] may lie in memory as [groups, m].
TEST(Options, ScalesThatAreWrittenMayBeTransposed) {
  QuantizeCall call, transposed;
  ASSERT_EQ(call.run(), QF_OK) << qf_last_error();
  Operand& scale = transposed.operand("scale");
  const int64_t rows = scale.shape[0], cols = scale.shape[1];
  scale.strides = {1, rows};
  ASSERT_EQ(transposed.run(), QF_OK) << qf_last_error();
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      EXPECT_EQ(scale.at<float>(c * rows + r), call.operand("scale").at<float>(r * cols + c));
    }
  }
  QuantizeCall overlapping;
  overlapping.operand("scale").strides = {1, rows - 1};
  expect_bad(overlapping, "scale");
  StaticQuantizeCall given;
  given.operand("scale").strides = {1, rows};
  expect_bad(given, "scale");
}

TEST(Options, ZeroPointsBelongToIntegers) {
  QuantizeCall call;
  call.args.format = QF_FP8_E4M3;
  call.operand("q").view.dtype = kU8;
  expect_bad(call, "zero");
  call.args.zero = nullptr;
  expect_bad(call, "row_sums");
}

TEST(Options, OfDequantize) {
  expect_bad_option<DequantizeCall>("format", [](auto& a) { a.format = kUnknownFormat; });
  expect_bad_option<DequantizeCall>("block", [](auto& a) { a.block = {0, -3}; });
}

TEST(Options, OfScaledMm) {
  expect_bad_option<ScaledMmCall>("a_format", [](auto& a) { a.a_format = kUnknownFormat; });
  expect_bad_option<ScaledMmCall>("b_format", [](auto& a) { a.b_format = QF_FP4_E2M1; });
  expect_bad_option<ScaledMmCall>("expected both integer or both FP8",
                                  [](auto& a) { a.b_format = QF_FP8_E4M3; });
  expect_bad_option<ScaledMmCall>("b_order", [](auto& a) { a.b_order = static_cast<qf_order>(2); });
  expect_bad_option<ScaledMmCall>("k", [](auto& a) { a.k = -1; });
  expect_bad_option<ScaledMmCall>("k=11", [](auto& a) { a.k = 11; });
  expect_bad_option<ScaledMmCall>("a_block", [](auto& a) { a.a_block = {-1, 1}; });
}

TEST(Options, OfLinear) {
  expect_bad_option<LinearCall>("weight.format", [](auto& a) { a.weight.format = kUnknownFormat; });
  expect_bad_option<LinearCall>("act_format", [](auto& a) { a.act_format = QF_INT4; });
  expect_bad_option<LinearCall>("act_group", [](auto& a) { a.act_group = 3; });
  expect_bad_option<QuantizedLinearCall>("act_group", [](auto& a) { a.act_group = -1; });
  expect_bad_option<LinearCall>("activation", [](auto& a) { a.activation = static_cast<qf_activation>(17); });
  expect_bad_option<QuantizedLinearCall>("out_format", [](auto& a) { a.out_format = QF_INT4; });
  expect_bad_option<QuantizedLinearCall>("out_mode", [](auto& a) { a.out_mode = QF_SCALE_MSE; });
  expect_bad_option<QuantizedLinearCall>("out_group", [](auto& a) { a.out_group = -2; });
  expect_bad_option<QuantizedLinearCall>("y has type i8", [](auto& a) { a.out_format = QF_FORMAT_NONE; });
  expect_bad_option<LinearCall>("weight.n", [](auto& a) { a.weight.n = -6; });
  expect_bad_option<LinearCall>("weight.codes", [](auto& a) { a.weight.k = 11; });
  expect_bad_option<LinearCall>("weight.block", [](auto& a) { a.weight.block = {1, -4}; });
  expect_bad_option<LinearCall>("neither codes nor packed", [](auto& a) { a.weight.codes = nullptr; });
  expect_bad_option<LinearBackwardCall>("neither codes nor packed",
                                        [](auto& a) { a.weight.codes = nullptr; });
  expect_bad_option<QuantizedLinearCall>("x has type i8", [](auto& a) { a.x_scale = nullptr; });
  expect_bad_option<LinearCall>("n/2=3", [](auto& a) { a.weight.is_gated = 1; });
}

TEST(Options, GatedWeightsAreEven) {
  LinearCall call;
  call.args.weight.n = 5;
  call.args.weight.is_gated = 1;
  expect_bad(call, "weight.n is odd");
}

TEST(Options, OfRmsNorm) {
  expect_bad_option<RmsNormCall>("eps", [](auto& a) { a.eps = -1e-5; });
  expect_bad_option<RmsNormCall>("eps", [](auto& a) { a.eps = NAN; });
  expect_bad_option<RmsNormCall>("out_format", [](auto& a) { a.out_format = kUnknownFormat; });
  expect_bad_option<RmsNormCall>("out_mode", [](auto& a) { a.out_mode = static_cast<qf_scale_mode>(-1); });
  expect_bad_option<RmsNormCall>("out_group", [](auto& a) { a.out_group = -1; });
}

TEST(Options, OfGatedAct) {
  expect_bad_option<GatedActCall>("activation",
                                  [](auto& a) { a.activation = static_cast<qf_activation>(-1); });
  expect_bad_option<GatedActCall>("out_format", [](auto& a) { a.out_format = QF_FP4_E2M1; });
  GatedActCall call;
  call.operand("x").shape[1] -= 1;
  expect_bad(call, "even number");
  expect_bad_option<GatedActCall>("y", [](auto& a) { a.is_ungated = 1; });
}

TEST(Options, OfGptqQuantize) {
  expect_bad_option<GptqQuantizeCall>("format", [](auto& a) { a.format = QF_FP8_E4M3; });
  for (const int32_t bits : {-1, 1, 5})
    expect_bad_option<GptqQuantizeCall>("bits", [bits](auto& a) { a.bits = bits; });
  expect_bad_option<GptqQuantizeCall>("group", [](auto& a) { a.group = -1; });
  expect_bad_option<GptqQuantizeCall>("scale_mode", [](auto& a) { a.scale_mode = QF_SCALE_STATIC; });
  expect_bad_option<GptqQuantizeCall>("act_order",
                                      [](auto& a) { a.act_order = static_cast<qf_act_order>(3); });
  expect_bad_option<GptqQuantizeCall>("g_idx", [](auto& a) { a.act_order = QF_ACT_ORDER_STATIC; });
  for (const double damping : {-0.1, static_cast<double>(NAN), static_cast<double>(INFINITY)})
    expect_bad_option<GptqQuantizeCall>("damping", [damping](auto& a) { a.damping = damping; });
}

TEST(Options, OfAwqSearch) {
  expect_bad_option<AwqSearchCall>("format", [](auto& a) { a.format = QF_FORMAT_NONE; });
  expect_bad_option<AwqSearchCall>("bits", [](auto& a) { a.bits = 9; });
  expect_bad_option<AwqSearchCall>("group", [](auto& a) { a.group = -2; });
  expect_bad_option<AwqSearchCall>("grid", [](auto& a) { a.grid = -1; });
  expect_bad_option<AwqSearchCall>("grid", [](auto& a) { a.grid = 1 << 20; });
}

TEST(Values, OfCalibrationAreFinite) {
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    GptqQuantizeCall gptq;
    gptq.operand("hessian").at<float>(kK + 2) = bad;
    expect_bad(gptq, "hessian");
    AwqSearchCall awq;
    awq.operand("weight").at<float>(3 * kK + 1) = bad;
    expect_bad(awq, "weight has the value");
    AwqSearchCall magnitudes;
    magnitudes.operand("act_scale").at<float>(kK - 1) = bad;
    expect_bad(magnitudes, "act_scale");
  }
  GptqQuantizeCall negative;
  negative.operand("hessian").at<float>(0) = -1.0f;
  expect_bad(negative, "not negative");
}

TEST(Values, OfAHessianAreThoseOfASumOfSquares) {
  GptqQuantizeCall call;
  call.operand("hessian").at<float>(5 * kK + 9) = 3.0f;  // more than either variance allows
  call.operand("hessian").at<float>(9 * kK + 5) = 3.0f;
  expect_bad(call, "not positive definite");
}

// Puts each bad number into the last place of a tensor of scales.
template <class CallType>
void expect_bad_scales(const char* name) {
  for (const float bad : {NAN, INFINITY, -INFINITY, 0.0f, -1.0f}) {
    CallType call;
    Operand& scale = call.operand(name);
    scale.template at<float>(static_cast<int64_t>(scale.bytes / 4) - 1) = bad;
    expect_bad(call, name);
  }
}

TEST(Values, ScalesAreFiniteAndPositive) {
  expect_bad_scales<StaticQuantizeCall>("scale");
  expect_bad_scales<DequantizeCall>("scale");
  expect_bad_scales<ScaledMmCall>("a_scale");
  expect_bad_scales<ScaledMmCall>("b_scale");
  expect_bad_scales<LinearCall>("weight.scale");
  expect_bad_scales<QuantizedLinearCall>("x_scale");
  expect_bad_scales<LinearBackwardCall>("weight.scale");
  expect_bad_scales<GatedActCall>("out_scale");
}

TEST(Values, E8m0ScalesAreNumbers) {
  DequantizeCall call;
  Operand scale("scale", kU8, {kM, 3}, false);
  scale.at<uint8_t>(5) = 255;
  call.args.scale = &scale.view;
  expect_bad(call, "scale");
}

TEST(Values, GroupIndicesAreWithinTheGroups) {
  for (const int32_t bad :
       {-1, 3, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()}) {
    LinearCall linear;
    linear.operand("weight.g_idx").at<int32_t>(kK - 1) = bad;
    expect_bad(linear, "weight.g_idx");
    LinearBackwardCall backward;
    backward.operand("weight.g_idx").at<int32_t>(kK - 1) = bad;
    expect_bad(backward, "weight.g_idx");
    DequantizeCall dequantize;
    dequantize.operand("g_idx").at<int32_t>(kK - 1) = bad;
    expect_bad(dequantize, "g_idx");
    DequantizeWordsCall words;
    words.operand("g_idx").at<int32_t>(23) = bad;
    expect_bad(words, "g_idx");
  }
}

TEST(Values, WeightsThatAreNotQuantizedHaveCodesAlone) {
  LinearCall quantized;
  const qf_weight& w = quantized.args.weight;
  for (const auto part : {&qf_weight::scale, &qf_weight::zero, &qf_weight::offset, &qf_weight::g_idx}) {
    PlainLinearCall call;
    call.args.weight.*part = w.*part;
    expect_bad(call, "a weight that is not quantized has none");
  }
  PlainLinearCall call;
  call.args.weight.block = {1, 4};
  expect_bad(call, "weight.block");
  call.args.weight.block = {}, call.args.act_format = QF_INT8;
  expect_bad(call, "the weight is not quantized");
  LinearBackwardCall backward;
  backward.args.weight.format = QF_F32;
  expect_bad(backward, "weight.format");
}

TEST(Values, WordsAreOfAKnownLayout) {
  DequantizeWordsCall call;
  call.args.bits = 5;
  expect_bad(call, "bits");
  call.args.bits = 8, call.args.layout = static_cast<qf_word_layout>(4);
  expect_bad(call, "layout");
  call.args.layout = QF_WORDS_AWQ;
  expect_bad(call, "bits is not 4");
  call.args.bits = 4;
  expect_bad(call, "no multiple of 8");
}

TEST(Values, FloatZerosAndOffsetsAreFinite) {
  LinearCall call;
  call.operand("weight.zero").at<float>(2) = INFINITY;
  expect_bad(call, "weight.zero");
  LinearCall with_offset;
  with_offset.operand("weight.offset").at<float>(2) = NAN;
  expect_bad(with_offset, "weight.offset");
}

// Codes of a table of numbers have scales of either sign, and no zero points or offsets.
TEST(Values, OfCodebooks) {
  Operand codes("q", kU8, {kM, (kK + 1) / 2}, false);
  for (const qf_format format : {QF_NF4, QF_FP4_BNB, QF_IQ4_NL}) {
    DequantizeCall call;
    call.args.format = format;
    call.args.q = &codes.view;
    expect_bad(call, "zero");
    call.args.zero = nullptr;
    expect_bad(call, "offset");
    call.args.offset = nullptr;
    call.operand("scale").at<float>(1) = INFINITY;
    expect_bad(call, "scale");
    call.operand("scale").at<float>(1) = -2.0f, call.operand("scale").at<float>(2) = 0.0f;
    EXPECT_EQ(call.run(), QF_OK) << qf_last_error();
  }
}

// ---- Packing ----

class Pack : public testing::Test {
 protected:
  void SetUp() override {
    if (qf_weight_packed_bytes(&call_.args.weight, {QF_CPU, 0}, &bytes_) == QF_UNSUPPORTED)
      GTEST_SKIP() << qf_last_error();
  }
  LinearCall call_;
  uint64_t bytes_ = 0;
};

TEST_F(Pack, ChecksValues) {
  Operand packed("weight.packed", kU8, {static_cast<int64_t>(bytes_)}, true);
  call_.args.weight.packed = &packed.view;
  call_.operand("weight.scale").at<float>(1) = NAN;
  EXPECT_EQ(qf_weight_pack(&call_.args.weight, nullptr), QF_BAD_ARGUMENT);
  EXPECT_NE(std::string(qf_last_error()).find("weight.scale"), std::string::npos) << qf_last_error();
  call_.operand("weight.scale").at<float>(1) = 1;
  call_.operand("weight.g_idx").at<int32_t>(0) = 77;
  EXPECT_EQ(qf_weight_pack(&call_.args.weight, nullptr), QF_BAD_ARGUMENT);
  EXPECT_NE(std::string(qf_last_error()).find("weight.g_idx"), std::string::npos) << qf_last_error();
}

TEST_F(Pack, RefusesMemoryThatIsShortOrOdd) {
  Operand packed("weight.packed", kU8, {static_cast<int64_t>(bytes_)}, true);
  call_.args.weight.packed = &packed.view;
  packed.shape[0] -= 1;
  EXPECT_EQ(qf_weight_pack(&call_.args.weight, nullptr), QF_BAD_ARGUMENT);
  EXPECT_NE(std::string(qf_last_error()).find("weight.packed"), std::string::npos) << qf_last_error();
  packed.shape[0] += 1;
  packed.view.byte_offset = 16;
  EXPECT_EQ(qf_weight_pack(&call_.args.weight, nullptr), QF_BAD_ARGUMENT);
  EXPECT_NE(std::string(qf_last_error()).find("aligned"), std::string::npos) << qf_last_error();
}

TEST_F(Pack, PackedBytesOfSomethingElseAreRefused) {
  Operand packed("weight.packed", kU8, {static_cast<int64_t>(bytes_)}, true);
  call_.args.weight.packed = &packed.view;
  expect_bad(call_, "weight.packed");  // zeros
  ASSERT_EQ(qf_weight_pack(&call_.args.weight, nullptr), QF_OK) << qf_last_error();
  call_.args.weight.format = QF_FP8_E4M3;
  call_.operand("weight.codes").view.dtype = kU8;
  call_.args.weight.zero = call_.args.weight.offset = nullptr;
  expect_bad(call_, "weight.packed");  // of another format
}

// Whatever byte of the header is damaged, and whatever entry of the tables behind it that lead into x and w:
// kernels do not find their way by it.
TEST_F(Pack, DamagedBytesAreRefused) {
  call_.operand("weight.g_idx").fill<int32_t>([](int64_t i) { return static_cast<int32_t>(i % 3); });
  ASSERT_EQ(qf_weight_packed_bytes(&call_.args.weight, {QF_CPU, 0}, &bytes_), QF_OK) << qf_last_error();
  Operand packed("weight.packed", kU8, {static_cast<int64_t>(bytes_)}, true);
  call_.args.weight.packed = &packed.view;
  ASSERT_EQ(qf_weight_pack(&call_.args.weight, nullptr), QF_OK) << qf_last_error();
  constexpr int64_t kHeader = 128, kReserved = 8;
  for (int64_t i = 0; i < kHeader - kReserved; ++i) {
    const bool is_flag_of_zeros = i >= 24 && i < 28;  // whether they are integers: leads nowhere
    for (const uint8_t bit : {0x01, 0x80}) {
      packed.at<uint8_t>(i) ^= bit;
      if (!is_flag_of_zeros) expect_bad(call_, "weight.packed");
      packed.at<uint8_t>(i) ^= bit;
    }
  }
  for (int64_t i = static_cast<int64_t>(bytes_) / 4 - 1, seen = 0; seen < 20; --i) {  // bounds, then k_map
    int32_t& entry = packed.at<int32_t>(i);
    if (entry == 0) continue;
    const int32_t before = std::exchange(entry, 1 << 20);
    expect_bad(call_, "weight.packed");
    entry = before, ++seen;
  }
  EXPECT_EQ(call_.run(), QF_OK) << qf_last_error();
}

// What pack() made serves without the canonical tensors, and gives the same bits.
TEST_F(Pack, PackedFormAloneSuffices) {
  call_.operand("weight.codes").fill<int8_t>([](int64_t i) {
    return static_cast<int8_t>(i * 37 % 251 - 120);
  });
  call_.operand("weight.g_idx").fill<int32_t>([](int64_t i) { return static_cast<int32_t>(i % 3); });
  call_.operand("x").fill<float>([](int64_t i) { return static_cast<float>(i % 7) - 2.5f; });
  ASSERT_EQ(qf_weight_packed_bytes(&call_.args.weight, {QF_CPU, 0}, &bytes_), QF_OK) << qf_last_error();
  Operand packed("weight.packed", kU8, {static_cast<int64_t>(bytes_)}, true);
  call_.args.weight.packed = &packed.view;
  ASSERT_EQ(qf_weight_pack(&call_.args.weight, nullptr), QF_OK) << qf_last_error();
  ASSERT_EQ(call_.run(), QF_OK) << qf_last_error();
  const Operand& y = call_.operand("y");
  const std::vector<uint8_t> with_both(y.memory.get(), y.memory.get() + y.bytes);

  call_.args.weight.codes = call_.args.weight.scale = call_.args.weight.zero = call_.args.weight.g_idx =
      call_.args.weight.offset = nullptr;
  for (const char* name : {"weight.codes", "weight.scale", "weight.zero", "weight.offset", "weight.g_idx"}) {
    std::memset(call_.operand(name).memory.get(), 0xff, call_.operand(name).bytes);
  }
  std::memset(y.memory.get(), 0xff, y.bytes);
  ASSERT_EQ(call_.run(), QF_OK) << qf_last_error();
  EXPECT_EQ(with_both, std::vector<uint8_t>(y.memory.get(), y.memory.get() + y.bytes));
}

// ---- Sizes of zero ----

TEST(Empty, NoRowsIsNothingToDo) {
  LinearCall linear;
  for (const char* name : {"x", "residual", "y"})
    linear.operand(name).shape[0] = 0, linear.operand(name).view.data = nullptr;
  EXPECT_EQ(linear.run(), QF_OK) << qf_last_error();
  EXPECT_TRUE(linear.outputs_are_untouched());

  QuantizeCall quantize;
  for (Operand& operand : quantize.operands) operand.shape[0] = 0;
  EXPECT_EQ(quantize.run(), QF_OK) << qf_last_error();
  EXPECT_TRUE(quantize.outputs_are_untouched());
}

// A scale of the whole tensor is there, whether or not the tensor is empty.
TEST(Empty, OneScaleForNothing) {
  float scale = 1;
  int64_t one[] = {1}, none[] = {0, kK}, rows[] = {kN, kK}, result[] = {0, kN};
  qf_tensor s = {&scale, {QF_CPU, 0}, 1, kF32, one, nullptr, 0};
  qf_tensor x = {nullptr, {QF_CPU, 0}, 2, kF32, none, nullptr, 0};
  qf_tensor q = {nullptr, {QF_CPU, 0}, 2, kI8, none, nullptr, 0};
  qf_quantize_args quantize = {};
  quantize.x = &x, quantize.format = QF_INT8, quantize.scale_mode = QF_SCALE_STATIC;
  quantize.q = &q, quantize.scale = &s;
  EXPECT_EQ(qf_quantize(&quantize, nullptr), QF_OK) << qf_last_error();
  qf_dequantize_args dequantize = {};
  dequantize.q = &q, dequantize.format = QF_INT8, dequantize.scale = &s, dequantize.x = &x;
  EXPECT_EQ(qf_dequantize(&dequantize, nullptr), QF_OK) << qf_last_error();
  std::vector<int8_t> b(static_cast<size_t>(kN * kK));
  qf_tensor w = {b.data(), {QF_CPU, 0}, 2, kI8, rows, nullptr, 0};
  qf_tensor y = {nullptr, {QF_CPU, 0}, 2, kF32, result, nullptr, 0};
  qf_scaled_mm_args product = {};
  product.a = &q, product.b = &w, product.c = &y;
  product.a_format = product.b_format = QF_INT8;
  product.a_scale = product.b_scale = &s;
  EXPECT_EQ(qf_scaled_mm(&product, nullptr), QF_OK) << qf_last_error();
  one[0] = 2;
  EXPECT_EQ(qf_quantize(&quantize, nullptr), QF_BAD_ARGUMENT);
}

TEST(Empty, NoColumnsIsNothingToDo) {
  ScaledMmCall call;
  for (const char* name : {"b", "b_scale", "b_zero", "bias"}) call.operand(name).shape[0] = 0;
  call.operand("c").shape[1] = 0;
  EXPECT_EQ(call.run(), QF_OK) << qf_last_error();
  EXPECT_TRUE(call.outputs_are_untouched());
}

// No columns to sum over: y = act(bias) + residual.
TEST(Empty, NoInnerSizeLeavesTheEpilogueOfTheBias) {
  LinearCall call;
  call.args.weight.k = 0;
  call.args.weight.g_idx = nullptr;
  for (const char* name : {"x", "weight.codes", "weight.scale", "weight.zero", "weight.offset"})
    call.operand(name).shape[1] = 0;
  call.operand("x_gain").shape[0] = 0;
  call.args.activation = QF_RELU;
  call.operand("bias").fill<float>([](int64_t i) { return static_cast<float>(i) - 2.0f; });
  EXPECT_EQ(call.run(), QF_OK) << qf_last_error();
  for (int64_t r = 0; r < kM; ++r) {
    for (int64_t c = 0; c < kN; ++c) {
      EXPECT_EQ(call.operand("y").at<float>(r * kN + c),
                (c > 2 ? static_cast<float>(c) - 2.0f : 0.0f) + 1.0f);
    }
  }

  LinearBackwardCall backward;
  backward.args.weight.n = 0;
  backward.operand("dy").shape[1] = 0;
  for (const char* name : {"weight.codes", "weight.scale", "weight.zero", "weight.offset"})
    backward.operand(name).shape[0] = 0;
  EXPECT_EQ(backward.run(), QF_OK) << qf_last_error();
  for (int64_t i = 0; i < kM * kK; ++i) EXPECT_EQ(backward.operand("dx").at<float>(i), 0.0f);
}

TEST(Huge, SizesThatAgreeAndOverflowAreRefused) {
  QuantizeCall call;
  int64_t shape[] = {int64_t{1} << 40, int64_t{1} << 40},
          scale_shape[] = {int64_t{1} << 40, int64_t{1} << 38};
  for (Operand& operand : call.operands) {
    operand.view.shape = operand.name == "x" || operand.name == "q" ? shape : scale_shape;
    operand.view.strides = nullptr;
  }
  expect_bad(call, "more than memory can hold");
}

// ---- Odd and ends of the interface ----

TEST(Threads, CountIsChecked) {
  const int32_t before = qf_get_num_threads();
  EXPECT_EQ(qf_set_num_threads(-1), QF_BAD_ARGUMENT);
  EXPECT_NE(std::string(qf_last_error()).find("num_threads"), std::string::npos);
  EXPECT_EQ(qf_get_num_threads(), before);
  EXPECT_EQ(qf_set_num_threads(3), QF_OK);
  EXPECT_EQ(qf_get_num_threads(), 3);
  EXPECT_EQ(qf_set_num_threads(0), QF_OK);
  EXPECT_EQ(qf_get_num_threads(), before);
}

TEST(Text, IsCutToItsCapacityAndTerminated) {
  const size_t length = qf_kernels(nullptr, 0);
  ASSERT_GT(length, 10u);
  char small[8];
  std::memset(small, 'x', sizeof small);
  EXPECT_EQ(qf_kernels(small, 5), length);
  EXPECT_EQ(std::string(small), "[{\"o");
  EXPECT_EQ(small[5], 'x');
}

}  // namespace
}  // namespace quantfuse
