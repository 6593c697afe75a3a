# SPDX-License-Identifier: Apache-2.0
"""load_quantized: checkpoints of every format into PyTorch models."""

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest

import quantfuse as qf
from quantfuse._checkpoint import Checkpoint

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import nn  # noqa: E402

from tiny_models import tiny, token_ids  # noqa: E402

ROOTS = [Path(__file__).parents[1] / "fixtures"]
if os.environ.get("QUANTFUSE_FIXTURES"):
    ROOTS.append(Path(os.environ["QUANTFUSE_FIXTURES"]))
FIXTURES = sorted(
    path.parent
    for root in ROOTS
    for path in root.glob("*/expected.safetensors")
    if path.parent.name != "hostile"
)


def source_of(folder):
    gguf = folder / "model.gguf"
    return gguf if gguf.exists() else folder


def tree_for(checkpoint):
    """Modules with the names and shapes of a checkpoint."""
    root = nn.Module()

    def parent_of(name):
        module = root
        for part in name.split(".") if name else []:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]
        return module

    for layer in checkpoint.layers:
        name = layer.name.removesuffix(".weight")
        above, _, leaf = name.rpartition(".")
        if len(layer.shape) == 2:
            parent_of(above).add_module(leaf, nn.Linear(layer.shape[1], layer.shape[0], bias=False))
        else:
            parent_of(name).register_parameter("weight", nn.Parameter(torch.zeros(layer.shape)))
    for tensor in checkpoint.plain:
        above, _, leaf = tensor.name.rpartition(".")
        parent_of(above).register_parameter(leaf, nn.Parameter(torch.zeros(tensor.shape)))
    return root


