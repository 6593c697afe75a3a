# SPDX-License-Identifier: Apache-2.0
"""Attention for compiled decoding over a static cache: ``model.set_attn_implementation(DECODING)``.

A static cache comes with a mask, and for a mask Transformers' ``sdpa`` copies keys and values once for every
query head that shares them, and reads the cache to its end. ``decode_attention`` does neither. Here it takes
the one step that pays, a single token in a model compiled for a GPU; all else, all masks included, is
``sdpa``'s.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from .._attention import decode_attention

DECODING = "quantfuse_decoding"


def lengths_of(seen: torch.Tensor) -> torch.Tensor:
    """Of ``seen`` ``[batch, size]``, up to the last token that is: int32 ``[batch]``."""
    numbers = torch.arange(1, seen.shape[-1] + 1, device=seen.device, dtype=torch.int32)
    return (seen * numbers).amax(-1)


def _decodes(q_length: int, device: Any) -> bool:
    return q_length == 1 and torch.device(device).type == "cuda" and torch.compiler.is_compiling()


def _mask(q_length: int, device: Any = "cpu", **arguments: Any) -> Any:
    if _decodes(q_length, device):
        arguments["allow_is_causal_skip"] = False
    return sdpa_mask(q_length=q_length, device=device, **arguments)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    for name in ("softcap", "s_aux", "position_bias"):
        if more.get(name) is not None:
            raise ValueError(f"{DECODING} attention has no {name}, which {type(module).__name__} needs")
    if attention_mask is None or not _decodes(query.shape[2], query.device):
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **more
        )
        return result
    seen = attention_mask[:, 0, 0].expand(query.shape[0], -1)
    return decode_attention(query, key, value, lengths_of(seen), seen, scaling), None


AttentionInterface.register(DECODING, _attention)
AttentionMaskInterface.register(DECODING, _mask)
