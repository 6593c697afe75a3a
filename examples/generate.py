# SPDX-License-Identifier: Apache-2.0
"""Text from a quantized model on the CPU, token by token.

    python examples/generate.py MODEL_FOLDER "Once upon a time"

Without a folder it takes a small model with random weights, whose text is as random. Needs torch and
transformers.
"""

import sys
import time

import torch
import transformers

import quantfuse as qf


def load(folder: str | None) -> tuple[torch.nn.Module, transformers.PreTrainedTokenizerBase | None]:
    if folder is not None:
        # Quantizes while it loads: the model never exists unquantized.
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=qf.QuantFuseConfig("int4")
        )
        return model, transformers.AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4
    )
    return qf.quantize_model(transformers.LlamaForCausalLM(config), "int4"), None


@torch.inference_mode()
def main(folder: str | None = None, prompt: str = "Once upon a time", max_new_tokens: int = 48) -> list[int]:
    model, tokenizer = load(folder)
    print(str(model.quantfuse_summary).splitlines()[-2])
    ids = (
        tokenizer(prompt, return_tensors="pt").input_ids if tokenizer else torch.tensor([[*prompt.encode()]])
    )

    written: list[int] = []
    cache = None
    start = time.perf_counter()
    for _ in range(max_new_tokens):
        output = model(ids, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        ids = output.logits[:, -1:].argmax(-1)
        written.append(int(ids))
        print(tokenizer.decode(written[-1:]) if tokenizer else f"{written[-1]} ", end="", flush=True)
    print(f"\n{len(written) / (time.perf_counter() - start):.1f} tokens/s")
    return written


if __name__ == "__main__":
    main(*sys.argv[1:3])
