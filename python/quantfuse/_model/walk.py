# SPDX-License-Identifier: Apache-2.0
"""The linear layers of a module tree: which are taken, and why the others are not."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..nn import QuantizedLinear


def is_conv1d(module: nn.Module) -> bool:
    """GPT-2's linear layer, ``transformers.pytorch_utils.Conv1D``, whose weight is [in, out]."""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or is_conv1d(module)


def weight_of(module: nn.Module) -> torch.Tensor:
    """``[out, in]``."""
    weight: Any = module.weight
    return weight.T if is_conv1d(module) else weight


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern is the name, some whole part of it ("lm_head", "layers.0"), or a glob over it."""
    return any(f".{pattern}." in f".{name}." or fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def select(
    model: nn.Module, include: Sequence[str] | None, exclude: Sequence[str]
) -> tuple[dict[str, nn.Module], list[tuple[str, str]]]:
    """Linear layers by name, each once; and names of others with the reason."""
    for name, patterns in (("include", include), ("exclude", exclude)):
        if isinstance(patterns, str):
            raise TypeError(f"{name} is a string, expected a list of names or patterns")
    chosen: dict[str, nn.Module] = {}
    others: list[tuple[str, str]] = []
    adapters = _adapters(model)
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            others.append((name, "is quantized already"))
        elif is_linear(module) and module in adapters:
            others.append((name, "is an adapter, which is there to be trained"))
        elif not is_linear(module):
            if isinstance(module, nn.Linear):
                others.append((name, f"is a {type(module).__name__}, whose forward may be its own"))
        elif matches(name, exclude):
            others.append((name, "excluded"))
        elif include is not None and not matches(name, include):
            others.append((name, "not included"))
        else:
            chosen[name] = module
    return chosen, others


def _adapters(model: nn.Module) -> set[nn.Module]:
    """What PEFT has put beside the layers of a model."""
    adapters: set[nn.Module] = set()
    for module in model.modules():
        if hasattr(module, "adapter_layer_names") and "base_layer" in module._modules:
            for name, child in module._modules.items():
                if name != "base_layer" and child is not None:
                    adapters.update(child.modules())
    return adapters


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Puts ``module`` in the place of the one called ``name``, wherever that one stands."""
    old = model.get_submodule(name)
    for parent in list(model.modules()):
        for child_name, child in list(parent._modules.items()):
            if child is old:
                parent._modules[child_name] = module
