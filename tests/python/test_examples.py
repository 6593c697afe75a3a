# SPDX-License-Identifier: Apache-2.0
"""The examples of the PyTorch package, and its benchmark, run."""

import importlib.util
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_adapter_learns_a_line_by_heart(capsys):
    pytest.importorskip("peft")
    assert example("lora").main() < 0.1
    assert "the quick brown fox jump" in capsys.readouterr().out.split("it goes on:")[1]


def test_generation(capsys):
    assert len(example("generate").main(max_new_tokens=4)) == 4
    assert "smaller" in capsys.readouterr().out


def test_serving_with_cuda_graphs():
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    tokens = example("serve_cuda_graphs").main(tokens=6)
    assert tokens.shape == (4, 7)
    assert bool(((tokens >= 0) & (tokens < 1024)).all())


def test_the_benchmark_of_a_model(tmp_path, capsys):
    from quantfuse.bench.model import main

    path = tmp_path / "results.json"
    arguments = ["--shape", "tiny", "--scheme", "int4,w8a8-int8", "--batch", "1,2", "--device", "cpu"]
    assert main([*arguments, "--prompt", "8", "--tokens", "2", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["model"] for row in rows[:5]] == ["float32", "float32", "bfloat16", "int4", "w8a8-int8"]
    assert all(row["decode_tokens_per_s"] > 0 for row in rows)
    assert "tokens/s" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--scheme", "int-4"])
    assert "did you mean 'int4'" in capsys.readouterr().err


@pytest.mark.parametrize("adds_late", [True, False])
@pytest.mark.parametrize("attention", ["sdpa", "append"])
def test_the_model_of_the_benchmark_is_the_same_with_a_cache_and_without(attention, adds_late):
    from quantfuse.bench._llama import SHAPES, random_llama

    model = random_llama(SHAPES["tiny"], "cpu", torch.float32)
    for layer in model.layers:
        layer.adds_late = adds_late
    model.make_cache(1, 16, attention)
    tokens = torch.randint(0, 256, (1, 9))
    with torch.inference_mode():
        whole = model(tokens, torch.arange(9))
        model(tokens[:, :6], torch.arange(6))
        for position in range(6, 9):
            last = model(tokens[:, position : position + 1], torch.tensor([position]))
    assert torch.equal(last, whole)
