# SPDX-License-Identifier: Apache-2.0
"""Every code and every rounding, against ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest

import quantfuse as qf
from reference import LARGEST, decode, encode, unpack_nibbles

ONE = np.ones(1, np.float32)
SIXTEEN_BITS = np.arange(65536, dtype=np.uint16).reshape(256, 256)


@pytest.mark.parametrize("format", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_all_256_codes_decode(format):
    codes = np.arange(256, dtype=np.uint8).reshape(1, 256)
    codes = codes.view(np.int8) if format == "int8" else codes
    x = qf.dequantize_tensor(codes, ONE, format)
    np.testing.assert_array_equal(x, decode(codes, format, 256).astype(np.float32))


@pytest.mark.parametrize("format", ["int4", "fp4_e2m1"])
def test_all_256_pairs_of_nibbles_decode(format):
    codes = np.arange(256, dtype=np.uint8).reshape(1, 256)
    x = qf.dequantize_tensor(codes, ONE, format)
    np.testing.assert_array_equal(x, decode(codes, format, 512).astype(np.float32))


def test_all_e8m0_codes_decode():
    scales = np.arange(255, dtype=np.uint8).reshape(255, 1)  # 255 is NaN, which is no scale
    x = qf.dequantize_tensor(np.ones((255, 1), np.int8), scales, "int8", block=(1, 0))
    np.testing.assert_array_equal(x, scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    tagged = qf.dequantize_tensor(
        np.ones((255, 1), np.int8), scales.view(ml_dtypes.float8_e8m0fnu), "int8", block=(1, 0)
    )
    np.testing.assert_array_equal(tagged, x)


def test_e8m0_nan_is_no_scale():
    with pytest.raises(ValueError, match="scale"):
        qf.dequantize_tensor(np.ones((1, 1), np.int8), np.array([255], np.uint8), "int8")


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("format", ["int8", "int4", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1"])
def test_every_16_bit_input_rounds(format, dtype):
    x = SIXTEEN_BITS.view(dtype)
    codes = qf.quantize_tensor(x, format, scale=ONE).codes
    with np.errstate(invalid="ignore"):
        expected = encode(x.astype(np.float32), format)
    if format in ("int4", "fp4_e2m1"):
        codes = unpack_nibbles(codes, 256)
        expected = expected.view(np.uint8) & 15
    if format.startswith("fp8"):  # the payload of a NaN is free
        values = decode(codes, format, 256)
        np.testing.assert_array_equal(np.isnan(values), np.isnan(x.astype(np.float32)))
        codes, expected = codes[~np.isnan(values)], expected[~np.isnan(values)]
    np.testing.assert_array_equal(codes, expected)


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2", "fp4_e2m1"])
def test_saturation_and_nan(format):
    inf = np.float32(np.inf)
    x = np.array([[inf, -inf, 3e38, -3e38, np.nan, -0.0]], np.float32)
    codes = qf.quantize_tensor(x, format, scale=ONE).codes
    values = decode(codes, format, 6)[0]
    largest = LARGEST[format]
    np.testing.assert_array_equal(values[:4], [largest, -largest, largest, -largest])
    assert np.isnan(values[4]) if format.startswith("fp8") else values[4] == 0
    assert values[5] == 0
    assert np.signbit(values[5])


def test_integers_saturate_and_nan_is_zero():
    x = np.array([[np.inf, -np.inf, 1e9, np.nan, 126.5, 127.5, -128.5, 0.5, 1.5]], np.float32)
    codes = qf.quantize_tensor(x, "int8", scale=ONE).codes
    np.testing.assert_array_equal(codes, [[127, -128, 127, 0, 126, 127, -128, 0, 2]])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_outputs_round_to_nearest_even(dtype, rng):
    codes = rng.integers(-128, 128, (64, 64), dtype=np.int8)
    scale = rng.uniform(1e-9, 1e3, (64, 64)).astype(np.float32)
    x = qf.dequantize_tensor(codes, scale, "int8", block=(1, 1), out=np.empty((64, 64), dtype))
    with np.errstate(over="ignore"):
        expected = (codes.astype(np.float32) * scale).astype(dtype)
    np.testing.assert_array_equal(x.view(np.uint16), expected.view(np.uint16))


def test_16_bit_floats_survive_both_ways():
    for dtype in (np.float16, ml_dtypes.bfloat16):
        x = SIXTEEN_BITS.view(dtype)
        # One block per number: the code is 127 times the sign, and the scale the number itself over 127.
        finite = np.isfinite(x.astype(np.float32)) & (np.abs(x.astype(np.float32)) > 1e-30)
        values = x[finite].reshape(-1, 1)
        codes, scale, _, _ = qf.quantize_tensor(values, "int8", block=(1, 0))
        back = qf.dequantize_tensor(codes, scale, block=(1, 0))
        np.testing.assert_allclose(back, values.astype(np.float32), rtol=2.0**-22)
