# SPDX-License-Identifier: Apache-2.0
"""from_pretrained and save_pretrained with QuantFuseConfig."""

import copy
import json
import logging

import pytest

import quantfuse as qf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402

from tiny_models import tiny, token_ids  # noqa: E402


@torch.no_grad()
def logits(model):
    return model(token_ids()).logits


def load(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@pytest.fixture
def folder(tmp_path):
    def save(family, **changes):
        model = tiny(family, **changes)
        model.save_pretrained(tmp_path / family)
        return model, tmp_path / family

    return save


@pytest.mark.parametrize("scheme", ["int4", "w8a8-int8"])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Gemma2", "GPT2"])
def test_quantized_while_loading_then_saved_and_loaded(family, scheme, folder, tmp_path):
    model, source = folder(family)
    expected = logits(qf.quantize_model(copy.deepcopy(model), scheme))
    loaded = load(source, quantization_config=qf.QuantFuseConfig(scheme))
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-4)
    assert loaded.quantfuse_summary.layers

    loaded.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "quantfuse"
    size = sum(file.stat().st_size for file in (tmp_path / "saved").glob("*.safetensors"))
    assert size < 0.5 * sum(file.stat().st_size for file in source.glob("*.safetensors"))
    again = load(tmp_path / "saved")
    assert torch.equal(logits(again), logits(loaded))


def test_options_reach_the_model(folder):
    _, source = folder("Llama")
    config = qf.QuantFuseConfig(
        qf.Scheme("int4", group=32, symmetric=False), exclude=("lm_head", "mlp"), fuse=False
    )
    loaded = load(source, quantization_config=config)
    layer = loaded.model.layers[0]
    assert layer.self_attn.q_proj.zeros.shape == (128, 4)
    assert type(layer.mlp.up_proj) is torch.nn.Linear


def test_in_bfloat16(folder, tmp_path):
    _, source = folder("Llama")
    loaded = load(source, quantization_config=qf.QuantFuseConfig("int8"), dtype=torch.bfloat16)
    assert logits(loaded).dtype == torch.bfloat16
    assert loaded.model.layers[0].mlp.down.scales.dtype == torch.float32
    loaded.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved", dtype=torch.bfloat16)
    assert again.model.layers[0].mlp.down.scales.dtype == torch.float32
    assert torch.equal(logits(again), logits(loaded))


def test_generation(folder):
    _, source = folder("Qwen2")
    loaded = load(source, quantization_config=qf.QuantFuseConfig("int8"))
    assert loaded.generate(token_ids(), max_new_tokens=4, do_sample=False, pad_token_id=0).shape == (2, 14)


def test_a_bad_weight_is_named(folder, caplog):
    _, source = folder("Llama")
    state = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    state[name][0, 0] = float("nan")
    save_file(state, source / "model.safetensors", {"format": "pt"})
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        with pytest.raises(Exception, match="conversion"):
            load(source, quantization_config=qf.QuantFuseConfig("int8"))
    finally:
        logger.removeHandler(caplog.handler)
    # The loader gathers what its operations raise and tells it in a report.
    assert "layers.1.mlp.up_proj.weight has values that are not finite" in caplog.text


def test_a_saved_model_with_a_tensor_of_another_shape_is_refused(folder, tmp_path):
    _, source = folder("Llama")
    load(source, quantization_config=qf.QuantFuseConfig("int8")).save_pretrained(tmp_path / "saved")
    path = tmp_path / "saved" / "model.safetensors"
    state = load_file(path)
    name = "model.layers.0.mlp.down.codes"
    state[name] = state[name][:, :100].contiguous()
    save_file(state, path, {"format": "pt"})
    # By us, or from Transformers 5.23 on by Transformers, which looks at shapes before we do.
    with pytest.raises(
        (ValueError, RuntimeError), match=r"layers\.0\.mlp\.down.*codes has shape|mismatched_sizes"
    ):
        load(tmp_path / "saved")


def test_wrong_options_are_refused_before_anything_is_loaded():
    with pytest.raises(ValueError, match="did you mean 'int4'"):
        qf.QuantFuseConfig("int-4")
    with pytest.raises(TypeError, match="exlude"):
        qf.QuantFuseConfig("int4", exlude=("mlp",))
    with pytest.raises(TypeError, match="include is the string"):
        qf.QuantFuseConfig("int4", include="mlp")


# ---- Models that were quantized when they were there ----


@pytest.mark.parametrize("options", [{}, {"include": ["self_attn"], "fuse": False}, {"exclude": ["mlp"]}])
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GPT2"])
def test_a_quantized_model_is_saved_and_loaded(family, options, tmp_path):
    if family == "GPT2" and "include" in options:
        options = {"include": ["c_attn"]}
    model = qf.quantize_model(tiny(family), "int4", **options)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert torch.equal(logits(again), logits(model))
    assert str(again) == str(model)
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again")), logits(model))


