# SPDX-License-Identifier: Apache-2.0
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import quantfuse as qf
from reference import FLOATS, decode, expand, quantize, reduce_blocks

FORMATS = ["int8", "int4", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1"]
BLOCKS = [(0, 0), (1, 0), (0, 1), (1, 32), (1, 7), (8, 16), (128, 128)]


def nasty(rng, rows, cols, dtype=np.float32):
    x = rng.standard_normal((rows, cols)).astype(np.float32)
    if x.size:
        x[:, rng.integers(cols)] *= 100
        x[rng.integers(rows)] = 0
        x.flat[rng.integers(x.size)] = -0.0
    return x.astype(dtype)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("format", FORMATS)
def test_dynamic_scales(format, block, rng):
    x = nasty(rng, 19, 45)
    codes, scale, zero, sums = qf.quantize_tensor(x, format, block=block)
    expected_codes, expected_scale, _ = quantize(x, format, block)
    np.testing.assert_array_equal(scale, expected_scale)
    np.testing.assert_array_equal(codes, expected_codes)
    assert zero is None
    assert sums is None


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("block", [(1, 0), (1, 16), (0, 0)])
def test_asymmetric(format, block, dtype, rng):
    x = (nasty(rng, 9, 33) + 1.5).astype(dtype)
    codes, scale, zero, sums = qf.quantize_tensor(x, format, block=block, symmetric=False, row_sums=True)
    expected_codes, expected_scale, expected_zero = quantize(x, format, block, symmetric=False)
    np.testing.assert_array_equal(scale, expected_scale)
    np.testing.assert_array_equal(zero, expected_zero)
    np.testing.assert_array_equal(codes, expected_codes)
    values = decode(codes, format, 33)
    group = block[1] or 33
    expected_sums = [[values[r, c : c + group].sum() for c in range(0, 33, group)] for r in range(9)]
    np.testing.assert_array_equal(sums, expected_sums)


@pytest.mark.parametrize(("format", "codes_format"), [("mxfp8", "fp8_e4m3"), ("mxfp4", "fp4_e2m1")])
def test_microscaling(format, codes_format, rng):
    x = nasty(rng, 5, 70)
    codes, scale, _, _ = qf.quantize_tensor(x, format)
    expected_codes, expected_scale, _ = quantize(x, codes_format, (1, 32), e8m0=True)
    np.testing.assert_array_equal(scale, expected_scale)
    np.testing.assert_array_equal(codes, expected_codes)
    back = qf.dequantize_tensor(codes, scale, format, cols=70)
    factor = expand(scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float64), 5, 70, (1, 32))
    np.testing.assert_array_equal(back, (decode(codes, codes_format, 70) * factor).astype(np.float32))


@pytest.mark.parametrize("format", FORMATS)
def test_mse_is_never_worse(format, rng):
    x = nasty(rng, 8, 256)

    def error(mse):
        codes, scale, _, _ = qf.quantize_tensor(x, format, block=(1, 64), mse=mse)
        back = qf.dequantize_tensor(codes, scale, format, block=(1, 64)).astype(np.float64)
        return reduce_blocks((back - x) ** 2, (1, 64), np.sum)

    plain, searched = error(False), error(True)
    assert (searched <= plain * (1 + 1e-6)).all()
    if format == "int4":
        assert searched.sum() < 0.95 * plain.sum()


@given(
    rows=st.integers(0, 9),
    cols=st.integers(0, 70),
    block=st.tuples(st.sampled_from([0, 1, 2, 5]), st.integers(0, 40)),
    format=st.sampled_from(FORMATS),
    dtype=st.sampled_from(FLOATS),
    pad=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)
def test_any_shape_and_stride(rows, cols, block, format, dtype, pad, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, cols + pad)).astype(dtype)[:, pad:]
    codes, scale, _, _ = qf.quantize_tensor(x, format, block=block)
    expected_codes, expected_scale, _ = quantize(x, format, block) if x.size else (codes, scale, None)
    np.testing.assert_array_equal(scale, expected_scale)
    np.testing.assert_array_equal(codes, expected_codes)
    if x.size:
        back = qf.dequantize_tensor(codes, scale, format, block=block, cols=cols)
        exact = decode(codes, format, cols).astype(np.float32) * expand(scale, rows, cols, block)
        np.testing.assert_array_equal(back, exact)


