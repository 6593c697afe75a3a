# SPDX-License-Identifier: Apache-2.0
"""Quantize and dequantize, in general and by the names that serving code calls."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ._library import DEQUANTIZE, QUANTIZE, invoke
from ._tensors import (
    CODE_DTYPES,
    DYNAMIC,
    FORMATS,
    FOUR_BIT,
    MICROSCALED,
    MSE,
    STATIC,
    DTypeLike,
    Family,
    Tensor,
    adopt,
    adopt_like,
    argument_like,
    blocks_of,
    ceil_div,
    dtype_of,
    format_of,
    hadamard_size,
    integer,
    two_sizes,
)


class Quantized(NamedTuple):
    """What :func:`quantize_tensor` returns; ``zero`` and ``row_sums`` are None unless asked for."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    row_sums: Tensor | None


# Every format by name: its codes' format, by name and by number.
_CODE_FORMATS = {name: (name, number) for name, number in FORMATS.items()}
_CODE_FORMATS.update({name: _CODE_FORMATS[codes] for name, codes in MICROSCALED.items()})


def _code_format(format: str) -> tuple[str, int]:
    known = _CODE_FORMATS.get(format)
    if known is None:
        raise ValueError(f"format is {format!r}, expected one of: {', '.join(_CODE_FORMATS)}")
    return known


def quantize_tensor(
    x: Tensor,
    format: str = "int8",
    *,
    block: tuple[int, int] | None = None,
    symmetric: bool = True,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    scale_format: str = "float32",
    mse: bool = False,
    row_sums: bool = False,
    hadamard: int | bool = 0,
    out: Tensor | None = None,
) -> Quantized:
    """``codes = saturate(round(x * (1 / scale)) + zero)``, round to nearest even.

    Args:
        x: ``[..., cols]`` float32, float16 or bfloat16, seen as a matrix ``[rows, cols]``.
        format: ``int8``, ``int4``, ``fp8_e4m3``, ``fp8_e5m2``, ``fp4_e2m1``, ``nf4``; or ``mxfp8``,
            ``mxfp4``, which are ``fp8_e4m3``, ``fp4_e2m1`` with E8M0 scales and blocks of ``(1, 32)``.
        block: the rectangle that shares a scale, 0 being the whole dimension: ``(0, 0)`` the tensor (the
            default), ``(1, 0)`` a row, ``(0, 1)`` a column, ``(1, g)`` a group, ``(128, 128)`` a 2-D block.
            The last one of a row or column may be short.
        symmetric: False gives integer formats a zero point.
        scale: given, it is used (a static scale) and nothing is computed; its shape is that of
            ``Quantized.scale``.
        zero: int8 zero points that go with a static ``scale``.
        scale_format: ``float32``, or ``e8m0`` for powers of two.
        mse: shrink each block's range to what makes its squared error least.
        row_sums: also return the int32 sums of codes of each row within each column of blocks.
        hadamard: rotate every so many neighbouring columns by the orthogonal Hadamard matrix before they are
            quantized, which spreads outliers over all of them: a power of two that divides ``cols``; True is
            the largest one. The rotation is its own inverse, and a product of two matrices that are rotated
            alike along k is that of the matrices themselves.
        out: memory for the codes.

    Returns:
        Codes ``[..., cols]`` (``[..., ceil(cols / 2)]`` for 4-bit formats), scale ``[ceil(rows / block rows),
        ceil(cols / block cols)]``, int8 zero points of the same shape, and row sums ``[rows, ceil(cols /
        block cols)]``.

    >>> import numpy as np, quantfuse as qf
    >>> x = np.array([[0.5, -1.0, 0.25, 2.0]], np.float32)
    >>> codes, scale, zero, row_sums = qf.quantize_tensor(x, "int8", block=(1, 2))
    >>> codes.tolist(), scale.shape
    ([[64, -127, 16, 127]], (1, 2))
    >>> qf.quantize_tensor(x, "mxfp4").codes.shape
    (1, 2)
    >>> outlier = np.array([[0, 0, 0, 8]], np.float32)
    >>> qf.quantize_tensor(outlier, "int8", hadamard=4).codes.tolist()     # 8 / sqrt(4) everywhere
    [[127, -127, -127, 127]]
    """
    x, family = adopt(x, "x")
    matrix = family.rows(x, "x")
    rows, cols = matrix.shape
    codes_format, number = _code_format(format)
    if block is None:
        block = (1, 32) if format in MICROSCALED else (0, 0)
    block_rows, block_cols = two_sizes(block, "block")
    shape = blocks_of(rows, cols, block)

    if out is None:
        code_cols = ceil_div(cols, 2) if codes_format in FOUR_BIT else cols
        out = family.empty((*x.shape[:-1], code_cols), CODE_DTYPES[codes_format], x)
    else:
        out = adopt_like(out, "out", family, "x")
    mode = STATIC if scale is not None else MSE if mse else DYNAMIC
    if scale is not None:
        if mse:
            raise ValueError("mse is given with a static scale, which leaves nothing to search")
        scale = adopt_like(scale, "scale", family, "x")
        zero = None if zero is None else adopt_like(zero, "zero", family, "x")
    else:
        if zero is not None:
            raise ValueError(
                "zero is given without scale: dynamic zero points are outputs, asked for by symmetric=False"
            )
        if scale_format not in ("float32", "e8m0"):
            raise ValueError(f"scale_format is {scale_format!r}, expected 'float32' or 'e8m0'")
        is_e8m0 = scale_format == "e8m0" or format in MICROSCALED
        scale = family.empty(shape, "uint8" if is_e8m0 else "float32", x)
        zero = None if symmetric else family.empty(shape, "int8", x)
    sums = family.empty((rows, shape[1]), "int32", x) if row_sums else None
    invoke(
        QUANTIZE,
        family.argument(matrix, "x"),
        number,
        block_rows,
        block_cols,
        mode,
        family.output(family.rows(out, "out"), "out"),
        family.argument(scale, "scale"),
        None if zero is None else family.argument(zero, "zero"),
        sums,
        hadamard_size(hadamard, cols),
    )
    return Quantized(out, scale, zero, sums)


