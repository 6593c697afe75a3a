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
    is_base = getattr(model, "base_model", None) is model
    prefix = getattr(model, "base_model_prefix", "") if is_base else ""  # its name in a whole model
    wide = [
        pattern
        for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        for pattern in getattr(model, attribute, None) or ()
    ]
    for name, module in model.named_modules():
        why = ""
        if isinstance(module, QuantizedLinear):
            why = "is quantized already"
        elif not is_linear(module):
            why = _why_no_linear(module)
            if not why:
                continue
        elif module in adapters:
            why = "is an adapter, which is there to be trained"
        elif _matches_either(name, prefix, exclude):
            why = "excluded"
        elif include is not None and not _matches_either(name, prefix, include):
            why = "not included"
        elif include is None and matches(name, wide):
            why = "is one that the model keeps in float32"
        else:
            why = _why_not_replaced(module)
        if why:
            others.append((name, why))
        else:
            chosen[name] = module
    return chosen, others


def _matches_either(name: str, prefix: str, patterns: Sequence[str]) -> bool:
    return matches(name, patterns) or (prefix != "" and matches(f"{prefix}.{name}", patterns))


def _why_no_linear(module: nn.Module) -> str:
    """Of modules that a user might take for linear layers."""
    if isinstance(module, nn.Linear):
        return f"is a {type(module).__name__}, whose forward may be its own"
    is_experts = any(p.ndim == 3 and p.shape[0] > 1 for p in module.parameters(recurse=False))
    if is_experts and not isinstance(module, nn.modules.conv._ConvNd):
        return f"is a {type(module).__name__}: weights of three dimensions, as of experts, are not quantized"
    return ""


def _why_not_replaced(linear: nn.Module) -> str:
    """A layer that is more than its weight and bias would lose the rest."""
    if "forward" in vars(linear):
        return "has a forward of its own"
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(linear, kind) for kind in kinds):
        return "has hooks"
    more = {*linear._parameters, *linear._buffers, *linear._modules} - {"weight", "bias"}
    return f"has {', '.join(sorted(more))} besides weight and bias" if more else ""


def _adapters(model: nn.Module) -> set[nn.Module]:
    """What PEFT has put beside the layers of a model: adapters, whole layers to be trained, and prompts."""
    adapters: set[nn.Module] = set()
    for module in model.modules():
        children = module._modules
        if not type(module).__module__.startswith("peft."):
            continue
        if hasattr(module, "adapter_layer_names") and "base_layer" in children:
            kept = [child for name, child in children.items() if name != "base_layer"]
        elif "modules_to_save" in children:
            kept = [children["modules_to_save"]]
        else:
            kept = [children["prompt_encoder"]] if "prompt_encoder" in children else []
        for child in kept:
            adapters.update(() if child is None else child.modules())
    return adapters


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Puts ``module`` in the place of the one called ``name``, wherever that one stands."""
    old = model.get_submodule(name)
    for parent in list(model.modules()):
        for child_name, child in list(parent._modules.items()):
            if child is old:
                parent._modules[child_name] = module
