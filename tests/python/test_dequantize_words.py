# SPDX-License-Identifier: Apache-2.0
"""awq_dequantize and gptq_dequantize against checkpoints that AutoAWQ, AutoGPTQ and GPTQModel wrote."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

import quantfuse as qf

torch = pytest.importorskip("torch")
from safetensors.torch import load_file  # noqa: E402

ROOTS = [Path(__file__).parents[1] / "fixtures"]
if os.environ.get("QUANTFUSE_FIXTURES"):
    ROOTS.append(Path(os.environ["QUANTFUSE_FIXTURES"]))
DEVICES = ["cpu"] + ["cuda"] * (torch.cuda.is_available() and bool(qf.info()["cuda"]["architectures"]))


def fixtures():
    found = []
    for root in ROOTS:
        for path in sorted(root.glob("*/expected.safetensors")):
            config = path.parent / "config.json"
            text = json.loads(config.read_text()) if config.exists() else {}
            method = text.get("quantization_config", {}).get("quant_method")
            if method in ("awq", "gptq"):
                found.append(pytest.param(path.parent, text["quantization_config"], id=path.parent.name))
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("folder", "config"), fixtures())
def test_every_layer_of_a_checkpoint(folder, config, device):
    tensors = {}
    for file in folder.glob("*.safetensors"):
        if file.name != "expected.safetensors":
            tensors.update(load_file(file))
    expected = load_file(folder / "expected.safetensors")
    modules = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    assert modules
    for module in modules:
        parts = {
            name: tensors[f"{module}.{name}"].to(device)
            for name in ("qweight", "scales", "qzeros", "g_idx")
            if f"{module}.{name}" in tensors
        }
        if config["quant_method"] == "awq":
            got = qf.awq_dequantize(**parts, group_size=config["group_size"])
        else:
            version = config.get("checkpoint_format", config.get("format", "gptq"))
            options = {"bits": config["bits"], "checkpoint_format": version}
            got = qf.gptq_dequantize(**parts, group_size=config["group_size"], **options)
        right = expected[f"{module}.weight"]
        assert got.dtype == parts["scales"].dtype
        assert torch.equal(got.T.cpu().float(), right.float()), module


def test_types_and_memory():
    rng = np.random.default_rng(1)
    words = rng.integers(-(2**31), 2**31, (64, 4), dtype=np.int64).astype(np.int32)
    zeros = rng.integers(-(2**31), 2**31, (2, 4), dtype=np.int64).astype(np.int32)
    scales = rng.uniform(0.01, 0.02, (2, 32)).astype(np.float16)
    exact = qf.awq_dequantize(words, scales, zeros, out_dtype="float32")
    assert exact.shape == (64, 32)
    assert exact.dtype == np.float32
    out = np.empty((64, 32), np.float16)
    assert qf.awq_dequantize(words, scales, zeros, out=out) is out
    assert (out == exact.astype(np.float16)).all()


def test_bad_arguments_are_named():
    words, zeros = np.zeros((64, 4), np.int32), np.zeros((2, 4), np.int32)
    scales = np.ones((2, 32), np.float16)
    with pytest.raises(ValueError, match="group_size is needed: 64 rows have 3 groups"):
        qf.awq_dequantize(words, np.ones((3, 32), np.float16), zeros)
    with pytest.raises(ValueError, match="qzeros"):
        qf.awq_dequantize(words, scales, np.zeros((2, 3), np.int32))
    with pytest.raises(ValueError, match="qweight"):
        qf.awq_dequantize(words.astype(np.int8), scales, zeros)
    with pytest.raises(ValueError, match="bits is 5"):
        qf.gptq_dequantize(np.zeros((8, 32), np.int32), scales, zeros, bits=5)
    with pytest.raises(ValueError, match="checkpoint_format is 'marlin'"):
        qf.gptq_dequantize(np.zeros((8, 32), np.int32), scales, zeros, checkpoint_format="marlin")
    g_idx = np.full(64, 2, np.int32)
    with pytest.raises(ValueError, match="g_idx has the value 2"):
        qf.gptq_dequantize(np.zeros((8, 32), np.int32), scales, zeros, g_idx, group_size=32)