def dequantize_tensor(
    codes: Tensor,
    scale: Tensor,
    format: str | None = None,
    *,
    block: tuple[int, int] | None = None,
    zero: Tensor | None = None,
    offset: Tensor | None = None,
    g_idx: Tensor | None = None,
    cols: int | None = None,
    out_dtype: DTypeLike = "float32",
    out: Tensor | None = None,
) -> Tensor:
    """``x = (codes - zero) * scale + offset``, in float32, rounded after every step.

    Args:
        codes: ``[..., cols]``, or ``[..., ceil(cols / 2)]`` for 4-bit formats.
        scale: float32, or E8M0 (uint8 or float8_e8m0fnu), shaped by ``block`` as in :func:`quantize_tensor`.
        format: as in :func:`quantize_tensor`, or ``nf4``, ``fp4_bnb``, ``iq4_nl``; needed unless the type of
            ``codes`` tells it.
        block: as in :func:`quantize_tensor`.
        zero: int8 or float32, shape of ``scale``.
        offset: float32, shape of ``scale``; integer formats.
        g_idx: ``[cols]`` int32, the column of ``scale`` for each column, in place of ``c // block[1]``.
        cols: of the result; needed only for 4-bit codes of odd rows.
        out_dtype: float32, float16 or bfloat16.
        out: memory for the result.

    >>> import numpy as np, quantfuse as qf
    >>> codes = np.array([[0x21, 0x0F]], np.uint8)     # 1, 2, -1, 0: the low nibble first
    >>> qf.dequantize_tensor(codes, np.array([0.5], np.float32), "int4", cols=3).tolist()
    [[0.5, 1.0, -0.5]]
    """
    codes, family = adopt(codes, "codes")
    name = format_of(codes, family, "codes") if format is None else format
    codes_format, number = _code_format(name)
    if block is None:
        block = (1, 32) if name in MICROSCALED else (0, 0)
    matrix = family.rows(codes, "codes")
    if cols is None:
        cols = 2 * matrix.shape[1] if codes_format in FOUR_BIT else matrix.shape[1]
    if out is None:
        out = family.empty((*codes.shape[:-1], cols), dtype_of(out_dtype, "out_dtype"), codes)
    else:
        out = adopt_like(out, "out", family, "codes")
    invoke(
        DEQUANTIZE,
        family.argument(matrix, "codes"),
        number,
        *block,
        argument_like(scale, "scale", family, "codes"),
        argument_like(zero, "zero", family, "codes"),
        argument_like(offset, "offset", family, "codes"),
        argument_like(g_idx, "g_idx", family, "codes"),
        family.output(family.rows(out, "out"), "out"),
    )
    return out


