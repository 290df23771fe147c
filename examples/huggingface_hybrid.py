"""Run a Hugging Face hybrid model with its whole cache in one storage.

The model is not changed and nothing is downloaded: a tiny Qwen3-Next with random weights. Its
StaticCache holds convolution states, float32 recurrent states, keys, values and int64 lengths;
after the prefill, `aliasstorage.consolidate_` moves them all into one `ByteStorage`, and the
decode step is compiled.

    python -m examples.huggingface_hybrid --slots 512
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import aliasstorage

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

Step = Callable[[torch.Tensor, Any], torch.Tensor]


def qwen3_next(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Return a tiny Qwen3-Next: three gated-delta-net layers and a softmax-attention one."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    config = Qwen3NextConfig(
        **SIZES,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        mlp_only_layers=[0, 1, 2, 3],  # routing to experts depends on data, and breaks graphs
        num_experts=4,
        num_experts_per_tok=2,
    )
    return Qwen3NextForCausalLM(config).to(dtype).eval()


def lfm2(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Return a tiny LFM2: short convolutions, with one state each, and softmax attention."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    torch.manual_seed(0)
    config = Lfm2Config(
        **SIZES,
        layer_types=["conv", "conv", "full_attention", "conv"],
    )
    return Lfm2ForCausalLM(config).to(dtype).eval()


MODELS = {"qwen3_next": qwen3_next, "lfm2": lfm2}


def prefill(model: torch.nn.Module, prompt: torch.Tensor, slots: int) -> tuple[Any, torch.Tensor]:
    """Run the prompt eagerly; return the cache and the next token of each sequence."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=slots)
    with torch.no_grad():
        logits = model(input_ids=prompt, past_key_values=cache, use_cache=True).logits
    return cache, logits[:, -1:].argmax(-1)


def decode_step(model: torch.nn.Module) -> Step:
    """Return the step that is compiled: one token of each sequence, to its logits."""

    def step(token: torch.Tensor, cache: Any) -> torch.Tensor:
        return model(input_ids=token, past_key_values=cache, use_cache=True).logits

    return step


def decode(step: Step, cache: Any, token: torch.Tensor, count: int) -> tuple[Any, torch.Tensor]:
    """Return ``count`` more tokens, greedily, and their logits."""
    tokens, logits = [], []
    with torch.no_grad():
        for _ in range(count):
            logits.append(step(token, cache))
            token = logits[-1][:, -1:].argmax(-1)
            tokens.append(token)
    return torch.cat(tokens, 1), torch.cat(logits, 1)


def main() -> None:
    """Decode with the model's own tensors and with one storage, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="qwen3_next")
    parser.add_argument("--slots", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    model = MODELS[arguments.model]()
    prompt = torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(0))
    variants = {
        "stock torch.compile, the model's own tensors": {},
        "aliasstorage, one storage": {"backend": "aliasstorage"},
    }
    # Before anything large is freed, so that each lies as in a process of its own.
    caches = {name: prefill(model, prompt, arguments.slots) for name in variants}
    want, _ = decode(decode_step(model), *prefill(model, prompt, arguments.slots), 8)
    times: dict[str, list[float]] = {name: [] for name in variants}
    running = {}
    for name, options in variants.items():
        step = torch.compile(decode_step(model), **options)
        cache, token = caches.pop(name)
        if options:
            storage = aliasstorage.consolidate_(cache)
        got, _ = decode(step, cache, token, 8)
        if not torch.equal(want, got):
            raise SystemExit(f"{name}: other tokens than the eager model")
        running[name] = (step, cache, got[:, -1:].clone())
    print(f"{arguments.model}, {arguments.slots} slots, {storage.nbytes / 2**20:.1f} MiB of cache")
    for number in range(arguments.rounds):  # interleaved, in both orders: machines are noisy
        for name in list(running)[:: 1 if number % 2 else -1]:
            step, cache, token = running[name]
            start = time.perf_counter()
            decode(step, cache, token, 10)
            times[name].append((time.perf_counter() - start) / 10 * 1e6)
    for name, measured in times.items():
        median = statistics.median(measured)
        print(f"  {name:<46} same tokens as eager, {median:8.0f} us a step")
    stock, ours = times.values()
    ratios = [b / a for a, b in zip(stock, ours, strict=True)]
    print(f"  ratio, of the two in one round: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
