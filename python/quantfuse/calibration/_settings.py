# SPDX-License-Identifier: Apache-2.0
"""What to do with every linear layer, checked."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

#: The methods of each scheme, the default first.
METHODS = {
    "int4": ("gptq", "awq", "mse", "rtn"),
    "int8": ("gptq", "awq", "mse", "rtn"),
    "w8a8": ("smoothquant", "gptq", "rtn"),
    "fp8": ("absmax", "percentile", "mse"),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    scheme: str
    method: str
    group: int  # 0: the whole row
    symmetric: bool
    act_order: bool
    damping: float
    smoothing: float
    percentile: float
    exclude: str | None

    @classmethod
    def make(cls, scheme: str, method: str | None, *, group: int | None, **others: Any) -> Settings:
        if scheme not in METHODS:
            raise ValueError(f"scheme is {scheme!r}, expected one of: {', '.join(METHODS)}")
        method = METHODS[scheme][0] if method is None else method
        if method not in METHODS[scheme]:
            raise ValueError(f"method is {method!r}, expected for {scheme}: {', '.join(METHODS[scheme])}")
        group = (128 if scheme == "int4" else 0) if group is None else group
        settings = cls(scheme, method, group, **others)
        settings._check()
        return settings

    def _check(self) -> None:
        if self.group < 0:
            raise ValueError(f"group is {self.group}, expected 0 (the whole row) or more")
        if self.scheme in ("w8a8", "fp8") and (self.group or not self.symmetric):
            raise ValueError(
                f"{self.scheme} has one symmetric scale a row, expected no group and symmetric=True"
            )
        if self.act_order and self.method != "gptq":
            raise ValueError(f"act_order goes with gptq, and method is {self.method!r}")
        for name, low, high in (("damping", 0.0, 10.0), ("smoothing", 0.0, 1.0), ("percentile", 0.0, 100.0)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}, expected {low} to {high}")
        if self.exclude is not None:
            try:
                re.compile(self.exclude)
            except re.error as error:
                raise ValueError(
                    f"exclude is {self.exclude!r}, which is no regular expression: {error}"
                ) from None

    @property
    def bits(self) -> int:
        return 4 if self.scheme == "int4" else 8

    @property
    def format(self) -> str:
        """Of the codes, as the package's other functions name it."""
        return {"int4": "int4", "fp8": "fp8_e4m3"}.get(self.scheme, "int8")

    @property
    def block(self) -> tuple[int, int]:
        return (1, self.group)

    def excludes(self, name: str) -> bool:
        return self.exclude is not None and re.search(self.exclude, name) is not None

    def fingerprint(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
