// SPDX-License-Identifier: Apache-2.0
//
// Calls everything that quantfuse.hpp offers, from a C++17 program outside the project's own build.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <quantfuse/quantfuse.hpp>
#include <string>
#include <vector>

namespace {

using namespace quantfuse;

int failures = 0;

void expect(bool condition, const char* what) {
  if (condition) return;
  std::printf("FAILED: %s\n", what);
  ++failures;
}

template <class E, class Body>
void expect_throws(const char* part_of_message, Body body) {
  try {
    body();
  } catch (const E& error) {
    expect(std::string(error.what()).find(part_of_message) != std::string::npos, error.what());
    return;
  } catch (const std::exception& error) {
    expect(false, error.what());
    return;
  }
  expect(false, part_of_message);
}

bool near(const std::vector<float>& a, const std::vector<float>& b, double tolerance) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (!(std::fabs(a[i] - b[i]) <= tolerance)) return false;
  }
  return a.size() == b.size();
}

// Small integers: every format below holds them exactly, so the results are exact too.
std::vector<float> ramp(int64_t count, int period) {
  std::vector<float> v(static_cast<size_t>(count));
  for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(static_cast<int>(i) % period - period / 2);
  return v;
}

// w[n,k] x[m,k] -> y[m,n]
std::vector<float> product(const std::vector<float>& x, const std::vector<float>& w, int64_t m, int64_t n,
                           int64_t k) {
  std::vector<float> y(static_cast<size_t>(m * n));
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t c = 0; c < k; ++c) sum += static_cast<double>(x[i * k + c]) * w[j * k + c];
      y[i * n + j] = static_cast<float>(sum);
    }
  }
  return y;
}

void test_library() {
  expect(version() == "0.1.0", "version");
  expect(info().front() == '{', "info is a JSON object");
  expect(kernels().find("quantize_ref") != std::string::npos, "kernels names the reference");
  set_num_threads(1);
  expect(num_threads() == 1, "set_num_threads");
  set_num_threads(0);
  expect(num_threads() >= 1, "default threads");
}

void test_tensors() {
  std::vector<float> v(6);
  expect_throws<BadArgument>("6 elements, expected at least 8", [&] { Tensor(v, {2, 4}); });
  expect_throws<BadArgument>("strides", [&] { Tensor(v.data(), DType::f32, {2, 3}, cpu(), {3}); });
  const Tensor original(v.data(), DType::f32, {2, 2}, cpu(), {3, 1});
  Tensor copy;
  expect(!copy && copy.get() == nullptr, "a default tensor is absent");
  copy = original;
  expect(copy.get()->shape != original.get()->shape && copy.size(1) == 2, "a copy owns its shape");
  expect(copy.get()->strides[0] == 3 && copy.data() == v.data(), "a copy keeps strides and data");
}

