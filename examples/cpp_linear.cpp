// SPDX-License-Identifier: Apache-2.0
//
// y = silu(x w^T + bias) with the weight in INT4, one scale per group of 128, from C++17.
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <quantfuse/quantfuse.hpp>
#include <random>
#include <string>
#include <vector>

int main() {
  using namespace quantfuse;
  const int64_t m = 4, n = 256, k = 512;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> x(m * k), weight(n * k), bias(n), y(m * n);
  for (auto* values : {&x, &weight, &bias}) {
    for (float& value : *values) value = normal(random);
  }

  // Quantize the weight and pack it for this machine's kernels, once; then run the layer.
  auto quantized = QuantizedWeight::from_float(Tensor(weight, {n, k}), Format::int4, per_group(128));
  const size_t bytes = quantized.nbytes();
  quantized.pack();
  LinearOptions options;
  options.bias = Tensor(bias, {n});
  options.activation = Activation::silu;
  linear(Tensor(x, {m, k}), quantized.view(), Tensor(y, {m, n}), options);

  // The same by a plain loop over the dequantized weight.
  std::vector<float> w(n * k);
  quantized.dequantize_to(Tensor(w, {n, k}));
  double largest_error = 0, worst = 0;
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = bias[j], magnitude = std::fabs(bias[j]);
      for (int64_t c = 0; c < k; ++c) {
        const double product = static_cast<double>(x[i * k + c]) * w[j * k + c];
        sum += product;
        magnitude += std::fabs(product);
      }
      const double error = std::fabs(y[i * n + j] - sum / (1 + std::exp(-sum)));
      largest_error = std::fmax(largest_error, error);
      worst = std::fmax(worst, error / (k * FLT_EPSILON * magnitude));  // of what k float additions may lose
    }
  }

  const std::string why = explain_linear(Tensor(x, {m, k}), quantized.view(), Tensor(y, {m, n}), options);
  std::printf("%s}\n", why.substr(0, why.find(',')).c_str());  // {"chosen": NAME}; then the others' reasons
  try {                                                        // a wrong shape is an exception that names it
    linear(Tensor(x, {m, k - 1}), quantized.view(), Tensor(y, {m, n}), options);
    return 1;
  } catch (const BadArgument& error) {
    std::printf("as expected: %s\n", error.what());
  }
  std::printf("C++: %d x %d x %d INT4 linear, weight %zu -> %zu bytes, largest error %.2e\n", int(m), int(n),
              int(k), weight.size() * sizeof(float), bytes, largest_error);
  return worst <= 1 ? 0 : 1;
}
