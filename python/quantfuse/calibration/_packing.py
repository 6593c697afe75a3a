# SPDX-License-Identifier: Apache-2.0
"""The compressed-tensors layout of quantized linears: their tensors and their ``quantization_config``.

Integer codes of 4 and 8 bits are stored plus 2^(bits-1), low bits first, in int32 along the rows
(``weight_packed``); zero points likewise, but packed down the columns. INT8 with INT8 activations and FP8
are stored as they are (``weight``). Scales have the type of the model's weights.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ._settings import Settings


@dataclasses.dataclass
class QuantizedLinear:
    """Canonical: codes ``[n, k]`` one per element (int8, or float8_e4m3fn), scale ``[n, groups]``, zero
    points int8 of the same shape or None, and for FP8 the static scale of the inputs ``[1]``."""

    codes: Any
    scale: Any
    zero: Any | None = None
    input_scale: Any | None = None
    group: int = 0  # columns that share a scale; 0: the whole row

    def dequantized(self) -> Any:
        """``[n, k]`` float32."""
        k = self.codes.shape[1]
        columns = torch.arange(k) // (self.group or k)
        codes = self.codes.float()
        if self.zero is not None:
            codes = codes - self.zero.float()[:, columns]
        return codes * self.scale.float()[:, columns]


def _pack_rows(codes: Any, bits: int) -> Any:
    """int8 ``[n, k]`` to int32 ``[n, ceil(k * bits / 32)]``."""
    per_word = 32 // bits
    n, k = codes.shape
    unsigned = torch.zeros(n, -(-k // per_word) * per_word, dtype=torch.int64)
    unsigned[:, :k] = codes.long() + (1 << (bits - 1))
    shifts = torch.arange(per_word) * bits
    words = (unsigned.reshape(n, -1, per_word) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _unpack_rows(words: Any, bits: int, k: int) -> Any:
    shifts = torch.arange(32 // bits) * bits
    codes = (words.long().unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return (codes.reshape(words.shape[0], -1)[:, :k] - (1 << (bits - 1))).to(torch.int8)


def _rounded_scale(scale: Any, dtype: Any) -> Any:
    """Never 0, which float16 makes of the least scales."""
    rounded = scale.to(dtype)
    return rounded.masked_fill(rounded == 0, torch.finfo(dtype).smallest_normal)


def to_tensors(name: str, linear: QuantizedLinear, settings: Settings, dtype: Any) -> dict[str, Any]:
    """The tensors of a linear called ``name``."""
    tensors = {f"{name}.weight_scale": _rounded_scale(linear.scale, dtype)}
    if settings.scheme in ("w8a8", "fp8"):
        tensors[f"{name}.weight"] = linear.codes
        if linear.input_scale is not None:
            tensors[f"{name}.input_scale"] = _rounded_scale(linear.input_scale, dtype)
        return tensors
    tensors[f"{name}.weight_packed"] = _pack_rows(linear.codes, settings.bits)
    tensors[f"{name}.weight_shape"] = torch.tensor(linear.codes.shape)
    if linear.zero is not None:
        tensors[f"{name}.weight_zero_point"] = _pack_rows(linear.zero.t(), settings.bits).t().contiguous()
    return tensors


def from_tensors(name: str, tensors: dict[str, Any], settings: Settings) -> QuantizedLinear:
    """What :func:`to_tensors` was given."""
    scale = tensors[f"{name}.weight_scale"]
    if settings.scheme in ("w8a8", "fp8"):
        return QuantizedLinear(tensors[f"{name}.weight"], scale, None, tensors.get(f"{name}.input_scale"))
    n, k = tensors[f"{name}.weight_shape"].tolist()
    codes = _unpack_rows(tensors[f"{name}.weight_packed"], settings.bits, k)
    zero = tensors.get(f"{name}.weight_zero_point")
    if zero is not None:
        zero = _unpack_rows(zero.t(), settings.bits, n).t()
    return QuantizedLinear(codes, scale, zero, None, settings.group)


def quantization_config(settings: Settings, ignore: list[str]) -> dict[str, Any]:
    """Of config.json."""
    is_float = settings.scheme == "fp8"
    weights = {
        "num_bits": settings.bits,
        "type": "float" if is_float else "int",
        "symmetric": settings.symmetric,
        "strategy": "group" if settings.group else "channel",
        "group_size": settings.group or None,
        "dynamic": False,
        "actorder": "weight" if settings.act_order else None,
    }
    activations: dict[str, Any] | None = None
    if settings.scheme in ("w8a8", "fp8"):
        activations = {
            "num_bits": 8,
            "type": weights["type"],
            "symmetric": True,
            "strategy": "tensor" if is_float else "token",
            "dynamic": not is_float,
        }
    format = {"w8a8": "int-quantized", "fp8": "float-quantized"}.get(settings.scheme, "pack-quantized")
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": activations,
                "output_activations": None,
                "format": format,
            }
        },
        "ignore": ignore,
    }
