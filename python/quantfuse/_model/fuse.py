# SPDX-License-Identifier: Apache-2.0
"""Layers of decoders that read the same input become one: q|k|v, gate|up, and the norm in front of them.

Nothing of a model's own code changes. Its attention goes on calling ``q_proj(x)``, ``k_proj(x)`` and
``v_proj(x)``, each of which is now a slice of one product; its MLP module is replaced by a ``GatedMLP``; and
a norm that is folded into the layer behind it hands its input through.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .._scheme import Scheme
from ..nn import GatedMLP, QuantizedLinear, RMSNorm
from .summary import Summary
from .walk import replace

# Not Gemma 3n: its layers read a norm's output twice, and cut the gate's.
_FAMILIES = r"^(Llama|Qwen[23]\w*|Mistral|Gemma(?!3n)[23]?)"
_ATTENTION = re.compile(_FAMILIES + r"\w*Attention$")
_MLP = re.compile(_FAMILIES + r"\w*MLP$")
_DECODER_LAYER = re.compile(_FAMILIES + r"\w*DecoderLayer$")

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda z: nn.functional.gelu(z, approximate="tanh"),
    "relu": nn.functional.relu,
}


def _state_of(x: torch.Tensor) -> Any:
    """What an output depends on besides ``x`` itself: what was written to it since, and the gradient mode."""
    if torch.compiler.is_compiling():
        return None
    return torch.is_grad_enabled(), None if x.is_inference() else x._version


class MergedLinear(nn.Module):
    """One quantized layer whose output is cut into those of several: see :class:`Slice`."""

    def __init__(self, linear: QuantizedLinear, norm: RMSNorm | None, num_slices: int) -> None:
        super().__init__()
        self.linear, self.norm = linear, norm
        self._num_slices = num_slices
        self._last: tuple[Any, Any, int, Any] | None = None

    def shared(self, x: torch.Tensor) -> torch.Tensor:
        """The whole output; computed for the first slice that asks with ``x``, let go with the last."""
        last, state = self._last, _state_of(x)
        if last is not None and last[0] is x and last[3] == state:
            self._last = None if last[2] == 1 else (x, last[1], last[2] - 1, state)
            shared: torch.Tensor = last[1]
            return shared
        y: torch.Tensor = self.linear(x) if self.norm is None else self.norm.into(self.linear, x)
        self._last = (x, y, self._num_slices - 1, state)
        return y

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None}


class Slice(nn.Module):
    """What a model calls ``q_proj``: columns of the output of a :class:`MergedLinear`."""

    def __init__(self, merged: MergedLinear, start: int, stop: int) -> None:
        super().__init__()
        self._merged = (merged,)  # a tuple, so that it is nobody's submodule twice
        self._columns = (start, stop)
        self.in_features, self.out_features = merged.linear.in_features, stop - start

    @property
    def weight(self) -> torch.Tensor:
        return self._merged[0].linear.weight[slice(*self._columns)]

    @property
    def bias(self) -> torch.Tensor | None:
        bias = self._merged[0].linear.bias
        return None if bias is None else bias[slice(*self._columns)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start, stop = self._columns
        return self._merged[0].shared(x).narrow(-1, start, stop - start)

    def extra_repr(self) -> str:
        start, stop = self._columns
        return f"in_features={self.in_features}, columns {start}:{stop} of qkv_proj"


class Folded(nn.Module):
    """In the place of a norm that its reader now computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def fuse(model: nn.Module, summary: Summary) -> None:
    """Merges the quantized layers of ``model`` that can be; the others, and why, go to the summary."""
    norms = dict(_foldable_norms(model))
    for parent_name, parent in list(model.named_modules()):
        kind = type(parent).__name__
        names: tuple[str, ...]
        activation: str | None
        if _ATTENTION.match(kind):
            names, activation = ("q_proj", "k_proj", "v_proj"), "identity"
        elif _MLP.match(kind):
            names, activation = ("gate_proj", "up_proj"), _activation_of(parent)
        else:
            continue
        members: list[Any] = [parent._modules.get(name) for name in names]
        if not all(type(member) is QuantizedLinear for member in members):
            continue
        is_mlp = len(names) == 2
        why_not = _why_not(members, activation)
        if is_mlp and type(parent._modules.get("down_proj")) is not QuantizedLinear:
            why_not = "down_proj is not quantized"
        if why_not:
            summary.left_alone.append((parent_name, f"{', '.join(names)} not fused: {why_not}"))
            continue
        norm = _fold(model, norms.get(parent_name), members[0].scheme)
        if is_mlp:
            gate_up = QuantizedLinear.merged(members, gated=True, activation=activation)
            mlp = GatedMLP.from_layers(gate_up, parent.get_submodule("down_proj"), norm)
            replace(model, parent_name, mlp.train(parent.training))
        else:
            _slice(parent, names, members, norm)
        note = "merged, norm folded" if norm is not None else "merged"
        summary.annotate([f"{parent_name}.{name}" for name in names], note)


