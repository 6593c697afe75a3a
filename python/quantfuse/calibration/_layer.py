# SPDX-License-Identifier: Apache-2.0
"""A decoder layer: which of its linears share an input, what produces that input, and what goes through
them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

#: Families whose decoder layers are built as below; by ``model_type`` of their configuration.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

#: Inputs that are kept of each linear: enough for a search, and for errors within about a percent.
SAMPLED_INPUTS = 512


@dataclasses.dataclass
class Site:
    """Linears with one input, and the module whose output it is: dividing that output by a factor per
    channel, and multiplying the columns of the linears by it, changes nothing. None where there is no such
    module."""

    names: tuple[str, ...]
    producer: str | None


def sites_of(layer: Any) -> list[Site]:
    """Of a Llama-like decoder layer; names are relative to it."""
    attention = layer.self_attn
    # With grouped queries several heads read one channel of v, and no factor per channel of o's input can be
    # moved into it.
    is_grouped = attention.v_proj.out_features != attention.o_proj.in_features
    return [
        Site(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "input_layernorm"),
        Site(("self_attn.o_proj",), None if is_grouped else "self_attn.v_proj"),
        Site(("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm"),
        Site(("mlp.down_proj",), "mlp.up_proj"),
    ]


def divide_output(module: Any, factors: Any) -> None:
    """Divides what a norm or a linear puts out by a factor per channel."""
    if isinstance(module, torch.nn.Linear):
        module.weight.data /= factors.unsqueeze(1)
        if module.bias is not None:
            module.bias.data /= factors
    else:
        module.weight.data /= factors


class InputStatistics:
    """What the methods want to know of the inputs of a site, gathered batch by batch."""

    def __init__(self, channels: int, total_inputs: int, wants_hessian: bool) -> None:
        self.hessian = torch.zeros(channels, channels) if wants_hessian else None
        self.largest = torch.zeros(channels)
        self._magnitudes = torch.zeros(channels, dtype=torch.float64)
        self._samples: list[Any] = []
        self._every = max(1, math.ceil(total_inputs / SAMPLED_INPUTS))
        self._count = 0

    def add(self, x: Any) -> None:
        x = x.detach().reshape(-1, x.shape[-1]).float()
        if not bool(torch.isfinite(x).all()):
            raise ValueError(
                "an input of a linear is not finite: the model does not work on the calibration data"
            )
        if self.hessian is not None:
            self.hessian.addmm_(x.t(), x)
        magnitudes = x.abs()
        self.largest = torch.maximum(self.largest, magnitudes.amax(0))
        self._magnitudes += magnitudes.sum(0, dtype=torch.float64)
        first = -self._count % self._every
        self._samples.append(x[first :: self._every].clone())
        self._count += x.shape[0]

    @property
    def samples(self) -> Any:
        """``[t, k]`` float32: inputs at even distances."""
        if len(self._samples) > 1:
            self._samples = [torch.cat(self._samples)]
        return self._samples[0]

    @property
    def mean_magnitude(self) -> Any:
        """``[k]`` float32."""
        return (self._magnitudes / self._count).float()

    def divide(self, factors: Any) -> None:
        """The inputs are divided by a factor per channel from now on."""
        self._samples = [self.samples / factors]
        self.largest = self.largest / factors
        self._magnitudes = self._magnitudes / factors
        if self.hessian is not None:
            self.hessian /= factors.unsqueeze(1) * factors
