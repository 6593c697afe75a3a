# SPDX-License-Identifier: Apache-2.0
"""``python -m quantfuse.quantize MODEL OUT --data TEXT``: quantfuse.calibrate_and_quantize for the shell."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .calibration import METHODS, calibrate_and_quantize


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m quantfuse.quantize",
        description="Quantize a Transformers model folder with calibration data, to a compressed-tensors "
        "folder. Stopped, it goes on where it was when it is started again.",
    )
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--data", type=Path, required=True, nargs="+", help="text files")
    parser.add_argument("--scheme", choices=list(METHODS), default="int4")
    methods = sorted({method for choices in METHODS.values() for method in choices})
    parser.add_argument(
        "--method", choices=methods, help="the default: gptq, smoothquant (w8a8), absmax (fp8)"
    )
    parser.add_argument("--group", type=int, help="columns that share a scale; 0: the whole row")
    parser.add_argument("--asymmetric", action="store_true", help="zero points (int4, int8)")
    parser.add_argument(
        "--act-order", action="store_true", help="gptq: channels with the largest inputs first"
    )
    parser.add_argument(
        "--damping", type=float, default=0.01, help="gptq: share of the diagonal's mean added to it"
    )
    parser.add_argument("--smoothing", type=float, default=0.5, help="smoothquant: the exponent")
    parser.add_argument("--percentile", type=float, default=99.99, help="fp8: of --method percentile")
    parser.add_argument(
        "--exclude", metavar="REGEX", help="linears whose name it is found in stay as they are"
    )
    parser.add_argument("--samples", type=int, default=128, help="sequences (default 128)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence (default 512)")
    parser.add_argument("--batch", type=int, default=8, help="sequences at a time (default 8)")
    return parser


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in options.data]
        calibrate_and_quantize(
            options.model,
            texts,
            options.scheme,
            options.method,
            out=options.out,
            group=options.group,
            symmetric=not options.asymmetric,
            act_order=options.act_order,
            damping=options.damping,
            smoothing=options.smoothing,
            percentile=options.percentile,
            exclude=options.exclude,
            samples=options.samples,
            length=options.length,
            batch=options.batch,
            progress=lambda line: print(line, flush=True),
        )
    except (OSError, ValueError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.out}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
