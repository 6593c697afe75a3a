# SPDX-License-Identifier: Apache-2.0
"""Where quantized weights wait until all of a model's are there, so that it changes whole or not at all."""

from __future__ import annotations

import contextlib
import signal
import tempfile
import threading
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import torch

from .._weight import QuantizedWeight

_TENSORS = ("codes", "scales", "zeros", "g_idx", "offsets")


class _Stored(NamedTuple):
    """A tensor in the file."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype


class Staging:
    """Weights by name. Those of a GPU wait in host memory. Those of a CPU wait in memory up to
    ``memory_limit`` bytes, further ones in a temporary file, or in memory where none can be written."""

    def __init__(self, memory_limit: int) -> None:
        self._memory_left = memory_limit
        self._waiting: dict[str, tuple[QuantizedWeight, dict[str, Any], torch.device]] = {}
        self._file: IO[bytes] | None = None
        self._may_write = True

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.clear()
        if self._file is not None:
            self._file.close()

    def put(self, name: str, weight: QuantizedWeight) -> None:
        """Takes over the tensors of ``weight``, which has none afterwards."""
        held = {field: getattr(weight, field) for field in _TENSORS if getattr(weight, field) is not None}
        device = held["codes"].device
        if device.type == "cpu":
            size = sum(tensor.nbytes for tensor in held.values())
            if size <= self._memory_left:
                self._memory_left -= size
            elif self._may_write:
                held = self._written(held)
        else:
            held = {field: tensor.cpu() for field, tensor in held.items()}
        for field in _TENSORS:
            setattr(weight, field, None)
        self._waiting[name] = (weight, held, device)

    def take(self, name: str) -> QuantizedWeight:
        """The weight called ``name``, with its tensors where they were; it waits no longer."""
        weight, held, device = self._waiting.pop(name)
        for field, tensor in held.items():
            here = self._read(tensor) if isinstance(tensor, _Stored) else tensor
            setattr(weight, field, here.to(device))
        return weight

    def _written(self, held: dict[str, torch.Tensor]) -> dict[str, Any]:
        stored = {}
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="quantfuse-")  # noqa: SIM115
            for field, tensor in held.items():
                offset = self._file.seek(0, 2)
                stored[field] = _Stored(offset, tensor.shape, tensor.dtype)
                self._file.write(_bytes(tensor.contiguous()))
            self._file.flush()
        except OSError:  # no folder for it, or no room
            self._may_write = False
            return held
        return stored

    def _read(self, stored: _Stored) -> torch.Tensor:
        assert self._file is not None
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        self._file.seek(stored.offset)
        target = _bytes(tensor)
        if self._file.readinto(target) != target.nbytes:  # type: ignore[attr-defined]
            raise OSError("the temporary file of quantized weights is shorter than it was written")
        return tensor


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.flatten().view(torch.uint8).numpy())


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """A KeyboardInterrupt that comes meanwhile is raised at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield  # interrupts come to the main thread alone
        return
    came: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *arguments: came.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came and callable(before):
        before(*came[0])