@pytest.mark.parametrize("while_loading", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_a_tied_head_that_is_quantized_is_tied_no_longer(family, while_loading, folder, tmp_path):
    model, source = folder(family, tie_word_embeddings=True)
    expected = logits(qf.quantize_model(copy.deepcopy(model), "int8", exclude=()))
    if while_loading:
        model = load(source, quantization_config=qf.QuantFuseConfig("int8", exclude=()))
    else:
        qf.quantize_model(model, "int8", exclude=())
    assert type(model.lm_head) is qf.nn.QuantizedLinear
    assert torch.equal(logits(model), expected)
    model.tie_weights()
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved")), expected)


def test_a_saved_model_is_read_as_a_checkpoint_too(tmp_path):
    model = qf.quantize_model(tiny("Llama"), "int4", fuse=False)
    model.save_pretrained(tmp_path)
    loaded = qf.load_quantized(tiny("Llama", attention_dropout=0.1), tmp_path, fuse=False)
    assert torch.equal(logits(loaded), logits(model))


BERT = {"vocab_size": 96, "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
BART = {"vocab_size": 96, "d_model": 128, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 128}
T5 = {"vocab_size": 96, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 1, "num_heads": 4}


@pytest.mark.parametrize("exclude", [("lm_head",), ()])
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("BertForMaskedLM", {**BERT, "intermediate_size": 256}),  # a bias that is tied
        ("BartForConditionalGeneration", {**BART, "decoder_ffn_dim": 128}),  # two embeddings that are
        ("UMT5ForConditionalGeneration", T5),  # a forward that asks whether the head is
    ],
)
def test_ties_of_other_parameters_stay(family, sizes, exclude, tmp_path):
    torch.manual_seed(0)
    kind = getattr(transformers, family)
    model = kind(kind.config_class(**sizes)).eval()
    ids = {"input_ids": token_ids()}
    if model.config.is_encoder_decoder:
        ids["decoder_input_ids"] = token_ids()
    with torch.no_grad():
        expected = model(**ids).logits
        qf.quantize_model(model, "int8", exclude=exclude)
        got = model(**ids).logits
        assert (got - expected).norm() < 0.1 * expected.norm()
        model.save_pretrained(tmp_path)
        again = kind.from_pretrained(tmp_path).eval()
        assert torch.equal(again(**ids).logits, got)
        again.tie_weights()
        assert torch.equal(again(**ids).logits, got)


def test_a_saved_model_is_loaded_as_a_part_of_another_and_with_another_head(tmp_path):
    model = qf.quantize_model(tiny("Llama"), "int8", include=["model.layers.*.mlp.*"])
    model.save_pretrained(tmp_path)
    base = transformers.AutoModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        hidden = base(token_ids()).last_hidden_state
        assert torch.equal(hidden, model.model(token_ids()).last_hidden_state)
    scores = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(scores.score) is torch.nn.Linear
    excluded = qf.QuantFuseConfig("int8", exclude=["model.layers.0.mlp"])
    tiny("Llama").save_pretrained(tmp_path / "float")
    base = transformers.AutoModel.from_pretrained(tmp_path / "float", quantization_config=excluded)
    assert type(base.layers[0].mlp.up_proj) is torch.nn.Linear
    assert type(base.layers[1].mlp) is qf.nn.GatedMLP


def test_patterns_are_for_the_names_of_the_model_at_hand():
    model = qf.quantize_model(tiny("Llama"), "int8", include=["model"], exclude=())
    assert type(model.lm_head) is torch.nn.Linear


def test_a_whole_model_is_saved_whose_base_was_quantized(tmp_path):
    model = tiny("Llama")
    qf.quantize_model(model.model, "int8", exclude=())
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model))


def test_the_parts_of_a_config_stay_those_of_the_parts_of_a_model():
    text = tiny("Llama").config.to_dict()
    vision = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 32, "patch_size": 16}
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision | {"model_type": "clip_vision_model"}
    )
    model = transformers.LlavaForConditionalGeneration(config)
    qf.quantize_model(model, "int8")
    assert model.config is not config
    assert model.config.text_config is model.model.language_model.config


def test_a_folder_that_names_no_layers_is_refused(tmp_path):
    qf.quantize_model(tiny("Llama"), "int8").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]["layers"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="names no layers"):
        load(tmp_path)


def test_a_head_that_was_replaced_is_saved_as_what_it_is(tmp_path):
    model = qf.quantize_model(tiny("Llama"), "int8", exclude=())
    model.lm_head = torch.nn.Linear(128, 96, bias=False)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model))


def test_a_config_that_two_models_share_is_not_written_to(tmp_path):
    first = tiny("Llama")
    second = transformers.LlamaForCausalLM(first.config)
    qf.quantize_model(first, "int8")
    assert not hasattr(second.config, "quantization_config")
    second.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(second.eval()))


