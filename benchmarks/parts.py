"""What regeneration costs, by part: calls by the number of windows, fences, copies, dispatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

import aliasstorage
from aliasstorage import AliasTensor, ByteStorage, Window
from benchmarks.cases import (
    MIB,
    Case,
    Variant,
    hybrid,
    layout_case,
    of_its_own,
    ours,
    small_windows,
    stock,
    token_write,
)

ROWS, WIDTH = 8, 16
DTYPES = (torch.float16, torch.float32)
CACHE_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.int64,
)


def windows_case(count: int) -> Case:
    """A call with ``count`` windows, a row written to each."""
    room = ROWS * WIDTH * 4
    windows = small_windows(count)
    slot, x = torch.tensor([1]), torch.ones(1, WIDTH)

    def step(caches: Sequence[Any], slot: Any, x: Any) -> Any:
        for cache in caches:
            cache[slot] = x.to(cache.dtype)
        return x + 1

    def inside(storage: ByteStorage, slot: Any, x: Any) -> Any:
        caches = [
            storage.window(DTYPES[number % 2], (ROWS, WIDTH), None, number * room)
            for number in range(count)
        ]
        return step(caches, slot, x)

    def variants() -> Iterator[Variant]:
        def of_buffer(label: str, function: Callable[..., Any], wrap: bool) -> Variant:
            buffer = torch.zeros(count * room, dtype=torch.uint8)
            views = [window.regenerate(buffer) for window in windows]
            args = aliasstorage.wrap(views) if wrap else views
            return Variant(label, lambda: function(args, slot, x), lambda: views)

        yield of_buffer("eager", step, wrap=False)
        separate = [torch.zeros(window.size, dtype=window.dtype) for window in windows]
        compiled = stock(step)
        yield Variant(
            "stock, separate caches", lambda: compiled(separate, slot, x), lambda: separate
        )
        storage = ByteStorage.adopt(torch.zeros(count * room, dtype=torch.uint8))
        of_storage = torch.compile(inside, fullgraph=True, backend="aliasstorage")
        yield Variant(
            "aliasstorage, taken inside",
            lambda: of_storage(storage, slot, x),
            lambda: [window.regenerate(storage.buffer) for window in windows],
        )
        yield of_buffer("aliasstorage, plain views", ours(step), wrap=False)
        yield of_buffer("aliasstorage, wrapped", ours(step), wrap=True)

    return Case("call", f"{count} windows", variants, baseline="stock, separate caches")


def where_the_time_goes(count: int) -> Case:
    """The parts of a call with ``count`` wrapped windows, whose graph does next to nothing."""
    room = ROWS * WIDTH * 4
    buffer = torch.zeros(count * room, dtype=torch.uint8)
    windows = small_windows(count)
    views = aliasstorage.wrap([window.regenerate(buffer) for window in windows])
    captured: dict[str, Any] = {}
    zero = torch.zeros(())

    def nothing(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return lambda *args: (zero,)

    def capture(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        bound = aliasstorage.backend(nothing, form="windows")(module, inputs)
        captured["bound"] = bound

        def call(*args: Any) -> Any:
            captured["args"] = args
            return bound(*args)

        return call

    def step(caches: Sequence[Any]) -> Any:
        for cache in caches:
            cache.add_(1)
        return caches[0].sum()

    def variants() -> Iterator[Variant]:
        whole = torch.compile(of_its_own(step), fullgraph=True, backend=capture)
        yield Variant("the whole call", lambda: whole(views), list)
        yield Variant(
            "without Dynamo's guards", lambda: captured["bound"](*captured["args"])[0], list
        )

        def flatten() -> torch.Tensor:
            for view in views:
                view.__tensor_flatten__()  # type: ignore[attr-defined]
            return zero

        def regenerate() -> torch.Tensor:
            for window in windows:
                window.regenerate(buffer)
            return zero

        yield Variant("flattening all windows", flatten, list)
        yield Variant("regenerating all windows", regenerate, list)

    return Case("where a call's time goes", f"{count} windows", variants)


def dtype_case(dtype: torch.dtype) -> Case:
    """A few rows written to and read from a cache of a dtype, beside a float32 one."""
    rows, width = 1 << 14, 64
    windows = [
        Window(torch.float32, (rows, width)),
        Window(dtype, (rows, width), byte_offset=rows * width * 4),
    ]
    slots = torch.arange(32) * 7
    x = torch.randint(0, 2, (32, width)).to(dtype)

    def step(states: Any, cache: Any, slots: Any, x: Any) -> Any:
        cache[slots] = x
        states[slots] = x.float()
        return cache[slots].float().sum() + states[slots].sum()

    case = layout_case("dtype", windows[1].span[1], windows, step, (slots, x), tolerance=1e-3)
    return replace(case, size=str(dtype).removeprefix("torch."))


def overlap_case(shared: int) -> Case:
    """Rows written to two windows in turns, of which a share of the bytes is the same."""
    rows, width = 1 << 14, 64
    nbytes = rows * width * 4
    windows = [
        Window(torch.float32, (rows, width)),
        Window(torch.int32, (rows, width), byte_offset=nbytes * (100 - shared) // 100 // 256 * 256),
    ]
    slots, x = torch.arange(32) * 7, torch.ones(32, width)

    def step(a: Any, b: Any, slots: Any, x: Any) -> Any:
        a[slots] = x
        b[slots] = 1
        a[slots + 1] = x
        b[slots + 1] = 2
        return b[slots].float().sum()

    case = layout_case("overlap", windows[1].span[1], windows, step, (slots, x))

    def variants() -> Iterator[Variant]:
        # Separate caches hold other bytes than shared ones; the result is the same.
        return (replace(variant, state=list) for variant in case.variants())

    return replace(case, size=f"{shared} % shared", variants=variants)


def flatness_case(make: Callable[[int], Case], sizes: Sequence[int]) -> Case:
    """One step on buffers of several sizes, in turns, as a ratio to the smallest."""
    name = "aliasstorage, wrapped"

    def variants() -> Iterator[Variant]:
        for nbytes in sizes:
            torch.manual_seed(0)  # the same step for each size, and so the same results
            case = make(nbytes)
            found = next(variant for variant in case.variants() if variant.name == name)
            yield replace(found, name=f"{name}, {case.size}")

    case = make(sizes[0])
    return Case("flatness", case.name, variants, case.tolerance)


def fences_case(pairs: int) -> Case:
    """Alternating writes of two windows, that share bytes or do not: the price of fences."""
    nbytes = ROWS * 1024 * 4
    slot = torch.tensor([1])

    def step(a: Any, b: Any, slot: Any) -> Any:
        for number in range(pairs):
            a[slot] = number
            b[slot] = number + 0.5
        return a[slot].float().sum() * 0

    def variants() -> Iterator[Variant]:
        def at(label: str, offset: int, function: Callable[..., Any]) -> Variant:
            buffer = torch.zeros(nbytes * 2, dtype=torch.uint8)
            first = Window(torch.float16, (ROWS, 1024)).regenerate(buffer)
            second = Window(torch.float32, (ROWS, 1024), None, offset).regenerate(buffer)
            return Variant(label, lambda: function(first, second, slot), list)

        yield at("disjoint windows", nbytes, ours(step))
        yield at("overlapping windows", 0, ours(step))
        yield at("eager, overlapping windows", 0, step)

    return Case("fences", f"{2 * pairs} writes", variants)


def copies_case(nbytes: int) -> Case:
    """A value kept across a write of its bytes, which is copied once."""
    rows = nbytes // 64

    def kept(a: Any, b: Any) -> Any:
        before = a[:rows] * 1
        b[0] = 1
        return a[0, 0] * 0, before

    def again(a: Any, b: Any) -> Any:
        before = a[:rows]
        b[0] = 1
        return a[0, 0] * 0, before.clone()

    def variants() -> Iterator[Variant]:
        def of(label: str, function: Callable[..., Any]) -> Variant:
            buffer = torch.zeros(2 * nbytes + 64, dtype=torch.uint8)
            a = Window(torch.float16, (2 * rows, 32)).regenerate(buffer)
            b = Window(torch.float32, (2 * rows, 16)).regenerate(buffer)
            return Variant(label, lambda: function(a, b)[0], list)

        yield of("eager, a clone", lambda a, b: (a[0, 0] * 0, a[:rows].clone(), b[0].fill_(1)))
        yield of("aliasstorage, value kept", ours(kept))
        yield of("aliasstorage, clone after", ours(again))

    return Case("copies", f"{nbytes} bytes", variants)


class LeastSubclass(torch.Tensor):
    """The least that a ``__torch_dispatch__`` subclass can do: the baseline of eager dispatch."""

    plain: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, plain: torch.Tensor) -> LeastSubclass:
        self = torch.Tensor._make_subclass(cls, plain)
        self.plain = plain
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args = [arg.plain if type(arg) is LeastSubclass else arg for arg in args]
        return func(*args, **(kwargs or {}))


EAGER = {
    "t.add_(1)": lambda t, x: t.add_(1),
    "t.add_(x)": lambda t, x: t.add_(x),
    "t + 1": lambda t, x: t + 1,
    "t[1]": lambda t, x: t[1],
    "t.view(-1)": lambda t, x: t.view(-1),
}


def eager_case(text: str) -> Case:
    """One operation in eager mode."""
    function, x = EAGER[text], torch.ones(32, 32)
    zero = torch.zeros(())

    def variants() -> Iterator[Variant]:
        def on(label: str, tensor: torch.Tensor) -> Variant:
            def call() -> torch.Tensor:
                function(tensor, x)
                return zero

            return Variant(label, call, list)

        raw = torch.zeros(4096, dtype=torch.uint8)
        plain = raw.view(torch.float32).view(32, 32)
        yield on("plain tensor", plain)
        yield on("least __torch_dispatch__", LeastSubclass(plain))
        yield on("AliasTensor", AliasTensor(raw, Window(torch.float32, (32, 32))))

    return Case("eager dispatch", text, variants, baseline="least __torch_dispatch__")


PARTS = [
    flatness_case(token_write, (MIB, 64 * MIB)),
    flatness_case(hybrid, (17 * MIB, 140 * MIB)),
    windows_case(8),
    windows_case(128),
    where_the_time_goes(128),
    fences_case(8),
    overlap_case(100),
    dtype_case(torch.bfloat16),
    copies_case(1 << 20),
    *(eager_case(text) for text in EAGER),
]
PARTS_FULL = [
    flatness_case(token_write, (MIB, 64 * MIB, 1024 * MIB)),
    flatness_case(hybrid, (17 * MIB, 140 * MIB, 1024 * MIB)),
    windows_case(1),
    windows_case(8),
    windows_case(32),
    windows_case(128),
    where_the_time_goes(8),
    where_the_time_goes(128),
    fences_case(1),
    fences_case(8),
    fences_case(32),
    *(overlap_case(shared) for shared in (0, 50, 100)),
    *(dtype_case(dtype) for dtype in CACHE_DTYPES),
    copies_case(1 << 14),
    copies_case(1 << 20),
    copies_case(1 << 23),
    *(eager_case(text) for text in EAGER),
]
