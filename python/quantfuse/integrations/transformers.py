# SPDX-License-Identifier: Apache-2.0
"""Transformers: ``from_pretrained`` quantizes while it loads, and loads what ``save_pretrained`` wrote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from .._model.quantize import check_weights, quantize_layer, quantize_model, settle
from .._model.summary import Summary
from .._model.walk import select
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
        self.why_not_serializable = ""

    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> None:
        config = self.quantization_config
        if self.pre_quantized:
            quantize_model(
                model,
                self.scheme,
                include=config.include,
                exclude=config.exclude,
                fuse=config.fuse,
                show_progress=False,
            )
            for module in model.modules():
                if isinstance(module, QuantizedLinear):
                    module._is_hf_initialized = True
            return
        chosen, self.summary.left_alone = select(model, config.include, config.exclude)
        self.waiting = set(chosen)
        if not chosen:
            raise ValueError("the model has no linear layer to quantize")

    def param_needs_quantization(self, model: nn.Module, param_name: str, **_: Any) -> bool:
        return param_name.endswith(".weight") and param_name.removesuffix(".weight") in self.waiting

    def get_quantize_ops(self) -> _Quantize:
        return _Quantize(self)

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        if self.pre_quantized:
            for name, module in model.named_modules():
                if isinstance(module, QuantizedLinear):
                    _check_loaded(name, module)
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
                untie(model, name)
                quantize_layer(model, name, self.scheme, self.summary)
            else:
                self.quantization_config.exclude.append(name)
                self.summary.left_alone.append((name, "the checkpoint does not have it"))
        self.waiting.clear()

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


def _check_loaded(name: str, layer: QuantizedLinear) -> None:
    """The loader puts tensors in place without a look at them, and memory as it finds it where a file has
    none; what came from a file it marks."""
    held = {**layer._held(), "layout": layer._buffers["layout"], "bias": layer.bias}
    for key, tensor in held.items():
        if tensor is not None and not getattr(tensor, "_is_hf_initialized", False):
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
        refuse_to_save(model, "it was quantized as a part of another module, not by itself")
    elif getattr(model, "hf_quantizer", None) is not None:
        refuse_to_save(model, "it was quantized more than once, in several ways")
    else:
        for name in quantized:
            untie(model, name)
        model.config.quantization_config = config
        model.hf_quantizer = QuantFuseHfQuantizer(config)


def refuse_to_save(model: nn.Module, why: str) -> None:
    """No folder that ``save_pretrained`` writes of it could be loaded again."""
    for pretrained in _outermost(model):
        if any(isinstance(module, QuantizedLinear) for module in pretrained.modules()):
            pretrained.hf_quantizer = QuantFuseHfQuantizer(QuantFuseConfig())
            pretrained.hf_quantizer.why_not_serializable = why


def untie(model: PreTrainedModel, name: str) -> None:
    """A quantized layer has a weight of its own, whatever the config says."""
    if getattr(model, "all_tied_weights_keys", {}).pop(f"{name}.weight", None) is not None:
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False


def _outermost(module: nn.Module) -> Iterator[Any]:
    if isinstance(module, PreTrainedModel):
        yield module
    else:
        for child in module.children():
            yield from _outermost(child)
