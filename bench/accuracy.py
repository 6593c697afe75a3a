# SPDX-License-Identifier: Apache-2.0
"""What each scheme and method costs: held-out perplexity of the small character model
(tests/python/character_model.py) as Transformers loads it from what calibrate_and_quantize wrote.

    python bench/accuracy.py --json bench/results/accuracy.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "python"))
import character_model
import quantfuse as qf

WEIGHT_METHODS = [("rtn", {}), ("mse", {}), ("awq", {}), ("gptq", {}), ("gptq", {"act_order": True})]
ROWS = [
    *(
        ("int4", method, {"group": group, **more})
        for group in (128, 64, 32)
        for method, more in WEIGHT_METHODS
    ),
    *(("int4", method, {"group": 128, "symmetric": False, **more}) for method, more in WEIGHT_METHODS),
    ("int8", "rtn", {}),
    ("w8a8", "rtn", {}),
    ("w8a8", "smoothquant", {}),
    ("w8a8", "gptq", {}),
    ("fp8", "absmax", {}),
    ("fp8", "percentile", {}),
    ("fp8", "mse", {}),
]


def measure(model: transformers.PreTrainedModel, exact: list[torch.Tensor]) -> dict[str, float]:
    return {
        "perplexity": character_model.perplexity(model),
        "divergence": character_model.divergence(model, exact),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()

    folder = character_model.trained_character_model()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    exact = character_model.log_probabilities(model)
    calibration = character_model.calibration_tokens()
    rows = [{"scheme": "fp32", "method": "", **measure(model, exact)}]
    for scheme, method, more in ROWS:
        with tempfile.TemporaryDirectory() as out:
            started = time.monotonic()
            qf.calibrate_and_quantize(folder, calibration, scheme, method, out=out, **more)
            seconds = round(time.monotonic() - started, 2)
            quantized = transformers.AutoModelForCausalLM.from_pretrained(out)
            rows.append(
                {"scheme": scheme, "method": method, **more, **measure(quantized, exact), "seconds": seconds}
            )
        print(rows[-1], flush=True)
    if options.json:
        machine = {
            "cpu": qf.info()["cpu"]["model"],
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        result = {"machine": machine, "model": character_model.CONFIG, "rows": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
