# SPDX-License-Identifier: Apache-2.0
"""What a GGUF calls the tensors of a decoder, and what llama.cpp's converter does to them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from .._checkpoint import Canonical

#: Architectures whose tensors map one to one. In "llama" (Mistral too) the rows of q and k are reordered.
ARCHITECTURES = ("llama", "qwen2", "qwen3")

_OF_THE_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_A_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"^blk\.(\d+)\.(\w+)\.(weight|bias)$")
_MODEL_NAME = re.compile(r"^(\w+)\.(weight|bias)$")


def transformers_name(name: str) -> str:
    """The name in Transformers; the name itself where it is not one of llama.cpp's."""
    if (found := _LAYER_NAME.match(name)) and found[2] in _OF_A_LAYER:
        return f"model.layers.{found[1]}.{_OF_A_LAYER[found[2]]}.{found[3]}"
    if (found := _MODEL_NAME.match(name)) and found[1] in _OF_THE_MODEL:
        return f"{_OF_THE_MODEL[found[1]]}.{found[2]}"
    return name


def row_order(name: str, architecture: str, config: Any, rows: int) -> np.ndarray[Any, Any] | None:
    """Which row of the file each row of the model is; None where they are the same.

    llama.cpp rotates neighbouring pairs where Transformers rotates halves: of every head, rows 0, 1, 2, 3,
    ... of the file are rows 0, d/2, 1, d/2 + 1, ... of the model.
    """
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    found = _LAYER_NAME.match(name)
    if architecture != "llama" or found is None or found[2] not in heads:
        return None
    num_heads = getattr(config, heads[found[2]], None)
    if not num_heads:
        raise ValueError(
            f"{name}: the model's config does not say {heads[found[2]]}, by which rows are ordered"
        )
    order: np.ndarray[Any, Any] = np.arange(rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
    return order


def reorder(weight: Canonical, order: np.ndarray[Any, Any]) -> Canonical:
    """A weight whose scales belong to single rows, in another order of them."""
    beside = {name: getattr(weight, name) for name in ("zeros", "offsets")}
    beside = {name: None if tensor is None else tensor[order] for name, tensor in beside.items()}
    return weight._replace(codes=weight.codes[order], scales=weight.scales[order], **beside)
