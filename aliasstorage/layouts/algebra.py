"""Say what lies where in a storage, in bytes, and get the windows.

A `Layout` is a length in bytes and named windows in it. `field` makes the smallest ones; the
other functions put layouts after each other, on top of each other, or next to each other many
times. Everything is plain data: nothing is allocated before `Layout.allocate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from aliasstorage.caches.byte_storage import ByteStorage
from aliasstorage.errors import LayoutError, MisalignedWindowError
from aliasstorage.subclass.alias_tensor import AliasTensor
from aliasstorage.windows.window import Window


@dataclass(frozen=True)
class Layout:
    """A number of bytes and the named windows in them.

    Examples:
        >>> import torch
        >>> from aliasstorage.layouts import field, packed, repeated
        >>> conv, ssm = field("conv", torch.bfloat16, (3, 4)), field("ssm", torch.float32, (2, 2))
        >>> page = packed(conv, ssm)
        >>> cache = repeated(page, 8)
        >>> cache.nbytes, cache["ssm"]
        (320, Window(torch.float32, (8, 2, 2), (10, 2, 1), byte_offset=24))
        >>> storage, windows = cache.allocate()
        >>> windows["ssm"][7].fill_(1.0).shape, storage.nbytes
        (torch.Size([2, 2]), 320)
    """

    nbytes: int
    windows: Mapping[str, Window]

    def __getitem__(self, name: str) -> Window:
        return self.windows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.windows)

    def allocate(
        self, device: torch.device | str | None = None
    ) -> tuple[ByteStorage, dict[str, AliasTensor]]:
        """Allocate zero bytes, and return the storage and its windows by name."""
        storage = ByteStorage.zeros(self.nbytes, device=device)
        return storage, self.on(storage)

    def on(self, storage: ByteStorage) -> dict[str, AliasTensor]:
        """Return the windows of an existing storage by name.

        Raises:
            LayoutError: The storage is shorter than the layout.
        """
        if storage.nbytes < self.nbytes:
            raise LayoutError(
                "A layout does not fit into a storage.",
                which=", ".join(self.windows),
                expected=f"at least {self.nbytes} bytes",
                got=f"{storage.nbytes} bytes",
                do="Allocate a longer storage, or lay out fewer blocks.",
            )
        return {
            name: storage.window(w.dtype, w.size, w.stride, w.byte_offset)
            for name, w in self.windows.items()
        }

    def renamed(self, name: Callable[[str], str]) -> Layout:
        """Return the layout with each window's name changed."""
        return Layout(self.nbytes, {name(old): window for old, window in self.windows.items()})

    def permuted(self, *dims: int) -> Layout:
        """Return the layout with the dimensions of every window reordered, at the same bytes."""
        return self._map(
            lambda name, w: Window(
                w.dtype,
                tuple(w.size[dim] for dim in dims),
                tuple(w.stride[dim] for dim in dims),
                w.byte_offset,
            )
        )

    def shifted(self, nbytes: int) -> Layout:
        """Return the layout with ``nbytes`` unnamed bytes before it."""
        return Layout(
            self.nbytes + nbytes,
            {name: _shifted(name, window, nbytes) for name, window in self.windows.items()},
        )

    def padded(self, nbytes: int) -> Layout:
        """Return the layout with unnamed bytes after it, ``nbytes`` long altogether.

        Raises:
            LayoutError: The layout is longer.
        """
        if nbytes < self.nbytes:
            raise LayoutError(
                "The fields of a page are longer than the page.",
                which=", ".join(self.windows),
                expected=f"at most {nbytes} bytes",
                got=f"{self.nbytes} bytes",
                do="Make the page longer, or the fields shorter.",
            )
        return Layout(nbytes, self.windows)

    def _map(self, change: Callable[[str, Window], Window]) -> Layout:
        changed = {name: change(name, window) for name, window in self.windows.items()}
        return Layout(self.nbytes, changed)


def field(name: str, dtype: torch.dtype, size: Sequence[int] = ()) -> Layout:
    """Return the layout of one contiguous window.

    Args:
        name: Its name.
        dtype: Its element type.
        size: Extents in elements; nothing for a single element.
    """
    return Layout(prod(size) * dtype.itemsize, {name: Window(dtype, tuple(size))})


