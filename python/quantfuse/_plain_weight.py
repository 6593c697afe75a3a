# SPDX-License-Identifier: Apache-2.0
"""Weights that are not quantized."""

from __future__ import annotations

from typing import Any

import tvm_ffi

from ._tensors import PLAIN_FORMATS, Family, Tensor, adopt
from ._weight import pack_arguments


class PlainWeight:
    """A weight matrix ``w`` ``[n, k]``, float32, float16 or bfloat16, for :func:`linear`.

    :meth:`pack` makes the copy that the CPU's kernels read, once; GPUs read ``w`` itself. The memory of
    ``w`` is the caller's, and is not to change afterwards.

    >>> import numpy as np, quantfuse as qf
    >>> weight = qf.PlainWeight(np.array([[1.0, -1.0], [0.5, 1.0]], np.float32)).pack()
    >>> qf.linear(np.array([[2.0, 1.0]], np.float32), weight, activation="relu").tolist()
    [[1.0, 2.0]]
    """

    __slots__ = ("_arguments", "_family", "is_gated", "packed", "shape", "w")

    def __init__(self, w: Tensor, is_gated: bool = False) -> None:
        self.w, self._family = adopt(w, "w")
        dtype = self._family.dtype_name(self.w)
        if dtype not in PLAIN_FORMATS:
            raise ValueError(f"w has type {dtype}, expected one of: {', '.join(PLAIN_FORMATS)}")
        if len(self.w.shape) != 2:
            raise ValueError(f"w has shape {tuple(self.w.shape)}, expected a matrix")
        self.shape: tuple[int, int] = tuple(self.w.shape)
        if is_gated and self.shape[0] % 2 != 0:
            raise ValueError(f"is_gated is given for {self.shape[0]} rows, expected an even number")
        self.is_gated = bool(is_gated)
        self.packed: Tensor | None = None
        self._arguments: tuple[Any, ...] | None = None

    @property
    def out_features(self) -> int:
        """Columns of the layer's output: n, or n / 2 where the weight is gated."""
        return self.shape[0] // 2 if self.is_gated else self.shape[0]

    def pack(self) -> PlainWeight:
        """Makes the copy that the CPU's kernels read, and returns the weight itself."""
        if self.packed is None:
            self.packed = pack_arguments(self._make_arguments(), self._family, self.w)
            self._arguments = None
        return self

    def call_arguments(self, family: Family) -> tuple[Any, ...]:
        """The fields of the C struct, made once."""
        if family is not self._family:
            raise TypeError("weight and x are of different families, expected all NumPy or all torch")
        if self._arguments is None:
            self._arguments = self._make_arguments()
        return self._arguments

    def _make_arguments(self) -> tuple[Any, ...]:
        def borrow(tensor: Tensor | None, name: str) -> Any:
            return None if tensor is None else tvm_ffi.from_dlpack(self._family.argument(tensor, name))

        format = PLAIN_FORMATS[self._family.dtype_name(self.w)]
        codes, packed = borrow(self.w, "w"), borrow(self.packed, "packed")
        return (format, *self.shape, 0, 0, codes, None, None, None, None, self.is_gated, packed)

    def __repr__(self) -> str:
        n, k = self.shape
        words = [self._family.dtype_name(self.w), f"{n} x {k}"]
        words += ["gated"] * self.is_gated + ["packed"] * (self.packed is not None)
        return f"PlainWeight({', '.join(words)})"
