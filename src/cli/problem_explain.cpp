// SPDX-License-Identifier: Apache-2.0
//
// Each operation's problem as tensors without data, put to its qf_OP_explain.
#include "commands.h"
#include "core/dtype.h"
#include "problem.h"
#include "tensor.h"

namespace quantfuse::cli {
namespace {

template <class Args, class Explain>
std::string ask(Explain explain, const Args& args, const qf_call& call) {
  const size_t length = explain(&args, &call, nullptr, 0);
  if (length == 0) throw UsageError(qf_last_error());
  std::string text(length + 1, '\0');
  explain(&args, &call, text.data(), text.size());
  text.resize(length);
  return text;
}

// The tensors of a quantized weight and the view of them that calls take.
struct Weight {
  Tensor codes, scale, zero, offset, g_idx, packed;
  qf_weight view = {};

  Weight(const cases::WeightSpec& s, int64_t n, int64_t k, qf_device device) {
    const int64_t group = s.block.cols == 0 ? k : s.block.cols;
    if (is_plain(s.format)) {
      codes = Tensor(s.format == QF_F32 ? kF32 : s.format == QF_F16 ? kF16 : kBf16, n, k, device);
      view = {s.format,          n,       k,      {}, codes.get(), nullptr, nullptr, nullptr, s.is_gated,
              /*is_constant=*/1, nullptr, nullptr};
      return;
    }
    codes = codes_tensor(s.format, n, k, device);
    scale = block_tensor(s.has_e8m0_scale ? kE8m0 : kF32, s.block, n, k, device);
    if (s.is_asymmetric) zero = block_tensor(s.has_float_zero ? kF32 : kI8, s.block, n, k, device);
    if (s.has_offset) offset = block_tensor(kF32, s.block, n, k, device);
    if (s.has_g_idx && group > 0) g_idx = Tensor::vector(kI32, k, device);
    view = {s.format,   n,           k,          s.block,           codes.get(), scale.get(),
            zero.get(), g_idx.get(), s.is_gated, /*is_constant=*/1, nullptr,     offset.get()};
  }

  // As a layer that was packed when it was loaded, if this device has a packed form for it.
  void pretend_packed(qf_device device) {
    uint64_t bytes = 0;
    if (qf_weight_packed_bytes(&view, device, &bytes) != QF_OK || bytes == 0) return;
    packed = Tensor::vector(kU8, static_cast<int64_t>(bytes), device);
    view.packed = packed.get();
  }
};

// An output of type `dtype`, or codes of `format` with their scale.
struct Output {
  Tensor y, scale;

  Output(qf_format format, qf_scale_mode mode, int64_t group, qf_dtype dtype, int64_t m, int64_t n,
         qf_device device) {
    if (format == QF_FORMAT_NONE) {
      y = Tensor(dtype, m, n, device);
      return;
    }
    y = codes_tensor(format, m, n, device);
    scale = mode == QF_SCALE_STATIC ? Tensor::vector(kF32, 1, device)
                                    : block_tensor(kF32, {1, group}, m, n, device);
  }
};

struct Explainer {
  qf_device device;
  qf_call call;

  std::string operator()(const cases::LinearSpec& s) const {
    Weight weight(s.weight, s.n, s.k, device);
    weight.pretend_packed(device);
    const int64_t n_out = s.weight.is_gated ? s.n / 2 : s.n;
    const Tensor x =
        s.has_quantized_x ? codes_tensor(s.act_format, s.m, s.k, device) : Tensor(s.dtype, s.m, s.k, device);
    const Tensor x_scale =
        s.has_quantized_x ? block_tensor(kF32, {1, s.act_group}, s.m, s.k, device) : Tensor();
    const Tensor x_gain = s.has_x_gain ? Tensor::vector(s.dtype, s.k, device) : Tensor();
    const Tensor bias = s.has_bias ? Tensor::vector(s.dtype, s.n, device) : Tensor();
    const Tensor residual = s.has_residual ? Tensor(s.dtype, s.m, n_out, device) : Tensor();
    const Output out(s.out_format, s.out_mode, s.out_group, s.dtype, s.m, n_out, device);
    const qf_linear_args args = {.x = x.get(),
                                 .x_scale = x_scale.get(),
                                 .act_format = s.act_format,
                                 .act_group = s.act_group,
                                 .weight = weight.view,
                                 .bias = bias.get(),
                                 .activation = s.activation,
                                 .residual = residual.get(),
                                 .y = out.y.get(),
                                 .out_format = s.out_format,
                                 .out_mode = s.out_mode,
                                 .out_group = s.out_group,
                                 .out_scale = out.scale.get(),
                                 .batch_invariant = s.is_batch_invariant,
                                 .x_gain = x_gain.get(),
                                 .x_eps = 0,
                                 .fast_accumulation = s.has_fast_accumulation};
    return ask(qf_linear_explain, args, call);
  }

  std::string operator()(const cases::LinearBackwardSpec& s) const {
    const Weight weight(s.weight, s.n, s.k, device);
    const Tensor dy(s.dtype, s.m, s.n, device), dx(s.dtype, s.m, s.k, device);
    return ask(qf_linear_backward_explain, qf_linear_backward_args{dy.get(), weight.view, dx.get()}, call);
  }

