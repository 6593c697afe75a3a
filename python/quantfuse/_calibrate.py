# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of quantization with calibration data: GPTQ and the search of AWQ, of one weight at a
time."""

from __future__ import annotations

from typing import NamedTuple

from ._library import AWQ_SEARCH, GPTQ_QUANTIZE, invoke
from ._tensors import (
    CODE_DTYPES,
    DYNAMIC,
    FORMATS,
    MSE,
    Tensor,
    adopt,
    adopt_like,
    argument_like,
    ceil_div,
    choice,
)

_ACT_ORDERS = {None: 0, False: 0, "none": 0, "group": 1, "static": 2, True: 2}
_INTEGER_FORMATS = {name: FORMATS[name] for name in ("int4", "int8")}


class GptqResult(NamedTuple):
    """What :func:`gptq_quantize` returns; ``zero`` and ``g_idx`` are None unless asked for."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    g_idx: Tensor | None
    loss: Tensor


class AwqResult(NamedTuple):
    """What :func:`awq_search` returns; ``clip`` is None unless asked for."""

    channel_scale: Tensor
    clip: Tensor | None
    loss: Tensor


def gptq_quantize(
    weight: Tensor,
    hessian: Tensor,
    format: str = "int4",
    *,
    bits: int = 0,
    group: int = 128,
    symmetric: bool = True,
    mse: bool = False,
    act_order: str | bool | None = None,
    damping: float = 0.01,
) -> GptqResult:
    """Quantizes a weight by GPTQ: each column makes up for the rounding errors of those before it, so that
    the layer's outputs change least on the inputs that ``hessian`` sums up.

    Args:
        weight: ``[n, k]`` float32, float16 or bfloat16.
        hessian: ``[k, k]`` float32, ``x.T @ x`` over the calibration inputs ``x``, times any factor.
        format: ``int4`` or ``int8``.
        bits: fewer bits than the format has: 2 to 4 in ``int4``, 2 to 8 in ``int8``; 0 is all.
        group: columns that share a scale, the last group perhaps fewer; 0 is the whole row.
        symmetric: False gives zero points.
        mse: shrink each group's range to what makes its squared error least.
        act_order: quantize columns with the largest inputs first: ``static`` (or True) keeps the groups
            those of neighbouring columns; ``group`` forms them in the new order and returns ``g_idx``.
        damping: the share of the mean of the diagonal that is added to it.

    Returns:
        Codes ``[n, k]`` int8 (``[n, ceil(k / 2)]`` uint8 for int4), scale ``[n, ceil(k / group)]`` float32,
        zero points int8 of the same shape, ``g_idx`` ``[k]`` int32, and the loss of each row, ``[n]``
        float32. All new.

    Raises:
        ValueError: a NaN or infinity, or a hessian that is not positive definite with its damping.

    >>> import numpy as np, quantfuse as qf
    >>> rng = np.random.default_rng(0)
    >>> x = rng.standard_normal((512, 64), np.float32) + rng.standard_normal((512, 1), np.float32)
    >>> w = rng.standard_normal((8, 64)).astype(np.float32)
    >>> codes, scale, zero, g_idx, loss = qf.gptq_quantize(w, x.T @ x, "int4", group=32)
    >>> nearest = qf.quantize_tensor(w, "int4", block=(1, 32))
    >>> def error(codes, scale):
    ...     return np.square(x @ (w - qf.dequantize_tensor(codes, scale, "int4", block=(1, 32))).T).sum()
    >>> bool(error(codes, scale) < 0.75 * error(nearest.codes, nearest.scale))
    True
    """
    weight, family = adopt(weight, "weight")
    number = choice(_INTEGER_FORMATS, format, "format")
    order = choice(_ACT_ORDERS, act_order, "act_order")
    if not damping > 0:
        raise ValueError(f"damping is {damping!r}, expected a positive number")
    n, k = _matrix_shape(weight, "weight")
    groups = _groups(k, group)
    codes = family.empty((n, ceil_div(k, 2) if format == "int4" else k), CODE_DTYPES[format], weight)
    scale = family.empty((n, groups), "float32", weight)
    zero = None if symmetric else family.empty((n, groups), "int8", weight)
    g_idx = family.empty((k,), "int32", weight) if order == 1 else None
    loss = family.empty((n,), "float32", weight)
    invoke(
        GPTQ_QUANTIZE,
        family.argument(weight, "weight"),
        argument_like(hessian, "hessian", family, "weight"),
        number,
        bits,
        group,
        MSE if mse else DYNAMIC,
        order,
        float(damping),
        codes,
        scale,
        zero,
        g_idx,
        loss,
    )
    return GptqResult(codes, scale, zero, g_idx, loss)