void test_quantize() {
  const int64_t rows = 3, cols = 40;
  std::vector<float> x = ramp(rows * cols, 15), back(x.size());  // -7..7
  std::vector<int8_t> q(x.size());
  std::vector<float> scale(rows), group_scale(rows * 3);

  per_token_quant_int8(Tensor(x, {rows, cols}), Tensor(q, {rows, cols}), Tensor(scale, {rows}));
  dequantize(Tensor(q, {rows, cols}), Tensor(scale, {rows}), Tensor(back, {rows, cols}), Format::int8,
             per_row());
  expect(near(x, back, 7.0 / 127), "per_token_quant_int8 and back");

  per_token_group_quant_int8(Tensor(x, {rows, cols}), Tensor(q, {rows, cols}), Tensor(group_scale, {rows, 3}),
                             16);
  dequantize(Tensor(q, {rows, cols}), Tensor(group_scale, {rows, 3}), Tensor(back, {rows, cols}),
             Format::int8, per_group(16));
  expect(near(x, back, 7.0 / 127), "per_token_group_quant_int8 and back");

  std::vector<uint8_t> codes(x.size());
  per_token_group_quant_fp8(Tensor(x, {rows, cols}), Tensor(codes, {rows, cols}),
                            Tensor(group_scale, {rows, 3}), 16);
  dequantize(Tensor(codes, {rows, cols}), Tensor(group_scale, {rows, 3}), Tensor(back, {rows, cols}),
             Format::fp8_e4m3, per_group(16));
  expect(near(x, back, 7.0 / 16), "per_token_group_quant_fp8 and back");

  const std::vector<float> one = {1.0f};
  static_quant_fp8(Tensor(x, {rows, cols}), Tensor(codes, {rows, cols}), ConstTensor(one, {1}));
  dequantize(Tensor(codes, {rows, cols}), ConstTensor(one, {1}), Tensor(back, {rows, cols}), Format::fp8_e4m3,
             per_tensor());
  expect(near(x, back, 0), "static_quant_fp8 of small integers is exact");

  // Asymmetric, with row sums.
  std::vector<int8_t> zero(rows);
  std::vector<int32_t> sums(rows);
  QuantizeOptions options;
  options.zero = Tensor(zero, {rows});
  options.row_sums = Tensor(sums, {rows});
  quantize(Tensor(x, {rows, cols}), Tensor(q, {rows, cols}), Tensor(scale, {rows}), Format::int8, per_row(),
           options);
  int32_t sum = 0;
  for (int64_t c = 0; c < cols; ++c) sum += q[c];
  expect(sum == sums[0], "row sums");
  DequantizeOptions how;
  how.zero = options.zero;
  dequantize(Tensor(q, {rows, cols}), Tensor(scale, {rows}), Tensor(back, {rows, cols}), Format::int8,
             per_row(), how);
  expect(near(x, back, 14.0 / 255), "asymmetric and back");

  // Questions that need no data.
  const Tensor nowhere(nullptr, DType::f32, {rows, cols}), no_codes(nullptr, DType::i8, {rows, cols});
  const Tensor no_scale(nullptr, DType::f32, {rows});
  const std::string why = explain_quantize(nowhere, no_codes, no_scale, Format::int8, per_row());
  expect(why.find("\"chosen\"") != std::string::npos, "explain_quantize");
  quantize_workspace(nowhere, no_codes, no_scale, Format::int8, per_row());
  expect_throws<BadArgument>("quantize: q has shape", [&] {
    quantize(Tensor(x, {rows, cols}), Tensor(q, {rows, cols - 1}), Tensor(scale, {rows}), Format::int8,
             per_row());
  });
  expect_throws<BadArgument>("no kernel named", [&] {
    Call call;
    call.kernel = "nonsense";
    quantize(Tensor(x, {rows, cols}), Tensor(q, {rows, cols}), Tensor(scale, {rows}), Format::int8, per_row(),
             {}, call);
  });
}

