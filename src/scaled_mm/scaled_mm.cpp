// SPDX-License-Identifier: Apache-2.0
#include "scaled_mm/scaled_mm.h"

#include "core/block.h"

namespace quantfuse::scaled_mm {
namespace {

// Codes [rows, cols], two per byte along cols where they have 4 bits.
Matrix expect_codes(Arguments& arg, const char* name, const qf_tensor* tensor, qf_format format, Dim& rows,
                    Dim& cols, const char* half_name) {
  if (!is_packed_4bit(format)) return arg.expect(name, tensor).shape(rows, cols).codes(format).matrix();
  Dim bytes{half_name, ceil_div(cols, 2)};
  return arg.expect(name, tensor).shape(rows, bytes).codes(format).matrix();
}

// The number of columns of a: as given, or from the shape of a, which does not tell it where codes are two
// per byte.
Dim resolve_k(const Arguments& arg, const qf_scaled_mm_args& a) {
  if (a.k < 0) arg.fail("k is " + std::to_string(a.k) + ", expected 0 (from the shape of a) or more");
  if (a.k > 0 || !is_packed_4bit(a.a_format) || !a.a || a.a->ndim != 2 || !a.a->shape || a.a->shape[1] == 0) {
    return Dim{"k", a.k > 0 || is_packed_4bit(a.a_format) ? a.k : -1};
  }
  const int64_t bytes = a.a->shape[1];
  arg.fail("k is 0, expected " + std::to_string(2 * bytes - 1) + " or " + std::to_string(2 * bytes) +
           ": a has 4-bit codes, two per byte, in " + std::to_string(bytes) + " columns");
}

struct Scale {
  Matrix values;
  qf_block block;
};

// Over [rows, k]. Without a scale, or with nothing to scale, the block is the whole matrix.
Scale parse_scale(Arguments& arg, const char* name, const qf_tensor* tensor, const char* block_name,
                  qf_block block, int64_t rows, int64_t k) {
  Scale whole = {{}, resolve_block(arg, block_name, {0, 0}, rows, k)};
  if (!tensor) return whole;
  const qf_block resolved = resolve_block(arg, block_name, block, rows, k);
  const Matrix values = expect_scale(arg, name, tensor, resolved, rows, k, {DType::f32});
  check_scale_values(arg, name, values);
  return k > 0 ? Scale{values, resolved} : whole;
}

Vector parse_zero(Arguments& arg, const char* name, const qf_tensor* tensor, Dim& size) {
  if (!tensor) return {};
  Dim one{"1", 1};
  const bool is_one = tensor->ndim == 0 || (tensor->ndim == 1 && tensor->shape && tensor->shape[0] == 1);
  return arg.expect(name, tensor).shape(is_one ? one : size).dtype({DType::i32}).vector();
}

}  // namespace

Problem Op::parse(const Args& a, Arguments& arg) {
  check_format(arg, "a_format", a.a_format, {QF_INT8, QF_INT4, QF_FP8_E4M3, QF_FP8_E5M2});
  check_format(arg, "b_format", a.b_format, {QF_INT8, QF_INT4, QF_FP8_E4M3, QF_FP8_E5M2});
  if (is_integer(a.a_format) != is_integer(a.b_format)) {
    arg.fail(std::string("a_format is ") + format_name(a.a_format) + " and b_format is " +
             format_name(a.b_format) + ", expected both integer or both FP8");
  }
  arg.require(a.b_order == QF_NK || a.b_order == QF_KN, "b_order is unknown, expected QF_NK or QF_KN");

  Problem p = {};
  p.a_format = a.a_format, p.b_format = a.b_format, p.b_order = a.b_order;
  p.is_b_constant = a.is_b_constant != 0;
  p.fast_accumulation = a.fast_accumulation != 0;
  Dim m{"m"}, n{"n"}, k = resolve_k(arg, a);
  p.a = expect_codes(arg, "a", a.a, a.a_format, m, k, "ceil(k/2)");
  p.c = arg.expect("c", a.c).shape(m, n).dtype({DType::i32, DType::f32, DType::f16, DType::bf16}).matrix();
  p.b = a.b_order == QF_NK ? expect_codes(arg, "b", a.b, a.b_format, n, k, "ceil(k/2)")
                           : expect_codes(arg, "b", a.b, a.b_format, k, n, "ceil(n/2)");
  p.m = m, p.n = n, p.k = k;

  if (p.is_exact()) {
    arg.require(is_integer(a.a_format), "c has type i32, and the codes are FP8; expected f32, f16 or bf16");
    arg.require(
        !a.a_scale && !a.b_scale && !a.bias,
        "c has type i32, the sum of the codes' products: expected no a_scale, no b_scale and no bias");
  }
  const Scale a_scale = parse_scale(arg, "a_scale", a.a_scale, "a_block", a.a_block, p.m, p.k);
  const Scale b_scale = parse_scale(arg, "b_scale", a.b_scale, "b_block", a.b_block, p.n, p.k);
  p.a_scale = a_scale.values, p.a_block = a_scale.block;
  p.b_scale = b_scale.values, p.b_block = b_scale.block;

  arg.require(is_integer(a.a_format) || (!a.a_zero && !a.b_zero),
              "zero points are given, but the codes are FP8");
  p.a_zero = parse_zero(arg, "a_zero", a.a_zero, m);
  p.b_zero = parse_zero(arg, "b_zero", a.b_zero, n);
  if (a.bias) p.bias = arg.expect("bias", a.bias).shape(n).dtype(kFloats).vector();
  arg.writes("c");
  p.device = arg.device();
  return p;
}

}  // namespace quantfuse::scaled_mm

using namespace quantfuse;
QF_DEFINE_OPERATION(qf_scaled_mm, scaled_mm::Op)
