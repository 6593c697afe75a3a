# SPDX-License-Identifier: Apache-2.0
"""Quantization of a Transformers model with calibration data, one decoder layer at a time.

torch and Transformers are imported when a model is quantized, not before.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ._settings import METHODS, Settings

__all__ = ["METHODS", "calibrate_and_quantize"]


def calibrate_and_quantize(
    model_dir: str | Path,
    data: Any,
    scheme: str = "int4",
    method: str | None = None,
    *,
    out: str | Path,
    group: int | None = None,
    symmetric: bool = True,
    act_order: bool = False,
    damping: float = 0.01,
    smoothing: float = 0.5,
    percentile: float = 99.99,
    exclude: str | None = None,
    samples: int = 128,
    length: int = 512,
    batch: int = 8,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Quantizes the linear layers of a Transformers model folder and writes a compressed-tensors folder,
    which Transformers and vLLM load.

    One decoder layer is in memory at a time, with its inputs on all calibration sequences and what the method
    sums up of them (GPTQ: the hessians of the layer's four inputs). Each finished layer is a file of its own,
    under its final name only when it is whole; a second call with the same arguments goes on where the first
    one was stopped.

    Args:
        model_dir: a folder with ``config.json`` and safetensors; Llama, Mistral, Qwen2 and Qwen3 models.
        data: text, a list of texts (both need the folder's tokenizer), or token ids ``[sequences, length]``.
        scheme: ``int4`` or ``int8`` (weights), ``w8a8`` (INT8 weights and activations, these scaled per
            token) or ``fp8`` (E4M3 weights and activations, these with a static scale per tensor).
        method: ``int4``, ``int8``: ``gptq`` (the default), ``awq``, ``mse``, ``rtn``. ``w8a8``:
            ``smoothquant`` (the default), ``gptq``, ``rtn``. ``fp8``, for the static scales: ``absmax`` (the
            default), ``percentile``, ``mse``.
        out: the folder to write; it is made.
        group: columns that share a scale; by default 128 for ``int4``, the whole row for the others.
        symmetric: False gives ``int4`` and ``int8`` zero points.
        act_order: GPTQ goes from the channels with the largest inputs to the smallest; groups stay as they
            are.
        damping: GPTQ adds this share of the mean of the hessian's diagonal to it.
        smoothing: SmoothQuant's exponent: 0 leaves activations as they are, 1 moves all their range to the
            weights.
        percentile: of the magnitudes of activations that FP8's ``percentile`` covers.
        exclude: a regular expression; linear layers whose name it is found in stay as they are.
        samples: at most so many sequences are used.
        length: tokens of a sequence that text is cut to.
        batch: sequences that run through a layer at a time.
        progress: is called with a line of text for each finished layer.

    Returns:
        A report, also written as ``quantfuse_report.json``: for each layer its seconds, the relative error
        of its output, and for each of its linears the relative squared error of the output by rounding to
        nearest (``rtn``) and as quantized (``error``).

    >>> import tempfile, torch, transformers, quantfuse as qf
    >>> config = transformers.LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1,
    ...                                   num_attention_heads=2, vocab_size=100)
    >>> ids = torch.arange(4000).reshape(40, 100) * 7 % 100
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     transformers.LlamaForCausalLM(config).save_pretrained(folder)
    ...     report = qf.calibrate_and_quantize(folder, ids, "int4", "gptq", group=32, out=folder + "/int4")
    >>> errors = report["layers"][0]["linears"]["mlp.down_proj"]
    >>> errors["error"] < errors["rtn"]
    True
    """
    settings = Settings.make(
        scheme,
        method,
        group=group,
        symmetric=symmetric,
        act_order=act_order,
        damping=damping,
        smoothing=smoothing,
        percentile=percentile,
        exclude=exclude,
    )
    from . import _driver, _text

    source = Path(model_dir)
    ids = _text.calibration_ids(source, data, samples, length)
    return _driver.quantize_folder(source, Path(out), ids, settings, batch, progress or (lambda line: None))
