"""What is measured: each case in several variants, with the check that makes a time count.

A variant is set up once and then called many times. Its `check` compares one call with eager
PyTorch on plain typed views of the same bytes; a variant that is wrong, or refused, has no time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

import aliasstorage
from aliasstorage import Window
from examples.hybrid_decode import Geometry, caches_of, make_step

MIB = 1 << 20

# Where buffers and inputs are made; ``--device`` sets it, before the cases are.
DEVICE = torch.device(os.environ.get("BENCHMARK_DEVICE", "cpu"))
if DEVICE.type != "cpu":
    torch.set_default_device(DEVICE)


@dataclass
class Variant:
    """One way to run a case.

    Attributes:
        name: What it is.
        call: Runs one step.
        state: Returns the bytes of the caches, comparable between variants.
    """

    name: str
    call: Callable[[], Any]
    state: Callable[[], list[torch.Tensor]]


@dataclass
class Case:
    """A step of some size.

    Attributes:
        name: What is measured.
        size: The parameter that cases of one name differ in, as text with its unit.
        variants: Yields the variants, the one first that all others must agree with.
        tolerance: How far results may differ.
        baseline: The variant that ratios are against, the first one by default.
    """

    name: str
    size: str
    variants: Callable[[], Iterator[Variant]]
    tolerance: float = 0.0
    baseline: str = ""


def stock(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(of_its_own(function), fullgraph=True)


def ours(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(of_its_own(function), fullgraph=True, backend="aliasstorage")


_numbers = count()


def of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a code object of its own.

    Dynamo keeps compiled graphs by code object: two variants of one function would find each
    other's graphs, and make each other's shapes dynamic.
    """

    def step(*args: Any) -> Any:
        return function(*args)

    step.__code__ = step.__code__.replace(co_filename=f"<variant {next(_numbers)}>")
    return step


def layout_case(
    name: str,
    nbytes: int,
    windows: list[Window],
    step: Callable[..., Any],
    extra: tuple[torch.Tensor, ...],
    by_hand: bool = False,
    tolerance: float = 0.0,
) -> Case:
    """Return a case whose caches are windows of one buffer."""

    def variants() -> Iterator[Variant]:
        def of_buffer(label: str, function: Callable[..., Any], wrap: bool) -> Variant:
            buffer = torch.zeros(nbytes, dtype=torch.uint8)
            caches = views(buffer)
            args = aliasstorage.wrap(caches) if wrap else caches
            return Variant(label, lambda: function(*args, *extra), lambda: caches)

        yield of_buffer("eager", step, wrap=False)
        separate = [view.clone() for view in views(torch.zeros(nbytes, dtype=torch.uint8))]
        compiled = stock(step)
        yield Variant(
            "stock, separate caches", lambda: compiled(*separate, *extra), lambda: separate
        )
        yield of_buffer("stock, plain views", stock(step), wrap=False)
        if by_hand:
            buffer = torch.zeros(nbytes, dtype=torch.uint8)

            def from_bytes(buffer: torch.Tensor, *extra: torch.Tensor) -> Any:
                return step(*views(buffer), *extra)

            compiled_from_bytes = stock(from_bytes)
            yield Variant(
                "stock, windows by hand from bytes",
                lambda: compiled_from_bytes(buffer, *extra),
                lambda: views(buffer),
            )
            yield from hidden(buffer)
        yield of_buffer("aliasstorage, plain views", ours(step), wrap=False)
        yield of_buffer("aliasstorage, wrapped", ours(step), wrap=True)

    def hidden(other: torch.Tensor) -> Iterator[Variant]:
        """Everything in one opaque operation, which makes its own views of the bytes."""
        buffer = torch.zeros_like(other)

        def opaque(raw: torch.Tensor, extra: list[torch.Tensor]) -> torch.Tensor:
            return step(*views(raw), *extra)

        operation = torch.library.custom_op(
            f"aliasstorage_benchmarks::hidden_{next(_numbers)}",
            opaque,
            mutates_args=("raw",),
            schema="(Tensor(a!) raw, Tensor[] extra) -> Tensor",
        )
        operation.register_fake(lambda raw, extra: raw.new_empty((), dtype=torch.float32))
        compiled = stock(lambda raw, *extra: operation(raw, list(extra)))
        yield Variant(
            "stock, hidden in a custom op",
            lambda: compiled(buffer, *extra),
            lambda: views(buffer),
        )

    def views(buffer: torch.Tensor) -> list[torch.Tensor]:
        return [window.regenerate(buffer) for window in windows]

    return Case(name, f"{nbytes / MIB:.0f} MiB", variants, tolerance)