def awq_search(
    weight: Tensor,
    x: Tensor,
    format: str = "int4",
    *,
    bits: int = 0,
    group: int = 128,
    symmetric: bool = True,
    act_scale: Tensor | None = None,
    grid: int = 20,
    clip: bool = False,
) -> AwqResult:
    """Searches the factors of the input channels with which a weight loses least when it is rounded to
    nearest.

    ``weight * channel_scale`` is what to quantize; it belongs to inputs ``x / channel_scale``, so the
    division goes into whatever produces them, a norm's gain or the rows of the weight before. Weights that
    share their input are searched as one, stacked row below row.

    Args:
        weight: ``[n, k]`` float32, float16 or bfloat16.
        x: ``[t, k]`` float32, float16 or bfloat16: sampled inputs, 256 to 1024 of them.
        format: ``int4`` or ``int8``.
        bits: fewer bits than the format has, as in :func:`gptq_quantize`.
        group: columns that share a scale, the last group perhaps fewer; 0 is the whole row.
        symmetric: False where the weight is to be quantized with zero points.
        act_scale: ``[k]`` float32, mean ``|x|`` of each channel over all inputs; None takes that of ``x``.
        grid: the factors are ``act_scale ** (i / grid)``, ``i`` from 0 to ``grid``.
        clip: also search for the largest magnitude that each group keeps.

    Returns:
        ``channel_scale`` ``[k]`` float32; ``clip`` ``[n, ceil(k / group)]`` float32, to limit
        ``weight * channel_scale`` to before it is quantized; ``loss`` ``[grid + 1]`` float32, the summed
        squared error of the outputs for each exponent, the first being rounding to nearest alone. All new.

    >>> import numpy as np, quantfuse as qf
    >>> rng = np.random.default_rng(0)
    >>> x = rng.standard_normal((256, 64)).astype(np.float32)
    >>> x[:, 5] *= 30.0                                    # a channel whose weights matter more
    >>> w = rng.standard_normal((16, 64)).astype(np.float32)
    >>> channel_scale, clip, loss = qf.awq_search(w, x, "int4", group=32)
    >>> int(channel_scale.argmax()), bool(loss.min() < 0.5 * loss[0])
    (5, True)
    """
    weight, family = adopt(weight, "weight")
    number = choice(_INTEGER_FORMATS, format, "format")
    n, k = _matrix_shape(weight, "weight")
    if grid < 1:
        raise ValueError(f"grid is {grid}, expected at least 1")
    channel_scale = family.empty((k,), "float32", weight)
    limits = family.empty((n, _groups(k, group)), "float32", weight) if clip else None
    loss = family.empty((grid + 1,), "float32", weight)
    invoke(
        AWQ_SEARCH,
        family.argument(weight, "weight"),
        family.argument(adopt_like(x, "x", family, "weight"), "x"),
        argument_like(act_scale, "act_scale", family, "weight"),
        number,
        bits,
        group,
        not symmetric,
        grid,
        channel_scale,
        limits,
        loss,
    )
    return AwqResult(channel_scale, limits, loss)


def _matrix_shape(x: Tensor, name: str) -> tuple[int, int]:
    if x.ndim != 2:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, expected a matrix [n, k]")
    n, k = x.shape
    return int(n), int(k)


def _groups(k: int, group: int) -> int:
    if group < 0:
        raise ValueError(f"group is {group}, expected 0 (the whole row) or more")
    return ceil_div(k, group or k or 1)
