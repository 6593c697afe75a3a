// SPDX-License-Identifier: Apache-2.0
//
// Checks that several operations share: the rectangle that shares a scale, the scale tensor it implies, and
// its values.
#pragma once

#include "core/expect.h"

namespace quantfuse {

// `block` with whole dimensions (0) resolved to the matrix's own size; at least 1, so that it can divide.
qf_block resolve_block(const Arguments& arg, const char* name, qf_block block, int64_t rows, int64_t cols);

// The scale tensor of a [rows, cols] matrix cut into resolved blocks.
Matrix expect_scale(Arguments& arg, const char* name, const qf_tensor* tensor, qf_block block, int64_t rows,
                    int64_t cols, std::initializer_list<DType> allowed);

// The same, or the transpose of such a tensor: then col_stride is not 1 (Expect::compact_or_transposed).
Matrix expect_scale_or_transposed(Arguments& arg, const char* name, const qf_tensor* tensor, qf_block block,
                                  int64_t rows, int64_t cols, std::initializer_list<DType> allowed,
                                  int64_t& col_stride);

// That the groups of columns, where they are given, are some of `groups`. On a GPU the values cannot be
// looked at without synchronising: there the caller answers for them.
void check_groups(const Arguments& arg, const char* name, const Vector& g_idx, int64_t groups);

// The columns that are rotated together: 0 (none), or a power of two that divides `cols`.
int64_t check_hadamard(const Arguments& arg, const char* name, int64_t size, int64_t cols);

// Fails unless every scale and its inverse are finite and positive (E8M0: not NaN). Reads CPU memory only; on
// a GPU it would have to synchronise, so there a bad scale gives the result that arithmetic gives.
void check_scale_values(const Arguments& arg, const char* name, const Matrix& scale);
// The same of a tensor of floats that need only be finite.
void check_finite(const Arguments& arg, const char* name, const Matrix& values);

// The scales that go with codes of `format`: finite and positive, of a codebook finite.
void check_scales_of(const Arguments& arg, const char* name, qf_format format, const Matrix& scale);

// A code format among `allowed`.
void check_format(const Arguments& arg, const char* name, qf_format format,
                  std::initializer_list<qf_format> allowed);
// All formats that codes may have, where nothing is quantized to them.
inline constexpr std::initializer_list<qf_format> kWeightFormats = {
    QF_INT8, QF_INT4, QF_FP8_E4M3, QF_FP8_E5M2, QF_FP4_E2M1, QF_NF4, QF_FP4_BNB, QF_IQ4_NL};
// And those of linear, which takes weights that are not quantized too.
inline constexpr std::initializer_list<qf_format> kLinearWeightFormats = {
    QF_INT8,    QF_INT4,   QF_FP8_E4M3, QF_FP8_E5M2, QF_FP4_E2M1, QF_NF4,
    QF_FP4_BNB, QF_IQ4_NL, QF_F32,      QF_F16,      QF_BF16};

}  // namespace quantfuse