def test_layers_that_share_a_weight_are_not_saved(tmp_path):
    model = tiny("Llama")
    first, second = (layer.mlp for layer in model.model.layers)
    second.down_proj.weight = first.down_proj.weight
    qf.quantize_model(model, "int8")
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path)


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    twice = qf.quantize_model(tiny("Llama"), "int4", include=["mlp"])
    qf.quantize_model(twice, "int8")
    inside = torch.nn.Sequential(tiny("Llama"))
    qf.quantize_model(inside, "int4")
    for model in (twice, inside[0]):
        with pytest.raises(ValueError, match="not serializable"):
            model.save_pretrained(tmp_path / "saved")
        assert not (tmp_path / "saved").exists()


def test_a_head_that_the_checkpoint_does_not_have_is_not_quantized(folder, tmp_path):
    _, source = folder("Llama")
    load_model = transformers.AutoModelForSequenceClassification.from_pretrained
    model = load_model(source, quantization_config=qf.QuantFuseConfig("int8"))
    assert type(model.score) is torch.nn.Linear
    model.save_pretrained(tmp_path / "saved")
    again = load_model(tmp_path / "saved")
    ids = token_ids(1)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("key", ["codes", "scales", "layout"])
@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_a_saved_model_without_a_tensor_is_refused(family, key, tmp_path):
    qf.quantize_model(tiny(family), "int8").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.1.mlp.down.{key}" if family == "Llama" else f"transformer.h.1.mlp.c_proj.{key}"
    del state[name]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"the checkpoint has no {name}"):
        load(tmp_path)


def test_a_saved_model_with_a_bad_scale_is_refused_by_name(tmp_path):
    qf.quantize_model(tiny("Llama"), "int8").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["model.layers.1.mlp.down.scales"][3] = float("nan")
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.down.*scale"):
        load(tmp_path)


# ---- Attention ----


def masks(length):
    """Of one token: a cache filled at its start, one with padding in front and a window, and any other."""
    mask = torch.zeros(3, 1, 1, length, dtype=torch.bool)
    mask[0, ..., :7] = True
    mask[1, ..., length - 30 : length - 3] = True
    mask[2] = torch.rand(length, generator=torch.Generator().manual_seed(0)) > 0.5
    return mask


def test_the_length_of_a_mask_is_up_to_the_last_key_that_is_seen():
    from quantfuse.integrations._decoding import lengths_of

    lengths = lengths_of(masks(100)[:, 0, 0])
    assert lengths.dtype == torch.int32
    assert lengths[:2].tolist() == [7, 97]
    assert masks(100)[2, 0, 0, lengths[2] - 1]
    assert not masks(100)[2, 0, 0, lengths[2] :].any()
    assert lengths_of(torch.zeros(1, 5, dtype=torch.bool)).tolist() == [0]


def test_decoding_attention_is_sdpa_where_nothing_is_compiled():
    from quantfuse.integrations.transformers import DECODING

    model = tiny("Llama")
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    expected = model.generate(token_ids(), **options, disable_compile=True)
    model.set_attn_implementation(DECODING)
    assert torch.equal(model.generate(token_ids(), **options, disable_compile=True), expected)


@torch.no_grad()
def decoded(model, is_compiled, attention_mask):
    """The logits of three steps behind a prompt, over a static cache that is not filled."""
    ids = token_ids(cols=13).cuda()
    cache = transformers.StaticCache(config=model.config, max_cache_len=200)
    model(ids[:, :10], past_key_values=cache, attention_mask=attention_mask[:, :10])
    forward = torch.compile(model, fullgraph=True, dynamic=False) if is_compiled else model
    steps = []
    for i in range(10, 13):
        options = {"attention_mask": attention_mask} if attention_mask.min() == 0 else {}
        positions = torch.tensor([[i]], device="cuda")
        steps.append(
            forward(ids[:, i : i + 1], past_key_values=cache, position_ids=positions, **options).logits
        )
    return torch.cat(steps, dim=1)


@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_a_compiled_model_decodes_by_our_attention(family, padding):
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    from quantfuse.integrations.transformers import DECODING

    torch._dynamo.reset()
    model = qf.quantize_model(tiny(family).bfloat16().cuda(), "int8")
    attention_mask = torch.ones(2, 200, dtype=torch.int64, device="cuda")
    attention_mask[0, :padding] = 0
    expected = decoded(model, False, attention_mask)
    model.set_attn_implementation(DECODING)
    got = decoded(model, True, attention_mask)
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())


def test_an_attention_that_cannot_be_had_is_refused():
    from quantfuse.integrations.transformers import DECODING

    model = tiny("Gemma2")
    model.set_attn_implementation(DECODING)
    with pytest.raises(ValueError, match="no softcap, which Gemma2Attention needs"):
        model(token_ids())
