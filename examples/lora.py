# SPDX-License-Identifier: Apache-2.0
"""An adapter over a frozen INT4 model, trained by PEFT on a CPU: it learns one line of text by heart.

    python examples/lora.py

Needs torch, transformers and peft.
"""

import peft
import torch
import transformers

import quantfuse as qf

TEXT = "the quick brown fox jumps over the lazy dog. "


def main(steps: int = 30) -> float:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
    )
    model = transformers.LlamaForCausalLM(config)

    # Adapters go onto q_proj, v_proj and so on, each of which stays a layer of its own with fuse=False.
    qf.quantize_model(model, qf.Scheme("int4", group=32), fuse=False)
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
    model = peft.get_peft_model(model, lora)
    model.print_trainable_parameters()

    ids = torch.tensor([[ord(c) for c in TEXT * 2]])
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    for step in range(steps):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}")

    with torch.no_grad():
        final = model(ids, labels=ids).loss.item()
    written = model.generate(ids[:, : len(TEXT) + 4], max_new_tokens=20, do_sample=False, pad_token_id=0)
    print(f"loss {final:.3f}; it goes on: {''.join(map(chr, written[0].tolist()))!r}")
    return final


if __name__ == "__main__":
    main()
