# SPDX-License-Identifier: Apache-2.0
"""quantize_model over module trees and over the families of Transformers."""

import copy
import os
import pickle
import signal
import subprocess
import sys
import tempfile

import pytest

import quantfuse as qf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from torch import nn  # noqa: E402

from quantfuse._model import quantize, staging  # noqa: E402
from quantfuse._model.fuse import MergedLinear  # noqa: E402
from tiny_models import FAMILIES, SIZES, tiny, token_ids  # noqa: E402


def relative(got, right):
    return ((got - right).norm() / right.norm()).item()


@torch.no_grad()
def logits(model):
    return model(token_ids()).logits


@pytest.mark.parametrize("scheme", ["int8", "w8a8-int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family, scheme):
    model = tiny(family)
    exact = logits(model)
    plain = qf.quantize_model(copy.deepcopy(model), scheme, fuse=False)
    fused = qf.quantize_model(copy.deepcopy(model), scheme)
    assert relative(logits(plain), exact) < 0.05
    assert relative(logits(fused), logits(plain)) < (1e-4 if scheme == "int8" else 1e-2)
    kinds = [type(module).__name__ for module in fused.modules()]
    if family == "GPT2":
        assert kinds.count("QuantizedLinear") == 8
    else:
        assert (kinds.count("GatedMLP"), kinds.count("MergedLinear"), kinds.count("Slice")) == (2, 2, 6)
        assert kinds.count("Folded") == 4
    assert isinstance(fused.lm_head, nn.Linear)
    assert not isinstance(fused.lm_head, qf.nn.QuantizedLinear)


@pytest.mark.parametrize("scheme", qf.SCHEMES)
def test_every_scheme(scheme):
    model = tiny("Llama")
    exact = logits(model)
    assert relative(logits(qf.quantize_model(model, scheme)), exact) < (0.4 if "4" in scheme else 0.1)


@torch.no_grad()
def compiled_graph(model):
    """The model compiled whole, the graph that the compiler is given, and what it returns."""
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    graphs = []

    def collect(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=collect), fullgraph=True)
    got = compiled(token_ids())
    assert len(graphs) == 1
    return compiled, graphs[0], got


def calls_of(graph, name):
    target = getattr(torch.ops.quantfuse, name).default
    return graph.graph.find_nodes(op="call_function", target=target)


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_the_fused_model_compiles_to_one_graph_with_four_products_a_layer(family):
    model = qf.quantize_model(tiny(family), "int8")
    _, graph, got = compiled_graph(model)
    torch.testing.assert_close(got.logits, logits(model), rtol=1e-4, atol=1e-4)
    assert len(calls_of(graph, "linear")) == 8
    assert len(calls_of(graph, "rms_norm")) == 4


# Gemma 2 has a norm between a product and what it is added to.
@pytest.mark.parametrize(("family", "folded"), [("Llama", 4), ("Gemma2", 0)])
@pytest.mark.parametrize("scheme", ["int8", "w8a8-int8"])
def test_additions_become_residuals(family, folded, scheme):
    from quantfuse._model.compile import FoldIntoLinears

    model = qf.quantize_model(tiny(family), scheme)
    compiled, graph, before = compiled_graph(model)
    additions = len(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor))
    FoldIntoLinears()(graph.graph)
    graph.recompile()
    assert sum(node.args[11] is not None for node in calls_of(graph, "linear")) == folded
    left = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    assert len(left) == additions - folded
    torch.testing.assert_close(logits(compiled), before.logits, rtol=1e-4, atol=1e-4)


# Where x is quantized, its norm and quantization are one kernel already.
@pytest.mark.parametrize(("scheme", "left"), [("int8", 0), ("w8a8-int8", 4)])
def test_norms_become_part_of_the_layer_behind_them(scheme, left):
    from quantfuse._model.compile import FoldIntoLinears

    model = qf.quantize_model(tiny("Llama"), scheme)
    compiled, graph, before = compiled_graph(model)
    norms = len(calls_of(graph, "rms_norm")) + len(calls_of(graph, "rms_norm_quantized"))
    FoldIntoLinears()(graph.graph)
    graph.recompile()
    assert norms == 4
    assert len(calls_of(graph, "rms_norm")) + len(calls_of(graph, "rms_norm_quantized")) == left
    gains = [node.args[17] for node in calls_of(graph, "linear") if len(node.args) > 17]
    assert len(gains) == 4 - left
    torch.testing.assert_close(logits(compiled), before.logits, rtol=1e-4, atol=1e-4)


