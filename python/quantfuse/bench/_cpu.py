# SPDX-License-Identifier: Apache-2.0
"""Decoding on a CPU, eagerly, several models by turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ._decoding import Decoding

_ROUNDS = 5


def measure(decodings: list[Decoding]) -> list[dict[str, Any]]:
    """The best of each over some rounds, in each of which every model has its turn."""
    prefills: list[list[float]] = [[] for _ in decodings]
    decodes: list[list[float]] = [[] for _ in decodings]
    for decoding in decodings:  # packs weights, and starts threads
        decoding.prefill()
        decoding.step()
    for _ in range(_ROUNDS):
        for i, decoding in enumerate(decodings):
            prefills[i].append(_seconds(decoding.prefill))
            decodes[i].append(_seconds(decoding.step, decoding.tokens))
    return [
        decoding.row(min(prefills[i]), decodes[i], decoding.resident_bytes)
        for i, decoding in enumerate(decodings)
    ]


def _seconds(run: Callable[[], None], times: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(times):
        run()
    return time.perf_counter() - start
