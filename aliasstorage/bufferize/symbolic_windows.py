"""Windows whose size, stride or offset is symbolic: ``cache[:n]``, or a cache whose size changes.

Note [Symbolic windows are roots of their own]
Problem: which bytes a symbolic window shows is known only when the graph is called.
Rule: its typed view is made at the call, and is an input of the graph like any other. To the
planner it is opaque. It is equal to another window only if all extents are the same expressions.
It shares bytes with whatever its *hull* shares bytes with: the bytes that it can reach for any
value of its symbols.
Reason: a hull that is too large costs a fence or a copy, and never a wrong order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from aliasstorage._compat import expression, python_source, symbol_bounds
from aliasstorage.windows.window import Window

# Past the end of any buffer; hulls without an upper bound end here.
END = 1 << 62


@dataclass(frozen=True)
class SymbolicWindow:
    """A window with symbolic extents.

    Attributes:
        dtype: Element type.
        size: Extents in elements, as integers and sympy expressions; so ``stride``, and
            ``byte_offset`` in bytes.
        hull: The bytes that it can reach, as a window of bytes.
        values: Size, stride and byte offset as integers and `torch.SymInt`.
    """

    dtype: torch.dtype
    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    byte_offset: Any
    hull: Window = field(compare=False)
    values: tuple[Sequence[Any], Sequence[Any], Any] = field(compare=False, repr=False)

    @property
    def numel(self) -> int:
        """An upper bound of the number of elements."""
        return self.hull.nbytes // self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """An upper bound of the number of bytes."""
        return self.hull.nbytes

    @property
    def symbols(self) -> tuple[str, ...]:
        """The names of the symbols, sorted."""
        extents = (*self.size, *self.stride, self.byte_offset)
        return tuple(
            sorted({str(s) for e in extents if not isinstance(e, int) for s in e.free_symbols})
        )

    def source(self, buffer: str, dtype: str) -> str:
        """Return a call of ``regenerate`` as Python code over the symbols."""
        size, stride = (
            f"({''.join(f'{python_source(extent)}, ' for extent in extents)})"
            for extents in (self.size, self.stride)
        )
        return f"regenerate({buffer}, {dtype}, {size}, {stride}, {python_source(self.byte_offset)})"


AnyWindow = Window | SymbolicWindow


def window_at(
    dtype: torch.dtype, size: Sequence[Any], stride: Sequence[Any], byte_offset: Any
) -> AnyWindow:
    """Return a window; a symbolic one if an extent is a `torch.SymInt` without a value."""
    extents = [expression(extent) for extent in (*size, *stride, byte_offset)]
    if all(isinstance(extent, int) for extent in extents):
        count = len(size)
        return Window(dtype, tuple(extents[:count]), tuple(extents[count:-1]), extents[-1])
    itemsize = dtype.itemsize
    end = byte_offset + itemsize  # of an empty window anything would do: it reaches no byte
    for extent, step in zip(size, stride, strict=True):
        end = end + (extent - 1) * step * itemsize
    low, high = symbol_bounds(byte_offset, 0, END)[0], symbol_bounds(end, 0, END)[1]
    hull = Window(torch.uint8, (max(1, high - low),), byte_offset=low)
    count = len(size)
    return SymbolicWindow(
        dtype,
        tuple(extents[:count]),
        tuple(extents[count:-1]),
        extents[-1],
        hull,
        (tuple(size), tuple(stride), byte_offset),
    )


def footprint(window: AnyWindow) -> Window:
    """Return a window of at least the bytes of ``window``."""
    return window if isinstance(window, Window) else window.hull


def reinterpret(window: AnyWindow, dtype: torch.dtype) -> AnyWindow:
    """Return the window of ``view.dtype``, of a window whose last dimension is contiguous."""
    if isinstance(window, Window):
        return window.compose(lambda tensor: tensor.view(dtype))
    size, stride, byte_offset = window.values
    old, new = window.dtype.itemsize, dtype.itemsize
    if old == new:
        return window_at(dtype, size, stride, byte_offset)
    size = (*size[:-1], size[-1] * old // new)
    stride = (*[step * old // new for step in stride[:-1]], stride[-1])
    return window_at(dtype, size, stride, byte_offset)


def squeeze_last(window: AnyWindow) -> AnyWindow:
    """Return the window of ``squeeze(-1)``, of a window whose last dimension has extent 1."""
    if isinstance(window, Window):
        return window.compose(lambda tensor: tensor.squeeze(-1))
    size, stride, byte_offset = window.values
    return window_at(window.dtype, size[:-1], stride[:-1], byte_offset)


def symbol_sources(
    placeholders: Sequence[torch.fx.Node], buffers: Collection[torch.fx.Node]
) -> dict[str, str]:
    """Return, for each symbol that a graph's inputs tell, Python code that computes it.

    Input number ``i`` is called ``ti``. The length of one of ``buffers`` is the last to be asked: a
    buffer may be longer than the graph was told, and then some other input tells the symbol.
    """
    sources: dict[str, str] = {}
    told = [(node in buffers, index, node) for index, node in enumerate(placeholders)]
    for _, index, node in sorted(told, key=lambda entry: entry[:2]):
        value = node.meta.get("val")
        found: list[tuple[Any, str]] = []
        if isinstance(value, torch.SymInt):
            found = [(value, f"t{index}")]
        elif isinstance(value, torch.Tensor):
            found = [(extent, f"t{index}.size({d})") for d, extent in enumerate(value.shape)]
            found += [(step, f"t{index}.stride({d})") for d, step in enumerate(value.stride())]
        for extent, code in found:
            symbol = expression(extent)
            if not isinstance(symbol, int) and symbol.is_symbol:
                sources.setdefault(str(symbol), code)
    return sources
