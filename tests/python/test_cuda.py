# SPDX-License-Identifier: Apache-2.0
"""torch tensors on a CUDA device."""

import unittest.mock

import pytest

import quantfuse as qf

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)
if not qf.info()["cuda"]["architectures"]:
    pytest.skip("quantfuse is built without CUDA kernels", allow_module_level=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (2, 7, 4096), (0, 64), (129, 5120)])
def test_same_bits_as_on_the_cpu(shape, dtype):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype)
    for call in (
        qf.per_token_quant_int8,
        lambda t: qf.per_token_group_quant_int8(t, 128),
        lambda t: qf.per_token_group_quant_fp8(t, 128),
    ):
        q, scale = call(x.cuda())
        expected_q, expected_scale = call(x)
        assert q.is_cuda
        assert torch.equal(scale.cpu(), expected_scale)
        assert torch.equal(q.cpu().view(torch.uint8), expected_q.view(torch.uint8))


@pytest.mark.parametrize("format", ["int8", "int4", "fp8_e4m3", "fp8_e5m2", "nf4", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("block", [(1, 0), (1, 32), (1, 33), (0, 0), (0, 1), (128, 128)])
@pytest.mark.parametrize("options", [{}, {"symmetric": False, "row_sums": True}, {"hadamard": 64}], ids=str)
def test_every_format_and_block_as_on_the_cpu(format, block, options):
    is_integer, is_packed = format in ("int8", "int4"), "4" in format.replace("e4m3", "")
    if not is_integer and "symmetric" in options:
        pytest.skip("floating formats have no zero points")
    if "hadamard" in options and (block[0] != 1 or (is_packed and block[1] % 2)):
        pytest.skip("rows alone are rotated")
    torch.manual_seed(0)
    x = torch.randn(131, 320).to(torch.bfloat16)
    on_cpu, on_gpu = (qf.quantize_tensor(t, format, block=block, **options) for t in (x, x.cuda()))
    for expected, got in zip(on_cpu, on_gpu, strict=True):
        assert (expected is None) == (got is None)
        if expected is not None:
            assert torch.equal(got.cpu().view(torch.uint8), expected.view(torch.uint8))


def test_the_search_for_scales_says_that_it_is_for_the_cpu():
    with pytest.raises(NotImplementedError, match="weights, which are quantized on the CPU"):
        qf.quantize_tensor(torch.randn(4, 64, device="cuda"), "int4", block=(1, 32), mse=True)


# ---- Producers ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 7, 64, 128, 1000, 4096, 70000])
def test_producers_give_what_they_give_on_the_cpu(n, dtype):
    torch.manual_seed(0)
    x, gain = torch.randn(5, 2 * n).to(dtype), torch.rand(2 * n).to(dtype)
    for produce in (
        lambda t, **o: qf.rms_norm(t, gain.to(t.device), **o),
        lambda t, **o: qf.silu_and_mul(t, **o),
        lambda t, **o: qf.activate(t, "gelu", **o),
    ):
        on_cpu, on_gpu = produce(x, out_dtype="float32"), produce(x.cuda(), out_dtype="float32")
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-5, atol=1e-5)
        for group in (0, 128):
            codes, scale = produce(x.cuda(), out_quant="int8", out_group=group)
            back = qf.dequantize_tensor(codes, scale, "int8", block=(1, group)).cpu()
            steps = scale.cpu().repeat_interleave(group or on_cpu.shape[1], 1)[:, : on_cpu.shape[1]]
            assert ((back - on_cpu).abs() <= 0.51 * steps + 1e-5).all()


def test_the_residual_of_a_norm_is_written_back():
    x, residual = (torch.randn(3, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    expected = x + residual
    qf.rms_norm(x, residual=residual)
    assert torch.equal(residual, expected)


@pytest.mark.parametrize("quant", [None, "int8", "fp8"])
def test_the_norm_module_runs_our_kernel(quant):
    norm = qf.nn.RMSNorm(256, out_quant=quant, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(4, 7, 256, device="cuda", dtype=torch.bfloat16)
    got, expected = norm(x), qf.rms_norm(x, norm.weight.detach(), norm.eps, out_quant=quant)
    if quant is None:
        got, expected = (got, norm.weight), (expected, norm.weight)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert "_sm" in qf.explain(qf.rms_norm, x)["chosen"]


def test_work_is_queued_on_the_current_stream():
    stream = torch.cuda.Stream()
    x = torch.empty(4096, 4096, device="cuda")
    source = torch.randn(4096, 4096, device="cuda")
    q, scale = torch.empty_like(x, dtype=torch.int8), torch.empty(4096, 1, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # what is queued on another stream would overtake this
        x.copy_(source)
        qf.per_token_quant_int8(x, out=(q, scale))
    stream.synchronize()
    assert torch.equal(q, qf.per_token_quant_int8(source)[0])


def test_graph_capture_and_replay():
    x = torch.randn(16, 1024, device="cuda")
    q, scale = torch.empty_like(x, dtype=torch.int8), torch.empty(16, 1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        qf.per_token_quant_int8(x, out=(q, scale))
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(q, qf.per_token_quant_int8(x)[0])


def test_tensors_on_two_devices_are_refused():
    with pytest.raises(ValueError, match="is on"):
        qf.quantize_tensor(torch.randn(4, 8, device="cuda"), out=torch.empty(4, 8, dtype=torch.int8))


def test_explain_names_a_cuda_kernel():
    answer = qf.explain(qf.per_token_quant_int8, torch.randn(4, 256, device="cuda"))
    assert "_sm" in answer["chosen"]


# ---- Products ----


def int8s(*shape):
    return torch.randint(-128, 128, shape, dtype=torch.int8, device="cuda")


def exact_product(a, b):
    return (a.double() @ b.double().T).to(torch.int32)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (16, 33, 127), (17, 130, 129), (300, 257, 512)])
def test_integer_products_are_exact(m, n, k):
    torch.manual_seed(2)
    a, b = int8s(m, k), int8s(n, k)
    assert torch.equal(qf.int8_matmul(a, b), exact_product(a, b))
    assert torch.equal(qf.int8_matmul(a, b.T.contiguous(), b_order="kn"), exact_product(a, b))
    packed = [t.view(torch.uint8) for t in (a, b)]  # as two numbers of 4 bits each
    nibbles = [(torch.stack([t & 15, t >> 4], -1).flatten(1).char() ^ 8) - 8 for t in packed]
    assert torch.equal(qf.int4_matmul(*packed), exact_product(*nibbles))


def test_views_that_begin_anywhere():
    a, b = int8s(40, 301)[3:, 1:260], int8s(70, 300)[:, 5:264]
    assert torch.equal(qf.int8_matmul(a, b), exact_product(a, b))


@pytest.mark.parametrize("m", [1, 16, 100])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_block_products(m, dtype):
    torch.manual_seed(3)
    a, b = (torch.randn(rows, 400, device="cuda").mul(40).to(dtype) for rows in (m, 200))
    a_scale, b_scale = torch.rand(m, 4, device="cuda"), torch.rand(2, 4, device="cuda")
    call = qf.w8a8_block_int8_matmul if dtype == torch.int8 else qf.w8a8_block_fp8_matmul
    c = call(a, b, a_scale, b_scale, output_dtype="float32")
    x = a.double() * a_scale.double().repeat_interleave(128, 1)[:, :400]
    w = b.double() * b_scale.double().repeat_interleave(128, 1)[:, :400].repeat_interleave(128, 0)[:200]
    bound = 1e-5 if dtype == torch.int8 else 2**-8  # tensor cores add FP8 products in fixed point
    assert ((c.double() - x @ w.T).abs() <= bound * (x.abs() @ w.abs().T)).all()


@pytest.mark.parametrize("k", [256, 4096])
def test_sums_that_stay_in_the_tensor_cores(k):
    torch.manual_seed(4)
    a, b = (torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (300, 520))
    scale = torch.full((1,), 0.5, device="cuda")
    exact, magnitudes = a.double() @ b.double().T / 2, a.double().abs() @ b.double().abs().T / 2
    promoted, fast = (qf.scaled_mm(a, b, scale, fast_accumulation=flag) for flag in (False, True))
    assert ((promoted.double() - exact).abs() <= 2**-8 * magnitudes).all()
    assert ((fast.double() - exact).abs() <= 2 * (11 * k / 32 + 33) ** 0.5 * 2**-13 * magnitudes).all()
    weight = qf.QuantizedWeight("fp8_e4m3", (520, k), (1, 0), b, scale.expand(520, 1).contiguous())
    x_scale = torch.ones(300, 1, device="cuda")
    y = qf.linear(a, weight, act_quant="fp8", x_scale=x_scale, fast_accumulation=True)
    assert ((y.double() - exact).abs() <= 2 * (11 * k / 32 + 33) ** 0.5 * 2**-13 * magnitudes).all()


def test_a_row_with_scale_zero_leaves_the_bias():
    a, b, bias = int8s(20, 64), int8s(40, 64), torch.randn(40, device="cuda")
    a_scale = torch.full((20, 1), 0.5, device="cuda")
    a_scale[7] = 0
    c = qf.scaled_mm(a, b, a_scale, bias=bias)
    assert torch.equal(c[7], bias)
    assert torch.equal(c[8], exact_product(a, b)[8] * 0.5 + bias)


@pytest.mark.parametrize("act_quant", ["int8", "fp8"])
@pytest.mark.parametrize("value", [0.0, 6e4, float("nan")])
def test_rows_of_zeros_of_one_huge_value_and_of_nan(act_quant, value):
    """Row 1 is zeros but for one number; a NaN is its own row's alone (of INT8 it becomes 0)."""
    weight = make_weight(96, 256, "int8")
    x = torch.randn(20, 256, device="cuda")
    expected = qf.linear(x, weight, act_quant=act_quant)
    x[1] = 0
    x[1, 5] = value
    y = qf.linear(x, weight, act_quant=act_quant)
    rest = torch.arange(20, device="cuda") != 1
    assert torch.equal(y[rest], expected[rest])
    if value != value:
        assert y[1].isnan().all() if act_quant == "fp8" else (y[1] == 0).all()
    else:
        torch.testing.assert_close(y[1], weight.dequantize()[:, 5] * value, rtol=1e-5, atol=0)


# ---- Linear layers ----


def make_weight(n, k, scheme="int4", group=128, **options):
    torch.manual_seed(1)
    w = qf.QuantizedWeight.from_float(torch.randn(n, k) / k**0.5, scheme, group=group, **options)
    return qf.QuantizedWeight(
        w.format, w.shape, w.block, w.codes.cuda(), w.scales.cuda(), is_gated=w.is_gated
    )


def expected_linear(x, weight):
    return x.double() @ weight.dequantize().double().T


@pytest.mark.parametrize("m", [1, 2, 8, 9, 33, 100, 300])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", ["int4", "int8", "fp8_e4m3", "mxfp4"])
def test_linear_of_a_packed_weight(m, dtype, scheme):
    weight = make_weight(272, 640, scheme, 32 if scheme == "mxfp4" else 128).pack()
    assert weight.packed is not None
    x = torch.randn(m, 640, device="cuda", dtype=dtype)
    y = qf.linear(x, weight, out_dtype="float32")
    torch.testing.assert_close(y.double(), expected_linear(x, weight), rtol=0, atol=2e-4)


# NF4's numbers are rounded to the type of x: 0.31% of a number in BF16, 0.033% in FP16.
@pytest.mark.parametrize("m", [1, 9, 40, 130])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("scheme", "group"), [("nf4", 64), ("int8", 16), ("int4", 48), ("fp4_e2m1", 16)])
def test_linear_of_codebooks_and_small_groups(m, dtype, scheme, group):
    weight = make_weight(272, 672 if group == 48 else 640, scheme, group).pack()
    assert weight.packed is not None
    x = torch.randn(m, weight.shape[1], device="cuda", dtype=dtype)
    y = qf.linear(x, weight, out_dtype="float32").double()
    of_codebook = (0.0032 if dtype == torch.bfloat16 else 0.00034) if scheme == "nf4" else 0
    bound = of_codebook * (x.double().abs() @ weight.dequantize().double().abs().T) + 2e-4
    assert ((y - expected_linear(x, weight)).abs() <= bound).all()


def test_packing_a_codebook_takes_any_finite_scale():
    for scale in (0.0, -1.0):
        weight = make_weight(64, 256, "nf4", 64)
        weight.scales[3, 1] = scale
        assert weight.pack().packed is not None
    weight = make_weight(64, 256, "nf4", 64)
    weight.scales[3, 1] = float("inf")
    with pytest.raises(ValueError, match=r"weight\.scale is not finite at index 13"):
        weight.pack()


def test_a_packed_weight_needs_no_canonical_one():
    weight = make_weight(256, 512)
    x = torch.randn(16, 512, device="cuda", dtype=torch.bfloat16)
    expected = qf.linear(x, weight.pack())
    assert torch.equal(qf.linear(x, weight.pack(drop_canonical=True)), expected)
    with pytest.raises(NotImplementedError, match="canonical"):
        qf.linear(x.float(), weight)


def in_act_order(weight, order):
    return qf.QuantizedWeight(
        weight.format, weight.shape, weight.block, weight.codes, weight.scales, g_idx=order.int().cuda()
    )


@pytest.mark.parametrize("m", [1, 7, 30, 300])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_linear_of_a_packed_weight_in_act_order(m, dtype):
    weight = in_act_order(make_weight(272, 648), torch.randperm(648) // 128)
    x = torch.randn(m, 648, device="cuda", dtype=dtype)
    expected = expected_linear(x, weight)
    assert weight.pack(drop_canonical=True).g_idx is None
    y = qf.linear(x, weight, out_dtype="float32")
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=2e-4)


def test_groups_that_differ_in_size_have_no_packed_form():
    order = torch.arange(640) // 128
    order[0] = 1
    weight = in_act_order(make_weight(64, 640), order)
    assert weight.pack().packed is None
    x = torch.randn(3, 640, device="cuda", dtype=torch.bfloat16)
    y = qf.linear(x, weight, out_dtype="float32")
    torch.testing.assert_close(y.double(), expected_linear(x, weight), rtol=0, atol=2e-4)


@pytest.mark.parametrize("group", [-1, 5])
def test_packing_refuses_columns_of_no_group(group):
    order = torch.arange(640) // 128
    order[130] = group
    with pytest.raises(ValueError, match=r"weight\.g_idx is out of range at index 130"):
        in_act_order(make_weight(64, 640), order).pack()


def test_weights_without_a_packed_form_run_from_the_canonical_one():
    weight = make_weight(64, 384, group=24).pack()
    assert weight.packed is None
    x = torch.randn(5, 384, device="cuda", dtype=torch.bfloat16)
    y = qf.linear(x, weight, out_dtype="float32")
    torch.testing.assert_close(y.double(), expected_linear(x, weight), rtol=0, atol=2e-4)


@pytest.mark.parametrize("exponent", [-101, 18])
def test_mxfp4_scales_that_no_packed_tile_holds_run_from_the_canonical_weight(exponent):
    weight = make_weight(64, 256, "mxfp4", 32)
    weight.scales[3, 1] = torch.tensor(127 + exponent, dtype=torch.uint8).view(weight.scales.dtype)
    assert weight.pack().packed is None
    x = torch.randn(5, 256, device="cuda", dtype=torch.bfloat16)
    y = qf.linear(x, weight, out_dtype="float32")
    torch.testing.assert_close(y.double(), expected_linear(x, weight), rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_packing_refuses_bad_scales(value):
    weight = make_weight(64, 256)
    weight.scales[3, 1] = value
    with pytest.raises(ValueError, match=r"weight\.scale is not finite and positive at index 7"):
        weight.pack()


def test_packed_bytes_of_another_weight_are_refused():
    weight, other = make_weight(256, 512).pack(), make_weight(256, 640).pack()
    weight.packed = other.packed
    weight._arguments = None
    with pytest.raises(ValueError, match=r"weight\.packed has"):
        qf.linear(torch.randn(4, 512, device="cuda", dtype=torch.bfloat16), weight)


def layers(m):
    """A chain whose every input is the output of the layer before: gated, wide, narrow."""
    gate_up, down = make_weight(1024, 512, gated=True).pack(), make_weight(512, 512).pack()
    x, h, y = (torch.empty(m, 512, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def run():
        for _ in range(3):
            qf.linear(x, gate_up, activation="silu", out=h)
            qf.linear(h, down, residual=x, out=y)
            qf.linear(y, down, out=x)

    return x, y, run


@pytest.mark.parametrize("m", [1, 5, 16, 64, 130])
def test_a_dependent_chain_has_the_same_bits_in_every_replay(m):
    x, y, run = layers(m)
    start = torch.randn_like(x)
    graph = torch.cuda.CUDAGraph()
    run()  # loads what a capture must not
    with torch.cuda.graph(graph):
        run()
    x.copy_(start)
    run_one_at_a_time(run)
    expected = x.clone(), y.clone()
    for _ in range(1000):
        x.copy_(start)
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(x, expected[0])
    assert torch.equal(y, expected[1])


def run_one_at_a_time(run):
    def waiting(*args, **kwargs):
        result = linear(*args, **kwargs)
        torch.cuda.synchronize()
        return result

    linear = qf.linear
    with unittest.mock.patch.object(qf, "linear", waiting):
        run()


def test_linear_on_two_streams_at_once():
    weight = make_weight(4096, 1024).pack()
    inputs = [torch.randn(m, 1024, device="cuda", dtype=torch.bfloat16) for m in (1, 16, 64, 200)]
    expected = [qf.linear(x, weight) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    outputs = [torch.empty_like(y) for y in expected]
    for _ in range(20):
        for stream, x, y in zip(streams, inputs, outputs, strict=True):
            with torch.cuda.stream(stream):
                qf.linear(x, weight, out=y)
    torch.cuda.synchronize()
    for y, right in zip(outputs, expected, strict=True):
        assert torch.equal(y, right)
