# SPDX-License-Identifier: Apache-2.0
"""The account of a model's quantization, and the bar that is shown meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class LayerReport:
    """One layer: its name, what became of it, bytes before and after, and the relative error of its weight
    (Frobenius norm; None where nothing was computed)."""

    name: str
    shape: tuple[int, int]
    format: str
    bytes_before: int
    bytes_after: int
    error: float | None = None
    note: str = ""


@dataclass
class Summary:
    """What :func:`quantfuse.quantize_model` or :func:`quantfuse.load_quantized` did; prints as a table."""

    title: str
    layers: list[LayerReport] = field(default_factory=list)
    left_alone: list[tuple[str, str]] = field(default_factory=list)  # name, why

    @property
    def bytes_before(self) -> int:
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        return sum(layer.bytes_after for layer in self.layers)

    def annotate(self, names: list[str], note: str) -> None:
        """Adds a note to the layers of these names."""
        for layer in self.layers:
            if layer.name.removesuffix(".weight") in names:
                layer.note = f"{layer.note}, {note}" if layer.note else note

    def __str__(self) -> str:
        rows = [("layer", "shape", "format", "before", "after", "error", "")]
        for layer in self.layers:
            error = "" if layer.error is None else f"{layer.error:.2%}"
            shape = f"{layer.shape[0]} x {layer.shape[1]}"
            sizes = _size(layer.bytes_before), _size(layer.bytes_after)
            rows.append((layer.name, shape, layer.format, *sizes, error, layer.note))
        widths = [max(len(row[i]) for row in rows) for i in range(7)]
        lines = [self.title]
        for row in rows:
            cells = [cell.rjust(width) for cell, width in zip(row[1:6], widths[1:6], strict=True)]
            lines.append("  ".join([row[0].ljust(widths[0]), *cells, row[6]]).rstrip())
        ratio = f" ({self.bytes_before / self.bytes_after:.2f}x smaller)" if self.bytes_after else ""
        lines.append(
            f"{len(self.layers)} layers, {_size(self.bytes_before)} -> {_size(self.bytes_after)}{ratio}"
        )
        lines += [f"left alone: {name}: {why}" for name, why in self.left_alone]
        return "\n".join(lines)


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def progress(items: Iterable[Any], total: int, what: str, is_shown: bool | None) -> Iterator[Any]:
    """The items, one by one, with a bar on stderr; by default where that is a terminal."""
    if is_shown is None:
        is_shown = sys.stderr.isatty()
    width = 32
    for done, item in enumerate(items):
        if is_shown:
            filled = width * done // max(total, 1)
            bar = "#" * filled + "." * (width - filled)
            print(f"\r{what} [{bar}] {done}/{total}", end="", file=sys.stderr, flush=True)
        yield item
    if is_shown:
        print(f"\r{what} [{'#' * width}] {total}/{total}", file=sys.stderr, flush=True)
