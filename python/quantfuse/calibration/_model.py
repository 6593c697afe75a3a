# SPDX-License-Identifier: Apache-2.0
"""A Transformers model folder of which only what is at hand is in memory: its modules stand on the meta
device, and a decoder layer has weights from when it is filled until it is emptied."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open

from ._layer import FAMILIES

_PREFIX = "model."  # of the base model's tensors


class SourceFolder:
    """The tensors of a folder, each read from its file when it is asked for."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} has no config.json, expected a Transformers model folder")
        self.folder = folder
        self.config = json.loads((folder / "config.json").read_text())
        if "quantization_config" in self.config:
            raise ValueError(f"{folder} is quantized already, expected a model in floating point")
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            names = json.loads(index.read_text())["weight_map"]
            self._file_of = {name: folder / file for name, file in names.items()}
        elif (folder / "model.safetensors").is_file():
            with safe_open(folder / "model.safetensors", "pt") as file:
                self._file_of = dict.fromkeys(file.keys(), folder / "model.safetensors")
        else:
            raise ValueError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")

    def checksums(self) -> dict[str, str]:
        """Of the files that hold tensors, by name: two models of one configuration differ in nothing else."""
        sums = {}
        for path in sorted(set(self._file_of.values())):
            value = 0
            with open(path, "rb") as file:
                while chunk := file.read(1 << 24):
                    value = zlib.crc32(chunk, value)
            sums[path.name] = f"{value:08x}"
        return sums

    def names(self) -> list[str]:
        return sorted(self._file_of)

    def tensor(self, name: str) -> Any:
        if name not in self._file_of:
            raise ValueError(f"{self.folder} has no tensor {name}")
        with safe_open(self._file_of[name], "pt") as file:
            return file.get_tensor(name)


class LayerwiseModel:
    """Runs token ids up to the first decoder layer, and hidden states through any one layer."""

    def __init__(self, source: SourceFolder) -> None:
        config = transformers.AutoConfig.from_pretrained(source.folder)
        if config.model_type not in FAMILIES:
            raise NotImplementedError(
                f"{source.folder} is a {config.model_type} model, expected one of: {', '.join(FAMILIES)}"
            )
        self.source = source
        with torch.device("meta"):
            self._base = transformers.AutoModel.from_config(config, dtype=torch.float32).eval()
        # Its frequencies are computed, not stored.
        self._base.rotary_emb = type(self._base.rotary_emb)(config=config)
        self._base.norm = torch.nn.Identity()
        self.layers = list(self._base.layers)
        self.dtype = source.tensor(f"{_PREFIX}layers.0.self_attn.q_proj.weight").dtype

    def layer_prefix(self, index: int) -> str:
        return f"{_PREFIX}layers.{index}."

    def layer_names(self, index: int) -> list[str]:
        prefix = self.layer_prefix(index)
        return [name for name in self.source.names() if name.startswith(prefix)]

    def check_tokens(self, ids: Any) -> None:
        size = self._base.embed_tokens.num_embeddings
        for token in (int(ids.min()), int(ids.max())):
            if not 0 <= token < size:
                raise ValueError(f"data has the token id {token}, expected 0 to {size - 1}")

    def fill(self, index: int) -> Any:
        """The layer with its weights, in float32."""
        layer, prefix = self.layers[index], self.layer_prefix(index)
        tensors = {}
        for name in self.layer_names(index):
            tensor = self.source.tensor(name).float()
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name} has values that are not finite")
            tensors[name.removeprefix(prefix)] = tensor
        layer.load_state_dict(tensors, strict=True, assign=True)
        return layer.requires_grad_(False)

    def empty(self, index: int) -> None:
        self.layers[index].to("meta")

    def start(self, batches: list[Any]) -> tuple[list[Any], list[list[dict[str, Any]]]]:
        """The inputs of the first layer, batch by batch, and for each batch what every layer is called with
        besides (masks and position embeddings, which equal batches share)."""
        embedding = self._base.embed_tokens
        embedding.load_state_dict(
            {"weight": self.source.tensor(f"{_PREFIX}embed_tokens.weight").float()}, assign=True
        )
        recorders = [_Recorder(layer) for layer in self.layers]
        self._base.layers = torch.nn.ModuleList(recorders)
        hidden, calls = [], []
        known: dict[Any, list[dict[str, Any]]] = {}
        for batch in batches:
            self._base(batch, use_cache=False)
            hidden.append(recorders[0].hidden)
            calls.append(known.setdefault(tuple(batch.shape), [recorder.call for recorder in recorders]))
        embedding.to("meta")
        return hidden, calls


class _Recorder(torch.nn.Module):  # type: ignore[misc]
    """Stands where a decoder layer was, remembers what it is called with, and passes its input on."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.attention_type = getattr(layer, "attention_type", "full_attention")
        self.hidden: Any = None
        self.call: dict[str, Any] = {}

    def forward(self, hidden_states: Any, **call: Any) -> Any:
        self.hidden, self.call = hidden_states, call
        return hidden_states
