# SPDX-License-Identifier: Apache-2.0
"""Weights in the words of 32 bits that AutoAWQ and the tools of GPTQ store, as numbers."""

from __future__ import annotations

from ._library import DEQUANTIZE_WORDS, invoke
from ._tensors import DTypeLike, Tensor, adopt, adopt_like, argument_like, dtype_of

_AWQ = 1
_GPTQ = {"gptq": 2, "gptq_v2": 3}


def awq_dequantize(
    qweight: Tensor,
    scales: Tensor,
    qzeros: Tensor,
    *,
    group_size: int | None = None,
    out_dtype: DTypeLike | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``w`` ``[k, n]`` of a layer that AutoAWQ stored (its GEMM version), ``(q - zero) * scale``.

    Args:
        qweight: ``[k, n / 8]`` int32: 4-bit codes, of every 8 columns 0, 2, 4, 6, 1, 3, 5, 7.
        scales: ``[groups, n]`` float16, bfloat16 or float32.
        qzeros: ``[groups, n / 8]`` int32, packed like ``qweight``.
        group_size: rows that share a scale, -1 for all; by default ``k / groups``.
        out_dtype: by default that of ``scales``.
        out: memory for the result.

    Returns:
        ``[k, n]``: the transpose of the layer's ``weight``.

    >>> import numpy as np, quantfuse as qf
    >>> qweight = np.array([[0x76543210]], np.uint32).view(np.int32)
    >>> zeros, scales = np.zeros((1, 1), np.int32), np.full((1, 8), 0.5, np.float16)
    >>> qf.awq_dequantize(qweight, scales, zeros).tolist()
    [[0.0, 2.0, 0.5, 2.5, 1.0, 3.0, 1.5, 3.5]]
    """
    qweight, _ = adopt(qweight, "qweight")
    rows = qweight.shape[0] if qweight.ndim == 2 else 0
    return _dequantize(_AWQ, 4, rows, qweight, scales, qzeros, None, group_size, out_dtype, out)


def gptq_dequantize(
    qweight: Tensor,
    scales: Tensor,
    qzeros: Tensor,
    g_idx: Tensor | None = None,
    *,
    bits: int = 4,
    group_size: int | None = None,
    checkpoint_format: str = "gptq",
    out_dtype: DTypeLike | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``w`` ``[k, n]`` of a layer that AutoGPTQ or GPTQModel stored, ``(q - zero) * scale``.

    Args:
        qweight: ``[ceil(k * bits / 32), n]`` int32: codes packed along ``k``.
        scales: ``[groups, n]`` float16, bfloat16 or float32.
        qzeros: ``[groups, ceil(n * bits / 32)]`` int32: zero points packed along ``n``.
        g_idx: ``[k]`` int32, the group of each row (act-order); by default ``row // group_size``.
        bits: 2, 3, 4 or 8.
        group_size: rows that share a scale, -1 for all; by default ``k / groups``.
        checkpoint_format: ``gptq``, whose zero points are stored less one, or ``gptq_v2``.
        out_dtype: by default that of ``scales``.
        out: memory for the result.

    Returns:
        ``[k, n]``: the transpose of the layer's ``weight``.

    >>> import numpy as np, quantfuse as qf
    >>> qweight = np.array([[0x76543210]], np.uint32).view(np.int32)
    >>> zeros, scales = np.zeros((1, 1), np.int32), np.ones((1, 1), np.float16)
    >>> qf.gptq_dequantize(qweight, scales, zeros).T.tolist()
    [[-1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]
    """
    qweight, family = adopt(qweight, "qweight")
    if checkpoint_format not in _GPTQ:
        raise ValueError(f"checkpoint_format is {checkpoint_format!r}, expected 'gptq' or 'gptq_v2'")
    if bits not in (2, 3, 4, 8):
        raise ValueError(f"bits is {bits}, expected 2, 3, 4 or 8")
    rows = qweight.shape[0] * 32 // bits if qweight.ndim == 2 else 0
    if g_idx is not None:
        g_idx = adopt_like(g_idx, "g_idx", family, "qweight")
        rows = g_idx.shape[0] if g_idx.ndim == 1 else rows
    layout = _GPTQ[checkpoint_format]
    return _dequantize(layout, bits, rows, qweight, scales, qzeros, g_idx, group_size, out_dtype, out)


def _dequantize(
    layout: int,
    bits: int,
    rows: int,
    qweight: Tensor,
    scales: Tensor,
    qzeros: Tensor,
    g_idx: Tensor | None,
    group_size: int | None,
    out_dtype: DTypeLike | None,
    out: Tensor | None,
) -> Tensor:
    _, family = adopt(qweight, "qweight")
    scales = adopt_like(scales, "scales", family, "qweight")
    if scales.ndim != 2:
        raise ValueError(f"scales has shape {tuple(scales.shape)}, expected [groups, n]")
    groups, columns = scales.shape
    if group_size is None:
        if groups == 0 or rows % groups != 0:
            raise ValueError(f"group_size is needed: {rows} rows have {groups} groups of scales")
        group_size = rows // groups
    if out is not None:
        out = adopt_like(out, "out", family, "qweight")
    elif out_dtype is None:
        out = family.empty_as((rows, columns), scales)
    else:
        out = family.empty((rows, columns), dtype_of(out_dtype, "out_dtype"), scales)
    invoke(
        DEQUANTIZE_WORDS,
        layout,
        bits,
        max(group_size, 0),
        family.argument(qweight, "qweight"),
        argument_like(qzeros, "qzeros", family, "qweight"),
        family.argument(scales, "scales"),
        argument_like(g_idx, "g_idx", family, "qweight"),
        family.output(out, "out"),
    )
    return out
