// SPDX-License-Identifier: Apache-2.0
//
// What the packed weight of a CUDA device looks like from outside: sizes and refusals, which need no device.
#include <gtest/gtest.h>

#include <string>

#include "call.h"

namespace quantfuse {
namespace {

constexpr qf_device kCuda = {QF_CUDA, 0};
constexpr qf_dtype kE8m0 = {14, 8, 1};

// Shapes of a weight without data.
struct Shapes {
  int64_t codes_shape[2], scale_shape[2], g_idx_shape[1], packed_shape[1] = {0};
  qf_tensor codes, scale, zero, g_idx, packed;
  qf_weight weight = {};

  Shapes(qf_format format, int64_t n, int64_t k, int64_t group) {
    const bool is_4bit = format == QF_INT4 || format == QF_FP4_E2M1 || format == QF_NF4;
    codes_shape[0] = n, codes_shape[1] = is_4bit ? (k + 1) / 2 : k;
    scale_shape[0] = n, scale_shape[1] = group ? (k + group - 1) / group : 1;
    g_idx_shape[0] = k;
    codes = {nullptr, kCuda, 2, is_4bit ? kU8 : kI8, codes_shape, nullptr, 0};
    scale = {nullptr, kCuda, 2, kF32, scale_shape, nullptr, 0};
    zero = {nullptr, kCuda, 2, kI8, scale_shape, nullptr, 0};
    g_idx = {nullptr, kCuda, 1, kI32, g_idx_shape, nullptr, 0};
    packed = {nullptr, kCuda, 1, kU8, packed_shape, nullptr, 0};
    weight.format = format, weight.n = n, weight.k = k, weight.block = {1, group};
    weight.codes = &codes, weight.scale = &scale;
  }
  uint64_t bytes() const {
    uint64_t count = 0;
    EXPECT_EQ(qf_weight_packed_bytes(&weight, kCuda, &count), QF_OK) << qf_last_error();
    return count;
  }
};

TEST(CudaPack, HasTilesOf16RowsAnd128ColumnsWithTheirScales) {
  EXPECT_EQ(Shapes(QF_INT4, 4096, 4096, 128).bytes(), 256u * 32 * (1024 + 64));
  EXPECT_EQ(Shapes(QF_INT4, 4096, 4096, 32).bytes(), 256u * 32 * (1024 + 4 * 64));
  EXPECT_EQ(Shapes(QF_INT8, 17, 129, 0).bytes(), 2u * 2 * (2048 + 64));
  EXPECT_EQ(Shapes(QF_INT8, 16, 256, 16).bytes(), 2u * (2048 + 8 * 64));  // Q6_K
  EXPECT_EQ(Shapes(QF_INT4, 16, 384, 96).bytes(), 3u * (1024 + 4 * 64));  // three times 32
  EXPECT_EQ(Shapes(QF_INT4, 16, 384, 192).bytes(), 3u * (1024 + 2 * 64));
  EXPECT_EQ(Shapes(QF_NF4, 16, 256, 64).bytes(), 2u * (1024 + 2 * 64));
  Shapes asymmetric(QF_INT4, 64, 256, 64);
  asymmetric.weight.zero = &asymmetric.zero;
  EXPECT_EQ(asymmetric.bytes(), 4u * 2 * (1024 + 2 * 80));
  asymmetric.zero.dtype = kF32;  // no integers: offsets, which are float32
  EXPECT_EQ(asymmetric.bytes(), 4u * 2 * (1024 + 2 * 128));
  Shapes offsets(QF_INT8, 64, 256, 32);
  offsets.weight.offset = &offsets.scale;
  EXPECT_EQ(offsets.bytes(), 4u * 2 * (2048 + 4 * 128));
  Shapes mxfp4(QF_FP4_E2M1, 64, 256, 32);  // scales of a byte, but float32 in any other case
  EXPECT_EQ(mxfp4.bytes(), 4u * 2 * (1024 + 4 * 64));
  for (const qf_dtype bytes : {kE8m0, kU8}) {  // as NumPy has them
    mxfp4.scale.dtype = bytes;
    EXPECT_EQ(mxfp4.bytes(), 4u * 2 * (1024 + 4 * 16));
  }
  mxfp4.weight.g_idx = &mxfp4.g_idx;
  EXPECT_EQ(mxfp4.bytes(), 4u * 2 * (1024 + 4 * 64) + 258 * 4);
  Shapes gated(QF_INT4, 34, 128, 128);  // 17 gate rows and 17 up rows, 8 of each in a strip
  gated.weight.is_gated = 1;
  EXPECT_EQ(gated.bytes(), 3u * (1024 + 64));
  Shapes sorted(QF_INT4, 64, 256, 64);  // and the column that each of the sorted ones is
  sorted.weight.g_idx = &sorted.g_idx;
  EXPECT_EQ(sorted.bytes(), 4u * 2 * (1024 + 2 * 64) + 258 * 4);
}

void expect_unsupported(const Shapes& shapes, const char* what) {
  uint64_t bytes = 0;
  EXPECT_EQ(qf_weight_packed_bytes(&shapes.weight, kCuda, &bytes), QF_UNSUPPORTED) << what;
  EXPECT_NE(std::string(qf_last_error()).find(what), std::string::npos) << qf_last_error();
}

TEST(CudaPack, SaysWhichWeightsHaveNone) {
  expect_unsupported(Shapes(QF_INT4, 64, 384, 24), "groups of multiples of 16");
  Shapes groups(QF_INT4, 64, 256, 64);
  groups.scale_shape[1] = 3, groups.weight.g_idx = &groups.g_idx;
  expect_unsupported(groups, "differ in size");
  expect_unsupported(Shapes(QF_INT4, 0, 256, 128), "empty");
}

// explain() parses as a call does, and needs no data.
std::string explain(const Shapes& shapes) {
  const int64_t x_shape[2] = {3, shapes.weight.k}, y_shape[2] = {3, shapes.weight.n};
  const qf_tensor x = {nullptr, kCuda, 2, kBf16, const_cast<int64_t*>(x_shape), nullptr, 0};
  const qf_tensor y = {nullptr, kCuda, 2, kBf16, const_cast<int64_t*>(y_shape), nullptr, 0};
  qf_linear_args args = {};
  args.x = &x, args.y = &y, args.weight = shapes.weight;
  const size_t length = qf_linear_explain(&args, nullptr, nullptr, 0);
  if (length == 0) return qf_last_error();
  std::string json(length + 1, '\0');
  qf_linear_explain(&args, nullptr, json.data(), json.size());
  return json;
}

TEST(CudaPack, BytesOfAnotherSizeAreRefused) {
  Shapes shapes(QF_INT4, 64, 256, 128);
  shapes.packed_shape[0] = static_cast<int64_t>(shapes.bytes());
  shapes.weight.packed = &shapes.packed;
  EXPECT_NE(explain(shapes).find("candidates"), std::string::npos);
  shapes.packed_shape[0] -= 64;
  EXPECT_NE(explain(shapes).find("weight.packed has 8640 bytes, expected 8704"), std::string::npos)
      << explain(shapes);
}

TEST(CudaPack, TheSizeTellsOfZeroPointsWhereTheCanonicalWeightIsGone) {
  Shapes shapes(QF_INT4, 64, 256, 128);
  shapes.weight.zero = &shapes.zero;
  shapes.packed_shape[0] = static_cast<int64_t>(shapes.bytes());
  shapes.weight.packed = &shapes.packed;
  shapes.weight.codes = shapes.weight.scale = shapes.weight.zero = nullptr;
  EXPECT_NE(explain(shapes).find("candidates"), std::string::npos) << explain(shapes);
  shapes.weight.format = QF_FP4_E2M1;  // which has no zero points
  EXPECT_NE(explain(shapes).find("weight.packed has"), std::string::npos) << explain(shapes);
}

TEST(CudaPack, TheSizeTellsOfOffsets) {
  Shapes shapes(QF_INT4, 64, 256, 128);
  shapes.weight.offset = &shapes.scale;
  shapes.packed_shape[0] = static_cast<int64_t>(shapes.bytes());
  shapes.weight.packed = &shapes.packed;
  shapes.weight.codes = shapes.weight.scale = shapes.weight.offset = nullptr;
  EXPECT_NE(explain(shapes).find("candidates"), std::string::npos) << explain(shapes);
  shapes.weight.format = QF_FP4_E2M1;  // which has none
  EXPECT_NE(explain(shapes).find("weight.packed has"), std::string::npos) << explain(shapes);
}

TEST(CudaPack, TheSizeTellsOfScalesOfAByte) {
  for (const bool has_bytes : {false, true}) {
    Shapes shapes(QF_FP4_E2M1, 64, 256, 32);
    if (has_bytes) shapes.scale.dtype = kE8m0;
    shapes.packed_shape[0] = static_cast<int64_t>(shapes.bytes());
    shapes.weight.packed = &shapes.packed;
    shapes.weight.codes = shapes.weight.scale = nullptr;
    EXPECT_NE(explain(shapes).find("candidates"), std::string::npos) << explain(shapes);
    shapes.packed_shape[0] += 64;
    EXPECT_NE(explain(shapes).find("weight.packed has"), std::string::npos) << explain(shapes);
  }
}

TEST(CudaPack, TheSizeTellsOfSortedColumnsToo) {
  for (const bool has_zeros : {false, true}) {
    Shapes shapes(QF_INT4, 128, 256, 128);
    shapes.weight.g_idx = &shapes.g_idx;
    if (has_zeros) shapes.weight.zero = &shapes.zero;
    shapes.packed_shape[0] = static_cast<int64_t>(shapes.bytes());
    shapes.weight.packed = &shapes.packed;
    EXPECT_NE(explain(shapes).find("candidates"), std::string::npos) << explain(shapes);
    shapes.weight.codes = shapes.weight.scale = shapes.weight.zero = shapes.weight.g_idx = nullptr;
    const std::string verdicts = explain(shapes);
    EXPECT_NE(verdicts.find("candidates"), std::string::npos) << verdicts;
    EXPECT_EQ(verdicts.find("the weight's columns are in the order of x"), std::string::npos) << verdicts;
  }
}

}  // namespace
}  // namespace quantfuse
