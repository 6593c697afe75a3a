# SPDX-License-Identifier: Apache-2.0
"""quantfuse.nn: the modules, their state, and what PyTorch does to modules."""

import copy
import io
import pickle
import time

import pytest

import quantfuse as qf

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.nn import functional  # noqa: E402

DEVICES = ["cpu"] + ["cuda"] * (torch.cuda.is_available() and bool(qf.info()["cuda"]["architectures"]))
device = pytest.mark.parametrize("device", DEVICES)
every_scheme = pytest.mark.parametrize("scheme", qf.SCHEMES)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def make(scheme="int8", k=256, n=96, device="cpu", dtype=torch.float32, bias=True):
    linear = nn.Linear(k, n, bias=bias, device=device, dtype=dtype)
    return linear, qf.nn.QuantizedLinear.from_linear(linear, scheme)


def relative(got, right):
    return ((got - right).norm() / right.norm()).item()


# ---- Schemes ----


def test_a_misspelt_scheme_is_answered_with_the_near_one():
    for given, near in (("int-4", "int4"), ("w8a8_fp8", "w8a8-fp8"), ("W4A8", "w4a8"), ("mxfp", "mxfp4")):
        with pytest.raises(ValueError, match=f"did you mean '{near}'"):
            qf.Scheme(given)
    for options, text in (
        ({"group": -1}, "group"),
        ({"group": "x"}, "group"),
        ({"group": (1, 2, 3)}, "group"),
        ({"group": [64]}, "group"),
        ({"symmetric": False}, "zero"),
    ):
        with pytest.raises(ValueError, match=text):
            qf.Scheme("fp8", **options)
    with pytest.raises(ValueError, match="groups of 32"):
        qf.Scheme("mxfp4", group=64)


@every_scheme
def test_a_scheme_survives_its_own_dictionary(scheme):
    given = qf.Scheme(scheme)
    assert qf.Scheme.of(given.to_dict()) == given
    assert qf.Scheme.of(given) is given
    assert scheme in repr(given)
    assert str(given).startswith(scheme)


# ---- QuantizedLinear ----


@device
@every_scheme
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_linear_of_every_scheme(scheme, dtype, device):
    linear, layer = make(scheme, device=device, dtype=dtype)
    x = torch.randn(2, 3, 256, device=device, dtype=dtype)
    y = layer(x)
    assert (y.dtype, y.shape) == (dtype, (2, 3, 96))
    rounded = functional.linear(x.float(), layer.weight.float().to(device), linear.bias.float())
    assert relative(y.float(), rounded) < (0.04 if "fp8" in scheme and "a8" in scheme else 0.015)
    assert relative(y.float(), linear(x).float()) < (0.2 if "4" in scheme else 0.06)
    assert layer(x[:0]).shape == (0, 3, 96)
    assert layer(x[:, :0]).shape == (len(x), 0, 96)


@device
@every_scheme
def test_gradient_of_every_scheme(scheme, device):
    _, layer = make(scheme, device=device)
    x = torch.randn(4, 256, device=device, requires_grad=True)
    dy = torch.randn(4, 96, device=device)
    layer(x).backward(dy)
    torch.testing.assert_close(x.grad, dy @ layer.weight.to(device), rtol=1e-3, atol=1e-3)
    assert layer.bias.grad.shape == (96,)


def test_options_of_the_scheme_reach_the_weight():
    linear = nn.Linear(256, 32)
    layer = qf.nn.QuantizedLinear.from_linear(linear, qf.Scheme("int4", group=64, symmetric=False))
    assert layer.scales.shape == layer.zeros.shape == (32, 4)
    exact = qf.QuantizedWeight.from_float(linear.weight.detach(), "int4", group=64, symmetric=False)
    assert torch.equal(layer.codes, exact.codes)


