"""Measure the variants of a case: interleaved, medians, and only what is right has a time."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch
import torch._dynamo
from torch.utils.benchmark import Measurement, Timer
from tqdm import tqdm

import aliasstorage
from benchmarks.cases import DEVICE, Case, Variant

Item = TypeVar("Item")


@dataclass
class Result:
    """What came of one variant.

    Attributes:
        variant: Its name.
        right: Whether it agreed with the first variant, None when it was refused.
        microseconds: Median time of a call.
        spread: Distance between the quartiles, in microseconds.
        ratio: Median over the rounds of its time over the baseline's in the same round.
        ratio_spread: Distance between the quartiles of that ratio.
        compile_seconds: Time of the first call.
        note: Why it has no time.
    """

    variant: str
    right: bool | None
    microseconds: float | None = None
    spread: float | None = None
    ratio: float | None = None
    ratio_spread: float | None = None
    compile_seconds: float = 0.0
    note: str = ""


@dataclass
class Measured:
    """A case and the results of its variants."""

    case: Case
    results: list[Result] = field(default_factory=list)

    @property
    def baseline(self) -> str:
        return self.case.baseline or self.results[0].variant

    def as_record(self) -> dict[str, Any]:
        return {
            "case": self.case.name,
            "size": self.case.size,
            "baseline": self.baseline,
            "results": [asdict(result) for result in self.results],
        }

    def __str__(self) -> str:
        lines = [f"{self.case.name}, {self.case.size} (x: times {self.baseline})"]
        for result in self.results:
            if result.microseconds is None:
                verdict = "WRONG" if result.right is False else "refused"
                lines.append(f"  {result.variant:<34} {verdict:>8}   {result.note}")
                continue
            ratio = "" if result.ratio is None else f"{result.ratio:8.2f} x"
            lines.append(
                f"  {result.variant:<34} {'right':>8} {result.microseconds:>12.1f} us {ratio}"
                f"   (first call {result.compile_seconds:.1f} s)"
            )
        return "\n".join(lines)


def measure(case: Case, rounds: int = 9, seconds: float = 0.1) -> Measured:
    """Measure all variants of a case, each for ``seconds`` in all."""
    torch._dynamo.reset()
    torch.set_default_device(None if DEVICE.type == "cpu" else DEVICE)
    variants = list(case.variants())
    torch.set_default_device(None)  # a mode that every call of a tensor's method would pay for
    measured = Measured(case)
    timers: dict[str, Timer] = {}
    want: Any = None
    title = f"{case.name}, {case.size}"
    with torch.no_grad():
        for variant in progress(variants, f"{title}: compiling", [v.name for v in variants]):
            result, value = first_call(variant)
            measured.results.append(result)
            if value is None:
                continue
            if want is None:
                want = (value, [t.clone() for t in sample(variant.state())])
            result.right = agrees(want, (value, sample(variant.state())), case.tolerance)
            if result.right:
                # With as many threads as before, which are a guard of the compiled graph.
                timers[variant.name] = Timer(
                    "call()", globals={"call": variant.call}, num_threads=torch.get_num_threads()
                )
        calls = {
            name: max(3, min(5000, int(seconds / rounds / max(timer.timeit(3).median, 1e-6))))
            for name, timer in timers.items()
        }
        times: dict[str, list[Measurement]] = {name: [] for name in timers}
        for _ in progress(range(rounds), title):
            for name, timer in timers.items():
                times[name].append(timer.timeit(calls[name]))
    against = times.get(measured.baseline)
    for result in measured.results:
        mine = times.get(result.variant)
        if mine is None:
            continue
        result.microseconds, result.spread = middle(m.median * 1e6 for m in mine)
        if against is not None:
            pairs = zip(mine, against, strict=True)
            result.ratio, result.ratio_spread = middle(a.median / b.median for a, b in pairs)
    return measured


def progress(items: Iterable[Item], title: str, names: Sequence[str] = ()) -> Iterator[Item]:
    """Yield items behind a bar whose clock goes on while one of them takes long."""
    done = threading.Event()
    with tqdm(items, title, leave=False) as bar:

        def tick() -> None:
            while not done.wait(2):
                bar.refresh()

        threading.Thread(target=tick, daemon=True).start()
        try:
            for number, item in enumerate(bar):
                if names:
                    bar.set_postfix_str(names[number])
                yield item
        finally:
            done.set()


def middle(values: Iterable[float]) -> tuple[float, float]:
    """Return the median, and the distance between the quartiles."""
    quartiles = torch.tensor(list(values), dtype=torch.float64, device="cpu").quantile(
        torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64, device="cpu")
    )
    low, median, high = quartiles.tolist()
    return median, high - low


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


def sample(state: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the part of the caches that the steps write, and a little around it."""
    return [tensor[:512].float() for tensor in state]


def agrees(want: Any, got: Any, tolerance: float) -> bool:
    values = [(want[0], got[0]), *zip(want[1], got[1], strict=False)]
    return all(
        torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance, equal_nan=True)
        for a, b in values
    )


def machine() -> dict[str, Any]:
    """Return where and with what a measurement was made."""
    name = torch.cuda.get_device_name(DEVICE) if DEVICE.type == "cuda" else processor()
    return {
        "device": name,
        "torch": torch.__version__,
        "aliasstorage": aliasstorage.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":")[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
