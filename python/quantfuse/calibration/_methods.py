# SPDX-License-Identifier: Apache-2.0
"""How the linears of one decoder layer become quantized ones, by each method."""

from __future__ import annotations

from typing import Any

import torch

from .._calibrate import awq_search, gptq_quantize
from .._quantize import quantize_tensor
from ._layer import InputStatistics, Site, divide_output
from ._packing import QuantizedLinear
from ._settings import Settings

_FP8_LARGEST = 448.0


def quantize_layer(
    layer: Any, sites: list[Site], statistics: list[InputStatistics], settings: Settings, dtype: Any
) -> tuple[dict[str, QuantizedLinear], dict[str, dict[str, float]]]:
    """The quantized linears of a layer by name, and the relative squared errors of their outputs: by
    rounding to nearest and as quantized. Norms and linears of the layer are scaled where the method moves
    factors into them."""
    pairs = list(zip(sites, statistics, strict=True))
    weights = {name: layer.get_submodule(name).weight.data for site in sites for name in site.names}
    exact = {name: stats.samples @ weights[name].t() for site, stats in pairs for name in site.names}
    errors: dict[str, dict[str, float]] = {}
    for site, stats in pairs:
        for name in site.names:
            outputs = stats.samples @ _nearest(weights[name], settings).dequantized().t()
            errors[name] = {"rtn": _relative_error(outputs, exact[name])}

    clips: dict[str, Any] = {}
    divided: dict[str, Any] = {}  # linears whose outputs are divided, and by what
    for site, stats in pairs:
        if settings.method == "awq":
            factors, found = _awq(weights, site, stats, settings)
            clips |= found
        else:
            factors = _smoothquant(weights, site, stats, settings)
        if factors is not None:
            producer = str(site.producer)
            move(layer, site, stats, factors)
            divided[producer] = factors
            if producer in clips:
                clips[producer] = clips[producer] / factors.unsqueeze(1)

    quantized = {}
    for site, stats in pairs:
        for name in site.names:
            linear = _quantize(weights[name], stats, settings, clips.get(name))
            # The file has scales in the model's own type, so errors and what follows are seen with those.
            linear.scale = linear.scale.to(dtype)
            quantized[name] = linear
            outputs = stats.samples @ linear.dequantized().t() * divided.get(name, 1.0)
            errors[name]["error"] = _relative_error(outputs, exact[name])
    return quantized, errors


def _quantize(weight: Any, stats: InputStatistics, settings: Settings, clip: Any | None) -> QuantizedLinear:
    if settings.method == "gptq":
        result = gptq_quantize(
            weight,
            stats.hessian,
            settings.format,
            group=settings.group,
            symmetric=settings.symmetric,
            act_order="static" if settings.act_order else None,
            damping=settings.damping,
        )
        codes = _one_per_element(result.codes, weight.shape[1], settings)
        return QuantizedLinear(codes, result.scale, result.zero, None, settings.group)
    if clip is not None:
        limit = clip.repeat_interleave(settings.group or weight.shape[1], 1)[:, : weight.shape[1]]
        weight = weight.clamp(-limit, limit)
    linear = _nearest(weight, settings, mse=settings.method == "mse" and settings.scheme != "fp8")
    if settings.scheme == "fp8":
        linear.input_scale = _static_scale(stats, settings)
    return linear


def _nearest(weight: Any, settings: Settings, mse: bool = False) -> QuantizedLinear:
    result = quantize_tensor(
        weight, settings.format, block=settings.block, symmetric=settings.symmetric, mse=mse
    )
    codes = _one_per_element(result.codes, weight.shape[1], settings)
    return QuantizedLinear(codes, result.scale, result.zero, None, settings.group)


def _one_per_element(codes: Any, columns: int, settings: Settings) -> Any:
    """Nibbles unpacked, low one first, and sign-extended."""
    if settings.scheme != "int4":
        return codes
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, :columns].to(torch.int8)
    return torch.where(nibbles > 7, nibbles - 16, nibbles)


def _relative_error(outputs: Any, exact: Any) -> float:
    """The squared error of outputs, as a share of the squared outputs."""
    return float((outputs - exact).square().sum() / exact.square().sum().clamp_min(1e-30))


# ---- Factors that move from inputs to weights ----


def move(layer: Any, site: Site, stats: InputStatistics, factors: Any) -> None:
    """Multiplies the columns of the site's linears by a factor each, and divides their inputs by it."""
    for name in site.names:
        layer.get_submodule(name).weight.data *= factors
    divide_output(layer.get_submodule(str(site.producer)), factors)
    stats.divide(factors)


def _awq(
    weights: dict[str, Any], site: Site, stats: InputStatistics, settings: Settings
) -> tuple[Any | None, dict[str, Any]]:
    """The factors that AWQ finds, None where they cannot be moved, and the clips of each linear."""
    rows = [weights[name] for name in site.names]
    # Without a producer to move factors into, all channels count alike and only clips are searched for.
    act_scale = stats.mean_magnitude if site.producer else torch.ones(rows[0].shape[1])
    found = awq_search(
        torch.cat(rows),
        stats.samples,
        settings.format,
        group=settings.group,
        symmetric=settings.symmetric,
        act_scale=act_scale,
        grid=20 if site.producer else 1,
        clip=True,
    )
    assert found.clip is not None
    clips = zip(site.names, found.clip.split([weight.shape[0] for weight in rows]), strict=True)
    # Clipping queries and keys changes which tokens attend to which, as AWQ's authors found: they stay whole.
    kept = {name: clip for name, clip in clips if not name.endswith(("q_proj", "k_proj"))}
    return found.channel_scale if site.producer else None, kept


def _smoothquant(
    weights: dict[str, Any], site: Site, stats: InputStatistics, settings: Settings
) -> Any | None:
    """Xiao et al. (2022): behind norms, whose outputs have channels far larger than the rest."""
    if settings.method != "smoothquant" or site.producer is None or not site.producer.endswith("norm"):
        return None
    largest = torch.stack([weights[name].abs().amax(0) for name in site.names]).amax(0).clamp_min(1e-5)
    factors = stats.largest.clamp_min(1e-5) ** settings.smoothing / largest ** (1 - settings.smoothing)
    return factors.clamp_min(1e-5)


# ---- Static scales of activations ----


def _static_scale(stats: InputStatistics, settings: Settings) -> Any:
    """``[1]``: the largest magnitude that FP8 activations keep, over the largest number of E4M3."""
    largest = stats.largest.amax()
    magnitudes = stats.samples.abs().flatten()
    if settings.method == "percentile":
        rank = min(magnitudes.numel(), max(1, round(magnitudes.numel() * settings.percentile / 100)))
        largest = magnitudes.kthvalue(rank).values
    elif settings.method == "mse":
        largest = min(
            (largest * 0.9**step for step in range(40)), key=lambda limit: _fp8_error(stats.samples, limit)
        )
    return (largest / _FP8_LARGEST).clamp_min(1e-12).reshape(1)


def _fp8_error(x: Any, limit: Any) -> float:
    scale = limit / _FP8_LARGEST
    rounded = (x / scale).clamp(-_FP8_LARGEST, _FP8_LARGEST).to(torch.float8_e4m3fn).float() * scale
    return float((rounded - x).square().sum())