def _row_groups(
    x: Tensor,
    number: int,
    dtype: str,
    group: int,
    row_sums: bool,
    out: Any,
    column_major_scales: bool = False,
) -> tuple[Tensor, ...]:
    """Dynamic scales of each row and group of columns: codes, scale, perhaps row sums, shaped like ``x``."""
    x, family = adopt(x, "x")
    shape = tuple(x.shape)
    cols = shape[-1] if shape else 0
    groups = ceil_div(cols, group or cols or 1)
    codes, scale, sums = (None, None, None) if out is None else _outputs(out, row_sums, family)
    if codes is None:
        codes = family.empty(shape, dtype, x)
    if scale is None and column_major_scales:
        scale = family.empty((groups, math.prod(shape[:-1])), "float32", x).T.reshape((*shape[:-1], groups))
    elif scale is None:
        scale = family.empty((*shape[:-1], groups), "float32", x)
    if row_sums and sums is None:
        sums = family.empty((*shape[:-1], groups), "int32", x)
    if len(shape) == 2:
        matrix, codes_matrix, scale_matrix, sums_matrix = x, codes, scale, sums
    else:
        matrix, codes_matrix = family.rows(x, "x"), family.rows(codes, "out[0]")
        scale_matrix = family.rows(scale, "out[1]")
        sums_matrix = None if sums is None else family.rows(sums, "out[2]")
    invoke(
        QUANTIZE,
        family.argument(matrix, "x"),
        number,
        1,
        group,
        DYNAMIC,
        family.output(codes_matrix, "out[0]"),
        family.output(scale_matrix, "out[1]"),
        None,
        None if sums_matrix is None else family.output(sums_matrix, "out[2]"),
        0,
    )
    return (codes, scale, sums) if row_sums else (codes, scale)


_OUT_NAMES = ("out[0]", "out[1]", "out[2]")


def _outputs(out: Any, row_sums: bool, family: Family) -> tuple[Any, Any, Any]:
    count = 3 if row_sums else 2
    if not isinstance(out, tuple | list) or len(out) != count:
        raise ValueError(f"out is {type(out).__name__}, expected a tuple of {count} tensors")
    given = [t if t is None else adopt_like(t, n, family, "x") for t, n in zip(out, _OUT_NAMES, strict=False)]
    return given[0], given[1], given[2] if row_sums else None


def per_token_quant_int8(
    x: Tensor, *, row_sums: bool = False, out: tuple[Tensor, ...] | None = None
) -> tuple[Tensor, ...]:
    """INT8 with one scale per token (row).

    Args:
        x: ``[..., k]`` float32, float16 or bfloat16.
        row_sums: also return the int32 sum of each row's codes.
        out: memory for the outputs, in their order.

    Returns:
        Codes ``[..., k]`` int8, scale ``[..., 1]`` float32, and perhaps row sums ``[..., 1]`` int32.

    >>> import numpy as np, quantfuse as qf
    >>> q, scale = qf.per_token_quant_int8(np.array([[1, -2], [0, 4]], np.float32))
    >>> q.tolist(), np.round(scale * 127, 5).tolist()
    ([[64, -127], [0, 127]], [[2.0], [4.0]])
    """
    return _row_groups(x, 1, "int8", 0, row_sums, out)


