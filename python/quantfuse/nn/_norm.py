# SPDX-License-Identifier: Apache-2.0
"""RMSNorm as a module, alone and in front of the layer that reads it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .. import _operators
from .._scheme import Scheme
from ._linear import QuantizedLinear, expect_quantized


class RMSNorm(nn.Module):
    """``x * weight / sqrt(mean(x**2) + eps)``, perhaps quantized.

    Args:
        out_quant: None, ``int8`` or ``fp8``. Quantized, the output is ``(codes, scale)``: what a layer of a
            scheme with the same ``act_quant`` takes by ``call_quantized``.
        out_group: columns that share a scale; 0 is the whole row.

    >>> import torch, quantfuse as qf
    >>> qf.nn.RMSNorm(2, eps=0.0)(torch.tensor([[3.0, 4.0]])).tolist()
    [[0.8485..., 1.1313...]]
    >>> codes, scale = qf.nn.RMSNorm(2, out_quant="int8")(torch.tensor([[3.0, 4.0]]))
    >>> codes.tolist()
    [[95, 127]]
    """

    def __init__(
        self,
        features: int,
        eps: float = 1e-6,
        *,
        out_quant: str | None = None,
        out_group: int = 0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.eps, self.out_quant, self.out_group = eps, out_quant, out_group
        self.weight = nn.Parameter(torch.ones(features, device=device, dtype=dtype))

    @classmethod
    def for_scheme(cls, gain: torch.Tensor, eps: float, scheme: Scheme) -> RMSNorm:
        """A norm whose output is what layers of ``scheme`` compute with."""
        norm = cls(gain.shape[0], eps, out_quant=scheme.act_quant, out_group=scheme.act_group, device="meta")
        is_trainable = gain.requires_grad and scheme.act_quant is None
        norm.weight = nn.Parameter(gain.detach().clone(), requires_grad=is_trainable)
        return norm

    def forward(self, x: torch.Tensor) -> Any:
        """``[..., features]``, or ``(codes, scale [..., ceil(features / out_group)])``."""
        if self.out_quant is None:
            return self.numbers(x)
        return _operators.rms_norm_quantized(x, self.weight, self.eps, self.out_quant, self.out_group)

    def numbers(self, x: torch.Tensor) -> torch.Tensor:
        """The output before it is quantized."""
        result: torch.Tensor = _operators.rms_norm(x, self.weight, self.eps)
        return result

    def into(self, layer: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
        """``layer(norm(x))``, with quantized numbers between them, or a gradient where one is wanted."""
        if self.out_quant is None or _operators.needs_gradient(x, self.weight):
            result: torch.Tensor = layer(self.numbers(x))
            return result
        expect_quantized(layer)
        codes, scale = self(x)
        return layer.call_quantized(codes, scale, _operators.dtype_of_result(x))

    def extra_repr(self) -> str:
        quantized = f", out_quant={self.out_quant}" if self.out_quant else ""
        return f"{self.weight.shape[0]}, eps={self.eps}{quantized}"
