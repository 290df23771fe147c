"""Measure the variants of a case: interleaved, medians, and only what is right has a time."""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch._dynamo

from benchmarks.cases import Case, Variant


@dataclass
class Result:
    """What came of one variant.

    Attributes:
        variant: Its name.
        right: Whether it agreed with eager, None when it was refused.
        microseconds: Median time of a call.
        spread: Half the distance between the quartiles, in microseconds.
        compile_seconds: Time of the first call.
        note: Why it has no time.
    """

    variant: str
    right: bool | None
    microseconds: float | None = None
    spread: float | None = None
    compile_seconds: float = 0.0
    note: str = ""


def progress(text: str) -> None:
    """Show what is going on, on a terminal's one line."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def measure(case: Case, rounds: int = 7, seconds: float = 0.15) -> list[Result]:
    """Measure all variants of a case."""
    torch._dynamo.reset()
    results: list[Result] = []
    runnable: list[tuple[Variant, Result]] = []
    want: Any = None
    with torch.no_grad():
        for variant in case.variants():
            progress(f"{case.name}, {case.size}: {variant.name} (compiling)")
            result, value = first_call(variant)
            results.append(result)
            if value is None:
                continue
            if want is None:
                want = (value, [t.clone() for t in sample(variant.state())])
            result.right = agrees(want, (value, sample(variant.state())), case.tolerance)
            if result.right:
                runnable.append((variant, result))
        times: dict[str, list[float]] = {variant.name: [] for variant, _ in runnable}
        repeats = {}
        for variant, _ in runnable:
            variant.call()
            once = max(timed(variant, 3), 1e-6)
            repeats[variant.name] = max(3, min(2000, int(seconds / rounds / once)))
        for number in range(rounds):
            for variant, _ in runnable:
                progress(f"{case.name}, {case.size}: {variant.name} ({number + 1}/{rounds})")
                times[variant.name].append(timed(variant, repeats[variant.name]))
    for variant, result in runnable:
        samples = sorted(times[variant.name])
        quarter = len(samples) // 4
        result.microseconds = statistics.median(samples) * 1e6
        result.spread = (samples[-1 - quarter] - samples[quarter]) / 2 * 1e6
    progress("")
    return results


def first_call(variant: Variant) -> tuple[Result, Any]:
    start = time.perf_counter()
    try:
        value = variant.call()
    except Exception as error:
        lines = str(error).splitlines()
        reason = next((line for line in lines if "aot_autograd()" in line), lines[0])
        return Result(variant.name, None, note=reason.split(": ")[-1]), None
    value = value.clone()
    return Result(variant.name, None, compile_seconds=time.perf_counter() - start), value


def timed(variant: Variant, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        variant.call()
    return (time.perf_counter() - start) / repeats


def sample(state: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the part of the caches that the steps write, and a little around it."""
    return [tensor[:512].float() for tensor in state]


def agrees(want: Any, got: Any, tolerance: float) -> bool:
    values = [(want[0], got[0]), *zip(want[1], got[1], strict=False)]
    return all(
        torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance, equal_nan=True)
        for a, b in values
    )


def table(case: Case, results: list[Result]) -> str:
    """Return a case's results for people."""
    by_name = {result.variant: result for result in results}
    eager = by_name["eager"].microseconds
    lines = [f"{case.name}, {case.size}"]
    for result in results:
        if result.microseconds is None:
            verdict = "WRONG" if result.right is False else "refused"
            lines.append(f"  {result.variant:<36} {verdict:>8}   {result.note}")
            continue
        ratio = f"{result.microseconds / eager:6.2f} x eager" if eager else ""
        lines.append(
            f"  {result.variant:<36} {'right':>8} {result.microseconds:>12.1f} us  {ratio}"
            f"   (first call {result.compile_seconds:.1f} s)"
        )
    return "\n".join(lines)


def as_record(case: Case, results: list[Result]) -> dict[str, Any]:
    return {"case": case.name, "size": case.size, "results": [asdict(r) for r in results]}