@pytest.mark.parametrize("folder", FIXTURES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_every_fixture_gives_the_numbers_of_its_own_tool(folder):
    checkpoint = Checkpoint(source_of(folder))
    rounding = {layer.name: layer.rounding for layer in checkpoint.layers}
    tree = qf.load_quantized(tree_for(checkpoint), source_of(folder))
    expected = load_file(folder / "expected.safetensors")
    loaded = 0
    for name, module in tree.named_modules():
        right = expected.get(f"{name}.weight")
        if right is None or not hasattr(module, "weight"):
            continue
        weight = module.weight.detach().float()
        dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(rounding.get(f"{name}.weight"))
        weight = weight if dtype is None else weight.to(dtype).float()
        assert torch.equal(weight, right.float()), name
        loaded += 1
    assert loaded > 0
    for report in tree.quantfuse_summary.layers:
        assert "dequantized" in report.note or report.bytes_after < report.bytes_before


# ---- Whole models ----


def write_fp8_block(model, folder, **config):
    """A model in DeepSeek's layout; returns the numbers that the linear layers have in it."""
    tensors, numbers = {}, {}
    for name, tensor in model.state_dict().items():
        if "_proj.weight" not in name:
            tensors[name] = tensor.clone()
            continue
        quantized = qf.quantize_tensor(tensor, "fp8_e4m3", block=(128, 128))
        tensors[name] = quantized.codes
        tensors[name.replace(".weight", ".weight_scale_inv")] = quantized.scale
        numbers[name] = qf.dequantize_tensor(quantized.codes, quantized.scale, block=(128, 128))
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", **config}
    text = {**model.config.to_dict(), "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(text, default=str))
    return numbers


def write_gguf(path, architecture, tensors):
    """tensors: name -> (type number, shape, bytes)."""

    def text(value):
        return struct.pack("<Q", len(value)) + value.encode()

    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 1)
    header += text("general.architecture") + struct.pack("<I", 8) + text(architecture)
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        header += text(name) + struct.pack("<I", len(shape))
        header += b"".join(struct.pack("<Q", size) for size in reversed(shape))
        header += struct.pack("<IQ", kind, len(data))
        data += raw + bytes(-len(raw) % 32)
    path.write_bytes(header + bytes(-len(header) % 32) + data)


def with_numbers(model, numbers):
    state = model.state_dict()
    state.update(numbers)
    model.load_state_dict(state)
    return model


def empty_like(model):
    with torch.device("meta"):
        empty = type(model)(model.config)
    return empty.eval()


@torch.no_grad()
def logits(model):
    return model(token_ids()).logits


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_model_in_fp8_blocks(tmp_path, on_meta):
    model = tiny("Llama")
    numbers = write_fp8_block(model, tmp_path)
    target = empty_like(model) if on_meta else tiny("Llama", attention_dropout=0.5).eval()
    loaded = qf.load_quantized(target, tmp_path)
    assert type(loaded.model.layers[0].mlp) is qf.nn.GatedMLP
    torch.testing.assert_close(logits(loaded), logits(with_numbers(model, numbers)), rtol=1e-4, atol=1e-5)


def q8_0(tensor):
    blocks = tensor.reshape(-1, 32)
    scale = (blocks.abs().amax(1, keepdim=True) / 127).half()
    codes = (blocks / scale.float().clamp_min(1e-12)).round().clamp(-127, 127).to(torch.int8)
    raw = np.concatenate([scale.numpy().view(np.uint8), codes.numpy().view(np.uint8)], axis=1)
    return raw.tobytes(), (codes.float() * scale.float()).reshape(tensor.shape)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf_model(model, architecture, path):
    """A model in Q8_0 under llama.cpp's names; returns the numbers that its matrices have there."""
    tensors, numbers = {}, {}
    for name, tensor in model.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        prefix = ""
        if stem.startswith("model.layers."):
            _, _, number, stem = stem.split(".", 3)
            prefix = f"blk.{number}."
        their_name = f"{prefix}{GGUF_NAMES[stem]}.{leaf}"
        heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(stem)
        if heads and architecture == "llama":  # as convert_hf_to_gguf.py does
            tensor = tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        if tensor.ndim == 2:
            raw, rounded = q8_0(tensor)
            tensors[their_name] = (8, tuple(tensor.shape), raw)
            if heads and architecture == "llama":
                rounded = rounded.reshape(heads, -1, 2, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
            numbers[name] = rounded
        else:
            tensors[their_name] = (0, tuple(tensor.shape), tensor.numpy().tobytes())
    write_gguf(path, architecture, tensors)
    return numbers


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize(("family", "architecture"), [("Llama", "llama"), ("Qwen2", "qwen2")])
def test_a_model_in_gguf(tmp_path, family, architecture, fuse):
    model = tiny(family)
    numbers = write_gguf_model(model, architecture, tmp_path / "model.gguf")
    loaded = qf.load_quantized(empty_like(model), tmp_path / "model.gguf", fuse=fuse)
    assert (type(loaded.model.layers[1].self_attn.q_proj) is qf.nn.QuantizedLinear) is not fuse
    assert "its module is Embedding" in str(loaded.quantfuse_summary)
    torch.testing.assert_close(logits(loaded), logits(with_numbers(model, numbers)), rtol=1e-4, atol=1e-5)


def test_buffers_that_no_checkpoint_has_are_computed_or_refused(tmp_path):
    """Transformers' models know how theirs begin; another module does not."""
    model = tiny("Llama")
    numbers = write_fp8_block(model, tmp_path)
    loaded = qf.load_quantized(empty_like(model), tmp_path, fuse=False)
    assert torch.equal(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)

    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(4, 4, bias=False)
            self.register_buffer("rate", torch.ones(3), persistent=False)

    save_file({"weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with torch.device("meta"):
        module = Scaled()
    with pytest.raises(ValueError, match="rate is on the meta device"):
        qf.load_quantized(module, tmp_path)
    assert module.weight.is_meta
    assert numbers


def test_a_quantized_head_does_not_fill_the_embedding_it_was_tied_to(tmp_path):
    model = tiny("Llama", tie_word_embeddings=True)
    head = qf.quantize_tensor(model.lm_head.weight.detach(), "fp8_e4m3", block=(128, 128))
    write_fp8_block(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    tensors |= {"lm_head.weight": head.codes, "lm_head.weight_scale_inv": head.scale}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 parameters.*model\.embed_tokens\.weight"):
        qf.load_quantized(tiny("Llama", tie_word_embeddings=True), tmp_path)


def test_a_loaded_model_is_not_saved_as_what_it_is_not(tmp_path, caplog):
    model = tiny("Llama")
    write_fp8_block(model, tmp_path / "source")
    loaded = qf.load_quantized(tiny("Llama"), tmp_path / "source")
    with pytest.raises(ValueError, match="not serializable"):
        loaded.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


# ---- What does not fit ----


def test_differences_are_errors_by_name(tmp_path):
    model = tiny("Llama")
    write_fp8_block(model, tmp_path)

    def refused(target, message, **options):
        before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            qf.load_quantized(target, tmp_path, **options)
        for name, tensor in target.state_dict().items():
            assert torch.equal(tensor, before[name])

    refused(tiny("Llama", vocab_size=100), r"lm_head.weight has shape \(96, 128\).*\(100, 128\)")
    refused(tiny("Llama", num_hidden_layers=1), r"9 .*tensors that the model does not have: model\.layers\.1")
    refused(tiny("Llama", num_hidden_layers=3), "parameters that the checkpoint does not have")
    refused(tiny("Llama"), "quant_method", stated={"quant_method": "unheard_of"})
    refused(tiny("Llama"), "on_inexact", on_inexact="whatever")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        qf.load_quantized(tiny("Llama"), tmp_path / "nowhere")
    loaded = qf.load_quantized(tiny("Llama", num_hidden_layers=3), tmp_path, strict=False)
    assert "the checkpoint does not have it" in str(loaded.quantfuse_summary)


def test_a_truncated_file_is_an_error(tmp_path):
    model = tiny("Llama")
    write_fp8_block(model, tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        qf.load_quantized(tiny("Llama"), tmp_path)


def test_what_is_not_a_linear_layer_can_be_refused(tmp_path):
    model = tiny("Llama")
    write_gguf_model(model, "llama", tmp_path / "model.gguf")
    with pytest.raises(ValueError, match=r"token_embd\.weight .*Embedding, .*on_inexact='dequantize' would"):
        qf.load_quantized(model, tmp_path / "model.gguf", on_inexact="error")
    assert type(model.lm_head) is nn.Linear
