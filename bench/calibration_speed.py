# SPDX-License-Identifier: Apache-2.0
"""How long GPTQ and the search of AWQ take for one 4096 x 4096 layer: best of three.

python bench/calibration_speed.py --json bench/results/calibration-speed.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import quantfuse as qf

SIZE, INPUTS, REPEATS = 4096, 512, 3


def best_seconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return round(min(times), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((SIZE, SIZE), np.float32)
    inputs = rng.standard_normal((2 * SIZE, SIZE), np.float32) + 2 * rng.standard_normal(
        (2 * SIZE, 1), np.float32
    )
    hessian = inputs.T @ inputs
    sampled = inputs[:INPUTS].copy()
    runs = {
        "gptq": lambda: qf.gptq_quantize(weight, hessian),
        "gptq act_order": lambda: qf.gptq_quantize(weight, hessian, act_order="group"),
        "gptq mse": lambda: qf.gptq_quantize(weight, hessian, mse=True),
        "awq": lambda: qf.awq_search(weight, sampled),
        "awq clip": lambda: qf.awq_search(weight, sampled, clip=True),
    }
    seconds = {}
    for name, run in runs.items():
        seconds[name] = best_seconds(run)
        print(f"{name}: {seconds[name]} s", flush=True)
    if options.json:
        cpu = qf.info()["cpu"]
        machine = {"cpu": cpu["model"], "isa": cpu["isa"], "threads": qf.get_num_threads()}
        shape = {"weight": [SIZE, SIZE], "awq inputs": INPUTS, "format": "int4", "group": 128}
        result = {"machine": machine, "problem": shape, "seconds": seconds}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
