# SPDX-License-Identifier: Apache-2.0
import importlib.util
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import quantfuse as qf  # noqa: E402

# batch, heads, kv_heads, size, width
SHAPES = [
    (1, 32, 8, 640, 128),
    (2, 8, 2, 200, 64),
    (3, 6, 2, 77, 24),  # widths and groups that are no powers of two
    (4, 4, 4, 100, 16),
    (1, 8, 1, 50, 256),
    (16, 8, 8, 300, 32),  # a head is one block's
    (1, 20, 1, 2100, 128),  # more query heads than rows of a tensor core; several blocks a split
]


def example(shape, dtype=torch.float32, device="cpu", seed=0):
    """q, keys, values, lengths with 0 and all among them, and a mask."""
    batch, heads, kv_heads, size, width = shape
    torch.manual_seed(seed)
    q = torch.randn(batch, heads, 1, width, device=device).to(dtype)
    keys, values = (torch.randn(batch, kv_heads, size, width, device=device).to(dtype) for _ in range(2))
    lengths = torch.randint(1, size + 1, (batch,), device=device, dtype=torch.int32)
    lengths[0] = size
    lengths[-1] = 0 if batch > 1 else size - 3
    return q, keys, values, lengths, torch.rand(batch, size, device=device) > 0.4


def exact(q, keys, values, lengths, mask):
    batch, heads, _, width = q.shape
    y = torch.zeros(batch, 1, heads, width, dtype=torch.float64, device=q.device)
    for b in range(batch):
        seen = torch.arange(keys.shape[2], device=q.device) < lengths[b if len(lengths) > 1 else 0]
        seen = seen if mask is None else seen & mask[b]
        for h in range(heads):
            of = h // (heads // keys.shape[1])
            k, v = (cache[b, of][seen].double() for cache in (keys, values))
            y[b, 0, h] = torch.softmax(k @ q[b, h, 0].double() * width**-0.5, 0) @ v
    return y


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_token(shape, has_mask):
    *tensors, mask = example(shape)
    mask = mask if has_mask else None
    got = qf.decode_attention(*tensors, mask)
    torch.testing.assert_close(got.double(), exact(*tensors, mask), rtol=1e-5, atol=1e-5)


def test_what_is_not_filled_may_be_anything():
    q, keys, values, lengths, mask = example(SHAPES[1])
    right = qf.decode_attention(q, keys, values, lengths, mask)
    unseen = ~(mask & (torch.arange(keys.shape[2]) < lengths[:, None]))[:, None, :, None]
    for anything in (float("nan"), float("inf")):
        keys, values = (cache.masked_fill(unseen, anything) for cache in (keys, values))
        assert torch.equal(qf.decode_attention(q, keys, values, lengths, mask), right)


