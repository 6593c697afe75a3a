# SPDX-License-Identifier: Apache-2.0
"""torch tensors on a CUDA device."""

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
