# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in any format that is read: their layers as weights, their other tensors as they are."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ._library import open_checkpoint
from ._tensors import FORMATS

_FORMAT_NAMES = {number: name for name, number in FORMATS.items()}


@dataclass(frozen=True)
class Layer:
    """A quantized weight of a checkpoint, described."""

    index: int
    name: str  # of the weight that it stands for
    shape: tuple[int, ...]
    format: str  # as the checkpoint's own tool calls it
    nbytes: int
    rounding: str  # what that tool rounds its numbers to: F32, F16 or BF16


@dataclass(frozen=True)
class PlainTensor:
    """A tensor that is not quantized, described."""

    index: int
    name: str
    shape: tuple[int, ...]
    type: str  # as safetensors calls it


class Canonical(NamedTuple):
    """The arguments of :class:`QuantizedWeight`, as NumPy arrays; FP8 codes are uint8."""

    format: str
    shape: tuple[int, int]
    block: tuple[int, int]
    codes: Any
    scales: Any
    zeros: Any
    offsets: Any
    g_idx: Any


class Checkpoint:
    """A folder of safetensors, a safetensors file or a GGUF, opened: headers are read, tensors are not.

    Args:
        path: the folder or the file.
        stated: fields that go over the checkpoint's ``quantization_config``, for what it does not say or says
            wrongly: ``{"quant_method": "gptq", "checkpoint_format": "gptq_v2"}``.
    """

    def __init__(self, path: str | os.PathLike[str], stated: Mapping[str, Any] | None = None) -> None:
        if not Path(path).exists():
            raise FileNotFoundError(f"{os.fspath(path)} does not exist")
        fields: list[str] = []
        for key, value in (stated or {}).items():
            fields += [key, value if isinstance(value, str) else json.dumps(value)]
        description, self._canonical, self._dequantize, self._plain = open_checkpoint(os.fspath(path), fields)
        about = json.loads(str(description))
        self.format = str(about["format"])
        self.architecture = str(about["architecture"])
        self.is_gguf = bool(about["is_gguf"])
        self.layers = [
            Layer(i, layer["name"], tuple(layer["shape"]), layer["format"], layer["bytes"], layer["rounding"])
            for i, layer in enumerate(about["layers"])
        ]
        self.plain = [
            PlainTensor(i, tensor["name"], tuple(tensor["shape"]), tensor["type"])
            for i, tensor in enumerate(about["plain"])
        ]

    def canonical(self, layer: Layer) -> Canonical | None:
        """The weight as ``linear`` takes it; None where its format does not map to that exactly."""
        parts = self._canonical(layer.index)
        if len(parts) == 0:
            return None
        number, n, k, block_rows, block_cols, *tensors = parts
        arrays: list[Any] = [None if t is None else np.from_dlpack(t) for t in tensors]
        codes, scales, zeros, offsets, g_idx = arrays
        format = _FORMAT_NAMES[number]
        if scales.dtype == np.uint8 and (block_rows, block_cols) == (1, 32):
            format = {"fp8_e4m3": "mxfp8", "fp4_e2m1": "mxfp4"}.get(format, format)
        codes = codes.view(np.int8) if format == "int8" else codes
        return Canonical(format, (n, k), (block_rows, block_cols), codes, scales, zeros, offsets, g_idx)

    def dequantize(self, layer: Layer) -> np.ndarray[Any, np.dtype[np.float32]]:
        """All numbers of the weight, float32, exactly as the format's own tool gives them."""
        out = np.empty(layer.shape, np.float32)
        self._dequantize(layer.index, out)
        return out

    def bytes_of(self, tensor: PlainTensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of a tensor where they lie in the file; read-only."""
        array: Any = np.from_dlpack(self._plain(tensor.index))
        array.flags.writeable = False
        return array  # type: ignore[no-any-return]
