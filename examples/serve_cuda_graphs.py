# SPDX-License-Identifier: Apache-2.0
"""A serving loop on a GPU: an INT4 model, a static cache, and one CUDA graph for every step of decoding.

    python examples/serve_cuda_graphs.py

Random weights; needs torch with CUDA and transformers.
"""

import torch
import transformers

import quantfuse as qf

BATCH, CONTEXT = 4, 256


@torch.inference_mode()
def main(tokens: int = 64) -> bool:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8
    )
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).bfloat16().eval()
    qf.quantize_model(model, "int4")

    # The prompt, as it comes, into a cache whose memory never moves.
    prompt = torch.randint(0, 1024, (BATCH, 32), device="cuda")
    cache = transformers.StaticCache(config=config, max_cache_len=CONTEXT)
    positions = torch.arange(32, device="cuda")
    first = model(prompt, past_key_values=cache, position_ids=positions[None]).logits[:, -1:].argmax(-1)

    # One step reads `token` and `position` and leaves the next ones there.
    token, position = first.clone(), torch.tensor([[32]], device="cuda")

    def step() -> None:
        logits = model(token, past_key_values=cache, position_ids=position).logits
        token.copy_(logits[:, -1:].argmax(-1))
        position.add_(1)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # allocates what a capture must not
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(tokens):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    print(f"{BATCH * tokens / start.elapsed_time(end) * 1e3:.0f} tokens/s for {BATCH} sequences")
    return bool((token >= 0).all())


if __name__ == "__main__":
    main()