def test_bits_and_quantize_from_float():
    layer = qf.nn.QuantizedLinear(64, 32, bias=False, bits=4)
    assert layer.scheme == qf.Scheme("int4")
    w = torch.randn(32, 64)
    x = torch.randn(5, 64)
    assert relative(layer.quantize_from_float(w)(x), x @ w.T) < 0.2
    with pytest.raises(ValueError, match="bits is 3"):
        qf.nn.QuantizedLinear(64, 32, bits=3)
    with pytest.raises(ValueError, match="both given"):
        qf.nn.QuantizedLinear(64, 32, bits=4, scheme="int8")
    with pytest.raises(ValueError, match="shape"):
        layer.quantize_from_float(w.T)
    w[3, 4] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        layer.quantize_from_float(w)


def test_weights_with_offsets_and_in_an_order_of_their_own():
    plain = qf.QuantizedWeight.from_float(torch.randn(24, 96), "int4", group=32, symmetric=False)
    order = torch.randperm(96).to(torch.int32) % 3
    tensors = plain.codes, plain.scales, plain.zeros, order
    weight = qf.QuantizedWeight("int4", (24, 96), (1, 32), *tensors, offsets=torch.randn(24, 3))
    layer = qf.nn.QuantizedLinear.from_weight(weight, torch.randn(24))
    x = torch.randn(5, 96, requires_grad=True)
    y = layer(x)
    torch.testing.assert_close(y, functional.linear(x, weight.dequantize(), layer.bias), rtol=1e-4, atol=1e-4)
    right = torch.ones(5, 24) @ weight.dequantize()
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], right, rtol=1e-4, atol=1e-4)
    other = copy.deepcopy(layer)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x.detach()), layer(x.detach()))
    table = qf.QuantizedWeight.from_float(torch.randn(24, 128), "nf4")
    assert "format=nf4" in repr(qf.nn.QuantizedLinear.from_weight(table))


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        (lambda *a: qf.nn.LinearGELU(*a, scheme="int8"), functional.gelu),
        (
            lambda *a: qf.nn.LinearGELU(*a, scheme="int8", approximate="tanh"),
            lambda z: functional.gelu(z, approximate="tanh"),
        ),
        (lambda *a: qf.nn.LinearSiLU(*a, scheme="int8"), functional.silu),
    ],
)
def test_layers_with_an_activation(kind, function):
    layer = kind(64, 32).quantize_from_float(torch.randn(32, 64) / 8)
    x = torch.randn(3, 64)
    torch.testing.assert_close(layer(x), function(x @ layer.weight.T), rtol=1e-3, atol=1e-4)


@device
def test_autocast(device):
    _, layer = make("int8", device=device)
    with torch.autocast(device, torch.bfloat16):
        assert layer(torch.randn(2, 256, device=device)).dtype == torch.bfloat16


def test_inputs_that_are_not_contiguous():
    _, layer = make()
    x = torch.randn(3, 256, 5)
    torch.testing.assert_close(layer(x.transpose(1, 2)), layer(x.transpose(1, 2).contiguous()))


