# SPDX-License-Identifier: Apache-2.0
"""Linear layers."""

from __future__ import annotations

from typing import Any

from ._library import LINEAR, LINEAR_BACKWARD, invoke
from ._plain_weight import PlainWeight
from ._tensors import (
    ACT_FORMATS,
    ACTIVATIONS,
    DTypeLike,
    Tensor,
    adopt,
    adopt_like,
    argument_like,
    choice,
    dtype_of,
    format_of,
    integer,
    plan_output,
)
from ._weight import QuantizedWeight


def linear(
    x: Tensor,
    weight: QuantizedWeight | PlainWeight | Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    act_quant: str | None = None,
    act_group: int = 0,
    x_scale: Tensor | None = None,
    out_dtype: DTypeLike | None = None,
    out_quant: str | None = None,
    out_group: int = 0,
    out_scale: Tensor | None = None,
    out: Any = None,
    batch_invariant: bool = False,
    x_gain: Tensor | None = None,
    x_eps: float = 1e-6,
    fast_accumulation: bool = False,
) -> Any:
    """``quantize( activation(x @ w.T + bias) [* up] + residual )``, all in one kernel.

    Args:
        x: ``[..., k]`` float32, float16 or bfloat16; or codes, with ``x_scale``.
        weight: ``n`` by ``k``; a tensor is taken as :class:`PlainWeight`, and on a CPU packed anew by every
            call. The layer has ``n`` outputs, or ``n / 2`` where the weight is gated: then the
            first half of its rows is the gate, the second the up projection, and the result is
            ``activation(gate) * up``.
        bias: ``[n]`` float32, float16 or bfloat16.
        activation: None, ``relu``, ``gelu`` (by the error function), ``gelu_tanh`` or ``silu``.
        residual: ``[..., n_out]`` float32, float16 or bfloat16, added last; it may be ``out`` itself.
        act_quant: None computes with ``x`` as it is. ``int8``, ``fp8`` (E4M3) or ``fp8_e5m2`` quantizes ``x``
            on the way in, per token, or per token and ``act_group`` columns.
        x_scale: ``[..., ceil(k / act_group)]`` float32, where ``x`` already holds codes.
        out_dtype: of an output that is not quantized; by default that of ``x`` (float32 where ``x`` is
            codes).
        out_quant: ``int8``, ``fp8`` (E4M3) or ``fp8_e5m2``: the output is codes.
        out_group: columns of the output that share a dynamic scale; 0 is the whole row.
        out_scale: one float32: a static scale in place of dynamic ones.
        out: memory for the output, or for ``(codes, scale)``.
        batch_invariant: the bits of a row must not depend on how many rows there are: no kernel runs whose
            order of summation does.
        x_gain: ``[k]`` float32, float16 or bfloat16: ``x`` is first normalized, as :func:`rms_norm` does with
            this gain and ``x_eps``; for one or two tokens of bfloat16 on Hopper in the same kernel. Not where
            ``x`` is quantized.
        fast_accumulation: as in :func:`scaled_mm`, where ``x`` and the weight are FP8.

    Returns:
        ``y`` ``[..., n_out]``; with dynamic scales ``(codes, scale)``, the scale ``[..., ceil(n_out /
        out_group)]``.

    >>> import numpy as np, quantfuse as qf
    >>> weight = qf.QuantizedWeight.from_float(np.array([[1.0, -1.0], [0.5, 1.0]], np.float32), "int8")
    >>> y = qf.linear(np.array([[2.0, 1.0], [-2.0, 1.0]], np.float32), weight, activation="relu")
    >>> y.astype(float).round(1).tolist()
    [[1.0, 2.0], [0.0, 0.0]]
    """
    x, family = adopt(x, "x")
    if not isinstance(weight, QuantizedWeight | PlainWeight):
        weight = PlainWeight(adopt_like(weight, "weight", family, "x")).pack()
    act_format = choice(ACT_FORMATS, act_quant, "act_quant")
    if x_scale is not None:
        x_scale = adopt_like(x_scale, "x_scale", family, "x")
        x_scale = family.argument(
            x_scale if x_scale.ndim <= 2 else family.rows(x_scale, "x_scale"), "x_scale"
        )
        act_format = act_format or choice(ACT_FORMATS, format_of(x, family, "x"), "x")
        out_dtype = "float32" if out_dtype is None and out_quant is None else out_dtype
    leading = tuple(x.shape[:-1])
    y, result = plan_output(
        family, x, leading, weight.out_features, out_dtype, out_quant, out_group, out_scale, out
    )
    if residual is not None:
        residual = adopt_like(residual, "residual", family, "x")
        residual = family.argument(family.rows(residual, "residual"), "residual")
    invoke(
        LINEAR,
        family.argument(family.rows(x, "x"), "x"),
        x_scale,
        act_format,
        integer(act_group, "act_group"),
        *weight.call_arguments(family),
        argument_like(bias, "bias", family, "x"),
        choice(ACTIVATIONS, activation, "activation"),
        residual,
        *y,
        batch_invariant,
        argument_like(x_gain, "x_gain", family, "x"),
        float(x_eps),
        fast_accumulation,
    )
    return result


def linear_backward(
    dy: Tensor, weight: QuantizedWeight, *, out_dtype: DTypeLike | None = None, out: Tensor | None = None
) -> Tensor:
    """``dx = dy @ w``: the gradient of :func:`linear` with respect to ``x``. Needs the canonical weight.

    Args:
        dy: ``[..., n]`` float32, float16 or bfloat16: the gradient before bias and activation.
        weight: ``n`` by ``k``.
        out_dtype: by default that of ``dy``.
        out: memory for the result.

    Returns:
        ``[..., k]``.

    >>> import numpy as np, quantfuse as qf
    >>> weight = qf.QuantizedWeight.from_float(np.array([[1.0, -1.0], [0.5, 1.0]], np.float32), "int8")
    >>> qf.linear_backward(np.array([[1.0, 2.0]], np.float32), weight).astype(float).round(1).tolist()
    [[2.0, 1.0]]
    """
    dy, family = adopt(dy, "dy")
    if not isinstance(weight, QuantizedWeight):
        raise TypeError(f"weight is a {type(weight).__name__}, expected a QuantizedWeight")
    shape = (*dy.shape[:-1], weight.shape[1])
    if out is not None:
        out = adopt_like(out, "out", family, "dy")
    elif out_dtype is None:
        out = family.empty_as(shape, dy)
    else:
        out = family.empty(shape, dtype_of(out_dtype, "out_dtype"), dy)
    invoke(
        LINEAR_BACKWARD,
        family.argument(family.rows(dy, "dy"), "dy"),
        *weight.call_arguments(family),
        family.output(family.rows(out, "out"), "out"),
    )
    return out
