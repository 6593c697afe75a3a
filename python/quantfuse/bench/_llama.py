# SPDX-License-Identifier: Apache-2.0
"""A Llama with a static cache, as small as it can be written; its classes have the names that
``quantize_model`` knows, so that it is fused as Transformers' own would be."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from .._attention import append_and_attend


class Shape(NamedTuple):
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SHAPES = {
    "llama3-8b": Shape(4096, 32, 32, 8, 14336, 128256),
    "llama-1b": Shape(2048, 22, 32, 4, 5632, 32000),
    "llama-160m": Shape(768, 12, 12, 12, 3072, 32000),
    "tiny": Shape(128, 2, 4, 2, 256, 256),
}


class LlamaAttention(nn.Module):
    """Attention over a cache of fixed length. Several tokens at once are a prompt, and start the cache; one
    token attends to all that are there, its own included, by SDPA where there is a mask of them."""

    def __init__(self, shape: Shape, **options: Any) -> None:
        super().__init__()
        self.shape = shape
        width = shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False, **options)
        self.k_proj = nn.Linear(shape.hidden, width, bias=False, **options)
        self.v_proj = nn.Linear(shape.hidden, width, bias=False, **options)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False, **options)
        self.keys: torch.Tensor
        self.values: torch.Tensor

    def forward(self, x: torch.Tensor, positions: torch.Tensor, rotation: Any, mask: Any) -> torch.Tensor:
        batch, length, _ = x.shape
        is_token = length == 1 and mask is None
        heads = (batch, -1, 1, self.shape.head_dim) if is_token else (batch, length, -1, self.shape.head_dim)
        q, k, v = self.q_proj(x).view(heads), self.k_proj(x).view(heads), self.v_proj(x).view(heads)
        if is_token:
            y = append_and_attend(q, k, v, rotation, self.keys, self.values, positions)
        else:
            q, k = (_rotate(part, *rotation) for part in (q, k))
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            self.keys.index_copy_(2, positions, k)
            self.values.index_copy_(2, positions, v)
            y = self._attended(q, k, v, mask).transpose(1, 2)
        result: torch.Tensor = self.o_proj(y.reshape(batch, length, -1))
        return result

    def _attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
        attention = nn.functional.scaled_dot_product_attention
        if q.shape[2] > 1:
            return attention(q, k, v, is_causal=True, enable_gqa=True)
        group = self.shape.heads // self.shape.kv_heads
        return attention(q, _repeat(self.keys, group), _repeat(self.values, group), attn_mask=mask)


def _repeat(heads: torch.Tensor, times: int) -> torch.Tensor:
    """As Transformers does ahead of a call with a mask, for which SDPA's kernels do not share heads."""
    batch, count, length, width = heads.shape
    expanded = heads[:, :, None].expand(batch, count, times, length, width)
    return expanded.reshape(batch, count * times, length, width)


class LlamaMLP(nn.Module):
    def __init__(self, shape: Shape, **options: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False, **options)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False, **options)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False, **options)
        self.act_fn = nn.functional.silu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return result


class LlamaDecoderLayer(nn.Module):
    """Takes and returns the residual stream and what is still to be added to it: where ``adds_late``, the
    output of the MLP, so that a compiler makes one kernel of the addition and the norm behind it. A quantized
    MLP adds by itself."""

    adds_late = True

    def __init__(self, shape: Shape, **options: Any) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(shape, **options)
        self.mlp = LlamaMLP(shape, **options)
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=1e-5, **options)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=1e-5, **options)

    def forward(
        self, x: torch.Tensor, delta: torch.Tensor | None, positions: torch.Tensor, rotation: Any, mask: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if delta is not None:
            x = x + delta
        x = x + self.self_attn(self.input_layernorm(x), positions, rotation, mask)
        y = self.mlp(self.post_attention_layernorm(x))
        return (x, y) if self.adds_late else (x + y, delta)


class Llama(nn.Module):
    def __init__(self, shape: Shape, **options: Any) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden, **options)
        self.layers = nn.ModuleList([LlamaDecoderLayer(shape, **options) for _ in range(shape.layers)])
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5, **options)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False, **options)
        self.tables: torch.Tensor

    @torch.no_grad()
    def make_cache(self, batch: int, length: int, attention: str = "sdpa") -> None:
        """``attention`` is what decodes: ``sdpa``, as Transformers calls it by default, or ``append``, which
        is ``append_and_attend``."""
        weight, shape = self.norm.weight, self.shape
        self._attention = attention
        size = (batch, shape.kv_heads, length, shape.head_dim)
        for layer in self.layers:
            for name in ("keys", "values"):
                cache = torch.zeros(size, device=weight.device, dtype=weight.dtype)
                layer.self_attn.register_buffer(name, cache, persistent=False)
        half = torch.arange(0, shape.head_dim, 2, device=weight.device, dtype=torch.float32)
        angles = torch.arange(length, device=weight.device)[:, None] * (500000.0 ** (-half / shape.head_dim))
        tables = torch.stack([angles.cos(), angles.sin()]).repeat(1, 1, 2)
        self.register_buffer("tables", tables.to(weight.dtype), persistent=False)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The most likely next token of each sequence, ``[batch, 1]``. A prompt's positions start at 0."""
        x, rotation, mask = self.before_layers(tokens, positions)
        delta = torch.zeros_like(x) if any(layer.adds_late for layer in self.layers) else None
        for layer in self.layers:
            x, delta = layer(x, delta, positions, rotation, mask)
        return self.after_layers(x, delta)

    def before_layers(self, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[Any, Any, Any]:
        """The residual stream, the rotation, and for SDPA the mask of one token, which sees all up to its
        own."""
        rotation = (self.tables[0, positions], self.tables[1, positions])
        mask = None
        if self._attention == "sdpa":
            mask = torch.arange(self.tables.shape[1], device=positions.device)[None] <= positions[:, None]
        if tokens.shape[1] > 1 or mask is not None:
            rotation = (rotation[0][:, None], rotation[1][:, None])  # the same for all heads
        return self.embed_tokens(tokens), rotation, mask

    def after_layers(self, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        logits = self.lm_head(self.norm((x if delta is None else x + delta)[:, -1:]))
        parts = logits.unflatten(-1, (-1, 32))  # a compiler gives a row of logits to one processor
        best, where = parts.max(-1)
        part = best.argmax(-1, keepdim=True)
        return (where + torch.arange(0, logits.shape[-1], 32, device=x.device)).gather(-1, part)[..., 0]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


@torch.no_grad()
def random_llama(shape: Shape, device: str, dtype: torch.dtype) -> Llama:
    """Weights are made where they are used, and small enough for the numbers to stay finite."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Llama(shape, dtype=dtype)
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.eval()
    return model
