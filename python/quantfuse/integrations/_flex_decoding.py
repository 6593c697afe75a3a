# SPDX-License-Identifier: Apache-2.0
"""Attention for compiled decoding over a static cache: ``model.set_attn_implementation("quantfuse_flex")``.

A static cache comes with a mask, and for a mask Transformers' ``sdpa`` copies keys and values once for every
query head that shares them, and reads the cache to its end. ``flex_attention`` does neither. Here it takes
the one step that pays, a single token in a model compiled for a GPU; all else, all masks included, is
``sdpa``'s.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from .._model.decoding import flex_options

FLEX_DECODING = "quantfuse_flex"
_BLOCK = 128  # tokens of the cache that are read or left together


def block_mask(mask: torch.Tensor) -> BlockMask:
    """Of one token of each sequence: ``mask`` is ``[batch, 1, 1, length]``, true where a key is seen."""
    length = mask.shape[-1]
    is_seen = nn.functional.pad(mask[:, 0, 0], (0, -length % _BLOCK))
    is_read = is_seen.unflatten(-1, (-1, _BLOCK)).any(-1).to(torch.int32)
    blocks = is_read.shape[-1]
    first = is_read.argmax(-1, keepdim=True)  # from the first block with a key to the last: mostly all are
    last = blocks - 1 - is_read.flip(-1).argmax(-1, keepdim=True)
    indices = (first + torch.arange(blocks, device=mask.device)) % blocks
    # Inductor would put what makes `is_seen` into the kernel, where it does not compile. A sum is memory.
    seen = nn.functional.pad(is_seen, (1, 0)).cumsum(-1, dtype=torch.int32)
    return BlockMask.from_kv_blocks(
        (last - first + 1)[:, None].to(torch.int32),
        indices[:, None, None].to(torch.int32),
        BLOCK_SIZE=_BLOCK,
        mask_mod=lambda batch, head, query, key: seen[batch, key + 1] > seen[batch, key],
        seq_lengths=(1, length),
    )


def _mask(q_length: int, device: Any = "cpu", **arguments: Any) -> Any:
    arguments["device"] = device
    if q_length != 1 or torch.device(device).type != "cuda" or not torch.compiler.is_compiling():
        return sdpa_mask(q_length=q_length, **arguments)
    arguments["allow_is_causal_skip"] = False
    return block_mask(sdpa_mask(q_length=q_length, **arguments))


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    for name in ("softcap", "s_aux", "position_bias"):
        if more.get(name) is not None:
            raise ValueError(f"{FLEX_DECODING} attention has no {name}, which {type(module).__name__} needs")
    if not isinstance(attention_mask, BlockMask):
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **more
        )
        return result
    attended = flex_attention(
        query,
        key,
        value,
        block_mask=attention_mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        kernel_options=flex_options(key),
    )
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(FLEX_DECODING, _attention)
AttentionMaskInterface.register(FLEX_DECODING, _mask)
