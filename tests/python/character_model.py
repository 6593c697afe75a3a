# SPDX-License-Identifier: Apache-2.0
"""A small Llama, trained on the spot to predict the characters of the Python standard library's sources.

Random weights cannot tell a good quantization from a bad one: all methods give noise. This model knows its
text well enough for perplexity to show a difference, and hidden size 256 gives two groups of 128 to a row.
The same Python, torch and number of threads give the same model. `python tests/python/character_model.py`
trains it; tests call `trained_character_model()`, which does so once and keeps it under build/.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import torch
import transformers

VOCABULARY = ["\n", *(chr(code) for code in range(32, 127))]
TRAINING = {"steps": 1200, "batch": 8, "length": 128, "lr": 3e-3, "seed": 20240607}
CONFIG = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
_PARTS = {5: "calibration", 7: "held_out"}  # of every ten files; the others are trained on
_CACHE = Path(__file__).resolve().parents[2] / "build" / "character_model"


@functools.cache
def _sources(part: str) -> str:
    """The text of one part of the standard library's top-level modules: "train", "calibration", "held_out".
    No file is in two parts."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    chosen = [path for i, path in enumerate(paths) if _PARTS.get(i % 10, "train") == part]
    keep = set(VOCABULARY)
    text = "\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in chosen)
    return "".join(c for c in text if c in keep)


def tokens(part: str, count: int) -> torch.Tensor:
    """The first ``count`` characters of a part, as token ids ``[count]``."""
    index = {c: i for i, c in enumerate(VOCABULARY)}
    text = _sources(part)[:count]
    if len(text) < count:
        raise ValueError(f"{part} has {len(text)} characters, fewer than {count}")
    return torch.tensor([index[c] for c in text])


def calibration_tokens(sequences: int = 64, length: int = 128) -> torch.Tensor:
    """Token ids ``[sequences, length]`` that the model was neither trained nor is measured on."""
    return tokens("calibration", sequences * length).reshape(sequences, length)


def _held_out(sequences: int, length: int = TRAINING["length"]) -> torch.Tensor:
    return tokens("held_out", sequences * length).reshape(sequences, length)


@torch.inference_mode()
def log_probabilities(model: torch.nn.Module, sequences: int = 512) -> list[torch.Tensor]:
    """Of every next character of held-out text, cut into sequences as long as those of the training."""
    return [model(batch).logits.float().log_softmax(-1) for batch in _held_out(sequences).split(32)]


def measures(own: list[torch.Tensor], exact: list[torch.Tensor]) -> dict[str, float]:
    """Of :func:`log_probabilities`: the perplexity, and the mean Kullback-Leibler divergence, in nats a
    character, from those of the exact model. A perplexity may fall by chance where rounding happens to move
    predictions the right way for this text; the divergence is zero for equal models alone."""
    batches = _held_out(32 * len(own)).split(32)
    losses = [-q[:, :-1].gather(2, b[:, 1:, None]).mean() for q, b in zip(own, batches, strict=True)]
    divergences = [(p.exp() * (p - q)).sum(-1).mean() for p, q in zip(exact, own, strict=True)]
    return {
        "perplexity": float(torch.stack(losses).mean().exp()),
        "divergence": float(torch.stack(divergences).mean()),
    }


def perplexity(model: torch.nn.Module, sequences: int = 512) -> float:
    """Of held-out text."""
    own = log_probabilities(model, sequences)
    return measures(own, own)["perplexity"]


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a character: a byte-pair encoding without pairs."""
    from tokenizers import Tokenizer, models

    vocabulary = {c: i for i, c in enumerate(VOCABULARY)}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    )


def train_character_model(out_dir: Path, *, progress: bool = False) -> Path:
    """Trains the model and saves it with its tokenizer as a Transformers folder, in a few
    minutes. The folder appears whole or not at all."""
    random_state = torch.random.get_rng_state()
    torch.manual_seed(TRAINING["seed"])
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    text = torch.tensor([VOCABULARY.index(c) for c in _sources("train")])
    length, steps = TRAINING["length"], TRAINING["steps"]

    # Norms and the embedding are not decayed; the rest is, so that weights do not drift apart in size.
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not q for q in matrices)]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=TRAINING["lr"],
        betas=(0.9, 0.95),
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, TRAINING["lr"], total_steps=steps, pct_start=0.1, final_div_factor=100
    )
    started = time.monotonic()
    for step in range(steps):
        starts = torch.randint(len(text) - length, (TRAINING["batch"],))
        batch = torch.stack([text[s : s + length] for s in starts.tolist()])
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if progress and step % 50 == 49:
            print(
                f"step {step + 1}/{steps}  loss {loss.item():.3f}  {time.monotonic() - started:.0f} s",
                flush=True,
            )
    torch.random.set_rng_state(random_state)

    out_dir.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(dir=out_dir.parent))
    model.eval().save_pretrained(beside)
    tokenizer().save_pretrained(beside)
    (beside / "training.json").write_text(_identity())
    shutil.rmtree(out_dir, ignore_errors=True)
    os.replace(beside, out_dir)
    return out_dir


def _identity() -> str:
    """What the cached model must agree with to be used again."""
    return json.dumps({"config": CONFIG, "training": TRAINING, "python": sys.version_info[:2]})


def trained_character_model() -> Path:
    """The folder of the trained model; trains it where build/ has none."""
    marker = _CACHE / "training.json"
    if not marker.exists() or marker.read_text() != _identity():
        train_character_model(_CACHE)
    return _CACHE


if __name__ == "__main__":
    folder = train_character_model(_CACHE, progress=True)
    trained = transformers.LlamaForCausalLM.from_pretrained(folder)
    print(f"{folder}: held-out perplexity {perplexity(trained):.3f}")