  std::string operator()(const cases::ScaledMmSpec& s) const {
    const Tensor a = codes_tensor(s.a_format, s.m, s.k, device);
    const Tensor b = s.b_order == QF_NK ? codes_tensor(s.b_format, s.n, s.k, device)
                                        : codes_tensor(s.b_format, s.k, s.n, device);
    const Tensor c(s.out, s.m, s.n, device);
    const Tensor a_scale = s.has_scales ? block_tensor(kF32, s.a_block, s.m, s.k, device) : Tensor();
    const Tensor b_scale = s.has_scales ? block_tensor(kF32, s.b_block, s.n, s.k, device) : Tensor();
    const Tensor a_zero = s.has_a_zero ? Tensor::vector(kI32, s.m, device) : Tensor();
    const Tensor b_zero = s.has_b_zero ? Tensor::vector(kI32, s.n, device) : Tensor();
    const Tensor bias = s.has_bias ? Tensor::vector(kF32, s.n, device) : Tensor();
    const qf_scaled_mm_args args = {.a = a.get(),
                                    .b = b.get(),
                                    .c = c.get(),
                                    .a_format = s.a_format,
                                    .b_format = s.b_format,
                                    .b_order = s.b_order,
                                    .is_b_constant = 1,
                                    .k = s.k,
                                    .a_scale = a_scale.get(),
                                    .b_scale = b_scale.get(),
                                    .a_block = s.a_block,
                                    .b_block = s.b_block,
                                    .a_zero = a_zero.get(),
                                    .b_zero = b_zero.get(),
                                    .bias = bias.get(),
                                    .fast_accumulation = s.has_fast_accumulation};
    return ask(qf_scaled_mm_explain, args, call);
  }

  std::string operator()(const cases::QuantizeSpec& s) const {
    const Tensor x(s.dtype, s.rows, s.cols, device), q = codes_tensor(s.format, s.rows, s.cols, device);
    const Tensor scale = block_tensor(s.has_e8m0_scale ? kE8m0 : kF32, s.block, s.rows, s.cols, device);
    const Tensor zero = s.is_asymmetric ? block_tensor(kI8, s.block, s.rows, s.cols, device) : Tensor();
    const Tensor sums =
        s.wants_row_sums ? block_tensor(kI32, {1, s.block.cols}, s.rows, s.cols, device) : Tensor();
    const qf_quantize_args args = {x.get(),     s.format,   s.block,    s.mode,    q.get(),
                                   scale.get(), zero.get(), sums.get(), s.hadamard};
    return ask(qf_quantize_explain, args, call);
  }

  std::string operator()(const cases::DequantizeSpec& s) const {
    const Tensor x(s.dtype, s.rows, s.cols, device), q = codes_tensor(s.format, s.rows, s.cols, device);
    const Tensor scale = block_tensor(s.has_e8m0_scale ? kE8m0 : kF32, s.block, s.rows, s.cols, device);
    const qf_dtype zero_type = s.has_float_zero ? kF32 : kI8;
    const Tensor zero = s.is_asymmetric ? block_tensor(zero_type, s.block, s.rows, s.cols, device) : Tensor();
    const Tensor g_idx = s.has_g_idx ? Tensor::vector(kI32, s.cols, device) : Tensor();
    const Tensor offset = s.has_offset ? block_tensor(kF32, s.block, s.rows, s.cols, device) : Tensor();
    const qf_dequantize_args args = {q.get(),    s.format,    s.block, scale.get(),
                                     zero.get(), g_idx.get(), x.get(), offset.get()};
    return ask(qf_dequantize_explain, args, call);
  }

  std::string operator()(const cases::RmsNormSpec& s) const {
    const Tensor x(s.dtype, s.m, s.n, device);
    const Tensor residual = s.has_residual ? Tensor(s.dtype, s.m, s.n, device) : Tensor();
    const Tensor gain = s.has_gain ? Tensor::vector(s.dtype, s.n, device) : Tensor();
    const Output out(s.out_format, s.out_mode, s.out_group, s.dtype, s.m, s.n, device);
    const qf_rms_norm_args args = {x.get(),         residual.get(), gain.get(), 1e-6,
                                   out.y.get(),     s.out_format,   s.out_mode, s.out_group,
                                   out.scale.get(), s.hadamard};
    return ask(qf_rms_norm_explain, args, call);
  }

  std::string operator()(const cases::GatedActSpec& s) const {
    const Tensor x(s.dtype, s.m, s.is_ungated ? s.n : 2 * s.n, device);
    const Output out(s.out_format, s.out_mode, s.out_group, s.dtype, s.m, s.n, device);
    const qf_gated_act_args args = {x.get(),     s.activation,    out.y.get(),  s.out_format, s.out_mode,
                                    s.out_group, out.scale.get(), s.is_ungated, s.hadamard};
    return ask(qf_gated_act_explain, args, call);
  }
};

}  // namespace

std::string explain_spec(const Spec& spec, qf_device device, const char* kernel, bool is_strict) {
  qf_call call = {};
  call.kernel = kernel;
  call.strict = is_strict;
  return std::visit(Explainer{device, call}, spec);
}

}  // namespace quantfuse::cli
