"""What a compiled function does with its windows: in place, fences, copies and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from aliasstorage.bufferize.report import BufferReport
from aliasstorage.bufferize.symbolic_windows import AnyWindow
from aliasstorage.compilation.backend import backend
from aliasstorage.windows.window import Window


@dataclass
class GraphReport:
    """One graph that was compiled.

    Attributes:
        buffers: A report for each byte buffer of the graph.
        code: The graph that the inner backend was handed, as Python.
    """

    buffers: list[BufferReport]
    code: str


@dataclass
class Explanation:
    """What `explain` found; ``str()`` of it is a table for people.

    Attributes:
        graphs: The graphs that were compiled, in order.
        result: What the function returned.
    """

    graphs: list[GraphReport] = field(default_factory=list)
    result: Any = None

    @property
    def buffers(self) -> list[BufferReport]:
        """The reports of all graphs."""
        return [buffer for graph in self.graphs for buffer in graph.buffers]

    @property
    def bytes_copied(self) -> int:
        """Bytes that a call copies so that values survive later writes."""
        return sum(window.nbytes for b in self.buffers for window, _ in b.copies)

    def __str__(self) -> str:
        if not self.buffers:
            return "No windows reached the compiler: no graph has aliased or wrapped inputs."
        parts = []
        for number, graph in enumerate(self.graphs):
            for report in graph.buffers:
                parts.append(_describe(number, report))
        return "\n\n".join(parts)


def explain(
    function: Callable[..., Any], *, inner: str = "aot_eager", **options: Any
) -> Callable[..., Explanation]:
    """Return a function that runs ``function`` once, compiled, and reports on its windows.

    The arguments are written as a call of the function writes them.

    Args:
        function: What `torch.compile` would be given.
        inner: The inner backend; ``aot_eager`` compiles fast and shows the same windows.
        options: Further options of `aliasstorage.backend`.

    Examples:
        >>> import torch, aliasstorage
        >>> raw = torch.zeros(64, dtype=torch.uint8)
        >>> def step(a, b):
        ...     old = a.clone()
        ...     b.add_(1)
        ...     return old
        >>> a, b = raw.view(torch.float16), raw.view(torch.float32)[:4]
        >>> print(aliasstorage.explain(step)(a, b))
        graph 0, a byte buffer of 64 bytes: 2 windows in 1 alias class
          [0] window_a: torch.float16 (32,) at byte 0, with [1]
          [1] window_b: torch.float32 (4,) at byte 0, with [0]
          computed into place  aten.add.Tensor -> [1]
          fences: 1
          copies: none
    """

    def run(*args: Any, **kwargs: Any) -> Explanation:
        from aliasstorage.compilation.graph_listeners import listening

        explanation = Explanation()

        def listen(reports: list[BufferReport], module: torch.fx.GraphModule) -> None:
            if reports:
                explanation.graphs.append(GraphReport(reports, module.code))

        compiled = torch.compile(function, backend=backend(inner=inner, **options))
        with listening(listen):
            explanation.result = compiled(*args, **kwargs)
        return explanation

    return run


def _describe(number: int, report: BufferReport) -> str:
    length = "a symbolic number of" if report.nbytes is None else report.nbytes
    title = f"graph {number}, a byte buffer of {length} bytes: "
    if report.reason is not None:
        return title + f"not written in place, because {report.reason}"
    windows = _count(len(report.roots), "window")
    classes = _count(len(report.classes), "alias class", "alias classes")
    lines = [f"{title}{windows} in {classes}"]
    class_of = {index: roots for roots in report.classes for index in roots}
    for index, root in enumerate(report.roots):
        others = [f"[{other}]" for other in class_of[index] if other != index]
        shares = f", with {' '.join(others)}" if others else ""
        lines.append(f"  [{index}] {report.names[index]}: {_window(root)}{shares}")
    width = len("computed into place")
    for write in report.writes:
        place = f"[{report.roots.index(write.window)}]" if write.window in report.roots else ""
        where = place or _window(write.window)
        lines.append(f"  {write.how:<{width}}  {write.operation} -> {where}")
    lines.append(f"  fences: {report.fences}")
    if not report.copies:
        lines.append("  copies: none")
    for window, reason in report.copies:
        much = f"{window.nbytes} bytes of " if isinstance(window, Window) else ""
        lines.append(f"  copy of {much}{_window(window)}: {reason}")
    return "\n".join(lines)


def _window(window: AnyWindow) -> str:
    return f"{window.dtype} {window.size} at byte {window.byte_offset}"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
