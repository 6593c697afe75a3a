# SPDX-License-Identifier: Apache-2.0
"""Calibration data: text or token ids become a matrix of token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def calibration_ids(model_dir: Path, data: Any, samples: int, length: int) -> Any:
    """``data`` as token ids ``[sequences, length]``, int64: text is tokenized, joined and cut into
    sequences."""
    if samples < 1 or length < 1:
        raise ValueError(f"samples is {samples} and length is {length}, expected at least 1")
    texts = [data] if isinstance(data, str) else data
    if isinstance(texts, list | tuple) and texts and all(isinstance(text, str) for text in texts):
        return _ids_of_text(model_dir, list(texts), samples, length)
    try:
        ids = torch.as_tensor(data)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"data is neither text nor a matrix of token ids: {error}") from None
    if ids.ndim != 2 or ids.numel() == 0 or ids.is_floating_point():
        raise ValueError(
            f"data has shape {tuple(ids.shape)} and type {ids.dtype}, expected token ids [sequences, length]"
        )
    return ids[:samples].long().contiguous()


def _ids_of_text(model_dir: Path, texts: list[str], samples: int, length: int) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    ids: list[int] = []
    for text in texts:
        # A piece at a time: more than enough is never tokenized.
        for start in range(0, len(text), 1 << 16):
            ids += tokenizer(text[start : start + (1 << 16)], add_special_tokens=False)["input_ids"]
            if len(ids) >= samples * length:
                break
    sequences = min(samples, len(ids) // length)
    if sequences == 0:
        raise ValueError(f"data has {len(ids)} tokens, expected at least one sequence of {length}")
    return torch.tensor(ids[: sequences * length]).reshape(sequences, length)