def per_token_group_quant_int8(
    x: Tensor,
    group_size: int,
    *,
    row_sums: bool = False,
    column_major_scales: bool = False,
    out: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, ...]:
    """INT8 with one scale per token and group of ``group_size`` columns; the last group may be short.

    Args:
        x: ``[..., k]`` float32, float16 or bfloat16.
        group_size: at least 1; it need not divide k.
        row_sums: also return the int32 sum of codes of each row and group.
        column_major_scales: the scale lies in memory as ``[groups, tokens]``: a transposed view of that.
        out: memory for the outputs, in their order; the scale may be such a view.

    Returns:
        Codes ``[..., k]`` int8, scale ``[..., ceil(k / group_size)]`` float32, and perhaps row sums int32.

    >>> import numpy as np, quantfuse as qf
    >>> q, scale = qf.per_token_group_quant_int8(np.ones((2, 5), np.float32), 2)
    >>> q.shape, scale.shape
    ((2, 5), (2, 3))
    """
    return _row_groups(x, 1, "int8", _group(group_size), row_sums, out, column_major_scales)


def per_token_group_quant_fp8(
    x: Tensor,
    group_size: int,
    *,
    format: str = "fp8_e4m3",
    column_major_scales: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """FP8 with one scale per token and group of ``group_size`` columns; the last group may be short.

    Args:
        x: ``[..., k]`` float32, float16 or bfloat16.
        group_size: at least 1; it need not divide k.
        format: ``fp8_e4m3`` or ``fp8_e5m2``.
        column_major_scales, out: as in :func:`per_token_group_quant_int8`.

    Returns:
        Codes ``[..., k]`` (``torch.float8_*``, or uint8 in NumPy) and scale ``[..., ceil(k / group_size)]``
        float32.

    >>> import numpy as np, quantfuse as qf
    >>> q, scale = qf.per_token_group_quant_fp8(np.ones((1, 4), np.float32), 4)
    >>> hex(q[0, 0]), round(1 / float(scale[0, 0]))     # 448 is 0x7e
    ('0x7e', 448)
    """
    return _row_groups(x, *_fp8(format), _group(group_size), False, out, column_major_scales)


def static_quant_fp8(
    x: Tensor, scale: Tensor, *, format: str = "fp8_e4m3", out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """FP8 with a scale that is known beforehand, one for the whole tensor.

    Args:
        x: ``[..., k]`` float32, float16 or bfloat16.
        scale: one float32, of any shape of size 1.
        format: ``fp8_e4m3`` or ``fp8_e5m2``.
        out: memory for the codes.

    Returns:
        Codes ``[..., k]`` and ``scale`` itself.

    >>> import numpy as np, quantfuse as qf
    >>> q, scale = qf.static_quant_fp8(np.array([[1.0, 1000.0]], np.float32), np.array([1.0], np.float32))
    >>> [hex(code) for code in q[0]]     # 1, and 448: beyond the largest comes the largest
    ['0x38', '0x7e']
    """
    x, family = adopt(x, "x")
    number, dtype = _fp8(format)
    scale = adopt_like(scale, "scale", family, "x")
    if math.prod(scale.shape) != 1:
        raise ValueError(f"scale has shape {tuple(scale.shape)}, expected one number")
    out = family.empty(tuple(x.shape), dtype, x) if out is None else adopt_like(out, "out", family, "x")
    invoke(
        QUANTIZE,
        family.argument(family.rows(x, "x"), "x"),
        number,
        0,
        0,
        STATIC,
        family.output(family.rows(out, "out"), "out"),
        family.argument(scale.reshape(1), "scale"),
        None,
        None,
        0,
    )
    return out, scale


def _group(group_size: int) -> int:
    if integer(group_size, "group_size") < 1:
        raise ValueError(f"group_size is {group_size}, expected at least 1")
    return group_size


def _fp8(format: str) -> tuple[int, str]:
    if format not in ("fp8_e4m3", "fp8_e5m2"):
        raise ValueError(f"format is {format!r}, expected 'fp8_e4m3' or 'fp8_e5m2'")
    return FORMATS[format], CODE_DTYPES[format]
