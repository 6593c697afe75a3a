# SPDX-License-Identifier: Apache-2.0
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import quantfuse as qf
from reference import FLOATS, ROUNDING, activate, assert_within, decode, expand, quantize, sum_bound

SCHEMES = ["int4", "int8", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "mxfp4", "mxfp8"]
CODES = {"mxfp4": "fp4_e2m1", "mxfp8": "fp8_e4m3"}


def values_of(weight) -> np.ndarray:
    """The weight as float64, decoded by the formula."""
    n, k = weight.shape
    codes = decode(weight.codes, CODES.get(weight.format, weight.format), k)
    scales = weight.scales
    if scales.dtype == np.uint8:
        scales = scales.view(ml_dtypes.float8_e8m0fnu)
    scales = scales.astype(np.float64)
    zeros = np.zeros_like(scales) if weight.zeros is None else weight.zeros.astype(np.float64)
    if weight.g_idx is not None:
        return (codes - zeros[:, weight.g_idx]) * scales[:, weight.g_idx]
    return (codes - expand(zeros, n, k, weight.block)) * expand(scales, n, k, weight.block)


def check(y, x, w, bias=None, activation=None, residual=None, gated=False) -> None:
    """Against the exact sum, within what float32 sums and the output's type may lose."""
    x = x.astype(np.float64)
    bias = 0 if bias is None else bias.astype(np.float64)
    pre = x @ w.T + bias
    slack = sum_bound(np.abs(x) @ np.abs(w.T) + np.abs(bias), x.shape[-1])
    if gated:
        gate, up = np.split(pre, 2, axis=-1)
        gate_slack, up_slack = np.split(slack, 2, axis=-1)
        exact = activate(gate, activation) * up
        slack = (1.2 * gate_slack + np.abs(gate) * 2.0**-20) * (np.abs(up) + up_slack)
        slack += np.abs(activate(gate, activation)) * up_slack
    else:
        exact = activate(pre, activation)
        slack = 1.2 * slack + np.abs(pre) * 2.0**-20  # no activation is steeper than 1.13
    if residual is not None:
        exact = exact + residual.astype(np.float64)
    assert_within(y, exact, slack + (np.abs(exact) + slack) * ROUNDING[y.dtype.name] * 1.01)


