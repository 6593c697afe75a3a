# SPDX-License-Identifier: Apache-2.0
"""Small models of the families, made from their configs."""

import torch
import transformers

SIZES = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FAMILIES = ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Gemma2", "Gemma3Text", "GPT2")


def tiny(family, **changes):
    torch.manual_seed(0)
    if family == "GPT2":
        config = transformers.GPT2Config(
            vocab_size=96, n_embd=128, n_layer=2, n_head=4, n_positions=128, **changes
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = getattr(transformers, f"{family}Config")(**{**SIZES, "head_dim": 32, **changes})
        name = {"Gemma3Text": "Gemma3"}.get(family, family)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases that are not all one or zero
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def token_ids(rows=2, cols=10):
    return torch.randint(0, 96, (rows, cols), generator=torch.Generator().manual_seed(1))
