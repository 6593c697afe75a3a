# SPDX-License-Identifier: Apache-2.0
"""Filling a model from a checkpoint that somebody else has quantized."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from .._checkpoint import Canonical, Checkpoint, Layer, PlainTensor
from .._tensors import CODE_DTYPES, MICROSCALED
from .._weight import QuantizedWeight
from ..nn import QuantizedLinear
from . import gguf_names
from .fuse import fuse as fuse_layers
from .quantize import settle
from .summary import LayerReport, Summary, progress
from .walk import is_conv1d, is_linear, replace

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def load_quantized(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    stated: Mapping[str, Any] | None = None,
    on_inexact: str = "dequantize",
    strict: bool = True,
    fuse: bool = True,
    device: Any = None,
    show_progress: bool | None = None,
) -> nn.Module:
    """Fills ``model`` with the weights of a quantized checkpoint, in place, and returns it.

    Args:
        model: a Transformers model made from the checkpoint's config, or any module tree with the same names;
            it may be on the meta device.
        folder: AWQ, GPTQ, compressed-tensors, FP8 block, bitsandbytes or torchao safetensors, or a GGUF
            (of the architectures llama, qwen2 and qwen3, or with the model's own names).
        stated: fields that go over the checkpoint's ``quantization_config``.
        on_inexact: what linear layers do not take (a quantized embedding, blocks across rows) is
            dequantized to the type of the model's own weight; ``"error"`` refuses it.
        strict: a tensor that the model does not have, and a parameter that the checkpoint does not have, is
            an error. Without, both are told in the summary.
        fuse: merge q, k, v and gate, up where their formats allow it, as in :func:`quantize_model`.
        device: of parameters that are on the meta device; by default the CPU.

    After an error the model is as it was. What was done is in ``model.quantfuse_summary``. Weights are loaded
    exactly; activations are not quantized, whatever the checkpoint's scheme is.

    >>> import quantfuse as qf, tempfile, torch
    >>> qf.load_quantized(torch.nn.Linear(4, 4), tempfile.mkdtemp())
    Traceback (most recent call last):
    ValueError: ...
    """
    if on_inexact not in ("dequantize", "error"):
        raise ValueError(f"on_inexact is {on_inexact!r}, expected 'dequantize' or 'error'")
    loading = _Loading(model, Checkpoint(folder, stated), on_inexact, torch.device(device or "cpu"))
    checkpoint = loading.checkpoint
    items = [*checkpoint.layers, *checkpoint.plain]
    for item in progress(items, len(items), f"loading {checkpoint.format or 'tensors'}", show_progress):
        if isinstance(item, Layer):
            loading.add_layer(item)
        else:
            loading.add_plain(item)
    loading.finish(strict)
    if fuse:
        fuse_layers(model, loading.summary)
        settle(model)
    if "transformers.modeling_utils" in sys.modules:
        from ..integrations.transformers import refuse_to_save

        refuse_to_save(model, "load_quantized filled it, and the checkpoint it came from is its saved form")
    if show_progress or (show_progress is None and sys.stderr.isatty()):
        print(loading.summary, file=sys.stderr)
    return model


class _Loading:
    """Gathers what goes into the model, and puts it there when all of it has come."""

    def __init__(
        self, model: nn.Module, checkpoint: Checkpoint, on_inexact: str, device: torch.device
    ) -> None:
        self.model, self.checkpoint = model, checkpoint
        self._refuse_inexact, self._device = on_inexact == "error", device
        self.summary = Summary(f"load_quantized: {checkpoint.format or 'not quantized'}")
        self._layers: dict[str, QuantizedLinear] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._unknown: list[str] = []
        self._own = dict(model.named_parameters(remove_duplicate=False))
        self._own.update(model.named_buffers(remove_duplicate=False))

    # ---- One tensor ----

    def _name(self, name: str) -> str:
        is_own = name in self._own or not self.checkpoint.is_gguf
        return name if is_own else gguf_names.transformers_name(name)

    def _order(self, name: str, rows: int) -> np.ndarray[Any, Any] | None:
        if self._name(name) == name:
            return None
        config = getattr(self.model, "config", None)
        return gguf_names.row_order(name, self.checkpoint.architecture, config, rows)

    def add_layer(self, layer: Layer) -> None:
        name = self._name(layer.name)
        target = self._own.get(name)
        if target is None:
            self._unknown.append(layer.name)
            return
        module_name = name.removesuffix(".weight")
        module = self.model.get_submodule(module_name) if module_name != name else self.model
        self._expect_shape(layer.name, layer.shape, target, is_conv1d(module))
        order = self._order(layer.name, layer.shape[0])
        weight = None
        why = f"its module is {type(module).__name__}, no linear layer"
        if is_linear(module) and module is not self.model:
            weight = self.checkpoint.canonical(layer)
            why = f"{layer.format} has no exact linear layer"
        before = target.numel() * target.element_size()
        shape = (layer.shape[0], layer.shape[-1])
        if weight is None:
            if self._refuse_inexact:
                raise ValueError(
                    f"{layer.name} cannot be loaded as it is: {why}; on_inexact='dequantize' would"
                )
            self._tensors[name] = self._numbers(layer, order, target, is_conv1d(module))
            note = f"dequantized to {str(target.dtype).removeprefix('torch.')}: {why}"
            self.summary.layers.append(LayerReport(name, shape, layer.format, before, before, None, note))
            return
        if order is not None:
            weight = gguf_names.reorder(weight, order)
        quantized = self._quantized(weight, target.device)
        self._layers[module_name] = QuantizedLinear.from_weight(quantized)
        after = quantized.nbytes
        self.summary.layers.append(LayerReport(name, shape, layer.format, before, after))

    def add_plain(self, tensor: PlainTensor) -> None:
        name = self._name(tensor.name)
        target = self._own.get(name)
        if target is None:
            self._unknown.append(tensor.name)
            return
        self._expect_shape(tensor.name, tensor.shape, target, False)
        dtype = _TYPES.get(tensor.type)
        if dtype is None:
            raise ValueError(f"{tensor.name} has type {tensor.type}, which a model's tensor cannot have")
        data = torch.from_numpy(np.array(self.checkpoint.bytes_of(tensor)))  # a copy: the file may go away
        value = data.view(dtype).reshape(tensor.shape)
        order = self._order(tensor.name, tensor.shape[0]) if tensor.shape else None
        if order is not None:
            value = value[torch.from_numpy(order)]
        self._tensors[name] = value.to(self._device_of(target), target.dtype)

    def _numbers(self, layer: Layer, order: Any, target: torch.Tensor, is_transposed: bool) -> torch.Tensor:
        numbers = torch.from_numpy(self.checkpoint.dequantize(layer))
        if order is not None:
            numbers = numbers[torch.from_numpy(order)]
        numbers = numbers.T.contiguous() if is_transposed else numbers
        return numbers.to(self._device_of(target), target.dtype)

    def _quantized(self, weight: Canonical, device: torch.device) -> QuantizedWeight:
        device = self._device if device.type == "meta" else device

        def move(array: Any) -> Any:
            return None if array is None else torch.from_numpy(np.ascontiguousarray(array)).to(device)

        codes = move(weight.codes).view(
            getattr(torch, CODE_DTYPES[MICROSCALED.get(weight.format, weight.format)])
        )
        return QuantizedWeight(
            weight.format,
            weight.shape,
            weight.block,
            codes,
            move(weight.scales),
            move(weight.zeros),
            move(weight.g_idx),
            offsets=move(weight.offsets),
        )

    def _device_of(self, target: torch.Tensor) -> torch.device:
        return self._device if target.is_meta else target.device

    @staticmethod
    def _expect_shape(name: str, shape: tuple[int, ...], target: torch.Tensor, is_transposed: bool) -> None:
        own = tuple(target.shape)[::-1] if is_transposed else tuple(target.shape)
        if shape != own:
            raise ValueError(f"{name} has shape {shape}, and the model's own has {own}")

    # ---- All of them ----

    def finish(self, strict: bool) -> None:
        missing = self._missing()
        if strict and (self._unknown or missing):
            raise ValueError(
                "the checkpoint and the model differ: "
                + "; ".join(
                    f"{len(names)} {what}: {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}"
                    for what, names in (
                        ("tensors that the model does not have", self._unknown),
                        ("parameters that the checkpoint does not have", missing),
                    )
                    if names
                )
            )
        self._tensors.update(self._computed_buffers())
        self.summary.left_alone += [(name, "the model does not have it") for name in self._unknown]
        self.summary.left_alone += [(name, "the checkpoint does not have it") for name in missing]
        for name, tensor in self._tensors.items():
            self._put(name, tensor)
        for name, layer in self._layers.items():
            old: Any = self.model.get_submodule(name)
            layer.bias, layer.weight_dtype = old.bias, old.weight.dtype
            replace(self.model, name, layer.train(old.training))
        self.model.quantfuse_summary = self.summary

    def _missing(self) -> list[str]:
        filled = {id(self._own[name]) for name in self._tensors}  # tied ones are filled together
        quantized = {f"{name}.weight" for name in self._layers}  # and a quantized one leaves the others
        wanted = set(self.model.state_dict()) - quantized
        return sorted(
            name for name, tensor in self._own.items() if name in wanted and id(tensor) not in filled
        )

    def _computed_buffers(self) -> dict[str, torch.Tensor]:
        """Values of buffers that no checkpoint has, because a model computes them (the frequencies of a
        rotation), where they are on the meta device."""
        stored = set(self.model.state_dict())
        values = {}
        for name, buffer in self.model.named_buffers():
            if not buffer.is_meta or name in stored:
                continue
            # What the model's own code leaves as it was depends on what was there.
            made, other = (self._initialized(name, before) for before in (0, 1))
            if not torch.equal(made, other):
                raise ValueError(
                    f"{name} is on the meta device, and is computed when a model is made: make the model "
                    "with its buffers on a device"
                )
            values[name] = made
        return values

    def _initialized(self, name: str, before: int) -> torch.Tensor:
        """What the model's own code makes of a buffer filled with ``before``, in a copy of its module."""
        owner, _, leaf = name.rpartition(".")
        probe = copy.deepcopy(self.model.get_submodule(owner))
        for key, buffer in probe._buffers.items():
            if buffer is not None:
                probe._buffers[key] = torch.full_like(buffer, before, device=self._device)
        initialize = getattr(self._maker_of(owner), "_init_weights", None)
        if initialize is not None:
            with torch.no_grad():
                initialize(probe)
        return probe.get_buffer(leaf)

    def _maker_of(self, name: str) -> nn.Module:
        """The innermost model of Transformers around a module, which knows how its tensors begin."""
        while name and not hasattr(self.model.get_submodule(name), "_init_weights"):
            name = name.rpartition(".")[0]
        return self.model.get_submodule(name)

    def _put(self, name: str, value: torch.Tensor) -> None:
        target = self._own[name]
        if not target.is_meta:
            with torch.no_grad():
                target.copy_(value)
            return
        new = (
            nn.Parameter(value, requires_grad=target.requires_grad)
            if isinstance(target, nn.Parameter)
            else value
        )
        for user, tensor in self._own.items():
            if tensor is target:
                parent, _, leaf = user.rpartition(".")
                module = self.model.get_submodule(parent)
                held = module._parameters if isinstance(target, nn.Parameter) else module._buffers
                held[leaf] = new
