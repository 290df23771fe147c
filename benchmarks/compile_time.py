"""Compile time against separately allocated caches: ``python -m benchmarks.compile_time``.

Each variant compiles in a process of its own with an empty cache, several times, interleaved.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch

VARIANTS = ("stock, separate caches", "aliasstorage, wrapped")


def compile_once(variant: str, groups: int) -> float:
    """Compile ``groups`` times four layers, and return the seconds of the first call."""
    import aliasstorage
    from examples.hybrid_decode import Geometry, caches_of, make_step

    geometry, pages = Geometry(), 64
    steps = [make_step(geometry, pages, seed=seed) for seed in range(groups)]
    layout = geometry.windows(pages)
    caches = []
    for _ in range(groups):
        raw = torch.zeros(pages * geometry.page_bytes, dtype=torch.uint8)
        views = {name: window.regenerate(raw) for name, window in layout.items()}
        if variant == VARIANTS[0]:
            caches.append(caches_of(views, copy=torch.clone))
        else:
            caches.append(caches_of(aliasstorage.wrap(views)))

    def model(caches, x, positions):
        for step, group in zip(steps, caches, strict=True):
            x = step(group, x, positions)
        return x

    # What the first compilation of a process pays once, whatever it compiles.
    torch.compile(lambda x: x + 1)(torch.ones(2))
    options = {} if variant == VARIANTS[0] else {"backend": "aliasstorage"}
    compiled = torch.compile(model, fullgraph=True, **options)
    x, positions = torch.randn(4, geometry.hidden), torch.tensor([0, 17, 80, 100])
    with torch.no_grad():
        start = time.perf_counter()
        compiled(caches, x, positions)
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=1, help="times four layers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--once", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        print(compile_once(arguments.once, arguments.groups))
        return
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(arguments.rounds):
        for variant in VARIANTS:
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-m", "benchmarks.compile_time"]
                command += ["--once", variant, "--groups", str(arguments.groups)]
                environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
                output = subprocess.run(
                    command, env=environment, check=True, capture_output=True, text=True
                ).stdout
                seconds[variant].append(float(output.splitlines()[-1]))
    separate = statistics.median(seconds[VARIANTS[0]])
    for variant, values in seconds.items():
        median = statistics.median(values)
        print(f"{variant:<28} {median:6.1f} s   {median / separate:.2f} x separate caches")


if __name__ == "__main__":
    main()