void test_products() {
  const int64_t m = 3, n = 5, k = 7;
  const std::vector<float> xf = ramp(m * k, 9), wf = ramp(n * k, 7), expected = product(xf, wf, m, n, k);
  const std::vector<int8_t> a(xf.begin(), xf.end()), b(wf.begin(), wf.end());
  const std::vector<int32_t> exact(expected.begin(), expected.end());
  std::vector<int32_t> c(m * n);
  int8_matmul(ConstTensor(a, {m, k}), ConstTensor(b, {n, k}), Tensor(c, {m, n}));
  expect(c == exact, "int8_matmul [n, k]");

  std::vector<int8_t> transposed(k * n);
  for (int64_t i = 0; i < n * k; ++i) transposed[i % k * n + i / k] = b[i];
  c.assign(c.size(), 0);
  int8_matmul(ConstTensor(a, {m, k}), ConstTensor(transposed, {k, n}), Tensor(c, {m, n}), Order::kn);
  expect(c == exact, "int8_matmul [k, n]");

  auto pack_rows = [&](const std::vector<int8_t>& values, int64_t rows) {
    std::vector<uint8_t> packed(rows * ((k + 1) / 2));
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < k; ++i) {
        packed[r * ((k + 1) / 2) + i / 2] |= static_cast<uint8_t>((values[r * k + i] & 15) << (i % 2 * 4));
      }
    }
    return packed;
  };
  const auto a4 = pack_rows(a, m), b4 = pack_rows(b, n);
  c.assign(c.size(), 0);
  int4_matmul(ConstTensor(a4, {m, (k + 1) / 2}), ConstTensor(b4, {n, (k + 1) / 2}), Tensor(c, {m, n}), k);
  expect(c == exact, "int4_matmul");

  // Blocks of 2 x 4 with the scale 1/2 everywhere, in both operands.
  const std::vector<float> a_scale(m * 2, 0.5f), b_scale(3 * 2, 0.5f);
  std::vector<float> y(m * n), quarter = expected;
  for (float& v : quarter) v *= 0.25f;
  w8a8_block_int8_matmul(ConstTensor(a, {m, k}), ConstTensor(b, {n, k}), ConstTensor(a_scale, {m, 2}),
                         ConstTensor(b_scale, {3, 2}), Tensor(y, {m, n}), {2, 4});
  expect(near(y, quarter, 1e-4), "w8a8_block_int8_matmul");

  std::vector<uint8_t> a8(m * k), b8(n * k);
  const std::vector<float> one = {1.0f};
  static_quant_fp8(ConstTensor(xf, {m, k}), Tensor(a8, {m, k}), ConstTensor(one, {1}));
  static_quant_fp8(ConstTensor(wf, {n, k}), Tensor(b8, {n, k}), ConstTensor(one, {1}));
  w8a8_block_fp8_matmul(ConstTensor(a8, {m, k}), ConstTensor(b8, {n, k}), ConstTensor(a_scale, {m, 2}),
                        ConstTensor(b_scale, {3, 2}), Tensor(y, {m, n}), {2, 4});
  expect(near(y, quarter, 1e-4), "w8a8_block_fp8_matmul");

  expect(explain_scaled_mm(ConstTensor(a, {m, k}), ConstTensor(b, {n, k}), Tensor(c, {m, n})).front() == '{',
         "explain_scaled_mm");
  scaled_mm_workspace(ConstTensor(a, {m, k}), ConstTensor(b, {n, k}), Tensor(c, {m, n}));
}

void test_linear() {
  const int64_t m = 3, n = 6, k = 64;
  const std::vector<float> x = ramp(m * k, 5), w = ramp(n * k, 15), expected = product(x, w, m, n, k);
  std::vector<float> y(m * n), dx(m * k), back(n * k);
  auto weight = QuantizedWeight::from_float(ConstTensor(w, {n, k}), Format::int4, per_group(32));
  weight.dequantize_to(Tensor(back, {n, k}));
  expect(near(back, w, 1e-5), "-7..7 survive INT4");
  expect(weight.nbytes() == static_cast<size_t>(n * k / 2 + n * 2 * 4), "bytes of an INT4 weight");

  linear(ConstTensor(x, {m, k}), weight.view(), Tensor(y, {m, n}));
  expect(near(y, expected, 1e-3), "linear on the canonical weight");

  linear_backward(ConstTensor(expected, {m, n}), weight.view(), Tensor(dx, {m, k}));
  std::vector<float> transposed(k * n);
  for (int64_t i = 0; i < n * k; ++i) transposed[i % k * n + i / k] = w[i];
  expect(near(dx, product(expected, transposed, m, k, n), 2e-2), "linear_backward");
  expect(explain_linear_backward(ConstTensor(expected, {m, n}), weight.view(), Tensor(dx, {m, k})).front() ==
             '{',
         "explain_linear_backward");
  linear_backward_workspace(ConstTensor(expected, {m, n}), weight.view(), Tensor(dx, {m, k}));

  weight.pack(/*drop_canonical=*/true);
  const QuantizedWeight moved = std::move(weight);
  Workspace own;
  Call call;
  call.workspace = &own;
  y.assign(y.size(), 0);
  linear(ConstTensor(x, {m, k}), moved.view(), Tensor(y, {m, n}), {}, call);
  expect(near(y, expected, 1e-3), "linear on the packed weight");

  LinearOptions options;
  options.activation = Activation::relu;
  options.residual = Tensor(y, {m, n});  // y itself
  linear(ConstTensor(x, {m, k}), moved.view(), Tensor(y, {m, n}), options);
  std::vector<float> sum = expected;
  for (float& v : sum) v += v > 0 ? v : 0;
  expect(near(y, sum, 2e-3), "linear adds to its own output");

  const std::string why = explain_linear(ConstTensor(x, {m, k}), moved.view(), Tensor(y, {m, n}), options);
  expect(why.find("linear_ref") != std::string::npos, "explain_linear");
  linear_workspace(ConstTensor(x, {m, k}), moved.view(), Tensor(y, {m, n}), options);
}

