# SPDX-License-Identifier: Apache-2.0
"""y = silu(x w^T + bias) with the weight in INT4, one scale per group of 128, from Python."""

import numpy as np

import quantfuse as qf

m, n, k = 4, 256, 512
random = np.random.default_rng(1)
x = random.standard_normal((m, k), np.float32)
w = random.standard_normal((n, k), np.float32)
bias = random.standard_normal(n, np.float32)

# Quantize the weight and pack it for this machine's kernels, once; then run the layer.
weight = qf.QuantizedWeight.from_float(w, "int4", group=128).pack()
y = qf.linear(x, weight, bias, activation="silu")

# The same in double over the dequantized weight.
dequantized = weight.dequantize().astype(np.float64)
before = x @ dequantized.T + bias
error = np.abs(y - before / (1 + np.exp(-before)))
magnitude = np.abs(x) @ np.abs(dequantized).T + np.abs(bias)
allowed = k * np.finfo(np.float32).eps * magnitude  # what k float additions may lose
print(f"Python: {m} x {n} x {k} INT4 linear, {weight}, largest error {error.max():.2e}")
assert (error <= allowed).all()
