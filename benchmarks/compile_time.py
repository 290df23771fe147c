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
from collections.abc import Callable
from typing import Any

import torch

import aliasstorage
from benchmarks.cases import small_windows
from examples.hybrid_decode import Geometry, caches_of, make_step

SEPARATE = "stock, separate caches"
VARIANTS = (SEPARATE, "aliasstorage, wrapped")


def hybrid_layers(variant: str, groups: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return ``groups`` times four layers of the hybrid step, and its arguments."""
    geometry, pages = Geometry(), 64
    steps = [make_step(geometry, pages, seed=seed) for seed in range(groups)]
    layout = geometry.windows(pages)
    caches = []
    for _ in range(groups):
        raw = torch.zeros(pages * geometry.page_bytes, dtype=torch.uint8)
        views = {name: window.regenerate(raw) for name, window in layout.items()}
        if variant == SEPARATE:
            caches.append(caches_of(views, copy=torch.clone))
        else:
            caches.append(caches_of(aliasstorage.wrap(views)))

    def model(caches: Any, x: Any, positions: Any) -> Any:
        for step, group in zip(steps, caches, strict=True):
            x = step(group, x, positions)
        return x

    return model, (caches, torch.randn(4, geometry.hidden), torch.tensor([0, 17, 80, 100]))


def cache_operations(
    variant: str, windows: int, operations: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function of many windows and many reads and writes, and its arguments."""
    specs = small_windows(windows)
    raw = torch.zeros(specs[-1].span[1], dtype=torch.uint8)
    caches = [spec.regenerate(raw) for spec in specs]
    caches = [c.clone() for c in caches] if variant == SEPARATE else aliasstorage.wrap(caches)

    def model(caches: Any, x: Any, slot: Any) -> Any:
        for number in range(operations):
            cache = caches[number % windows]
            if number % 3 == 2:
                x = x + cache[slot].float()
            else:
                cache[slot] = x.to(cache.dtype)
        return x

    return model, (caches, torch.randn(1, 16), torch.tensor([1]))


def compile_once(variant: str, groups: int, windows: int, operations: int) -> float:
    """Return the seconds of the first call."""
    if windows:
        model, args = cache_operations(variant, windows, operations)
    else:
        model, args = hybrid_layers(variant, groups)
    # What the first compilation of a process pays once, whatever it compiles.
    torch.compile(lambda x: x + 1)(torch.ones(2))
    options = {} if variant == SEPARATE else {"backend": "aliasstorage"}
    compiled = torch.compile(model, fullgraph=True, **options)
    with torch.no_grad():
        start = time.perf_counter()
        compiled(*args)
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=1, help="times four layers")
    parser.add_argument("--windows", type=int, default=0, help="measure many small windows")
    parser.add_argument("--operations", type=int, default=300, help="reads and writes of them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--once", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        print(
            compile_once(arguments.once, arguments.groups, arguments.windows, arguments.operations)
        )
        return
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(arguments.rounds):
        for variant in VARIANTS:
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-m", "benchmarks.compile_time"]
                command += ["--once", variant, "--groups", str(arguments.groups)]
                command += ["--windows", str(arguments.windows)]
                command += ["--operations", str(arguments.operations)]
                environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
                output = subprocess.run(
                    command, env=environment, check=True, capture_output=True, text=True
                ).stdout
                seconds[variant].append(float(output.splitlines()[-1]))
    separate = statistics.median(seconds[SEPARATE])
    for variant, values in seconds.items():
        median = statistics.median(values)
        print(f"{variant:<28} {median:6.1f} s   {median / separate:.2f} x separate caches")


if __name__ == "__main__":
    main()
