# SPDX-License-Identifier: Apache-2.0
"""Transformers: ``from_pretrained`` quantizes while it loads, and loads what ``save_pretrained`` wrote."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from .._model.fuse import fuse
from .._model.quantize import check_weights, quantize_chosen, quantize_layer, settle
from .._model.summary import Summary
from .._model.walk import is_linear, select
from .._scheme import Scheme
from ..nn import QuantizedLinear
from ._decoding import DECODING as DECODING  # and its attention is known to Transformers

_METHOD = "quantfuse"


@register_quantization_config(_METHOD)
class QuantFuseConfig(QuantizationConfigMixin):
    """``from_pretrained(path, quantization_config=QuantFuseConfig("int4"))`` quantizes layer by layer, as the
    tensors come from the files: the model never exists unquantized.

    Args:
        scheme: a :class:`quantfuse.Scheme`, its name, or its dictionary.
        include, exclude, fuse: as in :func:`quantfuse.quantize_model`.
        layers: in the config of a saved model the names of its quantized layers, in place of patterns.

    >>> import quantfuse as qf
    >>> qf.QuantFuseConfig("int4").to_dict()["scheme"]
    {'name': 'int4', 'group': 128, 'symmetric': True, 'mse': False}
    """

    def __init__(
        self,
        scheme: str | Scheme | dict[str, Any] = "int8",
        exclude: Sequence[str] = ("lm_head",),
        fuse: bool = True,
        *,
        include: Sequence[str] | None = None,
        layers: Sequence[str] | None = None,
        quant_method: str = _METHOD,
        **unknown: Any,
    ) -> None:
        if "format" in unknown:
            raise ValueError(
                "the folder is one that `quantfuse quantize --format quantfuse` wrote: make the model from "
                "its config, and fill it by quantfuse.load_quantized"
            )
        if unknown:
            raise TypeError(f"QuantFuseConfig has no {', '.join(unknown)}")
        self.quant_method = quant_method
        self.scheme = Scheme.of(scheme).to_dict()
        for name, patterns in (("include", include), ("exclude", exclude)):
            if isinstance(patterns, str):
                raise TypeError(f"{name} is the string {patterns!r}, expected a sequence of patterns")
        self.include = None if include is None else list(include)
        self.exclude = list(exclude)
        self.layers = None if layers is None else list(layers)
        self.fuse = fuse


class _Quantize(ConversionOps):
    """Called by the loader with a weight that has just been read."""

    def __init__(self, quantizer: QuantFuseHfQuantizer) -> None:
        self._quantizer = quantizer

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        model: nn.Module | None = None,
        full_layer_name: str | None = None,
        missing_keys: set[str] | None = None,
        **_: Any,
    ) -> dict[str, torch.Tensor]:
        assert model is not None
        assert full_layer_name is not None
        value = next(iter(input_dict.values()))
        weight = value[0] if isinstance(value, list) else value
        name = full_layer_name.removesuffix(".weight")
        module: Any = model.get_submodule(name)
        module.weight = nn.Parameter(weight, requires_grad=False)
        check_weights({name: module})
        layer = quantize_layer(model, name, self._quantizer.scheme, self._quantizer.summary)
        layer._is_hf_initialized = True
        self._quantizer.waiting.discard(name)
        if missing_keys is not None:
            missing_keys.discard(full_layer_name)
        return {}


@register_quantizer(_METHOD)
class QuantFuseHfQuantizer(HfQuantizer):
    """What Transformers calls at each stage of loading and saving."""

    requires_calibration = False

    def __init__(self, quantization_config: QuantFuseConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.scheme = Scheme.of(quantization_config.scheme)
        self.summary = Summary(f"from_pretrained: {self.scheme}")
        self.waiting: set[str] = set()  # layers whose weight has not come yet
        self.quantized: list[str] = []  # layers, by the names they had before some of them were merged
        self.why_not_serializable = ""

    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> None:
        config = self.quantization_config
        if not self.pre_quantized:
            chosen, self.summary.left_alone = select(model, config.include, config.exclude)
            self._leave_tied_layers(model, chosen)
            self.waiting = set(chosen)
            if not chosen:
                raise ValueError("the model has no linear layer to quantize")
            return
        if config.layers is None:
            raise ValueError("quantization_config names no layers: the folder was not saved by this version")
        chosen = _layers_called(model, config.layers)
        self.quantized = list(chosen)
        untie(model, chosen)
        quantize_chosen(model, chosen, self.scheme, config.fuse, self.summary)
        for module in model.modules():
            if isinstance(module, QuantizedLinear):
                module._is_hf_initialized = True
                module.is_loading = True

    def _leave_tied_layers(self, model: nn.Module, chosen: dict[str, nn.Module]) -> None:
        """The loader fills a layer from the one that it is tied to, whose weight is no parameter any more."""
        names = {f"{name}.weight" for name in chosen}
        for target, source in getattr(model, "all_tied_weights_keys", {}).items():
            if {target, source} <= names:
                for name in (target, source):
                    if chosen.pop(name.removesuffix(".weight"), None) is not None:
                        self.summary.left_alone.append((name, "is tied to another layer"))

    def param_needs_quantization(self, model: nn.Module, param_name: str, **_: Any) -> bool:
        return param_name.endswith(".weight") and param_name.removesuffix(".weight") in self.waiting

    def get_quantize_ops(self) -> _Quantize:
        return _Quantize(self)

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        if self.pre_quantized:
            for name, module in model.named_modules():
                if isinstance(module, QuantizedLinear):
                    module.is_loading = False
                    _check_loaded(name, module, getattr(model, "all_tied_weights_keys", {}))
            settle(model)
            return model
        self._decide_about_waiting(model)
        if self.quantization_config.fuse:
            fuse(model, self.summary)
        settle(model)
        model.quantfuse_summary = self.summary
        return model

    def _decide_about_waiting(self, model: nn.Module) -> None:
        """Of layers that no file has: a head tied to the embedding is quantized from that one's weight, as
        :func:`quantize_model` does; what Transformers has filled at random is there to be trained."""
        parameters: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            parameters.setdefault(id(parameter), []).append(name)
        for name in sorted(self.waiting):
            weight: Any = model.get_submodule(name).weight
            if len(parameters[id(weight)]) > 1:
                quantize_layer(model, name, self.scheme, self.summary)
            else:
                self.summary.left_alone.append((name, "the checkpoint does not have it"))
        self.waiting.clear()
        self.quantized = [report.name for report in self.summary.layers]
        untie(model, self.quantized)

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[None, dict[str, str]]:
        """Called by ``save_pretrained``, which then writes the config."""
        replaced = {name for name, module in model.named_modules() if is_linear(module)}  # since then
        self.quantization_config.layers = [name for name in self.quantized if name not in replaced]
        return None, {}

    def is_serializable(self) -> bool:
        if self.why_not_serializable:
            logging.get_logger(__name__).warning(f"The model cannot be saved: {self.why_not_serializable}")
        return not self.why_not_serializable

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def _layers_called(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Linear layers by the names of a saved model, of which this one may be the base, or have it."""
    wanted, prefix = set(names), f"{getattr(model, 'base_model_prefix', '')}."
    return {
        name: module
        for name, module in model.named_modules()
        if is_linear(module) and {name, prefix + name, name.removeprefix(prefix)} & wanted
    }