@device
def test_a_call_costs_little_more_than_that_of_torch(device):
    linear, layer = make(
        k=64, n=64, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32
    )
    x = torch.randn(1, 64, device=device, dtype=linear.weight.dtype)
    calls = {"torch": lambda: functional.linear(x, linear.weight, linear.bias), "ours": lambda: layer(x)}
    best = dict.fromkeys(calls, float("inf"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine waking another one takes longer than the call
    with torch.inference_mode():
        for _ in range(50):
            for name, run in calls.items():
                run()
                start = time.perf_counter()
                for _ in range(100):
                    run()
                best[name] = min(best[name], (time.perf_counter() - start) / 100)
                if device == "cuda":
                    torch.cuda.synchronize()
    torch.set_num_threads(threads)
    # 12 us on a machine that is otherwise idle, and whose F.linear takes 3 us.
    assert best["ours"] - best["torch"] < max(12e-6, 4 * best["torch"]), best


def test_an_unknown_activation_is_refused_when_the_layer_is_made():
    with pytest.raises(ValueError, match="activation is 'tanh'"):
        qf.nn.QuantizedLinear(64, 8, activation="tanh")


@pytest.mark.parametrize("scheme", ["int4", "w8a8-int8", qf.Scheme("int4", symmetric=False)])
def test_a_change_of_the_tensors_in_place_is_seen(scheme):
    layer = make(scheme, bias=False)[1]
    x = torch.randn(3, 256)
    with torch.no_grad():
        before = layer(x)
        layer.scales.mul_(2)
        torch.testing.assert_close(layer(x), 2 * before)
        layer.codes.zero_()
        if layer.zeros is not None:
            layer.zeros.zero_()
        assert not layer(x).any()


def test_other_tensors_beside_the_same_codes_are_seen():
    layer = make("int4", bias=False)[1]
    x = torch.randn(3, 256)
    with torch.no_grad():
        before = layer(x)
        twice = {"scales": layer.scales * 2}
        torch.testing.assert_close(torch.func.functional_call(layer, twice, (x,)), 2 * before)
        weight = layer.quantized_weight()
        other = qf.QuantizedWeight(weight.format, weight.shape, weight.block, weight.codes, weight.scales * 3)
        torch.testing.assert_close(qf.nn.QuantizedLinear.from_weight(other)(x), 3 * before)
        layer.scales = layer.scales * 2
        torch.testing.assert_close(layer(x), 2 * before)


def test_the_weight_has_the_type_of_the_numbers_it_was():
    layer = qf.nn.QuantizedLinear.from_linear(nn.Linear(64, 32, dtype=torch.bfloat16), "int8")
    assert layer.weight.dtype == torch.bfloat16
    assert layer.float().weight.dtype == torch.float32
    assert layer.half().weight.dtype == torch.float16
    assert layer.scales.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:.*jit:FutureWarning")
def test_a_trace_has_the_operator_and_forward_mode_is_refused():
    layer, x = make("int8", bias=False)[1], torch.randn(3, 256)
    with torch.no_grad():
        traced = torch.jit.trace(layer, (x,), check_trace=False)
        torch.testing.assert_close(traced(2 * x), layer(2 * x))
        forward_ad = torch.autograd.forward_ad
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, x)
            with pytest.raises(NotImplementedError, match="forward mode"):
                layer(dual)
            gain = {"weight": forward_ad.make_dual(torch.ones(256), torch.ones(256))}
            with pytest.raises(NotImplementedError, match="forward mode"):
                torch.func.functional_call(qf.nn.RMSNorm(256), gain, (x,))


WRITES = {
    "chunk": lambda weight: weight.chunk(2)[0].add_(1),
    "row by row": lambda weight: next(iter(weight)).zero_(),
    "inplace=": lambda weight: functional.relu(weight, inplace=True),
    "foreach": lambda weight: torch._foreach_add_([weight], 1.0),
    "aten": lambda weight: torch.ops.aten.add_.Tensor(weight, weight),
    "data +=": lambda weight: weight.data.__iadd__(1),
    "data =": lambda weight: setattr(weight, "data", torch.zeros_like(weight)),
    "[0] =": lambda weight: weight.__setitem__(0, 1),
    "a row": lambda weight: weight[0].zero_(),
    "init": lambda weight: nn.init.normal_(weight),
    "out=": lambda weight: torch.add(weight, 1, out=weight),
}


@pytest.mark.parametrize("write", WRITES)
def test_the_weight_cannot_be_written_to(write):
    layer = make("int4")[1]
    weight = layer.weight
    with pytest.raises(RuntimeError, match="frozen"), torch.no_grad():
        WRITES[write](weight)
    assert torch.equal(weight, layer.weight)
    assert type(weight + 1) is type(weight.clone()) is type(copy.deepcopy(weight)) is torch.Tensor
    assert qf.quantize_tensor(weight, "int8").codes.shape == weight.shape


def test_the_weight_is_copied_as_a_tensor(tmp_path):
    layer = make("int4")[1]
    torch.save({"w": layer.weight}, tmp_path / "w.pt")
    assert type(torch.load(tmp_path / "w.pt")["w"]) is torch.Tensor
    other = nn.Linear(256, 96)
    other.weight = nn.Parameter(layer.weight.clone())
    assert torch.equal(other.weight, layer.weight)


@pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="the compiler of torch 2.11 calls __torch_function__ of subclasses without end",
)
def test_the_weight_can_be_read_in_a_compiled_function():
    layer = make("int4")[1]
    read = torch.compile(lambda x: x @ layer.weight.T, backend="eager")
    assert torch.equal(read(torch.eye(256)), layer.weight.T)