@given(
    shape=st.lists(st.integers(0, 4), min_size=0, max_size=3),
    k=st.integers(1, 50),
    group=st.integers(1, 60),
    seed=st.integers(0, 2**31),
)
def test_named_forms_keep_leading_dimensions(shape, k, group, seed):
    x = np.random.default_rng(seed).standard_normal((*shape, k)).astype(np.float32)
    matrix = x.reshape(-1, k)
    rows = matrix.shape[0]

    q, scale, sums = qf.per_token_quant_int8(x, row_sums=True)
    assert (q.shape, scale.shape, sums.shape) == ((*shape, k), (*shape, 1), (*shape, 1))
    q8, scale8 = qf.per_token_group_quant_int8(x, group)
    assert scale8.shape == (*shape, -(-k // group))
    qf8, scale_f8 = qf.per_token_group_quant_fp8(x, group)
    assert (qf8.shape, scale_f8.shape) == (x.shape, scale8.shape)
    if rows:
        np.testing.assert_array_equal(q.reshape(rows, k), quantize(matrix, "int8", (1, 0))[0])
        np.testing.assert_array_equal(sums, q.astype(np.int32).sum(-1, keepdims=True))
        np.testing.assert_array_equal(q8.reshape(rows, k), quantize(matrix, "int8", (1, group))[0])
        np.testing.assert_array_equal(qf8.reshape(rows, k), quantize(matrix, "fp8_e4m3", (1, group))[0])


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2"])
def test_static_quant_fp8(format, rng):
    x = nasty(rng, 3, 20)
    scale = np.array(0.37, np.float32)
    q, same = qf.static_quant_fp8(x, scale, format=format)
    assert same is scale
    from reference import encode

    np.testing.assert_array_equal(q, encode(x * (np.float32(1) / scale), format))


def test_static_scale_and_zero(rng):
    x = nasty(rng, 4, 16)
    codes, scale, zero, _ = qf.quantize_tensor(x, "int8", block=(1, 8), symmetric=False)
    again = qf.quantize_tensor(x, "int8", block=(1, 8), scale=scale, zero=zero)
    np.testing.assert_array_equal(again.codes, codes)
    assert again.scale is scale


def test_dequantize_with_g_idx_and_float_zero(rng):
    codes = rng.integers(-8, 8, (6, 12), dtype=np.int8)
    scale = rng.uniform(0.5, 2, (6, 3)).astype(np.float32)
    zero = rng.uniform(-1, 1, (6, 3)).astype(np.float32)
    g_idx = rng.integers(0, 3, 12).astype(np.int32)
    x = qf.dequantize_tensor(codes, scale, block=(1, 4), zero=zero, g_idx=g_idx)
    np.testing.assert_allclose(x, (codes - zero[:, g_idx]) * scale[:, g_idx], rtol=1e-6)


def test_out_is_written_and_returned(rng):
    x = nasty(rng, 4, 8)
    q, scale = np.empty((4, 8), np.int8), np.empty((4, 1), np.float32)
    result = qf.per_token_quant_int8(x, out=(q, scale))
    assert result[0] is q
    assert result[1] is scale
    np.testing.assert_array_equal(q, qf.per_token_quant_int8(x)[0])


def test_fp8_out_of_its_own_type(rng):
    x = nasty(rng, 4, 8)
    q, scale = np.empty((4, 8), ml_dtypes.float8_e4m3fn), np.empty((4, 2), np.float32)
    qf.per_token_group_quant_fp8(x, 4, out=(q, scale))
    np.testing.assert_array_equal(q.view(np.uint8), qf.per_token_group_quant_fp8(x, 4)[0])
    with pytest.raises(ValueError, match="q has type"):
        qf.per_token_group_quant_fp8(x, 4, format="fp8_e5m2", out=(q, scale))


def test_strided_rows_and_their_neighbours(rng):
    x = nasty(rng, 5, 16)
    frame = np.full((5, 24), 77, np.int8)
    qf.quantize_tensor(x, "int8", block=(1, 0), out=frame[:, 4:20])
    np.testing.assert_array_equal(frame[:, 4:20], qf.per_token_quant_int8(x)[0])
    assert (frame[:, :4] == 77).all()
    assert (frame[:, 20:] == 77).all()


def test_read_only_and_memory_mapped_inputs(rng, tmp_path):
    x = nasty(rng, 4, 8)
    expected = qf.per_token_quant_int8(x)[0]
    frozen = np.frombuffer(x.tobytes(), np.float32).reshape(4, 8)
    assert not frozen.flags.writeable
    np.testing.assert_array_equal(qf.per_token_quant_int8(frozen)[0], expected)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    np.testing.assert_array_equal(qf.per_token_quant_int8(mapped)[0], expected)
    bf16 = x.astype(ml_dtypes.bfloat16)
    bf16.flags.writeable = False
    np.testing.assert_array_equal(qf.per_token_quant_int8(bf16)[0], quantize(bf16, "int8", (1, 0))[0])


def test_any_dlpack_producer_is_taken(rng):
    class Producer:
        def __init__(self, x):
            self.x = x

        def __dlpack__(self, **kwargs):
            return self.x.__dlpack__(**kwargs)

        def __dlpack_device__(self):
            return self.x.__dlpack_device__()

    x = nasty(rng, 4, 8)
    q, _ = qf.per_token_quant_int8(Producer(x))
    assert type(q) is np.ndarray
    np.testing.assert_array_equal(q, qf.per_token_quant_int8(x)[0])


def test_the_same_call_gives_the_same_bits(rng):
    x = nasty(rng, 33, 257)
    first = qf.quantize_tensor(x, "int4", block=(1, 32), mse=True)
    second = qf.quantize_tensor(x, "int4", block=(1, 32), mse=True)
    for a, b in zip(first[:2], second[:2], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("shape", [(7, 96), (1, 96), (2, 3, 96), (0, 96), (5, 10)])
def test_column_major_scales(shape, rng):
    x = rng.standard_normal(shape).astype(np.float32)
    for call in (qf.per_token_group_quant_int8, qf.per_token_group_quant_fp8):
        codes, scale = call(x, 16)
        same, transposed = call(x, 16, column_major_scales=True)
        np.testing.assert_array_equal(same, codes)
        np.testing.assert_array_equal(transposed, scale)
        assert transposed.shape == scale.shape
        if len(shape) == 2:
            assert transposed.T.flags.c_contiguous
