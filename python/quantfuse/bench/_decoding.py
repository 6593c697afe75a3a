# SPDX-License-Identifier: Apache-2.0
"""What is timed: a prompt, and the steps that decode behind it."""

from __future__ import annotations

from typing import Any

import torch

from ._llama import Llama


class Decoding:
    """A model with a cache for ``batch`` sequences; ``prefill`` and ``step`` each leave the next token where
    the next step finds it."""

    def __init__(self, model: Llama, name: str, attention: str, batch: int, prompt: int, tokens: int) -> None:
        self.model, self.name, self.attention = model, name, attention
        self.batch, self.prompt, self.tokens = batch, prompt, tokens
        model.make_cache(batch, prompt + tokens, attention)
        device = model.norm.weight.device
        self._prompt = torch.randint(0, model.shape.vocabulary, (batch, prompt), device=device)
        self._positions = torch.arange(prompt, device=device)
        self._token = self._prompt[:, -1:].clone()
        self._position = torch.zeros(1, dtype=torch.int64, device=device)

    def prefill(self) -> None:
        self._token.copy_(self.model(self._prompt, self._positions))
        self._position.fill_(self.prompt)

    def step(self) -> None:
        self._token.copy_(self.model(self._token, self._position))
        self._position.add_(1)

    @property
    def resident_bytes(self) -> int:
        """Of all weights and of the cache."""
        held = (*self.model.parameters(), *self.model.buffers())
        tensors = {tensor.data_ptr(): tensor for tensor in held}
        total: int = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        return total

    def row(self, prefill_time: float, times: list[float], peak_bytes: int, **more: Any) -> dict[str, Any]:
        """The results, from seconds for the prompt and for all tokens behind it."""
        return {
            "model": self.name,
            "attention": self.attention,
            "batch": self.batch,
            "first_token_ms": prefill_time * 1e3,
            "decode_tokens_per_s": self.batch * self.tokens / min(times),
            "decode_ms_per_step": min(times) / self.tokens * 1e3,
            "spread": max(times) / min(times) - 1,
            "resident_bytes": self.resident_bytes,
            "peak_bytes": peak_bytes,
            "joule_per_token": None,
            **more,
        }
