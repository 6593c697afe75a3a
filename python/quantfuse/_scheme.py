# SPDX-License-Identifier: Apache-2.0
"""How a layer is quantized, under one name."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, NamedTuple


class _Kind(NamedTuple):
    format: str
    group: int | tuple[int, int]
    act_quant: str | None = None
    act_group: int = 0


_KINDS = {
    "int8": _Kind("int8", 0),
    "int4": _Kind("int4", 128),
    "fp8": _Kind("fp8_e4m3", 0),
    "mxfp4": _Kind("mxfp4", 32),
    "w8a8-int8": _Kind("int8", 0, "int8"),
    "w8a8-fp8": _Kind("fp8_e4m3", 0, "fp8"),
    "w8a8-fp8-block": _Kind("fp8_e4m3", (128, 128), "fp8", 128),
    "w4a8": _Kind("int4", 128, "int8"),
}

#: The names of all schemes.
SCHEMES = tuple(_KINDS)


@dataclass(frozen=True)
class Scheme:
    """A way to quantize a linear layer: the format of its weight, and of its activations if any.

    Args:
        name: ``int8``, ``int4``, ``fp8``, ``mxfp4`` quantize the weight alone; ``w8a8-int8``, ``w8a8-fp8``,
            ``w8a8-fp8-block`` and ``w4a8`` also quantize activations, per token (``-block``: per token and
            128 columns), on the way into the kernel.
        group: columns of the weight that share a scale; 0 is the whole row; a pair is a 2-D block. By default
            128 for ``int4`` and ``w4a8``, 32 for ``mxfp4``, ``(128, 128)`` for ``w8a8-fp8-block``, else 0.
        symmetric: False gives integer weights zero points.
        mse: search the scales that make the squared error least.

    >>> import quantfuse as qf
    >>> qf.Scheme("int4", group=64)
    Scheme('int4', group=64)
    >>> print(qf.Scheme("w4a8"))
    w4a8: int4 weights in groups of 128, int8 activations per token
    >>> qf.Scheme("int-4")
    Traceback (most recent call last):
    ValueError: scheme is 'int-4'; did you mean 'int4'? Known are: int8, int4, fp8, mxfp4, ...
    """

    name: str
    group: int | tuple[int, int] | None = None
    symmetric: bool = True
    mse: bool = False

    def __post_init__(self) -> None:
        kind = _KINDS.get(self.name) if isinstance(self.name, str) else None
        if kind is None:
            near = difflib.get_close_matches(str(self.name).lower(), SCHEMES, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ValueError(f"scheme is {self.name!r}{hint} Known are: {', '.join(SCHEMES)}")
        group = kind.group if self.group is None else self.group
        if isinstance(group, list):
            group = tuple(group)
        sizes = group if isinstance(group, tuple) and len(group) == 2 else (group,)
        if not all(isinstance(size, int) and size >= 0 for size in sizes):
            raise ValueError(
                f"group is {self.group!r}, expected a number of columns or a block (rows, columns)"
            )
        if self.format == "mxfp4" and group != 32:
            raise ValueError(f"group is {group}, and mxfp4 has groups of 32")
        if not self.symmetric and self.format not in ("int8", "int4"):
            raise ValueError(f"symmetric is False, and {self.name} weights have no zero points")
        object.__setattr__(self, "group", group)

    @staticmethod
    def of(scheme: str | Scheme | dict[str, Any]) -> Scheme:
        """A scheme from its name, from what :meth:`to_dict` gave, or itself."""
        if isinstance(scheme, dict):
            return Scheme(**scheme)
        return scheme if isinstance(scheme, Scheme) else Scheme(scheme)

    @property
    def format(self) -> str:
        """The format of the weight, as :class:`QuantizedWeight` calls it."""
        return _KINDS[self.name].format

    @property
    def block(self) -> tuple[int, int]:
        """The rectangle of the weight that shares a scale."""
        assert self.group is not None
        return self.group if isinstance(self.group, tuple) else (1, self.group)

    @property
    def act_quant(self) -> str | None:
        """The format of activations: None, ``int8`` or ``fp8``."""
        return _KINDS[self.name].act_quant

    @property
    def act_group(self) -> int:
        """Columns of the activations that share a scale; 0 is the whole row."""
        return _KINDS[self.name].act_group

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a config file."""
        group = list(self.group) if isinstance(self.group, tuple) else self.group
        return {"name": self.name, "group": group, "symmetric": self.symmetric, "mse": self.mse}

    def __repr__(self) -> str:
        words = [repr(self.name)]
        if self.group != _KINDS[self.name].group:
            words.append(f"group={self.group}")
        words += ["symmetric=False"] * (not self.symmetric) + ["mse=True"] * self.mse
        return f"Scheme({', '.join(words)})"

    def __str__(self) -> str:
        if isinstance(self.group, tuple):
            span = f"in blocks of {self.group[0]} x {self.group[1]}"
        else:
            span = f"in groups of {self.group}" if self.group else "per channel"
        text = f"{self.name}: {'' if self.symmetric else 'asymmetric '}{self.format} weights {span}"
        if self.act_quant is not None:
            text += f", {self.act_quant} activations per token"
            text += f" and {self.act_group} columns" if self.act_group else ""
        return text
