# SPDX-License-Identifier: Apache-2.0
"""What each scheme costs, as perplexity of held-out text under a small model that was trained for it.

`python tests/python/test_accuracy.py [FILE.json]` prints the table of the documentation.
"""

import json
import sys

import pytest

import quantfuse as qf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from character_model import perplexity, trained_character_model  # noqa: E402

# Scheme and the largest relative increase of perplexity. Without a bound by design are the coarsest formats:
# theirs is that they stay usable.
BOUNDS = [
    (qf.Scheme("int8"), 0.005),
    (qf.Scheme("fp8"), 0.005),
    (qf.Scheme("w8a8-int8"), 0.01),
    (qf.Scheme("w8a8-fp8"), 0.01),
    (qf.Scheme("w8a8-fp8-block"), 0.01),
    (qf.Scheme("int4", group=64), 0.03),
    (qf.Scheme("int4", group=64, symmetric=False), 0.03),
    (qf.Scheme("int4", group=128), 0.1),
    (qf.Scheme("w4a8", group=64), 0.05),
    (qf.Scheme("mxfp4"), 0.2),
]


def load():
    return transformers.LlamaForCausalLM.from_pretrained(trained_character_model()).eval()


@pytest.fixture(scope="module")
def exact():
    return perplexity(load(), sequences=64)


@pytest.mark.parametrize(("scheme", "bound"), BOUNDS, ids=lambda value: repr(value))
def test_perplexity(scheme, bound, exact):
    increase = perplexity(qf.quantize_model(load(), scheme), sequences=64) / exact - 1
    assert increase < bound


def main() -> None:
    exact = perplexity(load())
    rows = [{"scheme": "FP32", "perplexity": exact, "increase": 0.0}]
    for scheme, _ in BOUNDS:
        model = qf.quantize_model(load(), scheme)
        summary = model.quantfuse_summary
        value = perplexity(model)
        ratio = summary.bytes_before / summary.bytes_after
        rows.append(
            {"scheme": repr(scheme), "perplexity": value, "increase": value / exact - 1, "smaller": ratio}
        )
    print("| scheme | perplexity | increase | layers smaller than FP32 |\n| --- | --- | --- | --- |")
    for row in rows:
        smaller = f"{row['smaller']:.2f}x" if "smaller" in row else ""
        print(f"| `{row['scheme']}` | {row['perplexity']:.4f} | {row['increase']:+.2%} | {smaller} |")
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            json.dump({"torch": torch.__version__, "quantfuse": qf.version(), "rows": rows}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