def test_one_length_for_all():
    q, keys, values, _, _ = example(SHAPES[1])
    lengths = torch.tensor([9], dtype=torch.int32)
    torch.testing.assert_close(
        qf.decode_attention(q, keys, values, lengths, scale=0.5),
        qf.decode_attention(q * 4, keys, values, lengths.repeat(2)),  # 4 / sqrt(64)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"q": torch.zeros(2, 8, 3, 64)},
            r"q has shape \(2, 8, 3, 64\), expected \[batch, heads, 1, width\]",
        ),
        ({"keys": torch.zeros(2, 3, 200, 64)}, "kv_heads is to divide heads"),
        ({"values": torch.zeros(2, 2, 9, 64)}, r"values has shape \(2, 2, 9, 64\)"),
        ({"values": torch.zeros(2, 2, 200, 64).half()}, "q, keys, values have types"),
        ({"lengths": torch.zeros(2, dtype=torch.int64)}, "lengths has type torch.int64"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, r"expected int32 \[1\] or \[2\]"),
        ({"mask": torch.ones(2, 100, dtype=torch.bool)}, r"expected bool \[2, 200\]"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    given = dict(zip(("q", "keys", "values", "lengths", "mask"), example(SHAPES[1]), strict=True))
    with pytest.raises(ValueError, match=message):
        qf.decode_attention(**(given | change))


# ---- With the token appended ----


def new_token(shape, dtype=torch.float32, device="cpu"):
    """q, k, v, rotation, keys, values, positions: the first and the last place are among them."""
    q, keys, values, _, _ = example(shape, dtype, device)
    batch, _, kv_heads, size, width = shape
    k, v = (torch.randn(batch, kv_heads, 1, width, device=device).to(dtype) for _ in range(2))
    rotation = tuple(torch.randn(batch, width, device=device).to(dtype) for _ in range(2))
    positions = torch.randint(0, size, (batch,), device=device)
    positions[0], positions[-1] = 0, size - 1
    return q, k, v, rotation, keys, values, positions


def rotated(x, rotation):
    first, second = x.float().chunk(2, -1)
    cos, sin = (table.float()[:, None, None] for table in rotation)
    return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


def appended(q, k, v, rotation, keys, values, positions):
    """What is right, from a copy of the cache: y, keys, values."""
    keys, values, places = keys.clone(), values.clone(), positions.expand(len(q))
    for b, place in enumerate(places.tolist()):
        if place < keys.shape[2]:
            keys[b, :, place], values[b, :, place] = rotated(k, rotation)[b, :, 0], v[b, :, 0]
    return exact(rotated(q, rotation), keys, values, places + 1, None), keys, values


def check_append(arguments, tolerance):
    right, right_keys, right_values = appended(*arguments)
    got = qf.append_and_attend(*arguments)
    torch.testing.assert_close(got.double(), right, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(arguments[4], right_keys, rtol=tolerance, atol=tolerance)
    assert torch.equal(arguments[5], right_values)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_is_appended(shape):
    check_append(new_token(shape), 1e-5)


@pytest.mark.parametrize("place", [0, 41, 199, 200, 300])  # the last two are beyond the end
@pytest.mark.parametrize("has_one_rotation", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_token_is_appended_at_one_place_for_all(place, has_one_rotation, dtype):
    q, k, v, rotation, keys, values, _ = new_token(SHAPES[1])
    rotation = tuple(table[:1] for table in rotation) if has_one_rotation else rotation
    check_append((q, k, v, rotation, keys, values, torch.tensor([place], dtype=dtype)), 1e-5)


def test_a_token_beyond_the_end_is_not_written():
    *given, keys, values, positions = new_token(SHAPES[1])
    positions[0], before = 200, (keys.clone(), values.clone())
    check_append((*given, keys, values, positions), 1e-5)
    assert torch.equal(keys[0], before[0][0])
    assert torch.equal(values[0], before[1][0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(2, 8, 1, 64)}, r"k has shape \(2, 8, 1, 64\), expected \(2, 2, 1, 64\)"),
        ({"v": torch.zeros(2, 2, 1, 64).half()}, "v has type torch.float16, q torch.float32"),
        ({"rotation": (torch.zeros(2, 32), torch.zeros(2, 32))}, r"cos has shape \(2, 32\)"),
        ({"rotation": (torch.zeros(2, 64), torch.zeros(1, 64))}, "cos and sin are to have the same"),
        ({"positions": torch.zeros(2)}, "positions has type torch.float32"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, r"positions has shape \(3,\)"),
        ({"positions": torch.tensor([3, -1])}, "positions has the value -1"),
        ({"keys": torch.zeros(2, 2, 64, 200).mT}, "rows of keys and values are to be contiguous"),
    ],
)
def test_what_cannot_be_appended_is_named(change, message):
    names = ("q", "k", "v", "rotation", "keys", "values", "positions")
    given = dict(zip(names, new_token(SHAPES[1]), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        qf.append_and_attend(**given)


# ---- The kernel ----

INTERPRETED = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from quantfuse import _attention, _attention_triton
from test_attention import SHAPES, example, new_token

for shape in SHAPES:
    q, k, v, rotation, keys, values, positions = new_token(shape)
    more = (positions, None, shape[-1] ** -0.5, (k, v), rotation)
    got = _attention_triton.launch(q, own := keys.clone(), own_values := values.clone(), *more)
    right = _attention._composed_append(q, k, v, *rotation, keys, values, positions, shape[-1] ** -0.5)
    for pair in ((got, right), (own, keys), (own_values, values)):
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5)
    *tensors, some = example(shape)
    for mask in (None, some):
        arguments = (*tensors, mask, shape[-1] ** -0.5)
        for _ in range(2):
            got = _attention_triton.launch(*arguments)
        torch.testing.assert_close(got, _attention._composed(*arguments), rtol=1e-4, atol=1e-5)
"""


def test_the_kernel_as_triton_interprets_it():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("the kernel itself is tested")
    command = [sys.executable, "-c", INTERPRETED, os.path.dirname(__file__)]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    return "cuda"


# Every kernel is compiled: what shapes and types have to do with each other is tried in one of them.
GPU_CASES = [
    *((shape, torch.bfloat16, 1e-2) for shape in SHAPES),
    (SHAPES[1], torch.float16, 2e-3),
    (SHAPES[1], torch.float32, 1e-5),
]


@pytest.mark.parametrize(("shape", "dtype", "tolerance"), GPU_CASES)
def test_on_a_gpu(cuda, shape, dtype, tolerance):
    *tensors, some = example(shape, dtype, cuda)
    for mask in (None, some):
        got = qf.decode_attention(*tensors, mask)
        assert torch.equal(got, qf.decode_attention(*tensors, mask))
        torch.testing.assert_close(got.double(), exact(*tensors, mask), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("shape", "dtype", "tolerance"), GPU_CASES)
def test_a_token_is_appended_on_a_gpu(cuda, shape, dtype, tolerance):
    check_append(new_token(shape, dtype, cuda), tolerance)


def test_rows_that_are_not_contiguous(cuda):
    q, keys, values, lengths, mask = example(SHAPES[1], torch.bfloat16, cuda)
    expected = qf.decode_attention(q, keys, values, lengths, mask)
    apart = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (q, keys, values)]
    wide = [torch.cat([tensor, tensor], -1)[..., :64] for tensor in (q, keys, values)]
    slow = [tensor.mT.contiguous().mT for tensor in (q, keys, values)]
    for others in (apart, wide, slow):
        assert torch.equal(qf.decode_attention(*others, lengths, mask), expected)
    one = mask[:1].expand(2, -1)
    assert torch.equal(
        qf.decode_attention(q, keys, values, lengths, one),
        qf.decode_attention(q, keys, values, lengths, one.contiguous()),
    )


def test_between_quantized_layers_in_a_graph(cuda):
    """Kernels that start before the one ahead has ended: a chain has the same bits in every replay."""
    torch.manual_seed(0)
    layers = [
        qf.nn.QuantizedLinear.from_linear(
            torch.nn.Linear(4096, 4096, bias=False, device=cuda, dtype=torch.bfloat16), "int4"
        )
        for _ in range(2)
    ]
    keys, values = (torch.randn(1, 8, 640, 128, device=cuda, dtype=torch.bfloat16) for _ in range(2))
    x = torch.randn(1, 1, 4096, device=cuda, dtype=torch.bfloat16)
    lengths = torch.tensor([600], dtype=torch.int32, device=cuda)

    def chain():
        y = x
        for _ in range(8):
            q = layers[0](y).view(1, 32, 1, 128)
            y = layers[1](qf.decode_attention(q, keys, values, lengths).view(1, 1, 4096))
        return y

    with torch.no_grad():
        expected = chain()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            chain()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            got = chain()
        for _ in range(50):
            got.zero_()
            graph.replay()
            assert torch.equal(got, expected)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_opcheck(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    tensors = example(SHAPES[1], device=device)
    torch.library.opcheck(torch.ops.quantfuse.decode_attention.default, (*tensors, 0.125))
    q, k, v, rotation, *others = new_token(SHAPES[1], device=device)
    torch.library.opcheck(torch.ops.quantfuse.append_and_attend.default, (q, k, v, *rotation, *others, 0.125))
