"""The typed views that a bufferized graph is called with: made once for each buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from aliasstorage._compat import python_source, steady_call
from aliasstorage.bufferize.symbolic_windows import AnyWindow, SymbolicWindow
from aliasstorage.windows.byte_buffers import PerTensor
from aliasstorage.windows.window import Window, regenerate

Views = tuple[torch.Tensor, ...]


def with_typed_views(
    compiled: Callable[[list[Any]], Any],
    count: int,
    kept: Sequence[int],
    roots: Sequence[tuple[int, AnyWindow]],
    symbols: Mapping[str, str],
    lengths: Mapping[int, Any],
) -> Callable[[list[Any]], Any]:
    """Return a function that calls a compiled graph with typed views of its buffers.

    The views of a buffer are made once and die with it; those of symbolic windows are made
    again when a symbol changes its value.

    Args:
        compiled: Takes a list: the kept arguments, then the typed views.
        count: Number of arguments of the function, which takes them as a list and empties it.
        kept: Positions of the arguments that are passed on.
        roots: For each typed view, the position of its buffer, and its window. Views of one
            buffer and the same symbols stand side by side.
        symbols: See `symbolic.symbol_sources`.
        lengths: For kept buffers that may be longer than the graph was told, the length as a
            sympy expression.
    """
    groups: dict[tuple[int, tuple[str, ...]], list[AnyWindow]] = {}
    for index, window in roots:
        names = window.symbols if isinstance(window, SymbolicWindow) else ()
        groups.setdefault((index, names), []).append(window)
    scope: dict[str, Any] = {"compiled": steady_call(compiled)}
    lines = ["def call(args):", f"    {', '.join(f't{i}' for i in range(count))}, = args"]
    lines.append("    args.clear()")
    named = {name for _, names in groups for name in names}
    named |= {str(s) for length in lengths.values() for s in length.free_symbols}
    lines += [f"    {name} = {symbols[name]}" for name in sorted(named)]
    inputs = [
        f"t{i}[:{python_source(lengths[i])}]" if i in lengths else f"t{i}"  # a view
        for i in kept
    ]
    for number, ((index, names), windows) in enumerate(groups.items()):
        if names:
            scope[f"views{number}"] = _symbolic_views(windows, names)
            lines.append(f"    v{number} = views{number}(t{index}, {', '.join(names)})")
        else:
            scope[f"find{number}"], scope[f"make{number}"] = _static_views(windows)
            lines += [
                f"    v{number} = find{number}(id(t{index}))",
                f"    if v{number} is None:",
                f"        v{number} = make{number}(t{index})",
            ]
        inputs.append(f"*v{number}")
    lines.append(f"    return compiled([{', '.join(inputs)}])")
    # Generated, since its time is paid at each step of an engine.
    exec(compile("\n".join(lines), "<aliasstorage>", "exec"), scope)  # noqa: S102
    call: Callable[[list[Any]], Any] = scope["call"]
    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _static_views(
    windows: Sequence[AnyWindow],
) -> tuple[Callable[[int], Views | None], Callable[[torch.Tensor], Views]]:
    """Return how to find the typed views of a buffer by its id, and how to make them."""
    made: PerTensor[Views] = PerTensor()

    def make(buffer: torch.Tensor) -> Views:
        views = tuple(w.regenerate(buffer) for w in windows if isinstance(w, Window))
        made.set(buffer, views)
        return views

    return made.by_id.get, make


def _symbolic_views(windows: Sequence[AnyWindow], names: Sequence[str]) -> Callable[..., Views]:
    """Return a function of a buffer and the values of symbols that gives the typed views."""
    made: PerTensor[tuple[tuple[int, ...], Views]] = PerTensor()
    scope: dict[str, Any] = {"regenerate": regenerate}
    calls = ""
    for number, window in enumerate(windows):
        assert isinstance(window, SymbolicWindow)  # noqa: S101  (grouped by symbols)
        scope[f"dtype{number}"] = window.dtype
        calls += f"{window.source('buffer', f'dtype{number}')}, "
    make = eval(f"lambda buffer, {', '.join(names)}: ({calls})", scope)  # noqa: S307

    def views(buffer: torch.Tensor, *values: int) -> Views:
        entry = made.get(buffer)
        if entry is None or entry[0] != values:
            entry = (values, make(buffer, *values))
            made.set(buffer, entry)
        return entry[1]

    return views
