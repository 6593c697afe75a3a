# SPDX-License-Identifier: Apache-2.0
"""What `quantfuse quantize` writes, loaded by Transformers and compressed-tensors themselves."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="Transformers is not installed")
pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
from safetensors.torch import load_file  # noqa: E402

import quantfuse as qf  # noqa: E402

_ROOT = Path(__file__).resolve().parents[2]
_COMMAND = Path(os.environ.get("QUANTFUSE_LIBRARY_DIR", _ROOT / "build")) / "quantfuse"
pytestmark = pytest.mark.skipif(not _COMMAND.exists(), reason="the quantfuse command is not built")


def _run(*arguments: object) -> None:
    result = subprocess.run([_COMMAND, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def _save_llama(folder: Path, dtype: torch.dtype) -> Any:
    """Rows of 64, so that FP8 blocks are ragged at the edge. The head shares the embedding's
    weight, and so is in no file."""
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=192 + 192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)  # logits that differ by more than rounding
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16"])
def llama(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, _save_llama(folder, getattr(torch, request.param))


_SCHEMES = [
    ("int4", []),
    ("int4", ["--group", "32", "--asymmetric"]),
    ("int4", ["--group", "channel", "--method", "mse"]),
    ("int8", []),
    ("int8", ["--group", "128", "--asymmetric"]),
    ("fp8", []),
    ("fp8", ["--group", "tensor"]),
    ("fp8-block", []),
    ("mxfp4", []),
    ("mxfp8", []),
    ("w8a8-int8", []),
    ("w8a8-int8", ["--asymmetric"]),
    ("w8a8-fp8", []),
    ("w8a8-fp8", ["--group", "tensor"]),
    ("w8a8-fp8-block", []),
    ("w4a8", []),
]


@pytest.mark.parametrize(("scheme", "options"), _SCHEMES, ids=lambda value: "".join(value) or "-")
def test_transformers_loads_what_we_write(
    llama: Any, tmp_path: Path, scheme: str, options: list[str]
) -> None:
    folder, model = llama
    # compressed-tensors dequantizes MX to bfloat16, whatever the type of the model.
    dtype = torch.bfloat16 if scheme.startswith("mx") else model.dtype
    out, back = tmp_path / "out", tmp_path / "back.safetensors"
    _run("quantize", folder, out, "--scheme", scheme, *options, "--exclude", "layers.1.mlp.up_proj")
    _run("dequantize", out, back)
    ours = load_file(back)

    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=dtype).eval()
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        logits = loaded(tokens).logits  # compressed-tensors dequantizes on the first call
    theirs = loaded.state_dict()
    quantized = [name for name in ours if "_proj" in name and "layers.1.mlp.up_proj" not in name]
    assert len(quantized) == 13
    for name in quantized:
        assert torch.equal(theirs[name].float(), ours[name].float()), name
        assert not torch.equal(ours[name], model.state_dict()[name].float()), f"{name} was not quantized"
    untouched = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(theirs[untouched], model.state_dict()[untouched].to(dtype))

    # The float model with our weights: the same logits, up to the rounding of quantized activations.
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    reference.load_state_dict({name: ours[name].to(dtype) for name in quantized}, strict=False)
    with torch.no_grad():
        expected = reference(tokens).logits
    error = (logits.float() - expected.float()).norm() / expected.float().norm()
    assert error <= (0.1 if scheme.startswith("w") else 1e-6), error


def test_shards_are_loaded(llama: Any, tmp_path: Path) -> None:
    folder, _ = llama
    _run("quantize", folder, tmp_path / "one", "--scheme", "int8")
    _run("quantize", folder, tmp_path / "many", "--scheme", "int8", "--shard-size", "50KB")
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 3
    tokens = torch.arange(8).reshape(1, 8)
    with torch.no_grad():
        one, many = (
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()(tokens).logits
            for name in ("one", "many")
        )
    assert torch.equal(one, many)


@pytest.mark.parametrize("scheme", ["int4", "int8", "fp8", "fp8-e5m2", "fp4", "mxfp4", "mxfp8"])
def test_own_layout_is_that_of_quantized_weights(llama: Any, tmp_path: Path, scheme: str) -> None:
    folder, model = llama
    name = "model.layers.0.mlp.down_proj"
    _run("quantize", folder, tmp_path / "out", "--scheme", scheme, "--format", "quantfuse")
    weight = qf.QuantizedWeight.load(tmp_path / "out" / "model.safetensors", name=name)

    formats = {"fp8": "fp8_e4m3", "fp8-e5m2": "fp8_e5m2", "fp4": "fp4_e2m1"}
    original = model.state_dict()[name + ".weight"].float().numpy()
    expected = qf.QuantizedWeight.from_float(original, formats.get(scheme, scheme))
    assert (weight.format, weight.block) == (expected.format, expected.block)
    assert np.array_equal(weight.codes, expected.codes)
    assert np.array_equal(weight.scales, expected.scales)

    # And the other way: a file of one weight is a checkpoint of one.
    expected.save(tmp_path / "one.safetensors")
    _run("dequantize", tmp_path / "one.safetensors", tmp_path / "back.safetensors")
    assert np.array_equal(load_file(tmp_path / "back.safetensors")["weight"].numpy(), expected.dequantize())


def test_a_weight_that_is_not_there_is_named(llama: Any, tmp_path: Path) -> None:
    _run("quantize", llama[0], tmp_path / "out", "--scheme", "int4", "--format", "quantfuse")
    with pytest.raises(ValueError, match="no weight named 'model_nothing'"):
        qf.QuantizedWeight.load(tmp_path / "out" / "model.safetensors", name="model_nothing")


@pytest.mark.parametrize("scheme", ["int4", "int4 with offsets", "int8", "nf4"])
def test_a_saved_weight_is_dequantized_by_the_command(tmp_path: Path, scheme: str) -> None:
    rng = np.random.default_rng(3)
    weight = qf.QuantizedWeight.from_float(
        rng.standard_normal((24, 128)).astype(np.float32), scheme.split()[0], group=64
    )
    if "offsets" in scheme:
        offsets = rng.standard_normal(weight.scales.shape).astype(np.float32)
        weight = qf.QuantizedWeight(
            weight.format, weight.shape, weight.block, weight.codes, weight.scales, offsets=offsets
        )
    weight.save(tmp_path / "one.safetensors")
    _run("dequantize", tmp_path / "one.safetensors", tmp_path / "out.safetensors", "--dtype", "f32")
    assert np.array_equal(load_file(tmp_path / "out.safetensors")["weight"].numpy(), weight.dequantize())


_BERT = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 128,
}
_WHISPER = {
    "vocab_size": 96,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


@pytest.mark.parametrize(
    ("family", "sizes", "head"),
    [
        ("BertForMaskedLM", _BERT, "cls.predictions.decoder"),
        ("RobertaForMaskedLM", _BERT | {"pad_token_id": 0}, "lm_head.decoder"),
        ("WhisperForConditionalGeneration", _WHISPER, "proj_out"),
    ],
)
def test_heads_that_share_a_weight_under_another_name(
    tmp_path: Path, family: str, sizes: dict[str, int], head: str
) -> None:
    kind = getattr(transformers, family)
    kind(kind.config_class(**sizes)).save_pretrained(tmp_path / "float")
    _run("quantize", tmp_path / "float", tmp_path / "quantized", "--scheme", "int8")
    loaded = kind.from_pretrained(tmp_path / "quantized")
    embedding = loaded.get_input_embeddings() if head != "proj_out" else loaded.model.decoder.embed_tokens
    assert loaded.get_submodule(head).weight is embedding.weight
