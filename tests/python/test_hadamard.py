# SPDX-License-Identifier: Apache-2.0
"""The Hadamard rotation in front of a quantization."""

import numpy as np
import pytest

import quantfuse as qf
from reference import quantize


def hadamard(size):
    """The orthogonal matrix, by its definition: the sign is the parity of the bits i and j share."""
    parity = [[(i & j).bit_count() % 2 for j in range(size)] for i in range(size)]
    return np.where(np.array(parity), -1.0, 1.0) / np.sqrt(size)


def rotate(x, size):
    return (x.reshape(*x.shape[:-1], -1, size) @ hadamard(size)).reshape(x.shape)


def dequantized(x, format, group, **options):
    codes, scale, _, _ = qf.quantize_tensor(x, format, block=(1, group), **options)
    return qf.dequantize_tensor(codes, scale, format, block=(1, group), cols=x.shape[-1])


def relative_error(got, exact):
    return np.linalg.norm(got - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64, 128, 256, 1024])
def test_codes_are_those_of_the_rotated_rows(size, rng):
    x = rng.standard_normal((3, 2 * size)).astype(np.float32)
    exact = rotate(x.astype(np.float64), size)
    codes, scale, _, _ = qf.quantize_tensor(x, "int8", block=(1, 0), hadamard=size)
    expected, expected_scale, _ = quantize(exact.astype(np.float32), "int8", (1, 0))
    np.testing.assert_allclose(scale, expected_scale.reshape(scale.shape), rtol=1e-5)
    assert np.abs(codes.astype(int) - expected).max() <= 1  # a tie may fall either way
    assert (codes == expected).mean() > 0.99


def test_the_rotation_is_its_own_inverse(rng):
    x = rng.standard_normal((4, 512)).astype(np.float32)
    once = dequantized(x, "int8", 1, hadamard=512)  # a scale for each number: almost without a loss
    twice = dequantized(once, "int8", 1, hadamard=512)
    assert relative_error(once, x) > 1
    assert relative_error(twice, x) < 1e-5


def test_products_of_rows_and_lengths_stay(rng):
    x, w = (rng.standard_normal((8, 256)).astype(np.float32) for _ in range(2))
    rotated_x, rotated_w = (dequantized(a, "int8", 1, hadamard=True) for a in (x, w))
    np.testing.assert_allclose(rotated_x @ rotated_w.T, x @ w.T, atol=1e-3)
    np.testing.assert_allclose(np.linalg.norm(rotated_x, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)


def rows_with_outliers(rng):
    """A few channels twenty times as large as the others: what activations of decoders have."""
    x = rng.standard_normal((16, 1024)).astype(np.float32)
    x[:, rng.choice(1024, 4, replace=False)] *= 20
    return x


@pytest.mark.parametrize("format", ["int4", "int8", "fp4_e2m1"])
def test_rows_with_outliers_lose_less(format, rng):
    x = rows_with_outliers(rng)
    small = np.abs(x) < 5  # what a scale for the outliers leaves little room for
    plain = dequantized(x, format, 0)
    rotated = rotate(dequantized(x, format, 0, hadamard=True).astype(np.float64), 1024)
    assert 2 * relative_error(rotated[small], x[small]) < relative_error(plain[small], x[small])


def test_outliers_do_not_saturate_static_fp8(rng):
    """FP8 has steps for outliers, but a static scale need not reach them; rotated, there are none."""
    x = rows_with_outliers(rng)
    scale = np.array([8 / 448], np.float32)

    def through_fp8(**options):
        codes = qf.quantize_tensor(x, "fp8_e4m3", scale=scale, **options).codes
        return qf.dequantize_tensor(codes, scale, "fp8_e4m3").astype(np.float64)

    assert relative_error(through_fp8(), x) > 0.3
    assert relative_error(rotate(through_fp8(hadamard=True), 1024), x) < 0.04


@pytest.mark.parametrize("size", [3, -4, 64, 1 << 40])
def test_bad_sizes_are_refused_by_name(size):
    x = np.zeros((2, 96), np.float32)
    calls = (
        lambda: qf.quantize_tensor(x, hadamard=size),
        lambda: qf.rms_norm(x, out_quant="int8", hadamard=size),
        lambda: qf.activate(x, out_quant="int8", hadamard=size),
    )
    for call in calls:
        with pytest.raises(ValueError, match=f"hadamard is {size}, expected .* divides the 96 columns"):
            call()


def test_only_quantized_outputs_are_rotated():
    x = np.zeros((2, 64), np.float32)
    with pytest.raises(ValueError, match="hadamard is given, but out_format is none"):
        qf.rms_norm(x, hadamard=32)


@pytest.mark.parametrize("group", [0, 32])
def test_producers_rotate_what_they_quantize(group, rng):
    x = rng.standard_normal((5, 384)).astype(np.float32)
    for produce, cols in (
        (lambda **o: qf.rms_norm(x, **o), 384),
        (lambda **o: qf.silu_and_mul(x, **o), 192),
        (lambda **o: qf.activate(x, "gelu", **o), 384),
    ):
        size = cols & -cols
        exact = rotate(produce().astype(np.float64), size)
        codes, scale = produce(out_quant="int8", out_group=group, hadamard=True)
        back = qf.dequantize_tensor(codes, scale, "int8", block=(1, group))
        np.testing.assert_allclose(back, exact, atol=0.51 * scale.max())