def small_windows(count: int) -> list[Window]:
    """Return windows of a few rows, float16 and float32 in turns, side by side."""
    dtypes, size = (torch.float16, torch.float32), (8, 16)
    room = size[0] * size[1] * 4
    return [Window(dtypes[number % 2], size, None, number * room) for number in range(count)]


def two_dtypes(nbytes: int) -> tuple[list[Window], tuple[torch.Tensor, ...]]:
    """Return a float16 and a float32 cache in one buffer, and slots and values for each."""
    half = nbytes // 2
    windows = [
        Window(torch.float16, (half // 128, 64)),
        Window(torch.float32, (half // 256, 64), byte_offset=half),
    ]
    slots = torch.arange(32) * 7
    x, y = torch.randn(32, 64).half(), torch.randn(32, 64)
    return windows, (slots, x, y)


def token_write(nbytes: int, by_hand: bool = False) -> Case:
    """Write a few tokens to two caches of different dtypes in one buffer."""
    windows, extra = two_dtypes(nbytes)

    def step(a: Any, b: Any, slots: Any, x: Any, y: Any) -> Any:
        a[slots] = x
        b[slots] = y + b[slots] * 0.5
        return a[slots].float().sum() + b[slots].sum()

    return layout_case("token write", nbytes, windows, step, extra, by_hand, 1e-3)


@torch.library.custom_op("aliasstorage_benchmarks::reshape_and_cache", mutates_args=("k", "v"))
def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> None:
    k[slots] = key
    v[slots] = value


def custom_op(nbytes: int) -> Case:
    """A custom operation that mutates two windows, as engines' cache kernels do."""
    windows, extra = two_dtypes(nbytes)

    def step(k: Any, v: Any, slots: Any, x: Any, y: Any) -> Any:
        reshape_and_cache(x + 1, y * 2, k, v, slots)
        return k[slots].float().sum() + v[slots].sum()

    return layout_case("custom op", nbytes, windows, step, extra, tolerance=1e-3)


def fp8_over_uint8(nbytes: int) -> Case:
    """An fp8 cache that is stored as bytes and read as fp8."""
    windows = [
        Window(torch.uint8, (nbytes // 64, 64)),
        Window(torch.float8_e4m3fn, (nbytes // 64, 64)),
    ]
    slots, x = torch.arange(32) * 7, torch.randn(32, 64)

    def step(raw: Any, cache: Any, slots: Any, x: Any) -> Any:
        raw[slots] = x.to(torch.float8_e4m3fn).view(torch.uint8)
        return cache[slots].float().sum()

    return layout_case("fp8 over uint8", nbytes, windows, step, (slots, x), tolerance=1e-3)


def int8_with_scales(nbytes: int) -> Case:
    """int8 values and float32 scales in one cell, for keys and for values."""
    head = 64
    cell = 2 * (head + 4)
    cells = nbytes // cell // 4 * 4
    windows = [
        Window(torch.int8, (cells, head), (cell, 1), 0),
        Window(torch.float32, (cells,), (cell // 4,), head),
        Window(torch.int8, (cells, head), (cell, 1), head + 4),
        Window(torch.float32, (cells,), (cell // 4,), 2 * head + 4),
    ]
    slots, x = torch.arange(32) * 7, torch.randn(32, head)

    def quantize(x: Any) -> tuple[Any, Any]:
        scale = x.abs().amax(-1) / 127
        return (x / scale.unsqueeze(-1)).round().to(torch.int8), scale

    def step(k: Any, k_scale: Any, v: Any, v_scale: Any, slots: Any, x: Any) -> Any:
        values, scale = quantize(x)
        k[slots], k_scale[slots] = values, scale
        values, scale = quantize(x * 2)
        v[slots], v_scale[slots] = values, scale
        return (k[slots].float() * k_scale[slots].unsqueeze(-1)).sum() + v_scale[slots].sum()

    return layout_case("int8 with scales", cells * cell, windows, step, (slots, x), tolerance=1e-3)


def interleaved_heads(nbytes: int) -> Case:
    """Keys and values that interleave at every head, in one page."""
    heads, dim = 4, 32
    tokens = nbytes // (heads * 2 * dim * 2)
    size, stride = (tokens, heads, dim), (heads * 2 * dim, 2 * dim, 1)
    windows = [
        Window(torch.bfloat16, size, stride),
        Window(torch.bfloat16, size, stride, 2 * dim),
    ]
    slots, x = torch.arange(32) * 7, torch.randn(32, heads, dim).bfloat16()

    def step(k: Any, v: Any, slots: Any, x: Any) -> Any:
        k[slots] = x
        v[slots] = x * 2
        return (k[slots] * v[slots]).float().sum()

    return layout_case("interleaved heads", nbytes, windows, step, (slots, x), tolerance=1e-2)


def hybrid(nbytes: int) -> Case:
    """The hybrid decode step: four layers over the same bytes."""
    geometry = Geometry()
    pages = nbytes // geometry.page_bytes
    layout = geometry.windows(pages)
    model = make_step(geometry, pages)
    x, positions = torch.randn(4, geometry.hidden), torch.tensor([0, 17, 80, 100])

    def variants() -> Iterator[Variant]:
        def of_buffer(label: str, compile_: Callable[..., Any], wrap: bool) -> Variant:
            buffer = torch.zeros(pages * geometry.page_bytes, dtype=torch.uint8)
            views = {name: window.regenerate(buffer) for name, window in layout.items()}
            caches = caches_of(aliasstorage.wrap(views) if wrap else views)
            function = compile_(model)
            rows = torch.cat([*model.slots, model.block_table.flatten()])
            return Variant(
                label,
                lambda: function(caches, x, positions),
                lambda: [buffer.view(pages, -1)[rows].view(torch.bfloat16)[:, :64]],
            )

        yield of_buffer("eager", lambda function: function, wrap=False)
        buffer = torch.zeros(pages * geometry.page_bytes, dtype=torch.uint8)
        views = {name: window.regenerate(buffer) for name, window in layout.items()}
        separate = caches_of(views, copy=torch.clone)
        del buffer
        compiled = stock(model)
        yield Variant("stock, separate caches", lambda: compiled(separate, x, positions), list)
        yield of_buffer("stock, plain views", stock, wrap=False)
        yield of_buffer("aliasstorage, plain views", ours, wrap=False)
        yield of_buffer("aliasstorage, wrapped", ours, wrap=True)

    return Case("hybrid decode step", f"{nbytes / MIB:.0f} MiB", variants, 2e-2)


def same_dtype_views(nbytes: int) -> Case:
    """Two float16 caches in one buffer, which stock torch.compile takes, by a synthetic base."""
    half = nbytes // 2
    windows = [
        Window(torch.float16, (half // 128, 64)),
        Window(torch.float16, (half // 128, 64), byte_offset=half),
    ]
    slots, x = torch.arange(32) * 7, torch.randn(32, 64).half()

    def step(k: Any, v: Any, slots: Any, x: Any) -> Any:
        k[slots] = x
        v[slots] = x * 2
        return k[slots].float().sum() + v[slots].float().sum()

    return layout_case("same dtype", nbytes, windows, step, (slots, x), tolerance=1e-3)


QUICK = [
    token_write(MIB),
    token_write(64 * MIB, by_hand=True),
    same_dtype_views(64 * MIB),
    custom_op(64 * MIB),
    fp8_over_uint8(64 * MIB),
    int8_with_scales(64 * MIB),
    interleaved_heads(64 * MIB),
    hybrid(17 * MIB),
    hybrid(140 * MIB),
]
FULL = [
    *QUICK,
    token_write(1024 * MIB),
    custom_op(MIB),
    fp8_over_uint8(MIB),
    int8_with_scales(MIB),
    interleaved_heads(MIB),
    hybrid(1024 * MIB),
]
