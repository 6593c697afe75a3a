// SPDX-License-Identifier: Apache-2.0
//
// linear with batch_invariant: a row has the same bits alone, among 300, and wherever among them it stands,
// and one kernel for all of them, or one that has the same sums. On the CPU, once per instruction set, and on
// a GPU where there is one.
#include <gtest/gtest.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <random>

#include "cases/buffer.h"
#include "cases/tensor.h"
#include "cases/verify.h"
#include "formats/codes.h"

namespace quantfuse::cases {
namespace {

constexpr int64_t kRows = 300;

// A compact matrix on a device.
struct DeviceMatrix {
  int64_t shape[2];
  qf_dtype dtype;
  Buffer memory;
  qf_device device;

  DeviceMatrix(qf_device where, qf_dtype type, int64_t rows, int64_t cols)
      : shape{rows, cols},
        dtype(type),
        memory(where, static_cast<size_t>(rows * cols) * type.bits / 8),
        device(where) {}
  int64_t row_bytes() const { return shape[1] * dtype.bits / 8; }
  // `count` rows from `first` on; `sizes` must live as long as the view.
  qf_tensor view(int64_t first, int64_t count, int64_t (&sizes)[2]) const {
    sizes[0] = count, sizes[1] = shape[1];
    return {static_cast<char*>(memory.data()) + first * row_bytes(), device, 2, dtype, sizes, nullptr, 0};
  }
};

struct Scheme {
  const char* name;
  qf_format format;
  qf_block block;
  qf_format act_format;
  qf_dtype dtype;
  bool is_asymmetric, is_gated;
  qf_activation activation;
};

const Scheme kSchemes[] = {
    {"int4 g128 bf16", QF_INT4, {1, 128}, QF_FORMAT_NONE, kBf16, false, false, QF_SILU},
    {"int4 g32 asymmetric f16 gated", QF_INT4, {1, 32}, QF_FORMAT_NONE, kF16, true, true, QF_SILU},
    {"int8 f16", QF_INT8, {1, 0}, QF_FORMAT_NONE, kF16, false, false, QF_GELU},
    {"e4m3 blocks bf16", QF_FP8_E4M3, {128, 128}, QF_FORMAT_NONE, kBf16, false, false, QF_IDENTITY},
    {"nf4 f32", QF_NF4, {1, 64}, QF_FORMAT_NONE, kF32, false, false, QF_RELU},
    {"int8 with int8", QF_INT8, {1, 0}, QF_INT8, kBf16, false, true, QF_SILU},
    {"int4 with int8", QF_INT4, {1, 128}, QF_INT8, kF16, false, false, QF_GELU_TANH},
    {"e4m3 with e4m3", QF_FP8_E4M3, {1, 0}, QF_FP8_E4M3, kBf16, false, false, QF_SILU},
    {"bf16", QF_BF16, {0, 0}, QF_FORMAT_NONE, kBf16, false, false, QF_GELU},
    {"f32", QF_F32, {0, 0}, QF_FORMAT_NONE, kF32, false, true, QF_SILU},
};

class Layer {
 public:
  static constexpr int64_t kN = 80, kK = 392;

  Layer(const Scheme& scheme, qf_device device)
      : scheme_(scheme),
        device_(device),
        codes_(device, code_dtype(scheme.format, false), kN,
               is_plain(scheme.format) ? kK : quantfuse::row_bytes(scheme.format, kK)),
        scale_(device, kF32, ceil_div(kN, resolved(scheme.block, kN, kK).rows),
               ceil_div(kK, resolved(scheme.block, kN, kK).cols)),
        zero_(device, kI8, scale_.shape[0], scale_.shape[1]),
        x_(device, scheme.dtype, kRows, kK) {
    fill_bytes(codes_, [&] { return is_plain(scheme.format) ? number(codes_.dtype, 0.1) : code(); });
    fill_bytes(scale_, [&] { return bytes_of(static_cast<float>(uniform(0.01, 0.02))); });
    fill_bytes(zero_, [&] { return std::vector<uint8_t>{static_cast<uint8_t>(random_() % 8)}; });
    fill_bytes(x_, [&] { return number(scheme.dtype, 1.0); });
    pack();
  }

  // y of rows [first, first + count) of x, on its own.
  std::vector<uint8_t> run(int64_t first, int64_t count) {
    DeviceMatrix y(device_, scheme_.dtype, count, scheme_.is_gated ? kN / 2 : kN);
    int64_t x_sizes[2], y_sizes[2];
    const qf_tensor x_view = x_.view(first, count, x_sizes), y_view = y.view(0, count, y_sizes);
    const qf_linear_args args = arguments(x_view, y_view);
    uint64_t bytes = 0;
    check(qf_linear_workspace(&args, nullptr, &bytes));
    const Buffer workspace(device_, bytes);
    qf_call call = {};
    call.workspace = workspace.data(), call.workspace_bytes = workspace.size();
    check(qf_linear(&args, &call));
    synchronize(device_);
    return y.memory.read();
  }