void test_producers() {
  const int64_t m = 2, n = 32;
  const std::vector<float> x = ramp(m * 2 * n, 9);
  std::vector<float> y(m * n), expected(m * n), scale(m), back(m * n);
  std::vector<int8_t> q(m * n);
  for (int64_t i = 0; i < m * n; ++i) {
    const double gate = x[i / n * 2 * n + i % n], up = x[i / n * 2 * n + n + i % n];
    expected[i] = static_cast<float>(gate / (1 + std::exp(-gate)) * up);
  }
  gated_act(ConstTensor(x, {m, 2 * n}), Tensor(y, {m, n}));
  expect(near(y, expected, 1e-4), "gated_act");

  OutputOptions out;
  out.format = Format::int8;
  out.scale = Tensor(scale, {m});
  gated_act(ConstTensor(x, {m, 2 * n}), Tensor(q, {m, n}), Activation::silu, out);
  dequantize(Tensor(q, {m, n}), Tensor(scale, {m}), Tensor(back, {m, n}), Format::int8, per_row());
  expect(near(back, expected, 16.0 / 127), "gated_act to INT8");

  const std::vector<float> gain(n, 2.0f), h(x.begin(), x.begin() + m * n);
  for (int64_t i = 0; i < m * n; ++i) expected[i] = h[i] > 0 ? h[i] : 0;
  activate(ConstTensor(h, {m, n}), Tensor(y, {m, n}), Activation::relu);
  expect(near(y, expected, 0), "activate");

  // Rotated twice, numbers are what they were.
  QuantizeOptions rotation;
  rotation.hadamard = n;
  std::vector<float> fine(m * n);
  const Block each = per_group(1);
  back = h;
  for (int i = 0; i < 2; ++i) {
    quantize(Tensor(back, {m, n}), Tensor(q, {m, n}), Tensor(fine, {m, n}), Format::int8, each, rotation);
    dequantize(Tensor(q, {m, n}), Tensor(fine, {m, n}), Tensor(back, {m, n}), Format::int8, each);
    expect(near(back, h, 1e-4) == (i == 1), "quantize with a rotation");
  }

  RmsNormOptions options;
  options.gain = ConstTensor(gain, {n});
  options.eps = 1e-5;
  rms_norm(ConstTensor(h, {m, n}), Tensor(y, {m, n}), options);
  for (int64_t r = 0; r < m; ++r) {
    double squares = 0;
    for (int64_t c = 0; c < n; ++c) squares += h[r * n + c] * h[r * n + c];
    const double factor = 2 / std::sqrt(squares / n + 1e-5);
    for (int64_t c = 0; c < n; ++c) expected[r * n + c] = static_cast<float>(h[r * n + c] * factor);
  }
  expect(near(y, expected, 1e-4), "rms_norm");

  expect(explain_rms_norm(ConstTensor(h, {m, n}), Tensor(y, {m, n}), options).front() == '{',
         "explain_rms_norm");
  expect(explain_gated_act(ConstTensor(x, {m, 2 * n}), Tensor(y, {m, n})).front() == '{',
         "explain_gated_act");
  rms_norm_workspace(ConstTensor(h, {m, n}), Tensor(y, {m, n}), options);
  gated_act_workspace(ConstTensor(x, {m, 2 * n}), Tensor(y, {m, n}));
}

