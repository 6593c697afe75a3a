/* SPDX-License-Identifier: Apache-2.0
 *
 * y = silu(x w^T + bias) with the weight in INT4, one scale per group of 128, from C.
 *
 *   cc c_linear.c $(pkg-config --cflags --libs quantfuse) -lm -o c_linear && ./c_linear
 */
#include <float.h>
#include <math.h>
#include <quantfuse/quantfuse.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { M = 4, N = 256, K = 512, GROUP = 128, GROUPS = K / GROUP };

static float x[M * K], weight[N * K], bias[N], y[M * N];
static uint8_t codes[N * K / 2]; /* two 4-bit codes per byte */
static float scales[N * GROUPS];
static float dequantized[N * K];

static void check(qf_status status) {
  if (status != QF_OK) {
    fprintf(stderr, "error %d: %s\n", (int)status, qf_last_error());
    exit(1);
  }
}

/* Numbers in [-1, 1), the same ones in every run. */
static void fill(float* values, int count, uint32_t seed) {
  for (int i = 0; i < count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    values[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
  }
}

/* A tensor is a pointer, a type and a shape. */
static qf_tensor tensor(void* data, qf_dtype dtype, int64_t* shape, int ndim) {
  qf_tensor t = {0};
  t.data = data;
  t.device.type = QF_CPU;
  t.dtype = dtype;
  t.shape = shape;
  t.ndim = ndim;
  return t;
}

int main(void) {
  const qf_dtype f32 = {2, 32, 1}, u8 = {1, 8, 1};
  int64_t x_shape[] = {M, K}, w_shape[] = {N, K}, y_shape[] = {M, N}, bias_shape[] = {N};
  int64_t code_shape[] = {N, K / 2}, scale_shape[] = {N, GROUPS};
  const qf_tensor x_t = tensor(x, f32, x_shape, 2), w_t = tensor(weight, f32, w_shape, 2);
  const qf_tensor y_t = tensor(y, f32, y_shape, 2), bias_t = tensor(bias, f32, bias_shape, 1);
  const qf_tensor codes_t = tensor(codes, u8, code_shape, 2), scales_t = tensor(scales, f32, scale_shape, 2);
  fill(x, M * K, 1);
  fill(weight, N * K, 2);
  fill(bias, N, 3);

  /* Quantize the weight. */
  qf_quantize_args quantize = {0};
  quantize.x = &w_t;
  quantize.format = QF_INT4;
  quantize.block.rows = 1;
  quantize.block.cols = GROUP;
  quantize.scale_mode = QF_SCALE_MSE;
  quantize.q = &codes_t;
  quantize.scale = &scales_t;
  check(qf_quantize(&quantize, NULL));

  /* Pack it for this machine's kernels, once. */
  qf_weight w = {0};
  w.format = QF_INT4;
  w.n = N;
  w.k = K;
  w.block = quantize.block;
  w.codes = &codes_t;
  w.scale = &scales_t;
  uint64_t packed_bytes = 0;
  const qf_status can_pack = qf_weight_packed_bytes(&w, x_t.device, &packed_bytes);
  int64_t packed_shape[] = {(int64_t)packed_bytes};
  void* packed = aligned_alloc(64, (packed_bytes + 64) / 64 * 64);
  const qf_tensor packed_t = tensor(packed, u8, packed_shape, 1);
  if (can_pack == QF_OK && packed_bytes > 0) { /* the scalar kernels read the canonical form */
    w.packed = &packed_t;
    check(qf_weight_pack(&w, NULL));
    w.codes = NULL; /* from here on the packed bytes are enough */
    w.scale = NULL;
  }

  /* Run the layer. Scratch memory is the caller's. */
  qf_linear_args linear = {0};
  linear.x = &x_t;
  linear.weight = w;
  linear.bias = &bias_t;
  linear.activation = QF_SILU;
  linear.y = &y_t;
  qf_call call = {0};
  check(qf_linear_workspace(&linear, &call, &call.workspace_bytes));
  call.workspace = aligned_alloc(64, (call.workspace_bytes + 64) / 64 * 64);
  check(qf_linear(&linear, &call));

  char why[4096];
  qf_linear_explain(&linear, &call, why, sizeof why);
  printf("%.*s}\n", (int)strcspn(why, ","), why); /* {"chosen": NAME}; the other kernels' reasons follow */

  /* The same by a plain loop over the dequantized weight. */
  qf_dequantize_args dequantize = {0};
  const qf_tensor dequantized_t = tensor(dequantized, f32, w_shape, 2);
  dequantize.q = &codes_t;
  dequantize.format = QF_INT4;
  dequantize.block = quantize.block;
  dequantize.scale = &scales_t;
  dequantize.x = &dequantized_t;
  check(qf_dequantize(&dequantize, NULL));
  double largest_error = 0, worst = 0;
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) {
      double sum = bias[n], magnitude = fabs(bias[n]);
      for (int k = 0; k < K; ++k) {
        const double product = (double)x[m * K + k] * dequantized[n * K + k];
        sum += product;
        magnitude += fabs(product);
      }
      const double error = fabs(y[m * N + n] - sum / (1 + exp(-sum)));
      largest_error = fmax(largest_error, error);
      worst = fmax(worst, error / (K * FLT_EPSILON * magnitude)); /* of what K float additions may lose */
    }
  }
  free(call.workspace);
  free(packed);
  printf("C: %d x %d x %d INT4 linear, weight %zu -> %zu bytes, largest error %.2e\n", M, N, K, sizeof weight,
         sizeof codes + sizeof scales, largest_error);
  return worst <= 1 ? 0 : 1;
}