  std::string kernel_for(int64_t count) {
    DeviceMatrix y(device_, scheme_.dtype, count, scheme_.is_gated ? kN / 2 : kN);
    int64_t x_sizes[2], y_sizes[2];
    const qf_tensor x_view = x_.view(0, count, x_sizes), y_view = y.view(0, count, y_sizes);
    const qf_linear_args args = arguments(x_view, y_view);
    std::string json(qf_linear_explain(&args, nullptr, nullptr, 0) + 1, '\0');
    qf_linear_explain(&args, nullptr, json.data(), json.size());
    json.pop_back();
    return nlohmann::json::parse(json)["chosen"];
  }

 private:
  static void check(qf_status status) {
    if (status != QF_OK) throw std::runtime_error(qf_last_error());
  }
  double uniform(double low, double high) {
    return low + (high - low) * static_cast<double>(random_()) / static_cast<double>(UINT32_MAX);
  }
  template <class T>
  static std::vector<uint8_t> bytes_of(T value) {
    std::vector<uint8_t> bytes(sizeof value);
    std::memcpy(bytes.data(), &value, sizeof value);
    return bytes;
  }
  std::vector<uint8_t> number(qf_dtype dtype, double size) {
    const auto value = static_cast<float>(uniform(-size, size));
    f16 half;
    bf16 brain;
    from_float(value, half), from_float(value, brain);
    return dtype.bits == 32 ? bytes_of(value) : dtype.code == 2 ? bytes_of(half) : bytes_of(brain);
  }
  std::vector<uint8_t> code() {
    auto byte = static_cast<uint8_t>(random_());
    if (scheme_.format == QF_FP8_E4M3 && (byte & 0x7f) == 0x7f) byte = 0;
    return {byte};
  }
  template <class Draw>
  static void fill_bytes(DeviceMatrix& matrix, const Draw& draw) {
    std::vector<uint8_t> bytes;
    while (bytes.size() < matrix.memory.size()) {
      const std::vector<uint8_t> more = draw();
      bytes.insert(bytes.end(), more.begin(), more.end());
    }
    matrix.memory.write(bytes.data());
  }

  qf_weight weight(qf_tensor (&views)[4], int64_t (&sizes)[4][2]) const {
    qf_weight w = {};
    w.format = scheme_.format, w.n = kN, w.k = kK, w.block = scheme_.block, w.is_gated = scheme_.is_gated;
    views[0] = codes_.view(0, kN, sizes[0]), w.codes = &views[0];
    if (is_plain(scheme_.format)) return w;
    views[1] = scale_.view(0, scale_.shape[0], sizes[1]), w.scale = &views[1];
    views[2] = zero_.view(0, zero_.shape[0], sizes[2]);
    if (scheme_.is_asymmetric) w.zero = &views[2];
    return w;
  }
  void pack() {
    weight_ = weight(views_, sizes_);
    uint64_t bytes = 0;
    const qf_status status = qf_weight_packed_bytes(&weight_, device_, &bytes);
    if (status == QF_UNSUPPORTED) return;
    check(status);
    packed_ = Buffer(device_, bytes);
    sizes_[3][0] = static_cast<int64_t>(bytes);
    views_[3] = {packed_.data(), device_, 1, kU8, sizes_[3], nullptr, 0};
    weight_.packed = &views_[3];
    check(qf_weight_pack(&weight_, nullptr));
  }
  qf_linear_args arguments(const qf_tensor& x, const qf_tensor& y) const {
    qf_linear_args args = {};
    args.x = &x, args.y = &y;
    args.act_format = scheme_.act_format;
    args.weight = weight_;
    args.activation = scheme_.activation;
    args.batch_invariant = 1;
    return args;
  }

  const Scheme& scheme_;
  qf_device device_;
  std::mt19937 random_{7};
  DeviceMatrix codes_, scale_, zero_, x_;
  Buffer packed_;
  qf_tensor views_[4] = {};
  int64_t sizes_[4][2] = {};
  qf_weight weight_ = {};
};

void expect_the_same_rows(qf_device device) {
  for (const Scheme& scheme : kSchemes) {
    SCOPED_TRACE(scheme.name);
    Layer layer(scheme, device);
    const std::vector<uint8_t> all = layer.run(0, kRows);
    const size_t row_bytes = all.size() / kRows;
    for (int64_t count = 1; count < kRows; ++count) {
      const int64_t first = 7 * count % (kRows - count + 1);
      const std::vector<uint8_t> some = layer.run(first, count);
      ASSERT_EQ(std::memcmp(some.data(), all.data() + static_cast<size_t>(first) * row_bytes, some.size()), 0)
          << count << " rows from " << first;
    }
    const std::string kernel = layer.kernel_for(1);
    for (const int64_t count : {2, 8, 17, 64, 129, 300}) {
      const std::string other = layer.kernel_for(count);
      EXPECT_EQ(other == "linear_int_amx" ? "linear_int_avx512" : other, kernel) << count;
    }
  }
}

TEST(BatchInvariant, OnTheCpu) { expect_the_same_rows({QF_CPU, 0}); }

TEST(BatchInvariant, OnAGpu) {
  if (!has_cuda_device()) GTEST_SKIP() << "there is no CUDA device here";
  expect_the_same_rows({QF_CUDA, 0});
}

}  // namespace
}  // namespace quantfuse::cases