def _check_loaded(name: str, layer: QuantizedLinear, tied: Collection[str]) -> None:
    """The loader puts tensors in place without a look at them, and memory as it finds it where a file has
    none; what came from a file it marks, and what is ``tied`` came with another tensor."""
    held = {**layer._held(), "layout": layer._buffers["layout"], "bias": layer.bias}
    for key, tensor in held.items():
        is_there = tensor is None or getattr(tensor, "_is_hf_initialized", False)
        if not is_there and f"{name}.{key}" not in tied:
            raise ValueError(f"the checkpoint has no {name}.{key}")
    try:
        layer.check_state()
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


# ---- Models that were quantized when they were there ----


def describe(model: nn.Module, config: QuantFuseConfig, quantized: Sequence[str]) -> None:
    """After :func:`quantize_model` quantized the layers called ``quantized``: ``save_pretrained`` writes what
    ``from_pretrained`` needs, or refuses."""
    if not isinstance(model, PreTrainedModel):
        return refuse_to_save(model, "it was quantized as a part of another module, not by itself")
    if getattr(model, "hf_quantizer", None) is not None:
        return refuse_to_save(model, "it was quantized more than once, in several ways")
    if _share_codes(model):
        return refuse_to_save(model, "some of its quantized layers share their weights")
    untie(model, quantized)
    config.layers = list(quantized)
    _own_config(model).quantization_config = config
    model.hf_quantizer = QuantFuseHfQuantizer(config)
    model.hf_quantizer.quantized = list(quantized)
    return None


def refuse_to_save(model: nn.Module, why: str) -> None:
    """No folder that ``save_pretrained`` writes of it could be loaded again."""
    for pretrained in _outermost(model):
        if any(isinstance(module, QuantizedLinear) for module in pretrained.modules()):
            pretrained.hf_quantizer = QuantFuseHfQuantizer(QuantFuseConfig())
            pretrained.hf_quantizer.why_not_serializable = why


def untie(model: nn.Module, quantized: Iterable[str]) -> None:
    """A quantized layer has a weight of its own, which no other parameter is tied to. The config goes on
    saying so: models read it for more than that."""
    weights = {f"{name}.weight" for name in quantized}
    for name, submodel in model.named_modules():
        prefix = f"{name}." if name else ""
        own = {key.removeprefix(prefix) for key in weights if key.startswith(prefix)}
        for attribute in ("all_tied_weights_keys", "_tied_weights_keys"):
            ties = getattr(submodel, attribute, None) if isinstance(submodel, PreTrainedModel) else None
            if isinstance(ties, dict) and own & {*ties, *ties.values()}:
                kept = {key: source for key, source in ties.items() if not own & {key, source}}
                setattr(submodel, attribute, kept)


def _share_codes(model: nn.Module) -> bool:
    layers = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    codes = [layer._held()["codes"] for layer in layers]
    addresses = [tensor.data_ptr() for tensor in codes if not tensor.is_meta and tensor.numel() > 0]
    return len(set(addresses)) < len(addresses)


def _own_config(model: PreTrainedModel) -> Any:
    """The config of a whole model becomes its own, since another model may have been made of the same. That
    of a base model stays as it is shared: the model around it would be saved without a word of its base."""
    if model.base_model is not model:
        copies: dict[int, Any] = {}
        copy.deepcopy(model.config, copies)
        for module in model.modules():
            config = getattr(module, "config", None)
            if id(config) in copies:
                module.config = copies[id(config)]
    return model.config


def _outermost(module: nn.Module) -> Iterator[Any]:
    if isinstance(module, PreTrainedModel):
        yield module
    else:
        for child in module.children():
            yield from _outermost(child)
