// SPDX-License-Identifier: Apache-2.0
#include "linear/weight.h"

#include "core/block.h"

namespace quantfuse {
namespace {

void check_plain(const Arguments& arg, const qf_weight& a) {
  arg.require(!a.scale, "weight.scale is given, and a weight that is not quantized has none");
  arg.require(!a.zero, "weight.zero is given, and a weight that is not quantized has none");
  arg.require(!a.offset, "weight.offset is given, and a weight that is not quantized has none");
  arg.require(!a.g_idx, "weight.g_idx is given, and a weight that is not quantized has none");
  arg.require(a.block.rows == 0 && a.block.cols == 0,
              "weight.block is given, and a weight that is not quantized has none");
}

}  // namespace

Weight parse_weight(Arguments& arg, const qf_weight& a, std::initializer_list<qf_format> formats) {
  Weight w;
  check_format(arg, "weight.format", a.format, formats);
  if (is_plain(a.format)) check_plain(arg, a);
  arg.require(a.n >= 0 && a.k >= 0, "weight.n or weight.k is negative");
  w.format = a.format;
  w.n = a.n, w.k = a.k;
  w.is_gated = a.is_gated != 0;
  w.is_constant = a.is_constant != 0 || a.packed;  // packing waited for all that wrote it
  arg.require(!w.is_gated || a.n % 2 == 0,
              "weight.n is odd, expected the even number of rows of a merged gate|up weight");
  w.block = resolve_block(arg, "weight.block", a.block, a.n, a.k);
  w.num_groups = ceil_div(w.k, w.block.cols);
  arg.require(a.codes || a.packed, "weight has neither codes nor packed");

  if (a.codes) {
    Dim n{"n", w.n}, code_cols{"code bytes", row_bytes(w.format, w.k)}, k{"k", w.k};
    auto codes = arg.expect("weight.codes", a.codes);
    w.codes = codes.shape(n, is_plain(w.format) ? k : code_cols).codes(w.format).matrix();
    if (a.g_idx) {
      w.g_idx = arg.expect("weight.g_idx", a.g_idx).shape(k).dtype({DType::i32}).vector();
      Dim row_blocks{"row blocks", ceil_div(w.n, w.block.rows)}, groups{"groups"};
      w.scale = arg.expect("weight.scale", a.scale)
                    .shape(row_blocks, groups)
                    .dtype({DType::f32, DType::e8m0, DType::u8})
                    .compact();
      w.num_groups = groups;
    } else if (!is_plain(w.format)) {
      w.scale =
          expect_scale(arg, "weight.scale", a.scale, w.block, w.n, w.k, {DType::f32, DType::e8m0, DType::u8});
    }
    if (a.zero) {
      arg.require(is_integer(w.format), "weight.zero is given, and floating formats have no zero points");
      Dim row_blocks{"row blocks", w.scale.rows}, groups{"groups", w.num_groups};
      w.zero = arg.expect("weight.zero", a.zero)
                   .shape_squeezed(row_blocks, groups)
                   .dtype({DType::i8, DType::f32})
                   .compact();
    }
    if (a.offset) {
      arg.require(is_integer(w.format), "weight.offset is given, and floating formats have no offsets");
      Dim row_blocks{"row blocks", w.scale.rows}, groups{"groups", w.num_groups};
      w.offset = arg.expect("weight.offset", a.offset)
                     .shape_squeezed(row_blocks, groups)
                     .dtype({DType::f32})
                     .compact();
    }
  }
  if (a.packed) {
    Dim bytes{"bytes"};
    w.packed = arg.expect("weight.packed", a.packed).shape(bytes).dtype({DType::u8}).aligned(64).vector();
  }
  return w;
}

void check_weight_values(const Arguments& arg, const Weight& w) {
  if (arg.device().type != QF_CPU) return;
  check_scales_of(arg, "weight.scale", w.format, w.scale);
  check_finite(arg, "weight.zero", w.zero);
  check_finite(arg, "weight.offset", w.offset);
  check_groups(arg, "weight.g_idx", w.g_idx, w.num_groups);
}

}  // namespace quantfuse