# ---- GatedMLP and RMSNorm ----


@device
@every_scheme
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_mlp(scheme, activation, device):
    mlp = qf.nn.GatedMLP(64, 160, scheme=scheme, activation=activation).to(device)
    mlp.gate_up.quantize_from_float(torch.randn(320, 64, device=device) / 8)
    mlp.down.quantize_from_float(torch.randn(64, 160, device=device) / 12)
    x = torch.randn(2, 5, 64, device=device)
    gate, up = (x @ mlp.gate_up.weight.to(device).T).chunk(2, dim=-1)
    act = functional.silu if activation == "silu" else lambda z: functional.gelu(z, approximate="tanh")
    expected = (act(gate) * up) @ mlp.down.weight.to(device).T
    assert relative(mlp(x), expected) < (0.06 if "a8" in scheme else 1e-3)


def test_a_gated_mlp_learns_through():
    mlp = qf.nn.GatedMLP(32, 64, scheme="w8a8-int8")
    mlp.gate_up.quantize_from_float(torch.randn(128, 32) / 6)
    mlp.down.quantize_from_float(torch.randn(32, 64) / 8)
    x = torch.randn(4, 32, requires_grad=True)
    gate, up = (x @ mlp.gate_up.weight.T).chunk(2, dim=-1)
    expected = (functional.silu(gate) * up) @ mlp.down.weight.T
    right = torch.autograd.grad(expected.square().sum(), x)[0]
    assert relative(torch.autograd.grad(mlp(x).square().sum(), x)[0], right) < 0.05


@every_scheme
def test_biases_learn_where_the_input_does_not(scheme):
    mlp = qf.nn.GatedMLP(64, 128, scheme=scheme, bias=True)
    mlp.gate_up.quantize_from_float(torch.randn(256, 64) / 6)
    mlp.down.quantize_from_float(torch.randn(64, 128) / 8)
    x = torch.randn(4, 64)
    gate, up = (x @ mlp.gate_up.weight.T + mlp.gate_up.bias).chunk(2, dim=-1)
    expected = (functional.silu(gate) * up) @ mlp.down.weight.T + mlp.down.bias
    biases = (mlp.gate_up.bias, mlp.down.bias)
    right = torch.autograd.grad(expected.square().sum(), biases)
    for got, wanted in zip(torch.autograd.grad(mlp(x).square().sum(), biases), right, strict=True):
        assert relative(got, wanted) < 0.1


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_the_bias_of_a_layer_over_quantized_inputs_learns(activation):
    layer = make("w8a8-int8")[1]
    layer.activation = activation or "identity"
    x = torch.randn(5, 256)
    codes, scale = qf.per_token_quant_int8(x)
    z = x @ layer.weight.T + layer.bias
    expected = functional.gelu(z) if activation else z
    (right,) = torch.autograd.grad(expected.square().sum(), layer.bias)
    y = layer.call_quantized(codes, scale, torch.float32)
    (got,) = torch.autograd.grad(y.square().sum(), layer.bias)
    assert relative(got, right) < 0.05


@pytest.mark.parametrize("scheme", ["w8a8-int8", "w8a8-fp8", "w8a8-fp8-block"])
def test_a_norm_hands_quantized_numbers_to_its_layer(scheme):
    layer = make(scheme)[1]
    norm = qf.nn.RMSNorm.for_scheme(torch.rand(256) + 0.5, 1e-5, layer.scheme)
    x = torch.randn(3, 4, 256)
    y = norm.into(layer, x)
    assert relative(y, layer(norm.numbers(x))) < 1e-2
    x.requires_grad_()
    norm.into(layer, x).sum().backward()
    assert torch.isfinite(x.grad).all()


# ---- State ----


@every_scheme
def test_state_round_trip(scheme, tmp_path):
    _, layer = make(scheme)
    x = torch.randn(2, 256)
    expected = layer(x)
    torch.save(layer.state_dict(), tmp_path / "state")
    other = qf.nn.QuantizedLinear(256, 96, scheme=scheme)
    other(x)  # packs what is replaced below
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert torch.equal(other(x), expected)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), expected)
    stream = io.BytesIO()
    torch.save(layer, stream)
    stream.seek(0)
    assert torch.equal(torch.load(stream, weights_only=False)(x), expected)


