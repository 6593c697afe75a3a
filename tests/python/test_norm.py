# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

import quantfuse as qf
from reference import FLOATS, ROUNDING, activate, assert_within, quantize


def normalise(h, gain, eps):
    h = h.astype(np.float64)
    return h * gain.astype(np.float64) / np.sqrt((h**2).mean(-1, keepdims=True) + eps)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 5, 256), (64,)])
def test_rms_norm(shape, has_residual, dtype, rng):
    x = rng.standard_normal(shape).astype(dtype)
    gain = rng.uniform(0.5, 1.5, shape[-1]).astype(dtype)
    residual = rng.standard_normal(shape).astype(dtype) if has_residual else None
    h = x if residual is None else (x.astype(np.float32) + residual.astype(np.float32)).astype(dtype)
    y = qf.rms_norm(x, gain, 1e-5, residual=residual)
    assert (y.dtype, y.shape) == (dtype, shape)
    if residual is not None:
        np.testing.assert_array_equal(residual, h)
    exact = normalise(h, gain, 1e-5)
    # The mean of n squares, a root, a division and two products.
    slack = (shape[-1] / 2 + 8) * 2.0**-24
    assert_within(y, exact, np.abs(exact) * (slack + ROUNDING[dtype.name] * 1.01))


@pytest.mark.parametrize(
    ("quant", "format"), [("int8", "int8"), ("fp8", "fp8_e4m3"), ("fp8_e5m2", "fp8_e5m2")]
)
@pytest.mark.parametrize("group", [0, 16, 33])
def test_quantized_norm_is_the_norm_quantized(quant, format, group, rng):
    x = rng.standard_normal((4, 100)).astype(np.float32)
    codes, scale = qf.rms_norm(x, out_quant=quant, out_group=group)
    y = qf.rms_norm(x)
    assert codes.shape == (4, 100)
    assert scale.shape == (4, -(-100 // group) if group else 1)
    _, expected_scale, _ = quantize(y, format, (1, group))
    np.testing.assert_allclose(scale, expected_scale, rtol=1e-6)
    back = qf.dequantize_tensor(codes, scale, format, block=(1, group))
    step = {"int8": 0.51 / 127, "fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3}[format]
    assert np.abs(back - y).max() <= step * np.abs(y).max() * 1.01


def test_static_scale(rng):
    x = rng.standard_normal((4, 64)).astype(np.float32)
    scale = np.array([0.05], np.float32)
    codes = qf.rms_norm(x, out_quant="int8", out_scale=scale)
    expected = np.rint(normalise(x, np.ones(64), 1e-6) / 0.05).clip(-128, 127)
    assert np.abs(codes - expected).max() <= 1  # a tie may fall either way
    assert (codes == expected).mean() > 0.99


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "identity"])
def test_gated_act(activation, dtype, rng):
    x = (4 * rng.standard_normal((3, 5, 62))).astype(dtype)
    y = qf.gated_act(x, activation)
    gate, up = np.split(x.astype(np.float64), 2, axis=-1)
    exact = activate(gate, activation) * up
    # An exponential or error function within 2^-20 of the magnitude of its argument, then two roundings.
    bound = np.abs(gate * up) * 2.0**-20 + np.abs(exact) * (ROUNDING[dtype.name] * 1.01 + 2.0**-22)
    assert_within(y, exact, bound)
    assert y.shape == (3, 5, 31)


def test_silu_and_mul_quantized(rng):
    x = rng.standard_normal((6, 128)).astype(np.float32)
    y = qf.silu_and_mul(x)
    np.testing.assert_array_equal(y, qf.gated_act(x, "silu"))
    codes, scale = qf.silu_and_mul(x, out_quant="int8", out_group=32)
    back = qf.dequantize_tensor(codes, scale, block=(1, 32))
    assert np.abs(back - y).max() <= scale.max() * 0.51


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "identity"])
def test_activate(activation, dtype, rng):
    x = (4 * rng.standard_normal((3, 5, 31))).astype(dtype)
    y = qf.activate(x, activation)
    exact = activate(x.astype(np.float64), activation)
    bound = np.abs(x.astype(np.float64)) * 2.0**-20 + np.abs(exact) * (ROUNDING[dtype.name] * 1.01 + 2.0**-22)
    assert_within(y, exact, bound)
    assert y.shape == x.shape


def test_activate_quantized(rng):
    x = rng.standard_normal((6, 96)).astype(np.float32)
    codes, scale = qf.activate(x, "gelu", out_quant="int8", out_group=32)
    back = qf.dequantize_tensor(codes, scale, block=(1, 32))
    assert np.abs(back - qf.activate(x, "gelu")).max() <= scale.max() * 0.51


def test_scales_may_be_written_transposed(rng):
    x = rng.standard_normal((5, 96)).astype(np.float32)
    for produce, cols in ((qf.rms_norm, 96), (qf.silu_and_mul, 48), (qf.activate, 96)):
        codes, scale = produce(x, out_quant="int8", out_group=16)
        memory = np.full((cols // 16, 5), np.nan, np.float32)
        out = np.empty((5, cols), np.int8), memory.T
        produce(x, out_quant="int8", out_group=16, out=out)
        np.testing.assert_array_equal(out[0], codes)
        np.testing.assert_array_equal(memory, scale.T)


def test_odd_columns_are_refused():
    with pytest.raises(ValueError, match="even"):
        qf.silu_and_mul(np.ones((2, 3), np.float32))
