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
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "python"))
import character_model
import quantfuse as qf

WEIGHT_METHODS = [("rtn", {}), ("mse", {}), ("awq", {}), ("gptq", {}), ("gptq", {"act_order": True})]
ROWS = [
    *(("int4", method, {"group": 128, **more}) for method, more in WEIGHT_METHODS),
    *(("int4", method, {"group": 128, "symmetric": False, **more}) for method, more in WEIGHT_METHODS),
    ("w8a8", "rtn", {}),
    ("w8a8", "smoothquant", {}),
    ("fp8", "absmax", {}),
    ("fp8", "percentile", {}),
    ("fp8", "mse", {}),
    *(("int4", method, {"group": 32, **more}) for method, more in WEIGHT_METHODS),
    *(("int4", method, {"group": 64, **more}) for method, more in WEIGHT_METHODS),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()

    folder = character_model.trained_character_model()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    exact = character_model.log_probabilities(model)
    machine = {
        "cpu": qf.info()["cpu"]["model"],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    rows = [{"scheme": "fp32", "method": "", **character_model.measures(exact, exact)}]
    for scheme, method, more in ROWS:
        with tempfile.TemporaryDirectory() as out:
            qf.calibrate_and_quantize(
                folder, character_model.calibration_tokens(), scheme, method, out=out, **more
            )
            quantized = transformers.AutoModelForCausalLM.from_pretrained(out)
        measures = character_model.measures(character_model.log_probabilities(quantized), exact)
        rows.append({"scheme": scheme, "method": method, **more, **measures})
        print(rows[-1], flush=True)
        # After every row: a run that is stopped has measured something.
        if options.json:
            result = {"machine": machine, "model": character_model.CONFIG, "rows": rows}
            options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
