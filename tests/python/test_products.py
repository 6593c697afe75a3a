# SPDX-License-Identifier: Apache-2.0
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import quantfuse as qf
from reference import ROUNDING, assert_within, decode, expand, pack_nibbles, sum_bound

sizes = st.integers(0, 40)


def int8s(rng, *shape):
    return rng.integers(-128, 128, shape, dtype=np.int8)


@given(m=sizes, n=sizes, k=sizes, order=st.sampled_from(["nk", "kn"]), seed=st.integers(0, 2**31))
def test_int8_is_exact(m, n, k, order, seed):
    rng = np.random.default_rng(seed)
    a, b = int8s(rng, m, k), int8s(rng, n, k)
    given_b = b if order == "nk" else np.ascontiguousarray(b.T)
    c = qf.int8_matmul(a, given_b, b_order=order)
    np.testing.assert_array_equal(c, a.astype(np.int32) @ b.T.astype(np.int32))
    assert c.dtype == np.int32


@given(m=sizes, n=sizes, k=sizes, order=st.sampled_from(["nk", "kn"]), seed=st.integers(0, 2**31))
def test_int4_is_exact_for_odd_sizes_too(m, n, k, order, seed):
    rng = np.random.default_rng(seed)
    a, b = rng.integers(-8, 8, (m, k)), rng.integers(-8, 8, (n, k))
    packed_b = pack_nibbles(b if order == "nk" else b.T)
    c = qf.int4_matmul(pack_nibbles(a), packed_b, k=k, n=n, b_order=order)
    np.testing.assert_array_equal(c, a @ b.T)


def test_extreme_integers_do_not_saturate():
    a, b = np.full((2, 4096), -128, np.int8), np.full((3, 4096), -128, np.int8)
    np.testing.assert_array_equal(qf.int8_matmul(a, b), np.full((2, 3), 128 * 128 * 4096))


def test_leading_dimensions(rng):
    a, b = int8s(rng, 2, 3, 8), int8s(rng, 5, 8)
    np.testing.assert_array_equal(qf.int8_matmul(a, b), a.astype(np.int32) @ b.T.astype(np.int32))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("a_rows", [False, True])
@pytest.mark.parametrize("b_rows", [False, True])
@pytest.mark.parametrize("format", ["int8", "fp8_e4m3"])
def test_scaled_mm_tensor_and_row_scales(format, a_rows, b_rows, dtype, rng):
    m, n, k = 7, 9, 50
    a, b = codes_of(rng, format, m, k), codes_of(rng, format, n, k)
    a_scale = rng.uniform(0.01, 0.02, (m, 1) if a_rows else (1,)).astype(np.float32)
    b_scale = rng.uniform(0.01, 0.02, n if b_rows else (1, 1)).astype(np.float32)
    bias = rng.standard_normal(n).astype(np.float32)
    c = qf.scaled_mm(a, b, a_scale, b_scale, bias=bias, out_dtype=dtype, a_format=format, b_format=format)
    x = decode(a, format, k) * a_scale.reshape(-1, 1).astype(np.float64)
    w = decode(b, format, k) * b_scale.reshape(-1, 1).astype(np.float64)
    exact = x @ w.T + bias
    bound = sum_bound(np.abs(x) @ np.abs(w.T) + np.abs(bias), k)
    assert_within(c, exact, bound + np.abs(exact) * ROUNDING[dtype] * 1.01)
    assert c.dtype.name == dtype


def codes_of(rng, format, *shape):
    if format == "int8":
        return int8s(rng, *shape)
    return rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def test_scaled_mm_zero_points(rng):
    m, n, k = 5, 6, 33
    a, b = int8s(rng, m, k), int8s(rng, n, k)
    a_zero, b_zero = rng.integers(-9, 9, m).astype(np.int32), rng.integers(-9, 9, n).astype(np.int32)
    one = np.ones(1, np.float32)
    c = qf.scaled_mm(a, b, one, one, a_zero=a_zero, b_zero=b_zero)
    exact = (a.astype(np.int64) - a_zero[:, None]) @ (b.astype(np.int64) - b_zero[:, None]).T
    assert_within(c, exact, sum_bound(np.abs(a.astype(float)) @ np.abs(b.T.astype(float)) + 1e4, k))


@pytest.mark.parametrize("format", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("shape", [(1, 128, 128), (5, 200, 300), (3, 127, 129)])
def test_block_scaled(format, shape, rng):
    m, n, k = shape
    A, B = codes_of(rng, format, m, k), codes_of(rng, format, n, k)
    groups = -(-k // 128)
    As = rng.uniform(0.5, 2, (m, groups)).astype(np.float32)
    Bs = rng.uniform(0.5, 2, (-(-n // 128), groups)).astype(np.float32)
    call = qf.w8a8_block_int8_matmul if format == "int8" else qf.w8a8_block_fp8_matmul
    c = call(A, B, As, Bs, [128, 128], "float32")
    x = decode(A, format, k) * expand(As.astype(np.float64), m, k, (1, 128))
    w = decode(B, format, k) * expand(Bs.astype(np.float64), n, k, (128, 128))
    assert_within(c, x @ w.T, sum_bound(np.abs(x) @ np.abs(w.T), k))
    assert call(A, B, As, Bs, [128, 128]).dtype == np.float16


def test_empty_sums_are_the_bias():
    a, b = np.empty((2, 0), np.int8), np.empty((3, 0), np.int8)
    bias = np.array([1, 2, 3], np.float32)
    np.testing.assert_array_equal(qf.scaled_mm(a, b, bias=bias), np.tile(bias, (2, 1)))
    np.testing.assert_array_equal(qf.int8_matmul(a, b), np.zeros((2, 3)))


def test_a_scale_that_does_not_tell_its_block_is_refused(rng):
    a, b = int8s(rng, 2, 8), int8s(rng, 3, 8)
    with pytest.raises(ValueError, match="a_block"):
        qf.scaled_mm(a, b, np.ones((2, 4), np.float32))


def test_permissions_change_nothing_on_a_cpu(rng):
    a, b = (rng.standard_normal((rows, 96)).astype(ml_dtypes.float8_e4m3fn) for rows in (5, 7))
    scale = np.array([0.5], np.float32)
    plain = qf.scaled_mm(a, b, scale)
    permitted = qf.scaled_mm(a, b, scale, is_b_constant=True, fast_accumulation=True)
    np.testing.assert_array_equal(permitted, plain)
