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
        if not torch.compiler.is_compiling() and any(map(_is_frozen, _written(func, args, kwargs))):
            raise RuntimeError(
                "the weight of a quantized layer is frozen and cannot be written to: change a clone() of it. "
                "An adapter is merged into the model before it is quantized, or kept beside the layer"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if torch.compiler.is_compiling():
                return result
            own = [arg for arg in args if _is_frozen(arg)]
            if isinstance(result, tuple | list) and not hasattr(result, "_fields"):
                return type(result)(_as_part(part, own) for part in result)
            return _as_part(result, own)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()  # whose it is to change

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


def _is_frozen(x: Any) -> bool:
    return isinstance(x, FrozenWeight)


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The tensors that a call writes to."""
    out = kwargs.get("out")
    written = list(out) if isinstance(out, tuple | list) else [out]
    name: str = func.__name__.split(".")[0]
    is_in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    if is_in_place or name in _ASSIGNMENTS or func == _ASSIGN_DATA or kwargs.get("inplace"):
        first = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
        written += first if isinstance(first, tuple | list) else [first]
    return written


def _as_part(x: Any, own: list[Any]) -> Any:
    """A view of a frozen weight is frozen too."""
    is_new = isinstance(x, torch.Tensor) and not _is_frozen(x)
    return x.as_subclass(FrozenWeight) if is_new and any(_same_memory(x, weight) for weight in own) else x


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a write to ``a`` changes ``b``, of which it may be a view."""
    addresses = {tensor.untyped_storage().data_ptr() for tensor in (a, b)}
    return len(addresses) == 1 and 0 not in addresses
