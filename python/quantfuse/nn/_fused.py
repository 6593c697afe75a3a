# SPDX-License-Identifier: Apache-2.0
"""Linear layers with their activation, over weights that are not quantized."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .. import _operators
from .._scheme import Scheme
from ._linear import QuantizedLinear


class FusedLinear(nn.Linear):
    """``activation(x @ w.T + bias)`` in one call, with the parameters of ``torch.nn.Linear``.

    The weight is float32, float16 or bfloat16, is trained as any other, and has the same place in a state.
    On a CPU the kernels read a packed copy, which is made again when the weight has changed (not when it was
    changed behind autograd's back, through ``weight.data``). On a GPU it is cuBLASLt that multiplies, where
    it is there; ``quantfuse.explain`` tells.

    Args:
        activation: None, ``relu``, ``gelu``, ``gelu_tanh`` or ``silu``.

    >>> import torch, quantfuse as qf
    >>> layer = qf.nn.FusedLinear.from_linear(torch.nn.Linear(64, 32), activation="silu")
    >>> layer
    FusedLinear(in_features=64, out_features=32, bias=True, activation=silu)
    >>> layer(torch.zeros(2, 3, 64)).shape
    torch.Size([2, 3, 32])
    """

    #: Whether the bits of a row must not depend on how many rows there are.
    batch_invariant = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: str | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.activation = _operators.checked_activation(activation)

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, activation: str | None = None) -> FusedLinear:
        """The same layer with an activation; its parameters are those of ``linear`` themselves."""
        sizes = linear.in_features, linear.out_features
        layer = FusedLinear(*sizes, False, activation=activation, device="meta")
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.train(linear.training)
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = self.weight
        device_type = "cuda" if x.is_cuda else "cpu"
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            # The CPU's kernels take any type of weight, and a copy would be packed anew.
            x, weight = x.to(dtype), weight.to(dtype) if x.is_cuda else weight
        result: torch.Tensor = _operators.linear_plain(
            x, weight, self.bias, self.activation, self.batch_invariant
        )
        return result

    def extra_repr(self) -> str:
        words = super().extra_repr()
        return words if self.activation == "identity" else f"{words}, activation={self.activation}"


class LinearGELU(FusedLinear):
    """``gelu(x @ w.T + bias)`` in one call; ``approximate`` as in ``torch.nn.GELU``.

    With ``scheme`` or ``bits`` the weight is quantized, and the layer a :class:`QuantizedLinear`.

    >>> import torch, quantfuse as qf
    >>> qf.nn.LinearGELU(64, 32, approximate="tanh")
    LinearGELU(in_features=64, out_features=32, bias=True, activation=gelu_tanh)
    >>> qf.nn.LinearGELU(64, 32, scheme="int8")
    QuantizedLinear(in_features=64, out_features=32, bias=True, scheme=int8, activation=gelu)
    """

    def __new__(cls, *args: Any, approximate: str = "none", **options: Any) -> Any:
        return _layer_of(cls, _gelu(approximate), args, options)

    def __init__(self, *args: Any, approximate: str = "none", **options: Any) -> None:
        super().__init__(*args, activation=_gelu(approximate), **options)

    @classmethod
    def from_linear(  # type: ignore[override]
        cls, linear: nn.Linear, scheme: str | Scheme | None = None, *, approximate: str = "none"
    ) -> FusedLinear | QuantizedLinear:
        """The same layer with GELU, quantized where ``scheme`` is given."""
        return _from_linear(linear, scheme, _gelu(approximate))


class LinearSiLU(FusedLinear):
    """``silu(x @ w.T + bias)`` in one call. With ``scheme`` or ``bits`` as in :class:`LinearGELU`."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        return _layer_of(cls, "silu", args, options)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, activation="silu", **options)

    @classmethod
    def from_linear(  # type: ignore[override]
        cls, linear: nn.Linear, scheme: str | Scheme | None = None
    ) -> FusedLinear | QuantizedLinear:
        """The same layer with SiLU, quantized where ``scheme`` is given."""
        return _from_linear(linear, scheme, "silu")


def _gelu(approximate: str) -> str:
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate is {approximate!r}, expected 'none' or 'tanh'")
    return {"none": "gelu", "tanh": "gelu_tanh"}[approximate]


def _layer_of(cls: type[FusedLinear], activation: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if options.get("scheme") is None and options.get("bits") is None:
        return nn.Linear.__new__(cls)
    return QuantizedLinear(*args, activation=activation, **options)


def _from_linear(
    linear: nn.Linear, scheme: str | Scheme | None, activation: str
) -> FusedLinear | QuantizedLinear:
    if scheme is None:
        return FusedLinear.from_linear(linear, activation=activation)
    return QuantizedLinear.from_linear(linear, scheme, activation=activation)
