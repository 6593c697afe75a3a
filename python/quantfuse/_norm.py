# SPDX-License-Identifier: Apache-2.0
"""The producers of quantized activations."""

from __future__ import annotations

from typing import Any

from ._library import GATED_ACT, RMS_NORM, invoke
from ._tensors import (
    ACTIVATIONS,
    DTypeLike,
    Tensor,
    adopt,
    adopt_like,
    argument_like,
    choice,
    hadamard_size,
    plan_output,
)


def rms_norm(
    x: Tensor,
    gain: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    out_dtype: DTypeLike | None = None,
    out_quant: str | None = None,
    out_group: int = 0,
    out_scale: Tensor | None = None,
    hadamard: int | bool = 0,
    out: Any = None,
) -> Any:
    """``h * gain / sqrt(mean(h**2) + eps)`` of ``h = x + residual``, perhaps quantized.

    Args:
        x: ``[..., n]`` float32, float16 or bfloat16.
        gain: ``[n]`` float32, float16 or bfloat16; None is 1.
        residual: shape and type of ``x``; ``h`` is **written back** to it.
        out_dtype: of an output that is not quantized; by default that of ``x``.
        out_quant: ``int8``, ``fp8`` (E4M3) or ``fp8_e5m2``: the output is codes.
        out_group: columns that share a dynamic scale; 0 is the whole row.
        out_scale: one float32: a static scale in place of dynamic ones.
        hadamard: rotate every so many columns of a quantized output, as in :func:`quantize_tensor`.
        out: memory for the output, or for ``(codes, scale)``, of which the scale may be a transposed view of
            ``[groups, tokens]``.

    Returns:
        ``y``; with dynamic scales ``(codes, scale)``, the scale ``[..., ceil(n / out_group)]`` float32.

    >>> import numpy as np, quantfuse as qf
    >>> qf.rms_norm(np.array([[3.0, 4.0]], np.float32), eps=0.0).astype(float).round(4).tolist()
    [[0.8485, 1.1314]]
    >>> codes, scale = qf.rms_norm(np.array([[3.0, 4.0]], np.float32), out_quant="int8")
    >>> codes.tolist()
    [[95, 127]]
    """
    x, family = adopt(x, "x")
    matrix = family.rows(x, "x")
    y, result = plan_output(
        family, x, tuple(x.shape[:-1]), x.shape[-1], out_dtype, out_quant, out_group, out_scale, out
    )
    if residual is not None:
        residual = adopt_like(residual, "residual", family, "x")
        residual = family.output(family.rows(residual, "residual"), "residual")
    invoke(
        RMS_NORM,
        family.argument(matrix, "x"),
        residual,
        argument_like(gain, "gain", family, "x"),
        float(eps),
        *y,
        hadamard_size(hadamard, x.shape[-1]),
    )
    return result


def gated_act(
    x: Tensor,
    activation: str = "silu",
    *,
    out_dtype: DTypeLike | None = None,
    out_quant: str | None = None,
    out_group: int = 0,
    out_scale: Tensor | None = None,
    hadamard: int | bool = 0,
    out: Any = None,
) -> Any:
    """``activation(x[..., :n]) * x[..., n:]``, perhaps quantized.

    Args:
        x: ``[..., 2 * n]`` float32, float16 or bfloat16: gate, then up.
        activation: ``silu``, ``gelu`` (by the error function), ``gelu_tanh``, ``relu`` or ``identity``.
        out_dtype, out_quant, out_group, out_scale, hadamard, out: as in :func:`rms_norm`.

    Returns:
        ``y`` ``[..., n]``; with dynamic scales ``(codes, scale)``.

    >>> import numpy as np, quantfuse as qf
    >>> qf.gated_act(np.array([[-1.0, 2.0, 3.0, 4.0]], np.float32), "relu").tolist()
    [[0.0, 8.0]]
    """
    return _activated(x, activation, True, out_dtype, out_quant, out_group, out_scale, hadamard, out)


def activate(
    x: Tensor,
    activation: str = "gelu",
    *,
    out_dtype: DTypeLike | None = None,
    out_quant: str | None = None,
    out_group: int = 0,
    out_scale: Tensor | None = None,
    hadamard: int | bool = 0,
    out: Any = None,
) -> Any:
    """``activation(x)``, perhaps quantized: the middle of a feed-forward layer without a gate.

    Args:
        x: ``[..., n]`` float32, float16 or bfloat16.
        activation: as in :func:`gated_act`.
        out_dtype, out_quant, out_group, out_scale, hadamard, out: as in :func:`rms_norm`.

    Returns:
        ``y`` ``[..., n]``; with dynamic scales ``(codes, scale)``.

    >>> import numpy as np, quantfuse as qf
    >>> codes, scale = qf.activate(np.array([[-1.0, 2.0, 4.0]], np.float32), "relu", out_quant="int8")
    >>> codes.tolist()
    [[0, 64, 127]]
    """
    return _activated(x, activation, False, out_dtype, out_quant, out_group, out_scale, hadamard, out)


def _activated(
    x: Tensor,
    activation: str,
    is_gated: bool,
    out_dtype: DTypeLike | None,
    out_quant: str | None,
    out_group: int,
    out_scale: Tensor | None,
    hadamard: int | bool,
    out: Any,
) -> Any:
    x, family = adopt(x, "x")
    matrix = family.rows(x, "x")
    cols = x.shape[-1]
    if is_gated:
        if cols % 2 != 0:
            raise ValueError(f"x has {cols} columns, expected an even number: gate and up")
        cols //= 2
    y, result = plan_output(
        family, x, tuple(x.shape[:-1]), cols, out_dtype, out_quant, out_group, out_scale, out
    )
    number = choice(ACTIVATIONS, activation, "activation")
    size = hadamard_size(hadamard, cols)
    invoke(GATED_ACT, family.argument(matrix, "x"), number, *y, int(not is_gated), size)
    return result


def silu_and_mul(
    x: Tensor,
    *,
    out_dtype: DTypeLike | None = None,
    out_quant: str | None = None,
    out_group: int = 0,
    out_scale: Tensor | None = None,
    hadamard: int | bool = 0,
    out: Any = None,
) -> Any:
    """``silu(x[..., :n]) * x[..., n:]``: :func:`gated_act` with SiLU, the middle of a SwiGLU layer.

    >>> import numpy as np, quantfuse as qf
    >>> qf.silu_and_mul(np.array([[0.0, 5.0]], np.float32)).tolist()
    [[0.0]]
    """
    return gated_act(
        x,
        "silu",
        out_dtype=out_dtype,
        out_quant=out_quant,
        out_group=out_group,
        out_scale=out_scale,
        hadamard=hadamard,
        out=out,
    )
