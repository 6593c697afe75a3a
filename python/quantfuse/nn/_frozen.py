# SPDX-License-Identifier: Apache-2.0
"""The numbers of a quantized weight, which are nobody's to change."""

from __future__ import annotations

from typing import Any

import torch

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "div", "mod", "pow", "and", "or", "xor")
_ASSIGNMENTS = {"__setitem__", *(f"__i{name}__" for name in (*_OPERATORS, "lshift", "rshift"))}
_ASSIGN_DATA = torch.Tensor.data.__set__


class FrozenWeight(torch.Tensor):
    """What a quantized layer gives for its ``weight``: numbers made for whoever asks. A write to them would
    be lost in silence (PEFT merges an adapter by ``layer.weight.data += delta``), and is refused."""

    _is_hf_initialized = True  # by which Transformers knows not to fill it with random numbers

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        targets = (args[0] if args else kwargs.get("tensor"), kwargs.get("out"))
        if (isinstance(targets[0], cls) and _writes(func)) or isinstance(targets[1], cls):
            raise RuntimeError(
                "the weight of a quantized layer is frozen and cannot be written to. An adapter is merged "
                "into the model before it is quantized, or kept beside the layer"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            is_part = isinstance(result, torch.Tensor) and any(
                isinstance(arg, cls) and _same_memory(result, arg) for arg in args
            )
            return result.as_subclass(cls) if is_part else result

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()  # whose it is to change


def _writes(func: Any) -> bool:
    name: str = func.__name__
    is_in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    return is_in_place or name in _ASSIGNMENTS or func == _ASSIGN_DATA


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a write to ``a`` changes ``b``, of which it may be a view."""
    addresses = {tensor.untyped_storage().data_ptr() for tensor in (a, b)}
    return len(addresses) == 1 and 0 not in addresses