def _why_not(members: list[Any], activation: str | None) -> str:
    if activation is None:
        return "its activation is not one the kernels have"
    first = members[0]
    for other in members[1:]:
        same = ("in_features", "weight_format", "block", "scheme")
        if any(getattr(first, name) != getattr(other, name) for name in same):
            return "formats differ"
        held, others = first._held(), other._held()
        is_other = any((held[name] is None) != (others[name] is None) for name in ("zeros", "offsets"))
        if is_other or first._device() != other._device():
            return "zero points, offsets or devices differ"
        g_idx = held["g_idx"], others["g_idx"]
        if not (g_idx[0] is g_idx[1] or (None not in g_idx and torch.equal(*g_idx))):
            return "the orders of their columns differ"
    rows = first.block[0]
    if rows != 1 and (rows == 0 or any(member.out_features % rows != 0 for member in members)):
        return f"blocks of {rows or 'all'} rows would span two of them"
    return ""


def _slice(parent: nn.Module, names: tuple[str, ...], members: list[Any], norm: RMSNorm | None) -> None:
    shared = MergedLinear(QuantizedLinear.merged(members), norm, len(members))
    start = 0
    for name, member in zip(names, members, strict=True):
        parent._modules[name] = Slice(shared, start, start + member.out_features)
        start += member.out_features
    parent.add_module("qkv_proj", shared.train(parent.training))


def _activation_of(mlp: nn.Module) -> str | None:
    """By its values, so that it does not matter how a version of transformers calls it."""
    function = getattr(mlp, "act_fn", None)
    if not callable(function):
        return None
    options: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults are meanwhile
    near, far = torch.linspace(-6, 6, 49, **options), torch.logspace(0, 3, 16, **options)
    z = torch.cat([near, far, -far])  # some activations are cut off far out
    with torch.no_grad():
        values = function(z)
    for name, known in _ACTIVATIONS.items():
        if torch.allclose(values, known(z), rtol=1e-6, atol=1e-6):
            return name
    return None


# ---- Norms ----


def _foldable_norms(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The readers of norms: (name of an attention or MLP, name of the norm whose output it alone reads)."""
    for name, module in model.named_modules():
        if not _DECODER_LAYER.match(type(module).__name__):
            continue
        has_pre = "pre_feedforward_layernorm" in module._modules
        before_mlp = "pre_feedforward_layernorm" if has_pre else "post_attention_layernorm"
        for reader, norm in (("self_attn", "input_layernorm"), ("mlp", before_mlp)):
            if norm in module._modules:
                yield f"{name}.{reader}", f"{name}.{norm}"


def _fold(model: nn.Module, name: str | None, scheme: Scheme) -> RMSNorm | None:
    """The norm, with a quantized output where the scheme wants one; in its place the model now hands its
    input through."""
    if name is None:
        return None
    norm: Any = model.get_submodule(name)
    known = _gain_offset(norm)
    if known is None:
        return None
    offset, eps = known
    gain = norm.weight if offset == 0 else norm.weight.float() + offset
    replace(model, name, Folded())
    return RMSNorm.for_scheme(gain, eps, scheme)


def _gain_offset(norm: Any) -> tuple[int, float] | None:
    """What a family adds to an RMSNorm's weight (Gemma 1, others 0), and eps; None for any other norm. Found
    by the values of a copy with a weight of our own, because the norm's may not be there yet."""
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, torch.Tensor) or not isinstance(eps, float):
        return None
    probe = copy.deepcopy(norm).to_empty(device="cpu").float()
    options: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults are meanwhile
    gain = torch.linspace(0.5, 1.5, weight.shape[0], **options)
    x = torch.linspace(-2, 3, weight.shape[0], **options)
    with torch.no_grad():
        probe.weight.copy_(gain)
        y = probe(x[None])[0]
        unit = x * torch.rsqrt(x.square().mean() + eps)
        for offset in (0, 1):
            if torch.allclose(y, unit * (gain + offset), rtol=1e-4, atol=1e-5):
                return offset, eps
    return None