void test_words_and_numbers() {
  const std::vector<int32_t> qweight = {0x76543210}, qzeros = {0};
  const std::vector<float> scales(8, 0.5f), expected = {0, 2, 0.5f, 2.5f, 1, 3, 1.5f, 3.5f};
  std::vector<float> x(8);
  const ConstTensor words(qweight, {1, 1}), zeros(qzeros, {1, 1}), of_columns(scales, {1, 8});
  dequantize_words(words, zeros, of_columns, Tensor(x, {1, 8}));
  expect(near(x, expected, 0), "dequantize_words");
  dequantize_words_workspace(words, zeros, of_columns, Tensor(x, {1, 8}));
  expect(explain_dequantize_words(words, zeros, of_columns, Tensor(x, {1, 8})).front() == '{',
         "explain_dequantize_words");

  // A weight of one row that is not quantized: the sum of squares.
  Weight weight;
  weight.format = Format::f32, weight.n = 1, weight.k = 8;
  weight.codes = ConstTensor(expected, {1, 8});
  std::vector<float> y(1);
  LinearOptions options;
  options.is_batch_invariant = true;
  linear(Tensor(x, {1, 8}), weight, Tensor(y, {1, 1}), options);
  expect(near(y, std::vector<float>{35.0f}, 1e-5), "linear over numbers");
}

void test_calibration() {
  const int64_t n = 3, k = 8;
  const std::vector<float> w = ramp(n * k, 7);
  std::vector<float> identity(k * k), scale(n), loss(n), channel_scale(k), back(n * k);
  for (int64_t i = 0; i < k; ++i) identity[i * k + i] = 1;
  std::vector<int8_t> q(n * k);
  GptqOptions gptq;
  gptq.group = 0;
  gptq.loss = Tensor(loss, {n});
  const ConstTensor weight(w, {n, k}), hessian(identity, {k, k});
  gptq_quantize(weight, hessian, Tensor(q, {n, k}), Tensor(scale, {n}), Format::int8, gptq);
  dequantize(Tensor(q, {n, k}), Tensor(scale, {n}), Tensor(back, {n, k}), Format::int8, per_row());
  expect(near(back, w, 3.0 / 127), "gptq_quantize");
  expect(gptq_quantize_workspace(weight, hessian, Tensor(q, {n, k}), Tensor(scale, {n}), Format::int8, gptq) >
                 0 ||
             explain_gptq_quantize(weight, hessian, Tensor(q, {n, k}), Tensor(scale, {n}), Format::int8, gptq)
                     .find("_ref") != std::string::npos,
         "gptq_quantize_workspace");

  // Inputs of equal size in every channel leave nothing to scale.
  const AwqOptions awq;
  awq_search(weight, hessian, Tensor(channel_scale, {k}), Format::int4, awq);
  expect(near(channel_scale, std::vector<float>(k, 1.0f), 1e-6), "awq_search");
  expect(explain_awq_search(weight, hessian, Tensor(channel_scale, {k}), Format::int4, awq).front() == '{',
         "explain_awq_search");
  awq_search_workspace(weight, hessian, Tensor(channel_scale, {k}), Format::int4, awq);
}

}  // namespace

int main() {
  test_library();
  test_tensors();
  test_quantize();
  test_products();
  test_linear();
  test_producers();
  test_words_and_numbers();
  test_calibration();
  std::printf("C++ interface: %d failures\n", failures);
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
