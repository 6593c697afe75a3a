# SPDX-License-Identifier: Apache-2.0
"""QuantFuse and PyTorch's own CPU kernels on the same layer, in the same process, on as many threads.

Every call finds its weight in memory and not in a cache: it rotates through copies that are together more
than three times as large as the last cache. Times are medians over all calls, ratios medians over turns, in
which everything compared is called one after the other: a machine that is slower for a while is so for all.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import quantfuse as qf

GROUP = 128
PAIRS = [
    ("quantfuse int4", "torch int4"),
    ("quantfuse int4", "torch bf16"),
    ("quantfuse int4, int8 activations", "torch int4"),
    ("quantfuse int8 x int8", "torch int8 x int8"),
]


TURNS = 12


class Contender:
    """A call on weights that it rotates through, and the times it took in each turn."""

    def __init__(self, call: Callable[[Any], Any], weights: list[Any]) -> None:
        self.call, self.weights = call, weights
        self.turns: list[list[float]] = []
        self.calls = 0

    def take_turn(self, seconds: float) -> None:
        time.sleep(0.04)  # until the idle threads of whoever ran before no longer spin
        for weight in self.weights[:2]:
            self.call(weight)
        times: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(times) < 3:
            weight = self.weights[self.calls % len(self.weights)]
            start = time.perf_counter()
            self.call(weight)
            times.append(time.perf_counter() - start)
            self.calls += 1
        self.turns.append(times)

    def microseconds(self) -> float:
        return statistics.median(time for turn in self.turns for time in turn) * 1e6

    def speedup_over(self, other: "Contender") -> float:
        pairs = zip(other.turns, self.turns, strict=True)
        return statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs)


def copies_of(make: Callable[[], Any], size: int, cache_bytes: int) -> list[Any]:
    return [make() for _ in range(3 * cache_bytes // size + 2)]


def measure(m: int, k: int, weights: dict[str, list[Any]], seconds: float) -> dict[str, Contender]:
    x = torch.randn(m, k, dtype=torch.bfloat16)
    x8 = torch.randint(-127, 128, (m, k), dtype=torch.int8)
    torch_int4 = torch.ops.aten._weight_int4pack_mm_for_cpu
    calls: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "quantfuse int4": ("int4", lambda w: qf.linear(x, w)),
        "quantfuse int4, int8 activations": ("int4", lambda w: qf.linear(x, w, act_quant="int8")),
        "quantfuse int8 x int8": ("int8", lambda w: qf.int8_matmul(x8, w)),
        "torch bf16": ("bf16", lambda w: torch.nn.functional.linear(x, w)),
        "torch int4": ("torch int4", lambda w: torch_int4(x, w[0], GROUP, w[1])),
        "torch int8 x int8": ("int8", lambda w: torch._int_mm(x8, w.t())),
    }
    contenders = {name: Contender(call, weights[kind]) for name, (kind, call) in calls.items()}
    for _ in range(TURNS):
        for contender in contenders.values():
            contender.take_turn(seconds / TURNS)
    return contenders


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--m", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--n", type=int, default=4096)
    parser.add_argument("--k", type=int, default=4096, help="a multiple of 128")
    parser.add_argument("--seconds", type=float, default=1.5, help="of measuring, per number")
    parser.add_argument("--json", type=Path, help="write the results to this file too")
    options = parser.parse_args()

    n, k = options.n, options.k
    threads = torch.get_num_threads()
    cache_bytes = int(qf.info()["cpu"]["l3_bytes"])
    print(f"weight {n} x {k}, {threads} threads, torch {torch.__version__}")

    w = torch.randn(n, k) / k**0.5
    int4 = qf.QuantizedWeight.from_float(w, "int4")
    codes = torch.randint(0, 16, (n, k), dtype=torch.int32)
    scales = torch.rand(k // GROUP, n, 2).to(torch.bfloat16)
    pack_for_torch = torch.ops.aten._convert_weight_to_int4pack_for_cpu
    makers: dict[str, tuple[int, Callable[[], Any]]] = {
        "int4": (n * k // 2, lambda: copy.copy(int4).pack(drop_canonical=True)),
        "torch int4": (n * k // 2, lambda: (pack_for_torch(codes, 1), scales.clone())),
        "int8": (n * k, lambda: torch.randint(-127, 128, (n, k), dtype=torch.int8)),
        "bf16": (n * k * 2, lambda: w.to(torch.bfloat16)),
    }
    weights = {kind: copies_of(make, size, cache_bytes) for kind, (size, make) in makers.items()}

    rows = []
    for m in options.m:
        contenders = measure(m, k, weights, options.seconds)
        us = {name: contender.microseconds() for name, contender in contenders.items()}
        for ours, theirs in PAIRS:
            speedup = contenders[ours].speedup_over(contenders[theirs])
            rows.append(
                {
                    "m": m,
                    "n": n,
                    "k": k,
                    "kernel": ours,
                    "us": us[ours],
                    "baseline": theirs,
                    "baseline_us": us[theirs],
                    "speedup": speedup,
                }
            )
            print(
                f"m={m:<5}{ours:<33}{us[ours]:>9.0f} us   {theirs:<18}{us[theirs]:>9.0f} us {speedup:>7.2f}x"
            )
    if options.json:
        header = {"info": qf.info(), "torch": torch.__version__, "threads": threads}
        options.json.write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
