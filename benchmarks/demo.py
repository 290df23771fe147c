"""The main job, in a minute or two: what is right, and how fast, against the alternatives."""

from __future__ import annotations

import torch

from benchmarks.cases import MIB, hybrid, token_write
from benchmarks.measure import measure


def main() -> None:
    print("Two caches of different dtypes in one buffer, and a token written to each:\n")
    print(measure(token_write(64 * MIB, by_hand=True)), flush=True)
    print("\nA hybrid decode step: three linear-attention layers and one attention layer whose")
    print("bfloat16 and float32 caches are the same bytes (compiles for a while):\n")
    print(measure(hybrid(140 * MIB)), flush=True)
    print(f"\ntorch {torch.__version__}, {torch.get_num_threads()} threads. 'right' means that the")
    print("result and the caches agree with eager PyTorch on plain views of the same bytes.")


if __name__ == "__main__":
    main()
