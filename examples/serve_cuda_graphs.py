# SPDX-License-Identifier: Apache-2.0
"""A serving loop on a GPU: a compiled INT4 model, a static cache, and one CUDA graph a step of decoding.

    python examples/serve_cuda_graphs.py

Random weights; needs torch with CUDA and transformers.
"""

import torch
import transformers

import quantfuse as qf
from quantfuse.integrations.transformers import DECODING

BATCH, CONTEXT, PROMPT = 4, 256, 32


@torch.inference_mode()
def main(tokens: int = 64) -> torch.Tensor:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).bfloat16().eval()
    qf.quantize_model(model, "int4")
    model.set_attn_implementation(DECODING)  # SDPA would copy the cache for every query head
    forward = torch.compile(model, fullgraph=True, dynamic=False, options=qf.compile_options())

    # The prompt, as it comes, into a cache whose memory never moves.
    prompt = torch.randint(0, 1024, (BATCH, PROMPT), device="cuda")
    cache = transformers.StaticCache(config=config, max_cache_len=CONTEXT)
    positions = torch.arange(PROMPT, device="cuda")
    first = model(prompt, past_key_values=cache, position_ids=positions[None]).logits[:, -1:].argmax(-1)

    # One step reads `token` and `position` and leaves the next ones there.
    token, position = first.clone(), torch.tensor([[PROMPT]], device="cuda")
    produced = [first]

    def step() -> None:
        logits = forward(token, past_key_values=cache, position_ids=position).logits
        token.copy_(logits[:, -1:].argmax(-1))
        position.add_(1)

    run = captured(step)
    for _ in range(tokens):
        run()
        produced.append(token.clone())
    return torch.cat(produced, dim=1)


def captured(step):
    """``step`` as a graph. Two steps ahead of it compile, and allocate what a capture must not."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


if __name__ == "__main__":
    print(main())