@pytest.mark.parametrize("packed", [False, True], ids=["canonical", "packed"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("m", [1, 5, 33])
def test_weight_only(m, scheme, dtype, packed, rng):
    w = rng.standard_normal((48, 160)).astype(np.float32)
    weight = qf.QuantizedWeight.from_float(w, scheme)
    exact = values_of(weight)
    if packed:
        weight.pack(drop_canonical=True)
    x = rng.standard_normal((m, 160)).astype(dtype)
    check(qf.linear(x, weight), x, exact)


@given(
    m=st.integers(0, 6),
    n=st.integers(0, 40),
    k=st.integers(0, 100),
    group=st.integers(0, 70),
    scheme=st.sampled_from(["int4", "int8", "fp8_e4m3", "fp4_e2m1"]),
    symmetric=st.booleans(),
    packed=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_shape_and_group(m, n, k, group, scheme, symmetric, packed, seed):
    rng = np.random.default_rng(seed)
    symmetric = symmetric or not scheme.startswith("int")
    w = rng.standard_normal((n, k)).astype(np.float32)
    weight = qf.QuantizedWeight.from_float(w, scheme, group=group, symmetric=symmetric)
    x = rng.standard_normal((m, k)).astype(np.float32)
    bias = rng.standard_normal(n).astype(np.float32)
    exact = values_of(weight) if n * k else np.zeros((n, k))
    y = qf.linear(x, weight.pack() if packed else weight, bias)
    assert y.shape == (m, n)
    check(y, x, exact, bias)


@pytest.mark.parametrize("packed", [False, True], ids=["canonical", "packed"])
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_epilogue(gated, activation, packed, rng):
    w = rng.standard_normal((64, 96)).astype(np.float32)
    weight = qf.QuantizedWeight.from_float(w, "int4", group=32, gated=gated)
    exact = values_of(weight)
    if packed:
        weight.pack()
    x = rng.standard_normal((2, 3, 96)).astype(np.float32)
    bias = rng.standard_normal(64).astype(np.float32)
    residual = rng.standard_normal((2, 3, weight.out_features)).astype(np.float32)
    y = qf.linear(x, weight, bias, activation=activation, residual=residual)
    check(y, x, exact, bias, activation, residual, gated)
    in_place = residual.copy()
    assert qf.linear(x, weight, bias, activation=activation, residual=in_place, out=in_place) is in_place
    np.testing.assert_array_equal(in_place, y)


@pytest.mark.parametrize("packed", [False, True], ids=["canonical", "packed"])
@pytest.mark.parametrize("act_group", [0, 32, 50])
@pytest.mark.parametrize(
    ("scheme", "symmetric", "act"),
    [
        ("int8", True, "int8"),
        ("int8", False, "int8"),
        ("int4", True, "int8"),
        ("int4", False, "int8"),
        ("fp8_e4m3", True, "fp8"),
        ("fp8_e5m2", True, "fp8_e5m2"),
    ],
)
def test_quantized_activations(scheme, symmetric, act, act_group, packed, rng):
    w = rng.standard_normal((40, 128)).astype(np.float32)
    weight = qf.QuantizedWeight.from_float(w, scheme, group=64, symmetric=symmetric)
    exact = values_of(weight)
    if packed:
        weight.pack()
    x = rng.standard_normal((4, 128)).astype(np.float32)
    act_format = {"int8": "int8", "fp8": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}[act]
    codes, scale, _ = quantize(x, act_format, (1, act_group))
    rounded = decode(codes, act_format, 128) * expand(scale.astype(np.float64), 4, 128, (1, act_group))

    y = qf.linear(x, weight, act_quant=act, act_group=act_group)
    check(y, rounded, exact)
    given_codes = qf.linear(codes, weight, act_quant=act, act_group=act_group, x_scale=scale)
    np.testing.assert_array_equal(given_codes, y)


@pytest.mark.parametrize("out_group", [0, 16])
@pytest.mark.parametrize(("quant", "format"), [("int8", "int8"), ("fp8", "fp8_e4m3")])
def test_quantized_output(quant, format, out_group, rng):
    w = rng.standard_normal((48, 64)).astype(np.float32)
    weight = qf.QuantizedWeight.from_float(w, "int4", group=32).pack()
    x = rng.standard_normal((3, 64)).astype(np.float32)
    y = qf.linear(x, weight, activation="silu")
    codes, scale = qf.linear(x, weight, activation="silu", out_quant=quant, out_group=out_group)
    expected_codes, expected_scale, _ = quantize(y, format, (1, out_group))
    np.testing.assert_allclose(scale, expected_scale, rtol=1e-5)
    difference = np.abs(decode(codes, format, 48) - decode(expected_codes, format, 48))
    step = 1 if format == "int8" else 32  # between 256 and 448 codes are 32 apart
    assert difference.max() <= step
    assert (difference == 0).mean() > 0.99

    static = np.array([0.25], np.float32)
    codes = qf.linear(x, weight, activation="silu", out_quant=quant, out_scale=static)
    from reference import encode

    expected = decode(encode(y * np.float32(4), format), format, 48)
    assert (decode(codes, format, 48) == expected).mean() > 0.99


def test_act_order(rng):
    n, k, groups = 24, 64, 4
    codes = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scales = rng.uniform(0.5, 2, (n, groups)).astype(np.float32)
    zeros = rng.integers(-8, 8, (n, groups)).astype(np.int8)
    g_idx = rng.permutation(np.arange(k) // (k // groups)).astype(np.int32)
    weight = qf.QuantizedWeight("int4", (n, k), (1, k // groups), codes, scales, zeros, g_idx)
    exact = values_of(weight)
    np.testing.assert_allclose(weight.dequantize(), exact, rtol=1e-6)
    x = rng.standard_normal((3, k)).astype(np.float32)
    check(qf.linear(x, weight), x, exact)
    check(qf.linear(x, weight.pack()), x, exact)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_backward(scheme, dtype, rng):
    weight = qf.QuantizedWeight.from_float(rng.standard_normal((40, 70)).astype(np.float32), scheme)
    dy = rng.standard_normal((2, 3, 40)).astype(dtype)
    dx = qf.linear_backward(dy, weight)
    assert (dx.shape, dx.dtype) == ((2, 3, 70), dtype)
    check(dx, dy, values_of(weight).T)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["canonical", "packed"])
@pytest.mark.parametrize("m", [1, 9])
def test_normalized_input(m, packed, dtype, rng):
    x, gain = rng.standard_normal((m, 256)).astype(dtype), rng.standard_normal(256).astype(dtype)
    weight = qf.QuantizedWeight.from_float(rng.standard_normal((40, 256)).astype(np.float32), "int4")
    if packed:
        weight.pack()
    y = qf.linear(x, weight, x_gain=gain, x_eps=1e-5)
    h = x.astype(np.float64)
    h *= gain.astype(np.float64) / np.sqrt(np.mean(h**2, axis=-1, keepdims=True) + 1e-5)
    w = values_of(weight)
    exact, magnitude = h @ w.T, np.abs(h) @ np.abs(w.T)
    rounding = ROUNDING[y.dtype.name]
    assert_within(y, exact, magnitude * (rounding + 2.0**-17) + np.abs(exact) * rounding)


def test_what_cannot_be_normalized(rng):
    x = rng.standard_normal((2, 64)).astype(np.float32)
    weight = qf.QuantizedWeight.from_float(rng.standard_normal((8, 64)).astype(np.float32), "int8")
    gain = np.ones(64, np.float32)
    with pytest.raises(ValueError, match="x_gain is given, and x is quantized"):
        qf.linear(x, weight, x_gain=gain, act_quant="int8")
    with pytest.raises(ValueError, match="x_gain has shape"):
        qf.linear(x, weight, x_gain=gain[:63])
    with pytest.raises(ValueError, match="x_eps is negative or NaN"):
        qf.linear(x, weight, x_gain=gain, x_eps=float("nan"))


def test_every_kernel_that_accepts_gives_the_same_layer(rng):
    weight = qf.QuantizedWeight.from_float(rng.standard_normal((64, 256)).astype(np.float32), "int4").pack()
    exact = values_of(weight)
    x = rng.standard_normal((4, 256)).astype(np.float32)
    answer = qf.explain(qf.linear, x, weight)
    accepting = [c["kernel"] for c in answer["candidates"] if c["accepts"]]
    assert answer["chosen"] == accepting[0]
    for kernel in accepting:
        with qf.options(kernel=kernel):
            check(qf.linear(x, weight), x, exact)


def test_output_types(rng):
    weight = qf.QuantizedWeight.from_float(rng.standard_normal((8, 32)).astype(np.float32), "int8")
    x = rng.standard_normal((2, 32)).astype(np.float16)
    assert qf.linear(x, weight).dtype == np.float16
    assert qf.linear(x, weight, out_dtype=np.float32).dtype == np.float32
    assert qf.linear(x, weight, out_dtype="bfloat16").dtype == ml_dtypes.bfloat16
    assert qf.linear(x, weight, out_dtype=ml_dtypes.bfloat16).dtype == ml_dtypes.bfloat16
