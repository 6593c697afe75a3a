# SPDX-License-Identifier: Apache-2.0
"""Products of two quantized matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ._library import SCALED_MM, invoke
from ._tensors import (
    FORMATS,
    DTypeLike,
    Family,
    Tensor,
    adopt,
    adopt_like,
    argument_like,
    choice,
    dtype_of,
    format_of,
)

_ORDERS = {"nk": 0, "kn": 1}
_PRODUCT_FORMATS = {name: FORMATS[name] for name in ("int8", "int4", "fp8_e4m3", "fp8_e5m2")}


def int8_matmul(a: Tensor, b: Tensor, *, b_order: str = "nk", out: Tensor | None = None) -> Tensor:
    """``a @ b.T`` in exact integers (modulo 2**32).

    Args:
        a: ``[..., k]`` int8.
        b: ``[n, k]`` int8; with ``b_order="kn"`` ``[k, n]``, and the product is ``a @ b``.
        out: memory for the result.

    Returns:
        ``[..., n]`` int32.

    >>> import numpy as np, quantfuse as qf
    >>> qf.int8_matmul(np.array([[1, 2]], np.int8), np.array([[3, 4], [-1, 0]], np.int8)).tolist()
    [[11, -1]]
    """
    return _integers(a, b, "int8", b_order, None, None, out)


def int4_matmul(
    a: Tensor,
    b: Tensor,
    *,
    k: int | None = None,
    n: int | None = None,
    b_order: str = "nk",
    out: Tensor | None = None,
) -> Tensor:
    """``a @ b.T`` of packed 4-bit integers, exact (modulo 2**32).

    Args:
        a: ``[..., ceil(k / 2)]`` uint8, two numbers per byte, the low nibble first.
        b: ``[n, ceil(k / 2)]`` uint8; with ``b_order="kn"`` ``[k, ceil(n / 2)]``.
        k: needed where it is odd.
        n: needed where it is odd and ``b_order`` is ``kn``.
        out: memory for the result.

    Returns:
        ``[..., n]`` int32.

    >>> import numpy as np, quantfuse as qf
    >>> a = np.array([[0x21, 0x03]], np.uint8)     # 1, 2, 3
    >>> b = np.array([[0x11, 0x0F]], np.uint8)     # 1, 1, -1
    >>> qf.int4_matmul(a, b, k=3).tolist()
    [[0]]
    """
    return _integers(a, b, "int4", b_order, k, n, out)


def _integers(
    a: Tensor, b: Tensor, format: str, b_order: str, k: int | None, n: int | None, out: Tensor | None
) -> Tensor:
    a, family = adopt(a, "a")
    b = adopt_like(b, "b", family, "a")
    order = choice(_ORDERS, b_order, "b_order")
    per_byte = 2 if format == "int4" else 1
    if len(b.shape) != 2:
        raise ValueError(f"b has shape {tuple(b.shape)}, expected a matrix")
    if n is None:
        n = b.shape[0] if order == 0 else b.shape[1] * per_byte
    if k is None and per_byte == 2:
        k = b.shape[0] if order == 1 else 2 * a.shape[-1]
    out = family.empty((*a.shape[:-1], n), "int32", a) if out is None else adopt_like(out, "out", family, "a")
    number = FORMATS[format]
    invoke(
        SCALED_MM,
        family.argument(family.rows(a, "a"), "a"),
        family.argument(b, "b"),
        family.output(family.rows(out, "out"), "out"),
        number,
        number,
        order,
        k or 0,
        *(None, None, 0, 0, 0, 0, None, None, None, False, False),
    )
    return out


def scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    out_dtype: DTypeLike = "float32",
    a_format: str | None = None,
    b_format: str | None = None,
    a_block: tuple[int, int] | None = None,
    b_block: tuple[int, int] | None = None,
    a_zero: Tensor | None = None,
    b_zero: Tensor | None = None,
    b_order: str = "nk",
    k: int | None = None,
    is_b_constant: bool = False,
    fast_accumulation: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """``sum_k (a - a_zero) * a_scale * (b - b_zero) * b_scale + bias``.

    Args:
        a: ``[..., k]`` codes: INT8, INT4 (``[..., ceil(k / 2)]``), E4M3 or E5M2.
        b: ``[n, k]`` codes, or ``[k, n]`` with ``b_order="kn"``; integer if ``a`` is, FP8 if ``a`` is.
        a_scale: float32, shaped by ``a_block`` over ``[m, k]``; None is 1.
        b_scale: float32, shaped by ``b_block`` over ``[n, k]``; None is 1.
        bias: ``[n]`` float32, float16 or bfloat16.
        out_dtype: float32, float16 or bfloat16.
        a_format, b_format: needed where the type of the codes does not tell (uint8).
        a_block, b_block: the rectangle that shares a scale. By default one number is a scale of the tensor
            and a column of numbers one of each row.
        a_zero: int32, ``[m]`` or ``[1]``. b_zero: int32, ``[n]`` or ``[1]``. Integer formats only.
        k: needed for INT4 where it is odd.
        is_b_constant: nothing that is still under way on the stream writes ``b`` or ``b_scale``: kernels may
            read them ahead. For weights; a few microseconds for a few rows of ``a``.
        fast_accumulation: FP8 sums may stay in the tensor cores for all of ``k``, as with torch's
            ``use_fast_accum``: up to 5% faster for many rows on Hopper, where a sum has about 14 bits then.
        out: memory for the result.

    Returns:
        ``[..., n]``.

    >>> import numpy as np, quantfuse as qf
    >>> a, b = np.array([[2, 4]], np.int8), np.array([[1, 1]], np.int8)
    >>> qf.scaled_mm(a, b, np.array([0.5], np.float32), bias=np.array([10], np.float32)).tolist()
    [[13.0]]
    """
    a, family = adopt(a, "a")
    b = adopt_like(b, "b", family, "a")
    if len(b.shape) != 2:
        raise ValueError(f"b has shape {tuple(b.shape)}, expected a matrix")
    a_number = choice(_PRODUCT_FORMATS, a_format or format_of(a, family, "a"), "a_format")
    b_number = choice(_PRODUCT_FORMATS, b_format or format_of(b, family, "b"), "b_format")
    order = choice(_ORDERS, b_order, "b_order")
    if a_number == FORMATS["int4"] and k is None:
        k = 2 * a.shape[-1]
    if out is None:
        n = b.shape[0] if order == 0 else b.shape[1] * (2 if b_number == FORMATS["int4"] else 1)
        out = family.empty((*a.shape[:-1], n), dtype_of(out_dtype, "out_dtype"), a)
    else:
        out = adopt_like(out, "out", family, "a")
    invoke(
        SCALED_MM,
        family.argument(family.rows(a, "a"), "a"),
        family.argument(b, "b"),
        family.output(family.rows(out, "out"), "out"),
        a_number,
        b_number,
        order,
        k or 0,
        _scale_argument(a_scale, "a_scale", family),
        _scale_argument(b_scale, "b_scale", family),
        *_block_of_scale(a_scale, a_block, "a_block"),
        *_block_of_scale(b_scale, b_block, "b_block"),
        argument_like(a_zero, "a_zero", family, "a"),
        argument_like(b_zero, "b_zero", family, "a"),
        argument_like(bias, "bias", family, "a"),
        is_b_constant,
        fast_accumulation,
    )
    return out


def _scale_argument(scale: Tensor | None, name: str, family: Family) -> Any:
    if scale is None:
        return None
    scale = adopt_like(scale, name, family, "a")
    return family.argument(scale if len(scale.shape) in (1, 2) else _flat(scale, name, family), name)


def _flat(scale: Tensor, name: str, family: Family) -> Tensor:
    return scale.reshape(1) if len(scale.shape) == 0 else family.rows(scale, name)


def _block_of_scale(scale: Tensor | None, block: tuple[int, int] | None, name: str) -> tuple[int, int]:
    if block is not None:
        return block
    if scale is None or math.prod(scale.shape) == 1:
        return 0, 0
    if len(scale.shape) == 1 or scale.shape[-1] == 1:
        return 1, 0
    raise ValueError(f"{name} is missing, and a scale of shape {tuple(scale.shape)} does not tell it")


def w8a8_block_int8_matmul(
    A: Tensor,
    B: Tensor,
    As: Tensor,
    Bs: Tensor,
    block_size: Sequence[int] = (128, 128),
    output_dtype: DTypeLike = "float16",
    *,
    out: Tensor | None = None,
) -> Tensor:
    """INT8 activations, scaled per token and group, times INT8 weights, scaled per 2-D block.

    Args:
        A: ``[..., K]`` int8. B: ``[N, K]`` int8.
        As: ``[..., ceil(K / block_size[1])]`` float32.
        Bs: ``[ceil(N / block_size[0]), ceil(K / block_size[1])]`` float32.
        block_size: of B's blocks, along N and along K; edges may be short.
        output_dtype: float32, float16 or bfloat16.
        out: memory for the result.

    Returns:
        ``[..., N]``.

    >>> import numpy as np, quantfuse as qf
    >>> A, B = np.ones((2, 256), np.int8), np.ones((3, 256), np.int8)
    >>> As, Bs = np.full((2, 2), 0.5, np.float32), np.array([[1.0, 3.0]], np.float32)
    >>> qf.w8a8_block_int8_matmul(A, B, As, Bs).tolist()
    [[256.0, 256.0, 256.0], [256.0, 256.0, 256.0]]
    """
    return _block_matmul(A, B, As, Bs, "int8", block_size, output_dtype, out)


def w8a8_block_fp8_matmul(
    A: Tensor,
    B: Tensor,
    As: Tensor,
    Bs: Tensor,
    block_size: Sequence[int] = (128, 128),
    output_dtype: DTypeLike = "float16",
    *,
    out: Tensor | None = None,
) -> Tensor:
    """As :func:`w8a8_block_int8_matmul`, with E4M3 codes (uint8 or float8_e4m3fn) for A and B.

    >>> import numpy as np, quantfuse as qf
    >>> A, B = np.full((1, 128), 0x38, np.uint8), np.full((1, 128), 0x40, np.uint8)     # 1 and 2
    >>> one = np.ones((1, 1), np.float32)
    >>> qf.w8a8_block_fp8_matmul(A, B, one, one, output_dtype="float32").tolist()
    [[256.0]]
    """
    return _block_matmul(A, B, As, Bs, "fp8_e4m3", block_size, output_dtype, out)


def _block_matmul(
    A: Tensor,
    B: Tensor,
    As: Tensor,
    Bs: Tensor,
    format: str,
    block_size: Sequence[int],
    output_dtype: DTypeLike,
    out: Tensor | None,
) -> Tensor:
    if len(block_size) != 2:
        raise ValueError(f"block_size is {block_size!r}, expected two sizes")
    block_n, block_k = block_size
    return scaled_mm(
        A,
        B,
        As,
        Bs,
        out_dtype=output_dtype,
        a_format=format,
        b_format=format,
        a_block=(1, block_k),
        b_block=(block_n, block_k),
        out=out,
    )