def test_a_norm_that_two_layers_read_stays():
    from quantfuse._model.compile import FoldIntoLinears

    layer = qf.nn.QuantizedLinear.from_linear(nn.Linear(64, 64), "int8")
    gain = torch.ones(64)

    def products(token_ids):
        x = nn.functional.one_hot(token_ids, 96)[..., :64].float()
        h = torch.ops.quantfuse.rms_norm(x, gain, 1e-5)
        return layer(h), layer(h), layer(torch.ops.quantfuse.rms_norm(x, None, 1e-5))

    _, graph, _ = compiled_graph(products)
    FoldIntoLinears()(graph.graph)
    assert len(calls_of(graph, "rms_norm")) == 2


def test_what_is_no_residual_stays_an_addition():
    from quantfuse._model.compile import FoldIntoLinears

    layer = qf.nn.QuantizedLinear.from_linear(nn.Linear(64, 64), "int8")

    def sums(token_ids):
        x = nn.functional.one_hot(token_ids, 96)[..., :64].float()
        y, z = layer(x), layer(x[:, :1])
        scaled = torch.add(x, layer(2 * x), alpha=2)
        # y is read twice, z is broadcast, and the last is of another type
        return (y + x) * y + (z + x) + scaled + (layer(3 * x) + x.double())

    _, graph, _ = compiled_graph(sums)
    FoldIntoLinears()(graph.graph)
    assert all(node.args[11] is None for node in calls_of(graph, "linear"))


def test_the_options_of_the_compiler():
    torch._dynamo.reset()
    layer = qf.nn.QuantizedLinear.from_linear(nn.Linear(64, 64), "int8")
    options = qf.compile_options(combo_kernels=False)
    assert options["combo_kernels"] is False
    x = torch.randn(3, 64)
    with torch.no_grad():
        forward = torch.compile(lambda x: x + layer(x), options=options)
        torch.testing.assert_close(forward(x), x + layer(x))


def test_generation_with_a_cache_agrees_with_the_layers_alone():
    model = tiny("Llama")
    plain = qf.quantize_model(copy.deepcopy(model), "int4", fuse=False)
    fused = qf.quantize_model(model, "int4")
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(fused.generate(token_ids(), **options), plain.generate(token_ids(), **options))


def test_a_fused_model_is_copied_and_pickled():
    model = qf.quantize_model(tiny("Qwen2"), "w8a8-int8")
    expected = logits(model)
    assert torch.equal(logits(copy.deepcopy(model)), expected)
    assert torch.equal(logits(pickle.loads(pickle.dumps(model))), expected)
    other = qf.quantize_model(tiny("Qwen2", rms_norm_eps=1e-6), "w8a8-int8")
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other), expected)


def test_a_slice_is_computed_once_and_let_go():
    model = qf.quantize_model(tiny("Llama"), "int8")
    merged = next(module for module in model.modules() if isinstance(module, MergedLinear))
    calls = []
    merged.linear.register_forward_hook(lambda *_: calls.append(1))
    logits(model)
    assert len(calls) == 1
    assert merged._last is None


def test_a_slice_is_of_what_x_is_now():
    attention = qf.quantize_model(tiny("Llama"), "int8").model.layers[0].self_attn
    x = torch.randn(1, 3, attention.q_proj.in_features)
    with torch.no_grad():
        before = attention.q_proj(x)
        x.mul_(2)
        assert not torch.equal(attention.q_proj(x), before)
    x = x.clone().requires_grad_()
    with torch.no_grad():
        attention.q_proj(x)
    assert attention.q_proj(x).requires_grad