@every_scheme
def test_casts_change_the_bias_alone(scheme):
    _, layer = make(scheme)
    codes, scales = layer.codes, layer.scales
    for cast, dtype in (("half", torch.float16), ("bfloat16", torch.bfloat16), ("double", torch.float64)):
        getattr(layer, cast)()
        assert layer.bias.dtype == dtype
        assert (layer.codes.dtype, layer.scales.dtype) == (codes.dtype, scales.dtype)
    layer.to(torch.bfloat16).cpu()
    assert layer(torch.randn(2, 256, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_layer_on_the_meta_device_takes_a_state():
    _, layer = make("int4")
    with torch.device("meta"):
        empty = qf.nn.QuantizedLinear(256, 96, scheme="int4")
    assert empty.codes.is_meta
    empty.load_state_dict(layer.state_dict(), assign=True)
    x = torch.randn(2, 256)
    assert torch.equal(empty(x), layer(x))
    assert qf.nn.QuantizedLinear(256, 96, scheme="int4", device="meta").to_empty(device="cpu").codes.is_cpu


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a CUDA device")
@every_scheme
def test_one_state_serves_every_device(scheme, tmp_path):
    _, layer = make(scheme)
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    there = qf.nn.QuantizedLinear(256, 96, scheme=scheme).cuda().bfloat16()
    there.load_state_dict(state)
    x = torch.randn(2, 256).bfloat16()
    assert relative(there(x.cuda()).cpu().float(), layer(x.float())) < 0.03
    for name, tensor in there.state_dict().items():
        if name != "bias":
            assert torch.equal(tensor.cpu().view(torch.uint8), state[name].view(torch.uint8))
    back = there.cpu().float()
    assert relative(back(x.float()), layer(x.float())) < 0.01
    assert torch.equal(copy.deepcopy(there.cuda())(x.cuda().float()), there(x.cuda().float()))


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a CUDA device")
def test_on_a_gpu_the_packed_form_is_the_only_one():
    layer = make("int4", k=1024, n=1024, device="cuda")[1]
    assert layer.codes is None
    assert layer.packed.nbytes < 1.1 * (1024 * 1024 // 2 + 1024 * 8 * 4)
    x = torch.randn(2, 1024, device="cuda", requires_grad=True)
    layer(x).sum().backward()
    assert layer.codes.is_cuda


@device
@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_the_canonical_form_may_be_dropped(scheme, device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layer = make(scheme, device=device, dtype=dtype)[1]
    x = torch.randn(3, 256, device=device, dtype=dtype)
    with torch.no_grad():
        expected = layer(x)
        assert torch.equal(layer.drop_canonical()(x), expected)
    assert layer.codes is None
    layer.half()
    uses = (
        layer.state_dict,
        lambda: copy.deepcopy(layer),
        lambda: layer.weight,
        lambda: layer.to("meta"),
        lambda: layer(x.half().requires_grad_()),
    )
    for use in uses:
        with pytest.raises(RuntimeError, match="canonical tensors were dropped"):
            use()


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a CUDA device")
def test_a_layer_that_ran_from_its_packed_form_still_takes_float32():
    layer = make("int4", device="cuda", dtype=torch.bfloat16)[1]
    x = torch.randn(3, 256, device="cuda")
    y = layer(x.bfloat16())
    assert relative(layer(x), y.float()) < 0.02


def test_wrong_states_are_refused():
    _, layer = make("int8")
    x = torch.randn(2, 256)
    before = layer(x)
    state = layer.state_dict()

    def refused(message, **changes):
        changed = {name: value for name, value in {**state, **changes}.items() if value is not None}
        with pytest.raises(RuntimeError, match=message):
            layer.load_state_dict(changed)
        assert torch.equal(layer(x), before)

    refused("codes has shape", codes=state["codes"][:50])
    refused("scales has type", scales=state["scales"].double())
    refused("expected", scales=None)
    refused("expected", zeros=torch.zeros(96, 1, dtype=torch.int8))
    refused("another layout", layout=make("int4")[1].layout)
    refused("another layout", layout=torch.zeros(2))
    refused("Missing key", codes=None, scales=None, layout=None)
    refused("not quantized", codes=None, scales=None, layout=None, weight=torch.zeros(96, 256))
    refused("Missing key.*bias", bias=None)
    refused("Unexpected key", surprise=torch.zeros(1))
    refused("another layout", **{**make("int8", k=128)[1].state_dict(), "bias": state["bias"]})


# ---- Compilation and export ----


def model(scheme):
    return nn.Sequential(make(scheme, 64, 128)[1], nn.SiLU(), make(scheme, 128, 32)[1])


@pytest.mark.parametrize("scheme", ["int4", "w8a8-int8", "w8a8-fp8-block"])
def test_compiled_without_a_break_and_once_for_all_m(scheme):
    torch._dynamo.reset()
    layers = model(scheme)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layers, backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for m in (2, 3, 7, 100, 5):
            x = torch.randn(m, 64)
            torch.testing.assert_close(compiled(x), layers(x))
    assert counter.frame_count == 1


@device
def test_compiled_by_inductor_with_a_gradient(device):
    torch._dynamo.reset()
    layers = model("int8").to(device)
    compiled = torch.compile(layers, fullgraph=True, dynamic=True)
    x = torch.randn(3, 64, device=device, requires_grad=True)
    torch.testing.assert_close(compiled(x), layers(x), rtol=1e-4, atol=1e-4)
    given = torch.autograd.grad(compiled(x).square().sum(), x)[0]
    torch.testing.assert_close(
        given, torch.autograd.grad(layers(x).square().sum(), x)[0], rtol=1e-3, atol=1e-3
    )


def test_compiled_gated_mlp():
    torch._dynamo.reset()
    for scheme in ("int4", "w8a8-int8"):
        mlp = qf.nn.GatedMLP(64, 96, scheme=scheme)
        mlp.gate_up.quantize_from_float(torch.randn(192, 64))
        mlp.down.quantize_from_float(torch.randn(64, 96))
        compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
        x = torch.randn(3, 64)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), mlp(x))


@pytest.mark.parametrize("scheme", ["int4", "w8a8-int8"])
def test_exported_and_loaded(scheme, tmp_path):
    layers = model(scheme).eval()
    x = torch.randn(4, 64)
    rows = torch.export.Dim("rows", min=2, max=1024)
    program = torch.export.export(layers, (x,), dynamic_shapes=({0: rows},))
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    for m in (4, 9):
        x = torch.randn(m, 64)
        torch.testing.assert_close(loaded(x), layers(x))


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a CUDA device")
@every_scheme
def test_captured_in_a_cuda_graph(scheme):
    layers = model(scheme).cuda().bfloat16()
    x = torch.randn(4, 64, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            layers(x)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = layers(x)
        for _ in range(3):
            x.normal_()
            graph.replay()
            assert torch.equal(y, layers(x))


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a CUDA device")
def test_compiled_with_cuda_graphs():
    torch._dynamo.reset()
    layers = model("int4").cuda().bfloat16()
    compiled = torch.compile(layers, mode="reduce-overhead", fullgraph=True)
    with torch.inference_mode():
        for _ in range(5):
            x = torch.randn(4, 64, device="cuda", dtype=torch.bfloat16)
            torch.testing.assert_close(compiled(x), layers(x), rtol=2e-2, atol=2e-2)


# ---- Options of a layer ----


@device
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_fast_accumulation_changes_little_or_nothing(device, activation):
    linear = nn.Linear(512, 96, device=device)
    layer = qf.nn.QuantizedLinear.from_linear(linear, "w8a8-fp8", activation=activation)
    x = torch.randn(300, 512, device=device, requires_grad=True)
    results = []
    for layer.fast_accumulation in (False, True):
        y = layer(x)
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
        results.append((y.detach(), gradient))
    for promoted, fast in zip(*results, strict=True):
        assert torch.equal(promoted, fast) if device == "cpu" else relative(fast, promoted) < 1e-3
