# SPDX-License-Identifier: Apache-2.0
"""The gated feed-forward layer of a decoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .. import _operators
from .._scheme import Scheme
from ._linear import QuantizedLinear, expect_quantized
from ._norm import RMSNorm


class GatedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))``: two kernels, for gate and up are one weight.

    With a scheme that quantizes activations the product leaves the first kernel quantized, and so does the
    output of ``norm``, where the layer has one in front of it. On a GPU a scale that is a whole row's is
    known only when the kernel has ended: there the product goes through memory in the type of ``x``.

    >>> import torch, quantfuse as qf
    >>> mlp = qf.nn.GatedMLP(64, 256, scheme="int8")
    >>> mlp(torch.zeros(2, 5, 64)).shape
    torch.Size([2, 5, 64])
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        *,
        scheme: str | Scheme = "int8",
        activation: str = "silu",
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"scheme": scheme, "device": device, "dtype": dtype}
        self.gate_up = QuantizedLinear(
            features, hidden_features, bias, activation=activation, gated=True, **options
        )
        self.down = QuantizedLinear(hidden_features, features, bias, **options)
        self.norm: RMSNorm | None = None

    @classmethod
    def from_layers(
        cls, gate_up: QuantizedLinear, down: QuantizedLinear, norm: RMSNorm | None = None
    ) -> GatedMLP:
        """A layer made of layers: ``gate_up`` is gated and has the activation."""
        mlp = cls(1, 1, device="meta")
        mlp.gate_up, mlp.down, mlp.norm = gate_up, down, norm
        return mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        expect_quantized(self.gate_up, self.down)
        gate_up, scheme = self.gate_up, self.down.scheme
        gain = None if self.norm is None else self.norm.weight
        needs_gradient = _operators.needs_gradient(x, gate_up.bias, gain)
        is_staged = x.is_cuda and scheme.act_group == 0
        if scheme.act_quant is None or needs_gradient or is_staged:
            hidden = gate_up(x) if self.norm is None else self.norm.into(gate_up, x)
            result: torch.Tensor = self.down(hidden)
            return result
        dtype, x_scale = _operators.dtype_of_result(x), None
        if self.norm is not None:
            x, x_scale = self.norm(x)
        codes, scale = _operators.linear_quantized(
            x,
            *gate_up._operands(),
            gate_up.bias,
            gate_up.activation,
            scheme.act_quant,
            scheme.act_group,
            x_scale,
            scheme.act_quant,
            scheme.act_group,
            gate_up.batch_invariant,
            gate_up.fast_accumulation,
        )
        return self.down.call_quantized(codes, scale, dtype)
