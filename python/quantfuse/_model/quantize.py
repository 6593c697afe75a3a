# SPDX-License-Identifier: Apache-2.0
"""Quantizing every linear layer of a model."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from .._scheme import Scheme
from .._weight import QuantizedWeight
from ..nn import QuantizedLinear
from .fuse import fuse as fuse_layers
from .staging import Staging, interrupts_deferred
from .summary import LayerReport, Summary, progress
from .walk import replace, select, weight_of


def quantize_model(
    model: nn.Module,
    scheme: str | Scheme = "int8",
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = ("lm_head",),
    fuse: bool = True,
    show_progress: bool | None = None,
) -> nn.Module:
    """Replaces the linear layers of ``model`` by quantized ones, in place, and returns it.

    Args:
        model: any module tree; ``torch.nn.Linear`` and ``transformers``' ``Conv1D`` are quantized, on the
            device they are on. A layer on the meta device becomes a quantized one on the meta device, whose
            state is loaded later.
        scheme: a :class:`quantfuse.Scheme` or its name.
        include: names of layers to take; None takes all. A name is a whole one, a part of one
            (``"self_attn"``) or a glob (``"model.layers.*.mlp.*"``).
        exclude: names of layers to leave.
        fuse: merge q, k, v and gate, up of Llama, Qwen, Mistral and Gemma models into one layer each, and
            fold the RMSNorm in front of them; with schemes that quantize activations its output is codes.
        show_progress: a bar and the summary on stderr; None shows them on a terminal.

    The model is as it was until the last layer has been quantized, so that neither an error, nor a lack of
    memory, nor an interrupt on the way changes it. The memory in use is the model's and that of one layer:
    the quantized layers of a GPU wait in host memory, those of a CPU in a temporary file (in memory where
    none can be written). Then they are put in place, in one go that an interrupt does not part. What was done
    is in ``model.quantfuse_summary``, which prints as a table. A model of Transformers is then written by
    ``save_pretrained`` and loaded by ``from_pretrained``.

    >>> import torch, quantfuse as qf
    >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    >>> model = qf.quantize_model(model, "int4")
    >>> model[2]
    QuantizedLinear(in_features=256, out_features=8, bias=True, scheme=int4, group=128)
    >>> print(model.quantfuse_summary)  # doctest: +NORMALIZE_WHITESPACE
    quantize_model: int4: int4 weights in groups of 128
    layer      shape        format     before     after  error
    0          256 x 256    int4    256.0 KiB  34.0 KiB  ...%
    2          8 x 256      int4      8.0 KiB   1.1 KiB  ...%
    2 layers, 264.0 KiB -> 35.1 KiB (7.53x smaller)
    """
    scheme = Scheme.of(scheme)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, expected a torch.nn.Module")
    if type(model) is nn.Linear:
        raise ValueError("model is itself a Linear: use quantfuse.nn.QuantizedLinear.from_linear")
    chosen, others = select(model, include, exclude)
    if not chosen:
        reasons = "; ".join(f"{name}: {why}" for name, why in others[:8])
        raise ValueError(f"model has no linear layer to quantize{f' ({reasons})' if reasons else ''}")
    names = list(chosen)
    summary = Summary(f"quantize_model: {scheme}", left_alone=others)
    quantize_chosen(model, chosen, scheme, fuse, summary, show_progress)
    if "transformers.modeling_utils" in sys.modules:
        from ..integrations.transformers import QuantFuseConfig, describe

        describe(model, QuantFuseConfig(scheme, exclude, fuse, include=include), names)
    if show_progress or (show_progress is None and sys.stderr.isatty()):
        print(summary, file=sys.stderr)
    return model


def quantize_chosen(
    model: nn.Module,
    chosen: dict[str, nn.Module],
    scheme: Scheme,
    fuse: bool,
    summary: Summary,
    show_progress: bool | None = False,
) -> None:
    """Replaces the layers of ``model`` that are in ``chosen``, which is empty afterwards."""
    check_weights(chosen)
    _check_device(chosen, scheme)
    shared = _shared_weights(model, chosen)
    errors: dict[str, float] = {}
    with Staging(max(_nbytes(weight_of(module)) for module in chosen.values())) as staging:
        for name in progress(list(chosen), len(chosen), f"quantizing to {scheme.name}", show_progress):
            weight = weight_of(chosen[name])
            if not weight.is_meta and shared.get(name, (name,))[0] == name:
                quantized = _quantized(weight, scheme)
                errors[name] = _relative_error(weight.detach(), quantized)
                staging.put(name, quantized)
                del quantized
            del weight
        names = list(chosen)
        chosen.clear()  # holds the last reference to a layer that is replaced
        with interrupts_deferred():
            for name in names:
                waiting = staging.take(name) if name in errors else None
                _replace_layer(model, name, scheme, waiting, errors.get(name), summary, shared.get(name))
            if fuse:
                fuse_layers(model, summary)
            settle(model)
            model.quantfuse_summary = summary


def replace_linear_with_quantized(model: nn.Module, bits: int = 8, **options: Any) -> nn.Module:
    """:func:`quantize_model` by a number of bits, 8 or 4.

    >>> import torch, quantfuse as qf
    >>> qf.replace_linear_with_quantized(torch.nn.Sequential(torch.nn.Linear(64, 8)), bits=8)[0]
    QuantizedLinear(in_features=64, out_features=8, bias=True, scheme=int8)
    """
    if bits not in (8, 4):
        raise ValueError(f"bits is {bits}, expected 8 or 4")
    return quantize_model(model, f"int{bits}", **options)


def check_weights(chosen: dict[str, nn.Module]) -> None:
    """Refuses, by name, weights that cannot be quantized."""
    for name, module in chosen.items():
        weight = weight_of(module)
        if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"{name}.weight has type {weight.dtype}, expected float32, float16 or bfloat16")
        if not weight.is_meta and not bool(torch.isfinite(weight).all()):
            raise ValueError(f"{name}.weight has values that are not finite")


def _check_device(chosen: dict[str, nn.Module], scheme: Scheme) -> None:
    """A small layer is quantized and run on every device of the model."""
    devices = {weight_of(module).device for module in chosen.values()}
    if len(devices) > 1 and torch.device("meta") in devices:
        name = next(name for name, module in chosen.items() if weight_of(module).is_meta)
        raise ValueError(f"{name} is on the meta device, as offloaded layers are, and other layers are not")
    for device in devices:
        if device.type not in ("cpu", "cuda", "meta"):
            raise ValueError(f"the model is on {device}, expected cpu or cuda")
        if device.type == "meta":
            continue
        probe = QuantizedLinear(128, 16, bias=False, scheme=scheme, device=device)
        try:
            probe.quantize_from_float(torch.zeros(16, 128, device=device))
            probe(torch.zeros(1, 128, device=device, dtype=torch.bfloat16))
        except NotImplementedError as error:
            raise NotImplementedError(f"{scheme.name} cannot run on {device}: {error}") from error


def _shared_weights(model: nn.Module, chosen: Collection[str]) -> dict[str, tuple[str, str]]:
    """Layers whose weight has another user: the first layer with that weight, and a note."""
    users: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), []).append(name.removesuffix(".weight"))
    shared = {}
    for names in users.values():
        layers = [name for name in names if name in chosen]
        others = [name for name in names if name not in chosen]
        for name in layers if len(names) > 1 else []:
            if name != layers[0]:
                shared[name] = (layers[0], f"shares the weight of {layers[0]}")
            elif others:
                shared[name] = (name, f"{others[0]} shares the weight and keeps it")
    return shared


def quantize_layer(model: nn.Module, name: str, scheme: Scheme, summary: Summary) -> QuantizedLinear:
    """Replaces one linear layer of ``model``. It is left to the caller to settle the model."""
    weight = weight_of(model.get_submodule(name))
    quantized = _quantized(weight, scheme)
    return _replace_layer(
        model, name, scheme, quantized, _relative_error(weight.detach(), quantized), summary
    )


def _quantized(weight: torch.Tensor, scheme: Scheme) -> QuantizedWeight:
    layer = QuantizedLinear(weight.shape[1], weight.shape[0], bias=False, scheme=scheme, device="meta")
    return layer.quantize(weight)


def _replace_layer(
    model: nn.Module,
    name: str,
    scheme: Scheme,
    quantized: QuantizedWeight | None,
    error: float | None,
    summary: Summary,
    shares: tuple[str, str] | None = None,
) -> QuantizedLinear:
    """Puts ``quantized`` in the place of a linear layer; None for one on the meta device, or where ``shares``
    names the layer whose quantized weight it takes."""
    module: Any = model.get_submodule(name)
    weight = weight_of(module)
    owner, note = shares or (name, "")
    report = LayerReport(name, (weight.shape[0], weight.shape[1]), scheme.format, 0, 0, error, note)
    if owner == name:
        layer = QuantizedLinear(weight.shape[1], weight.shape[0], bias=False, scheme=scheme, device="meta")
        layer.bias = module.bias
        if quantized is not None:
            layer._adopt(quantized)
        report.bytes_before = _nbytes(weight)
        report.bytes_after = layer.canonical_bytes
    else:
        first: Any = model.get_submodule(owner)
        layer = QuantizedLinear.from_weight(first.quantized_weight(), module.bias, scheme=scheme)
    layer.weight_dtype = weight.dtype
    layer.train(module.training)
    replace(model, name, layer)
    summary.layers.append(report)
    return layer


def _nbytes(tensor: torch.Tensor) -> int:
    count: int = tensor.numel() * tensor.element_size()
    return count


def settle(model: nn.Module) -> None:
    """The last step: every quantized layer decides what it keeps on its device."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.settle()


def _relative_error(weight: torch.Tensor, quantized: QuantizedWeight) -> float:
    exact = weight.float()
    norm = float(exact.norm())
    return float((quantized.dequantize() - exact).norm()) / norm if norm else 0.0
