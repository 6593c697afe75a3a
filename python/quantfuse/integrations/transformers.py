# SPDX-License-Identifier: Apache-2.0
"""Transformers: ``from_pretrained`` quantizes while it loads, and loads what ``save_pretrained`` wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
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
        exclude, fuse: as in :func:`quantfuse.quantize_model`.

    >>> import quantfuse as qf
    >>> qf.QuantFuseConfig("int4").to_dict()["scheme"]
    {'name': 'int4', 'group': 128, 'symmetric': True, 'mse': False}
    """

    def __init__(
        self,
        scheme: str | Scheme | dict[str, Any] = "int8",
        exclude: Sequence[str] = ("lm_head",),
        fuse: bool = True,
        **_: Any,
    ) -> None:
        self.quant_method = _METHOD
        self.scheme = Scheme.of(scheme).to_dict()
        if isinstance(exclude, str):
            raise TypeError(f"exclude is the string {exclude!r}, expected a sequence of patterns")
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
        self._chosen: set[str] = set()

    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> None:
        config = self.quantization_config
        if self.pre_quantized:
            quantize_model(model, self.scheme, exclude=config.exclude, fuse=config.fuse, show_progress=False)
            for module in model.modules():
                if isinstance(module, QuantizedLinear):
                    module._is_hf_initialized = True
            return
        chosen, self.summary.left_alone = select(model, None, config.exclude)
        self._chosen = {f"{name}.weight" for name in chosen}
        if not chosen:
            raise ValueError("the model has no linear layer to quantize")

    def param_needs_quantization(self, model: nn.Module, param_name: str, **_: Any) -> bool:
        return param_name in self._chosen

    def get_quantize_ops(self) -> _Quantize:
        return _Quantize(self)

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        if self.pre_quantized:
            for name, module in model.named_modules():
                if isinstance(module, QuantizedLinear):
                    _check_loaded(name, module)
            settle(model)
            return model
        if self.quantization_config.fuse:
            fuse(model, self.summary)
        settle(model)
        model.quantfuse_summary = self.summary
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def _check_loaded(name: str, layer: QuantizedLinear) -> None:
    """The loader puts tensors in place without a look at them."""
    if layer._buffers["codes"].is_meta:
        raise ValueError(f"{name}: the checkpoint has no codes for it")
    try:
        layer.check_state()
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