def packed(*parts: Layout, align: int = 1, nbytes: int | None = None) -> Layout:
    """Put layouts one after the other.

    Args:
        parts: The layouts.
        align: Each starts at a multiple of this many bytes. Engines leave it at 1 and see to it
            that their states fit; 8 is enough for every dtype.
        nbytes: Length altogether, in bytes; what is left over is padding.

    Raises:
        MisalignedWindowError: A window would start at a byte that its dtype does not allow, such
            as an odd number of 16-bit elements before a ``float32`` field.
        LayoutError: The layouts are longer than ``nbytes``, or two windows have one name.

    Examples:
        >>> import torch
        >>> from aliasstorage.layouts import field, packed
        >>> packed(field("a", torch.bfloat16, (3,)), field("b", torch.float32), align=8)["b"]
        Window(torch.float32, (), byte_offset=8)
    """
    windows: dict[str, Window] = {}
    end = 0
    for part in parts:
        start = -(-end // align) * align
        _add(windows, part.shifted(start))
        end = start + part.nbytes
    whole = Layout(end, windows)
    return whole if nbytes is None else whole.padded(nbytes)


def overlay(*parts: Layout, nbytes: int | None = None) -> Layout:
    """Put layouts on top of each other: all start at the same byte and share their bytes.

    Args:
        parts: The layouts.
        nbytes: Length altogether, in bytes; that of the longest layout when omitted.

    Raises:
        LayoutError: A layout is longer than ``nbytes``, or two windows have one name.
    """
    windows: dict[str, Window] = {}
    for part in parts:
        _add(windows, part)
    whole = Layout(max((part.nbytes for part in parts), default=0), windows)
    return whole if nbytes is None else whole.padded(nbytes)


def repeated(part: Layout, count: int, *, stride: int | None = None, dim: int = 0) -> Layout:
    """Put a layout ``count`` times, and give each window one more dimension for it.

    Args:
        part: The layout, such as a page.
        count: How many times.
        stride: From one to the next, in bytes; the layout's length when omitted.
        dim: Where the new dimension stands in each window.

    Raises:
        MisalignedWindowError: ``stride`` is no multiple of a window's itemsize.
        LayoutError: ``stride`` is shorter than the layout.
    """
    step = part.nbytes if stride is None else stride
    if step < part.nbytes and count > 1:
        raise LayoutError(
            "Repetitions of a layout would overlap.",
            which=", ".join(part.windows),
            expected=f"a stride of at least {part.nbytes} bytes",
            got=f"{step} bytes",
            do="Use overlay for windows that share bytes.",
        )

    def repeat(name: str, window: Window) -> Window:
        itemsize = window.dtype.itemsize
        if step % itemsize:
            raise _misaligned(name, window.dtype, step, "repeats every")
        size, strides = list(window.size), list(window.stride)
        size.insert(dim, count)
        strides.insert(dim, step // itemsize)
        return Window(window.dtype, tuple(size), tuple(strides), window.byte_offset)

    whole = part._map(repeat)
    return Layout(step * count, whole.windows)


def consolidated(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> Layout:
    """Return tensors of any dtypes one after the other, each on a multiple of 8 bytes.

    This is what tensordict's ``consolidate`` does when dtypes differ.

    Examples:
        >>> import torch
        >>> layout = consolidated({"k": (torch.bfloat16, (3,)), "n": (torch.int64, (1,))})
        >>> [(name, window.byte_offset) for name, window in layout.windows.items()], layout.nbytes
        ([('k', 0), ('n', 8)], 16)
    """
    parts = [field(name, dtype, size) for name, (dtype, size) in tensors.items()]
    whole = packed(*parts, align=8)
    return whole.padded(-(-whole.nbytes // 8) * 8)


def _add(windows: dict[str, Window], part: Layout) -> None:
    for name, window in part.windows.items():
        if name in windows:
            raise LayoutError(
                "Two windows of a layout have one name.",
                which=name,
                expected="a name of its own for each window",
                got=f"{windows[name]} and {window}",
                do="Rename one with layout.renamed(lambda name: ...).",
            )
        windows[name] = window


def _shifted(name: str, window: Window, nbytes: int) -> Window:
    offset = window.byte_offset + nbytes
    if offset % window.dtype.itemsize:
        raise _misaligned(name, window.dtype, offset, "starts at")
    return Window(window.dtype, window.size, window.stride, offset)


def _misaligned(name: str, dtype: torch.dtype, nbytes: int, what: str) -> MisalignedWindowError:
    return MisalignedWindowError(
        f"A field {what} a byte that its dtype does not allow.",
        which=f"{name}, {dtype}",
        expected=f"a multiple of {dtype.itemsize} bytes",
        got=f"{nbytes} bytes",
        do="Pad what comes before it: packed(..., align=8), or an even number of elements.",
    )
