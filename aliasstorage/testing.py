"""A conformance kit for authors of backends and devices.

    python -m aliasstorage.testing my_backend --device my_device --import my_package

runs each case in a process of its own and prints what was right, which bytes differ, and what is
unsupported. `check_backend` does the same in one process, for a callable backend.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from aliasstorage.compilation.backend import backend
from aliasstorage.windows.overlap import overlaps
from aliasstorage.windows.window import Window

Verdict = Literal["right", "differs", "unsupported", "crashed"]

ROWS = (1, 3)


@dataclass(frozen=True)
class Case:
    """A function on windows of one storage.

    Attributes:
        name: Its name.
        nbytes: Length of the storage, in bytes.
        windows: The windows that the function takes.
        function: Takes the windows and a row index, and returns a tensor or a tuple of them.
            What it writes is exact in its dtype, so that buffers are compared as bytes.
    """

    name: str
    nbytes: int
    windows: tuple[Window, ...]
    function: Callable[..., Any]


@dataclass(frozen=True)
class Outcome:
    """What came of a case."""

    case: str
    verdict: Verdict
    detail: str = ""


@dataclass(frozen=True)
class Conformance:
    """The outcomes of all cases; ``str`` gives a table."""

    backend: str
    outcomes: tuple[Outcome, ...]

    @property
    def sound(self) -> bool:
        """Whether nothing was silently wrong."""
        return not any(outcome.verdict == "differs" for outcome in self.outcomes)

    def __str__(self) -> str:
        count = sum(outcome.verdict == "right" for outcome in self.outcomes)
        lines = [f"{self.backend}: {count} of {len(self.outcomes)} right"]
        for outcome in self.outcomes:
            lines.append(f"  {outcome.verdict:<12} {outcome.case:<28} {outcome.detail}".rstrip())
        return "\n".join(lines)


CASES: dict[str, Case] = {}


def _case(nbytes: int, *windows: Window) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__.replace("_", " ")
        CASES[name] = Case(name, nbytes, windows, function)
        return function

    return register


_HALF = Window(torch.float16, (16, 32))
_FLOAT = Window(torch.float32, (16, 16))


@_case(2048, _HALF, Window(torch.float32, (16, 16), byte_offset=1024))
def two_dtypes(a: Any, b: Any, rows: Any) -> Any:
    a[rows] = 1
    b[rows] = b[rows] * 0 + 2
    return a[rows].float(), b[rows] * 2


@_case(1024, _HALF, _FLOAT)
def a_write_is_read_in_another_dtype(a: Any, b: Any, rows: Any) -> Any:
    a.fill_(2)
    return b * 1


@_case(1024, _HALF, _FLOAT)
def reads_and_writes_in_turns(a: Any, b: Any, rows: Any) -> Any:
    before = b[rows] * 1
    a[rows] = 3
    between = b[rows] * 1
    b.mul_(0)
    return before, between, a.float() + 1


@_case(2048, Window(torch.float16, (8, 4, 32), (128, 32, 1)), Window(torch.float32, (8, 4, 8), (64, 16, 1), byte_offset=8))  # fmt: skip  # noqa: E501
def overlapping_lattices(a: Any, b: Any, rows: Any) -> Any:
    b[rows] = 5
    return a[rows].float() * 1


@_case(2048, Window(torch.float16, (8, 4, 16), (128, 32, 1)), Window(torch.float16, (8, 4, 16), (128, 32, 1), byte_offset=32))  # fmt: skip  # noqa: E501
def interleaved_keys_and_values(k: Any, v: Any, rows: Any) -> Any:
    k[rows] = 1
    v[rows] = 2
    return (k[rows] * v[rows]).float()


@_case(2304, Window(torch.int8, (32, 64), (72, 1)), Window(torch.float32, (32,), (18,), byte_offset=64))  # fmt: skip  # noqa: E501
def values_with_scales(values: Any, scales: Any, rows: Any) -> Any:
    scales[rows] = 0.5
    values[rows] = 7
    return values[rows].float() * scales[rows].unsqueeze(-1)


@_case(1024, Window(torch.uint8, (16, 64)), Window(torch.float8_e4m3fn, (16, 64)))
def float8_over_bytes(raw: Any, cache: Any, rows: Any) -> Any:
    raw[rows] = 56
    return cache[rows].float()


@_case(512, Window(torch.int64, (16,)), Window(torch.float32, (32,), byte_offset=128))
def lengths(length: Any, values: Any, rows: Any) -> Any:
    length.fill_(3)
    length.add_(1)
    values.mul_(0)
    return length * 2


@_case(512, Window(torch.float64, (16,)), Window(torch.float32, (32,), byte_offset=128))
def doubles(wide: Any, values: Any, rows: Any) -> Any:
    wide.fill_(0.1)
    values.mul_(0)
    return wide * 3


@_case(512, Window(torch.bool, (64,)), Window(torch.uint8, (512,)))
def bools(flags: Any, raw: Any, rows: Any) -> Any:
    flags[rows] = True
    return raw[:8] + 1


@_case(512, Window(torch.complex64, (16,)), Window(torch.float32, (32,), byte_offset=128))
def complex_numbers(numbers: Any, values: Any, rows: Any) -> Any:
    numbers.fill_(2)
    values.mul_(0)
    return torch.view_as_real(numbers * 1)


@_case(1024, _HALF, Window(torch.uint8, (16, 64)))
def blocks_are_copied(a: Any, raw: Any, rows: Any) -> Any:
    a[0:2] = a[4:6].clone()
    raw[7] = raw[0]
    return a[7].float()


# Three states of a hybrid model's page, and the keys and values over them.
_PAGE = 1024


@_case(
    6 * _PAGE,
    Window(torch.float32, (6, 2, 8, 16)),
    Window(torch.float32, (6, 3, 16), (_PAGE // 4, 16, 1)),
    Window(torch.float16, (6, 4, 8, 8), (_PAGE // 2, 64, 8, 1), byte_offset=192),
)
def hybrid_step(kv: Any, conv: Any, state: Any, rows: Any) -> Any:
    x = conv[rows] * 0 + 1
    conv[rows] = torch.cat([x[:, 1:], x[:, :1] + 1], 1)
    state[rows] = state[rows] * 0 + 2
    kv[4:5, 0, 3] = 3
    return conv[rows].sum(1), state[rows].float().sum(-1), kv[4, :, 3]


def check_backend(
    inner: Any,
    *,
    device: str = "cpu",
    form: str | None = None,
    cases: Sequence[str] | None = None,
) -> Conformance:
    """Run the cases on a backend, in this process.

    Args:
        inner: A backend's name, or a callable, as for `aliasstorage.backend`.
        device: Where the storages lie.
        form: The form that the backend is given; its default when omitted.
        cases: Names of cases; all of them when omitted.

    Examples:
        >>> from aliasstorage.testing import check_backend
        >>> print(check_backend("eager", cases=["two dtypes", "lengths"]))
        eager: 2 of 2 right
          right        two dtypes
          right        lengths
    """
    outcomes = [_run(CASES[name], inner, device, form) for name in cases or CASES]
    return Conformance(_title(inner, device, form), tuple(outcomes))


def _title(inner: Any, device: str, form: str | None) -> str:
    name = inner if isinstance(inner, str) else getattr(inner, "__name__", repr(inner))
    on = "" if device == "cpu" else f" on {device}"
    return name + on + (f", form {form}" if form else "")


def _run(case: Case, inner: Any, device: str, form: str | None) -> Outcome:
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 0x3F, (case.nbytes,), dtype=torch.uint8, generator=generator)
    want_raw, got_raw = raw.clone(), raw.to(device)
    rows = torch.tensor(ROWS)
    options = {} if form is None else {"form": form}
    with torch.no_grad():
        views = [window.regenerate(want_raw) for window in case.windows]
        want = _flat(case.function(*views, rows))
        try:
            torch.compiler.reset()
            compiled = torch.compile(case.function, backend=backend(inner, **options))
            views = [window.regenerate(got_raw) for window in case.windows]
            got = [t.cpu().clone() for t in _flat(compiled(*views, rows.to(device)))]
            got_raw = got_raw.cpu()
        except Exception as error:  # a backend may raise anything
            return Outcome(case.name, "unsupported", _reason(error))
    wrong = (want_raw != got_raw).nonzero().flatten().tolist()
    if wrong:
        return Outcome(case.name, "differs", _where(case, wrong))
    for number, (left, right) in enumerate(zip(want, got, strict=True)):
        if not torch.allclose(left, right, rtol=1e-3, atol=1e-5, equal_nan=True):
            return Outcome(case.name, "differs", f"result {number}; the storage is right")
    return Outcome(case.name, "right")


def _flat(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _reason(error: Exception) -> str:
    inner = getattr(error, "inner_exception", None) or error
    lines = str(inner).strip().splitlines() or [""]
    return f"{type(inner).__name__}: {lines[0][:90]}"


def _where(case: Case, wrong: Sequence[int]) -> str:
    first = Window(torch.uint8, (1,), byte_offset=wrong[0])
    inside = [f"window {i}" for i, w in enumerate(case.windows) if overlaps(w, first)]
    return f"{len(wrong)} bytes, from byte {wrong[0]} on, in {' and '.join(inside) or 'no window'}"


def _run_alone(name: str, arguments: argparse.Namespace) -> Outcome:
    command = [sys.executable, "-m", "aliasstorage.testing", arguments.backend, "--only", name]
    command += ["--device", arguments.device]
    command += ["--form", arguments.form] if arguments.form else []
    for module in arguments.imports:
        command += ["--import", module]
    try:
        done = subprocess.run(  # noqa: S603  (this module, with the caller's own arguments)
            command, capture_output=True, text=True, timeout=arguments.timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return Outcome(name, "crashed", f"no answer in {arguments.timeout} s")
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            return Outcome(**json.loads(line))
    return Outcome(name, "crashed", f"the process ended with {done.returncode}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases, each in a process of its own; return 1 if one is silently wrong."""
    parser = argparse.ArgumentParser(prog="python -m aliasstorage.testing", description=__doc__)
    parser.add_argument("backend", help="a backend's name")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--form", help="windows, bytes, slices or arrays")
    parser.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for a case")
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON")
    parser.add_argument("--only", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.only:
        for module in arguments.imports:
            importlib.import_module(module)
        case = CASES[arguments.only]
        outcome = _run(case, arguments.backend, arguments.device, arguments.form)
        print(json.dumps(vars(outcome)))
        return 0
    outcomes = tuple(_run_alone(name, arguments) for name in CASES)
    title = _title(arguments.backend, arguments.device, arguments.form)
    conformance = Conformance(title, outcomes)
    print(json.dumps([vars(o) for o in outcomes]) if arguments.json else conformance)
    return 0 if conformance.sound else 1


if __name__ == "__main__":
    sys.exit(main())
