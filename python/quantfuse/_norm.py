# SPDX-License-Identifier: Apache-2.0
"""The producers of quantized activations."""

from __future__ import annotations

from typing import Any

from ._library import GATED_ACT, RMS_NORM, invoke
from ._tensors import ACTIVATIONS, DTypeLike, Tensor, adopt, adopt_like, argument_like, choice, plan_output


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
        out: memory for the output, or for ``(codes, scale)``.

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
    out: Any = None,
) -> Any:
    """``activation(x[..., :n]) * x[..., n:]``, perhaps quantized.

    Args:
        x: ``[..., 2 * n]`` float32, float16 or bfloat16: gate, then up.
        activation: ``silu``, ``gelu`` (by the error function), ``gelu_tanh``, ``relu`` or ``identity``.
        out_dtype, out_quant, out_group, out_scale, out: as in :func:`rms_norm`.

    Returns:
        ``y`` ``[..., n]``; with dynamic scales ``(codes, scale)``.

    >>> import numpy as np, quantfuse as qf
    >>> qf.gated_act(np.array([[-1.0, 2.0, 3.0, 4.0]], np.float32), "relu").tolist()
    [[0.0, 8.0]]
    """
    x, family = adopt(x, "x")
    matrix = family.rows(x, "x")
    if x.shape[-1] % 2 != 0:
        raise ValueError(f"x has {x.shape[-1]} columns, expected an even number: gate and up")
    y, result = plan_output(
        family, x, tuple(x.shape[:-1]), x.shape[-1] // 2, out_dtype, out_quant, out_group, out_scale, out
    )
    number = choice(ACTIVATIONS, activation, "activation")
    invoke(GATED_ACT, family.argument(matrix, "x"), number, *y)
    return result


def silu_and_mul(
    x: Tensor,
    *,
    out_dtype: DTypeLike | None = None,
    out_quant: str | None = None,
    out_group: int = 0,
    out_scale: Tensor | None = None,
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
        out=out,
    )
