# SPDX-License-Identifier: Apache-2.0
"""Through a model, layer by layer:  inputs of layer i --run, gather--> statistics --method--> quantized
linears --write--> a file;  the same inputs through the quantized layer are the inputs of layer i + 1.

The folder written has one file per decoder layer and one per other tensor. A file is written beside its name
and renamed when it is whole; the index and config.json come last, so that a folder that can be loaded is
complete."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ._layer import InputStatistics, Site, sites_of
from ._methods import quantize_layer
from ._model import LayerwiseModel, SourceFolder
from ._packing import QuantizedLinear, from_tensors, quantization_config, to_tensors
from ._settings import Settings

_REPORT = "quantfuse_report.json"
_INDEX = "model.safetensors.index.json"


def quantize_folder(
    source_dir: Path,
    out: Path,
    ids: Any,
    settings: Settings,
    batch: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    if batch < 1:
        raise ValueError(f"batch is {batch}, expected at least 1")
    if out.resolve() == source_dir.resolve():
        raise ValueError(f"out is {out}, the folder of the model itself")
    source = SourceFolder(source_dir)
    return _Run(source, out, ids, settings, batch, progress).run()


class _Run:
    def __init__(
        self,
        source: SourceFolder,
        out: Path,
        ids: Any,
        settings: Settings,
        batch: int,
        progress: Callable[[str], None],
    ) -> None:
        self._source, self._out, self._settings, self._progress = source, out, settings, progress
        self._model = LayerwiseModel(source)
        self._model.check_tokens(ids)
        self._check_groups()
        self._batches = list(ids.split(batch))
        self._num_inputs = ids.numel()
        # What a finished layer must have been made with to be taken over.
        self._identity = json.dumps(
            {
                "settings": settings.fingerprint(),
                "model": source.config,
                "weights": source.checksums(),
                "data": [list(ids.shape), _checksum(ids)],
            },
            sort_keys=True,
        )

    def run(self) -> dict[str, Any]:
        self._out.mkdir(parents=True, exist_ok=True)
        layers = [self._finished_report(i) for i in range(len(self._model.layers))]
        if None in layers:
            with torch.inference_mode():
                layers = self._quantize_layers(layers)
        self._copy_other_tensors()
        report = {"settings": self._settings.fingerprint(), "layers": layers}
        self._finish(report)
        return report

    def _check_groups(self) -> None:
        """compressed-tensors has no short last group."""
        for index, layer in enumerate(self._model.layers):
            for name in (name for site in self._sites(index, layer) for name in site.names):
                columns = layer.get_submodule(name).in_features
                if self._settings.group and columns % self._settings.group:
                    raise ValueError(
                        f"{self._model.layer_prefix(index)}{name} has {columns} columns, not a multiple of "
                        f"{self._settings.group}, as compressed-tensors wants: choose another group, or "
                        "exclude it"
                    )

    # ---- Layers ----

    def _layer_file(self, index: int) -> Path:
        return self._out / f"layer-{index:05d}.safetensors"

    def _finished_report(self, index: int) -> dict[str, Any] | None:
        """Of a layer that an earlier call has finished."""
        path = self._layer_file(index)
        if not path.is_file():
            return None
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
        if metadata.get("identity") != self._identity:
            raise ValueError(
                f"{path} was made with other arguments, another model or other data: "
                f"remove {self._out}, or choose another folder"
            )
        report: dict[str, Any] = json.loads(metadata["report"])
        return report

    def _quantize_layers(self, reports: list[dict[str, Any] | None]) -> list[dict[str, Any] | None]:
        last = max(i for i, report in enumerate(reports) if report is None)
        hidden, calls = self._model.start(self._batches)
        for index in range(last + 1):
            started = time.monotonic()
            layer = self._model.fill(index)
            sites = self._sites(index, layer)
            report = reports[index]
            if report is None:
                exact, statistics = self._observe(layer, sites, hidden, calls, index)
                quantized, errors = quantize_layer(
                    layer, sites, statistics, self._settings, self._model.dtype
                )
                del statistics
                tensors = self._tensors_of(index, layer, quantized)
            else:
                with safe_open(self._layer_file(index), "pt") as file:
                    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                quantized = self._take_over(index, layer, sites, tensors)
            for name, linear in quantized.items():
                layer.get_submodule(name).weight.data = linear.dequantized()
            self._advance(layer, hidden, calls, index)
            if report is None:
                error = float((hidden[0] - exact).square().sum() / exact.square().sum().clamp_min(1e-30))
                seconds = round(time.monotonic() - started, 2)
                report = {"layer": index, "seconds": seconds, "output_error": error, "linears": errors}
                self._write(self._layer_file(index), tensors, report)
                reports[index] = report
                self._progress(_line(report, len(reports)))
            self._model.empty(index)
        return reports

    def _sites(self, index: int, layer: Any) -> list[Site]:
        """Of the linears that are to be quantized. Linears that share an input are scaled together, so a
        factor moves only where all of them take part, and out of a producer that may change."""
        prefix = self._model.layer_prefix(index)
        sites = []
        for site in sites_of(layer):
            names = tuple(name for name in site.names if not self._settings.excludes(prefix + name))
            is_whole = names == site.names and not self._settings.excludes(f"{prefix}{site.producer}")
            if names:
                sites.append(Site(names, site.producer if is_whole else None))
        return sites

    def _observe(
        self, layer: Any, sites: list[Site], hidden: list[Any], calls: list[list[dict[str, Any]]], index: int
    ) -> tuple[Any, list[InputStatistics]]:
        """The layer's exact outputs for the first batch, and the inputs of each site over all batches."""
        statistics, hooks = [], []
        for site in sites:
            linear = layer.get_submodule(site.names[0])
            stats = InputStatistics(linear.in_features, self._num_inputs, self._settings.method == "gptq")
            hooks.append(linear.register_forward_pre_hook(lambda _, args, stats=stats: stats.add(args[0])))
            statistics.append(stats)
        first = None
        for inputs, call in zip(hidden, calls, strict=True):
            outputs = layer(inputs, **call[index])
            first = outputs if first is None else first
        for hook in hooks:
            hook.remove()
        return first, statistics

    def _advance(self, layer: Any, hidden: list[Any], calls: list[list[dict[str, Any]]], index: int) -> None:
        """The layer's outputs take the place of its inputs."""
        for i, call in enumerate(calls):
            hidden[i] = layer(hidden[i], **call[index])

    def _tensors_of(self, index: int, layer: Any, quantized: dict[str, QuantizedLinear]) -> dict[str, Any]:
        prefix, dtype = self._model.layer_prefix(index), self._model.dtype
        tensors: dict[str, Any] = {}
        for name, value in layer.state_dict().items():
            linear = name.removesuffix(".weight")
            if linear in quantized:
                tensors |= to_tensors(prefix + linear, quantized[linear], self._settings, dtype)
            else:
                tensors[prefix + name] = value.to(dtype)
        return {name: tensor.contiguous() for name, tensor in tensors.items()}

    def _take_over(
        self, index: int, layer: Any, sites: list[Site], tensors: dict[str, Any]
    ) -> dict[str, QuantizedLinear]:
        """The quantized linears of a finished layer's file; its other tensors go into the layer, whose norms
        may have been scaled."""
        prefix = self._model.layer_prefix(index)
        names = [name for site in sites for name in site.names]
        quantized = {name: from_tensors(prefix + name, tensors, self._settings) for name in names}
        for name, value in layer.state_dict().items():
            if name.removesuffix(".weight") not in quantized:
                value.copy_(tensors[prefix + name].float())
        return quantized

    # ---- Files ----

    def _write(self, path: Path, tensors: dict[str, Any], report: dict[str, Any] | None = None) -> None:
        metadata = {"format": "pt", "identity": self._identity}
        if report is not None:
            metadata["report"] = json.dumps(report)
        beside = path.with_suffix(".part")
        save_file(tensors, beside, metadata=metadata)
        os.replace(beside, path)

    def _write_text(self, path: Path, text: str) -> None:
        beside = path.with_suffix(".part")
        beside.write_text(text)
        os.replace(beside, path)

    def _copy_other_tensors(self) -> None:
        """What is in no decoder layer, a file each: one of them in memory at a time."""
        for i, name in enumerate(self._other_names()):
            path = self._out / f"other-{i:05d}.safetensors"
            if not self._is_of_this_run(path):
                self._write(path, {name: self._source.tensor(name)})

    def _is_of_this_run(self, path: Path) -> bool:
        if not path.is_file():
            return False
        with safe_open(path, "pt") as file:
            return bool((file.metadata() or {}).get("identity") == self._identity)

    def _other_names(self) -> list[str]:
        in_layers = {n for i in range(len(self._model.layers)) for n in self._model.layer_names(i)}
        return [name for name in self._source.names() if name not in in_layers]

    def _finish(self, report: dict[str, Any]) -> None:
        weight_map: dict[str, str] = {}
        total = 0
        for path in sorted(self._out.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                weight_map |= dict.fromkeys(file.keys(), path.name)
            total += path.stat().st_size
        for path in self._source.folder.iterdir():
            # The tokenizer, the generation configuration, and what else is small and no weight.
            is_weight = path.suffix in (".safetensors", ".bin", ".pt", ".gguf") or path.name in (
                _INDEX,
                "config.json",
            )
            if path.is_file() and not is_weight and not (self._out / path.name).exists():
                shutil.copyfile(path, self._out / path.name)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        self._write_text(self._out / _REPORT, json.dumps(report, indent=1))
        self._write_text(self._out / _INDEX, json.dumps(index, indent=1, sort_keys=True))
        config = self._source.config | {
            "quantization_config": quantization_config(self._settings, self._ignored())
        }
        self._write_text(self._out / "config.json", json.dumps(config, indent=1))

    def _ignored(self) -> list[str]:
        """Linears that stay in floating point, by their full names."""
        ignored = ["lm_head"]
        for index, layer in enumerate(self._model.layers):
            prefix = self._model.layer_prefix(index)
            taken = {name for site in self._sites(index, layer) for name in site.names}
            linears = [name for name, module in layer.named_modules() if isinstance(module, torch.nn.Linear)]
            ignored += [prefix + name for name in linears if name not in taken]
        return ignored


def _checksum(ids: Any) -> int:
    """A number that other token ids hardly have too."""
    weights = torch.arange(1, ids.numel() + 1) % 1000003
    return int((ids.flatten() * weights).sum())


def _line(report: dict[str, Any], count: int) -> str:
    linears = report["linears"].values()
    rtn = sum(errors["rtn"] for errors in linears) / max(len(linears), 1)
    error = sum(errors["error"] for errors in linears) / max(len(linears), 1)
    return (
        f"layer {report['layer'] + 1}/{count}  {report['seconds']:.1f} s  "
        f"mean error of its linears: {rtn:.3g} by rounding to nearest, {error:.3g} as quantized; "
        f"of its output: {report['output_error']:.3g}"
    )