def test_the_gradient_reaches_the_embedding():
    model = tiny("Llama")
    ids = token_ids()
    right = torch.autograd.grad(model(ids).logits.square().sum(), model.model.embed_tokens.weight)[0]
    for scheme in ("int8", "w8a8-int8"):
        quantized = qf.quantize_model(copy.deepcopy(model), scheme)
        weight = quantized.model.embed_tokens.weight
        assert relative(torch.autograd.grad(quantized(ids).logits.square().sum(), weight)[0], right) < 0.1


# ---- Trees ----


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ModuleDict({"a": nn.Linear(64, 64)}), nn.Linear(64, 8))


def test_include_and_exclude():
    model = qf.quantize_model(layers(), "int8", include=("1", "2"), exclude=("1.a",))
    assert [type(m) for m in (model[0], model[1]["a"], model[2])] == [
        nn.Linear,
        nn.Linear,
        qf.nn.QuantizedLinear,
    ]
    reasons = dict(model.quantfuse_summary.left_alone)
    assert reasons == {"0": "not included", "1.a": "excluded"}
    assert type(qf.quantize_model(layers(), "int8", include=("?.a",))[1]["a"]) is qf.nn.QuantizedLinear
    with pytest.raises(TypeError, match="exclude is a string"):
        qf.quantize_model(layers(), "int8", exclude="lm_head")


def test_what_cannot_be_quantized_is_an_error():
    for model in (nn.Sequential(nn.ReLU()), nn.ModuleDict({"lm_head": nn.Linear(4, 4)})):
        with pytest.raises(ValueError, match="no linear layer"):
            qf.quantize_model(model, "int8")
    with pytest.raises(ValueError, match="from_linear"):
        qf.quantize_model(nn.Linear(4, 4), "int8")
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        qf.quantize_model({}, "int8")
    with pytest.raises(ValueError, match="did you mean 'int8'"):
        qf.quantize_model(layers(), "int-8")
    with pytest.raises(ValueError, match=r"0\.weight has type torch.float64"):
        qf.quantize_model(layers().double(), "int8")
    with pytest.raises(ValueError, match="bits is 5"):
        qf.replace_linear_with_quantized(layers(), bits=5)


def test_a_bad_weight_leaves_the_model_as_it_was():
    model = layers()
    with torch.no_grad():
        model[2].weight[1, 2] = float("inf")
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match=r"2\.weight has values that are not finite"):
        qf.quantize_model(model, "int8")
    assert dict(model.named_modules()) == before


