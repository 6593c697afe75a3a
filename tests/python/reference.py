# SPDX-License-Identifier: Apache-2.0
"""The formulas of the operations in plain NumPy, written from their documentation and not from their code."""

from __future__ import annotations

import ml_dtypes
import numpy as np

FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
LARGEST = {"int8": 127, "int4": 7, "fp8_e4m3": 448, "fp8_e5m2": 57344, "fp4_e2m1": 6}
LOWEST = {"int8": -128, "int4": -8}
EMAX = {"fp8_e4m3": 8, "fp8_e5m2": 15, "fp4_e2m1": 2, "int8": 6, "int4": 2}
ML_TYPES = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
}
# Half a unit in the last place, relative.
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def unpack_nibbles(packed: np.ndarray, cols: int) -> np.ndarray:
    """Two numbers per byte, the low nibble first."""
    both = np.stack([packed & 15, packed >> 4], axis=-1)
    return both.reshape(*packed.shape[:-1], 2 * packed.shape[-1])[..., :cols]


def pack_nibbles(nibbles: np.ndarray) -> np.ndarray:
    nibbles = nibbles.astype(np.uint8) & 15
    if nibbles.shape[-1] % 2:
        nibbles = np.concatenate([nibbles, np.zeros_like(nibbles[..., :1])], axis=-1)
    return np.ascontiguousarray(nibbles[..., 0::2] | nibbles[..., 1::2] << 4)


def decode(codes: np.ndarray, format: str, cols: int) -> np.ndarray:
    """The values of codes as float64."""
    if format == "int8":
        return codes.astype(np.float64)
    if format == "int4":
        nibbles = unpack_nibbles(codes, cols).astype(np.int64)
        return ((nibbles ^ 8) - 8).astype(np.float64)
    if format == "fp4_e2m1":
        return unpack_nibbles(codes, cols).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return codes.view(np.uint8).view(ML_TYPES[format]).astype(np.float64)


def encode(values: np.ndarray, format: str, zero: np.ndarray | int = 0) -> np.ndarray:
    """Round to nearest even, saturate: codes, 4-bit ones not yet packed. NaN is 0 where there is no NaN."""
    values = values.astype(np.float32)
    if format in LOWEST:
        rounded = np.rint(np.nan_to_num(values, nan=0.0, posinf=1e4, neginf=-1e4).clip(-1e4, 1e4))
        shifted = rounded + np.where(np.isnan(values), 0, zero)
        return shifted.clip(LOWEST[format], LARGEST[format]).astype(np.int8)
    if format == "fp4_e2m1":
        values = np.nan_to_num(values, nan=0.0)
    limit = np.float32(LARGEST[format])
    clipped = np.clip(values, -limit, limit)
    return clipped.astype(ML_TYPES[format]).view(np.uint8)


def expand(per_block: np.ndarray, rows: int, cols: int, block: tuple[int, int]) -> np.ndarray:
    """A number per block as a number per element."""
    block_rows, block_cols = block[0] or max(rows, 1), block[1] or max(cols, 1)
    return per_block.repeat(block_rows, axis=0)[:rows].repeat(block_cols, axis=1)[:, :cols]


def reduce_blocks(x: np.ndarray, block: tuple[int, int], reduce) -> np.ndarray:
    rows, cols = x.shape
    block_rows, block_cols = block[0] or max(rows, 1), block[1] or max(cols, 1)
    return np.array(
        [
            [reduce(x[r : r + block_rows, c : c + block_cols]) for c in range(0, cols, block_cols)]
            for r in range(0, rows, block_rows)
        ],
        dtype=x.dtype,
    ).reshape(-(-rows // block_rows), -(-cols // block_cols))


def quantize(x, format, block, symmetric=True, e8m0=False):
    """Dynamic scales: codes (4-bit ones packed), scale, zero or None. ``x`` is finite."""
    x = x.astype(np.float32)
    rows, cols = x.shape
    zero = None
    if symmetric:
        amax = reduce_blocks(np.abs(x), block, np.max)
        if e8m0:
            with np.errstate(divide="ignore"):
                exponent = np.floor(np.log2(amax)) - EMAX[format]
            scale = np.clip(exponent + 127, 0, 254).astype(np.uint8)
            factor = scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        else:
            scale = np.maximum(amax / np.float32(LARGEST[format]), np.float32(2.0**-126))
            factor = scale
    else:
        low = np.minimum(reduce_blocks(x, block, np.min), 0)
        high = np.maximum(reduce_blocks(x, block, np.max), 0)
        steps = np.float32(LARGEST[format] - LOWEST[format])
        scale = np.maximum(high / steps - low / steps, np.float32(2.0**-126))
        zero = np.rint(-low * (np.float32(1) / scale)) + LOWEST[format]
        zero = zero.clip(LOWEST[format], LARGEST[format]).astype(np.int8)
        factor = scale
    inverse = np.float32(1) / expand(factor, rows, cols, block)
    codes = encode(x * inverse, format, 0 if zero is None else expand(zero, rows, cols, block))
    return (pack_nibbles(codes) if format in ("int4", "fp4_e2m1") else codes), scale, zero


def activate(x: np.ndarray, name: str | None) -> np.ndarray:
    from math import erf

    if name in (None, "identity"):
        return x
    if name == "relu":
        return np.maximum(x, 0)
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "gelu":
        return 0.5 * x * (1 + np.vectorize(erf, otypes=[np.float64])(x / np.sqrt(2)))
    assert name == "gelu_tanh"
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def sum_bound(magnitude: np.ndarray, count: int) -> np.ndarray:
    """How far a float32 sum of ``count`` products may lie from the exact one, whatever its order: each of its
    terms is rounded at most ``count`` times by additions and a few times on the way in."""
    return magnitude * (count + 8) * 2.0**-24


def assert_within(actual, expected, bound) -> None:
    """|actual - expected| <= bound, element by element; NaN only where NaN is expected."""
    actual = np.asarray(actual).astype(np.float64)
    expected = np.broadcast_to(expected, actual.shape)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    excess = np.nan_to_num(np.abs(actual - expected) - bound, nan=0.0)
    worst = np.unravel_index(excess.argmax(), excess.shape) if excess.size else None
    assert worst is None or excess[worst] <= 0, (
        f"at {worst}: {actual[worst]} differs from {expected[worst]} by {abs(actual - expected)[worst]}, "
        f"more than {np.broadcast_to(bound, actual.shape)[worst]}"
    )