class Interruption:
    """Quantizes some layers, and then does not."""

    def __init__(self, monkeypatch, error, after):
        self.error, self.left = error, after
        self.quantize = qf.nn.QuantizedLinear.quantize
        monkeypatch.setattr(qf.nn.QuantizedLinear, "quantize", lambda layer, weight: self(layer, weight))

    def __call__(self, layer, weight):
        if layer.out_features == 16:  # the layer that tries the device
            return self.quantize(layer, weight)
        if self.left == 0:
            raise self.error
        self.left -= 1
        return self.quantize(layer, weight)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), torch.OutOfMemoryError("no memory left"), MemoryError()]
)
def test_a_failure_on_the_way_leaves_the_model_as_it_was(monkeypatch, error, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    model = tiny("Llama").to(device)
    before, state = dict(model.named_modules()), dict(model.state_dict(keep_vars=True))
    Interruption(monkeypatch, error, after=9)
    with pytest.raises(type(error)):
        qf.quantize_model(model, "int4")
    assert dict(model.named_modules()) == before
    assert {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()} == {
        name: id(tensor) for name, tensor in state.items()
    }
    assert not hasattr(model, "quantfuse_summary")
    monkeypatch.undo()
    assert relative(logits(qf.quantize_model(model.cpu(), "int8")), logits(tiny("Llama"))) < 0.05


@pytest.fixture
def interruptible():
    """A shell starts what it runs in the background with interrupts ignored, and so would be pytest's."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_of_the_last_step_comes_after_it(monkeypatch, interruptible):
    fuse = quantize.fuse_layers

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        return fuse(*arguments)

    model, expected = tiny("Llama"), logits(qf.quantize_model(tiny("Llama"), "int4"))
    monkeypatch.setattr(quantize, "fuse_layers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        qf.quantize_model(model, "int4")
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("scheme", ["int4", "fp8", "w8a8-int8", qf.Scheme("int4", symmetric=False)])
def test_layers_wait_in_a_file_or_where_there_is_none_in_memory(monkeypatch, tmp_path, scheme):
    expected = logits(qf.quantize_model(tiny("Llama"), scheme))
    sizes = []

    class Watched(staging.Staging):
        def __init__(self, _):
            super().__init__(memory_limit=0)

        def __exit__(self, *error):
            sizes.append(0 if self._file is None else self._file.seek(0, 2))
            super().__exit__(*error)

    monkeypatch.setattr(quantize, "Staging", Watched)
    model = qf.quantize_model(tiny("Llama"), scheme)
    assert torch.equal(logits(model), expected)
    assert sizes == [model.quantfuse_summary.bytes_after]

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert torch.equal(logits(qf.quantize_model(tiny("Llama"), scheme)), expected)
    assert sizes[1:] == [0]


MEMORY_PROGRAM = """
import resource
import torch, quantfuse as qf
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(64)])
qf.quantize_model(torch.nn.Sequential(torch.nn.Linear(1024, 1024, bias=False)), "int8")
before = peak()
qf.quantize_model(model, "int8")
print(peak() - before)
"""


def test_the_memory_in_use_is_the_models_and_that_of_a_layer():
    """64 layers of 4 MiB in float32 and of 1 MiB when quantized, 64 MiB together."""
    quiet = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}  # gives back what is let go
    command = [sys.executable, "-c", MEMORY_PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | quiet)
    assert float(done.stdout.split()[-1]) < 16


def test_a_quantized_model_is_left_alone():
    model = qf.quantize_model(layers(), "int8")
    with pytest.raises(ValueError, match="is quantized already"):
        qf.quantize_model(model, "int4")


def test_a_module_in_two_places_stays_one():
    shared = nn.Linear(16, 16)
    model = qf.quantize_model(nn.Sequential(shared, nn.ReLU(), shared), "int8")
    assert model[0] is model[2]
    assert type(model[0]) is qf.nn.QuantizedLinear


def test_layers_that_share_a_weight_share_its_quantized_form():
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    model[2].weight = model[0].weight
    bias = model[2].bias
    qf.quantize_model(model, "int8")
    assert model[0].codes is model[2].codes
    assert model[2].bias is bias
    assert [layer.bytes_after > 0 for layer in model.quantfuse_summary.layers] == [True, False]


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_layers_that_are_more_than_a_weight_are_left_alone():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)))
    model[0].register_forward_pre_hook(lambda module, args: (2 * args[0],))
    model[1].forward = lambda x: 2 * x
    torch.nn.utils.weight_norm(model[2])
    model[3].register_buffer("mask", torch.ones(64))
    model.append(nn.Linear(64, 64))
    model[5].register_full_backward_pre_hook(lambda module, gradients: None)
    qf.quantize_model(model, "int8")
    assert [type(module) is qf.nn.QuantizedLinear for module in model] == [False] * 4 + [True, False]
    reasons = dict(model.quantfuse_summary.left_alone)
    assert reasons["0"] == "has hooks"
    assert reasons["1"] == "has a forward of its own"
    assert reasons["3"] == "has mask besides weight and bias"


def test_what_a_model_keeps_in_float32_is_left_unless_it_is_included():
    sizes = {"vocab_size": 96, "d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 1, "num_heads": 2}
    for include, is_quantized in ((None, False), (["wo", "q"], True)):
        model = transformers.T5EncoderModel(transformers.T5Config(**sizes))
        qf.quantize_model(model, "int8", include=include)
        block = model.encoder.block[0]
        assert isinstance(block.layer[1].DenseReluDense.wo, qf.nn.QuantizedLinear) == is_quantized
        assert isinstance(block.layer[0].SelfAttention.q, qf.nn.QuantizedLinear)


def test_experts_are_said_to_be_left():
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_local_experts=2, head_dim=32)
    )
    qf.quantize_model(model, "int8")
    assert "weights of three dimensions" in str(model.quantfuse_summary)


def test_layers_that_are_elsewhere_are_refused():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, device="meta"))
    with pytest.raises(ValueError, match="1 is on the meta device"):
        qf.quantize_model(model, "int8")
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("activation", ["relu6", "gelu_10", "gelu_new"])
@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_activations_are_told_apart_whatever_the_default_type(activation, default):
    model = tiny("Llama", hidden_act=activation)
    for layer in model.model.layers:
        layer.mlp.gate_proj.weight.data *= 60
    expected = logits(model)
    try:
        torch.set_default_dtype(default)
        qf.quantize_model(model, "int8")
    finally:
        torch.set_default_dtype(torch.float32)
    assert (type(model.model.layers[0].mlp) is qf.nn.GatedMLP) == (activation == "gelu_new")
    assert relative(logits(model), expected) < 0.1


def test_adapters_on_merged_layers_are_refused():
    peft = pytest.importorskip("peft")
    model = qf.quantize_model(tiny("Llama"), "w8a8-int8")
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    with pytest.raises(TypeError, match="fuse=False"):
        logits(model)


def test_layers_that_peft_trains_whole_are_left():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["down_proj"])
    model = peft.get_peft_model(tiny("Llama"), config)
    qf.quantize_model(model, "int8")
    down = model.base_model.model.model.layers[0].mlp.down_proj
    assert type(down.modules_to_save["default"]) is nn.Linear
    assert down.modules_to_save["default"].weight.requires_grad


def test_adapters_are_left_to_be_trained():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny("Llama"), config)
    expected = logits(model)
    qf.quantize_model(model, "int8")
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert type(layer.base_layer) is qf.nn.QuantizedLinear
    assert type(layer.lora_A["default"]) is nn.Linear
    assert "is an adapter" in str(model.quantfuse_summary)
    assert relative(logits(model), expected) < 0.05


@pytest.mark.parametrize("way", ["merge", "safe_merge", "pissa"])
def test_an_adapter_is_not_lost_by_merging_it(way):
    peft = pytest.importorskip("peft")
    model = qf.quantize_model(tiny("Llama"), "int4", fuse=False)
    init = way if way == "pissa" else False
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=init)

    def merge():
        peft.get_peft_model(model, config).merge_and_unload(safe_merge=way == "safe_merge")

    with pytest.raises(RuntimeError, match="frozen"):
        merge()


def test_a_head_tied_to_the_embedding():
    model = tiny("Llama", tie_word_embeddings=True)
    exact = logits(model)
    qf.quantize_model(model, "int8", exclude=())
    assert type(model.lm_head) is qf.nn.QuantizedLinear
    assert "shares the weight" in str(model.quantfuse_summary)
    assert relative(logits(model), exact) < 0.05


def test_multihead_attention_keeps_the_layer_whose_weight_it_reads():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    x = torch.randn(2, 5, 32)
    exact = layer(x)
    model = qf.quantize_model(nn.Sequential(layer), "int8")
    assert "forward may be its own" in str(model.quantfuse_summary)
    assert relative(model(x), exact) < 0.05


def test_a_model_on_the_meta_device_takes_the_state_of_another():
    real = qf.quantize_model(tiny("Llama"), "int4")
    with torch.device("meta"):
        empty = tiny("Llama")
    qf.quantize_model(empty, "int4")
    empty.load_state_dict(real.state_dict(), assign=True)
    for name, buffer in real.named_buffers():
        if "inv_freq" in name:
            parent, _, leaf = name.rpartition(".")
            empty.get_submodule(parent)._buffers[leaf] = buffer
    assert torch.equal(logits(empty), logits(real))


def test_the_summary_counts_bytes_and_errors():
    model = layers()
    before = sum(m.weight.nbytes for m in (model[0], model[1]["a"], model[2]))
    qf.replace_linear_with_quantized(model, bits=4)
    summary = model.quantfuse_summary
    assert summary.bytes_before == before
    assert summary.bytes_after == 136 * 32 + 136 * 4
    assert all(0.01 < layer.error < 0.2 for layer in summary.layers)
    assert "3 layers" in str(summary)


def test_progress_goes_to_stderr(capsys):
    qf.quantize_model(layers(), "int8", show_progress=True)
    assert "3/3" in capsys.readouterr().err
    qf.quantize_model(layers(), "int8", show_progress=False)
    assert capsys.readouterr().err == ""
