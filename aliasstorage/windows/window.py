"""`Window`: a typed, strided view of a byte buffer, as plain data.

Nothing here dispatches or compiles. All offsets and spans are in bytes; sizes and strides
are in elements of the window's dtype, as in `torch.Tensor`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from aliasstorage._compat import run_eagerly, symbol_bounds
from aliasstorage.errors import (
    InvalidWindowError,
    MisalignedWindowError,
    UnsupportedTensorError,
    WindowOutOfBoundsError,
)
from aliasstorage.windows.overlap import overlaps


def contiguous_stride(size: Sequence[int]) -> tuple[int, ...]:
    """Return the row-major stride of ``size``, in elements.

    Examples:
        >>> contiguous_stride((2, 3, 4))
        (12, 4, 1)
    """
    stride: list[int] = []
    step = 1
    for extent in reversed(size):
        stride.append(step)
        step *= max(extent, 1)
    return tuple(reversed(stride))


@dataclass(frozen=True)
class Window:
    """A dtype, a size and a stride in elements, and a byte offset, over a byte buffer.

    Args:
        dtype: The element type.
        size: Extent of each dimension, in elements.
        stride: Step of each dimension, in elements; row-major when omitted.
        byte_offset: Where the first element starts, in bytes from the start of the buffer.

    Raises:
        InvalidWindowError: A size, stride or offset is negative, or their lengths differ.
        MisalignedWindowError: ``byte_offset`` is not a multiple of the itemsize, which
            `torch.Tensor.view` with a dtype requires of every view.

    Examples:
        >>> import torch
        >>> keys = Window(torch.bfloat16, (4, 8), byte_offset=64)
        >>> keys.stride, keys.nbytes, keys.span
        ((8, 1), 64, (64, 128))
        >>> keys.overlaps(Window(torch.float32, (4,), byte_offset=124))
        True
    """

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...] = None  # type: ignore[assignment]  # filled in below
    byte_offset: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", tuple(self.size))
        stride = contiguous_stride(self.size) if self.stride is None else tuple(self.stride)
        object.__setattr__(self, "stride", stride)
        self._validate()

    def _validate(self) -> None:
        if not isinstance(self.dtype, torch.dtype):
            raise InvalidWindowError(
                "A window needs a torch.dtype.",
                expected="a torch.dtype such as torch.float16",
                got=repr(self.dtype),
                do="Pass the dtype first: Window(dtype, size, stride, byte_offset).",
            )
        if len(self.size) != len(self.stride):
            raise InvalidWindowError(
                "A window's size and stride differ in length.",
                expected=f"{len(self.size)} strides for size {self.size}",
                got=f"{len(self.stride)}: {self.stride}",
                do="Give one stride, in elements, for each dimension.",
            )
        for name, values in (("size", self.size), ("stride", self.stride)):
            if any(value < 0 for value in values):
                raise InvalidWindowError(
                    f"A window's {name} is negative.",
                    expected=f"a {name} of at least 0 in every dimension",
                    got=str(values),
                    do="torch has no negative sizes or strides; flip the values instead.",
                )
        if self.byte_offset < 0:
            raise InvalidWindowError(
                "A window's byte offset is negative.",
                expected="an offset of at least 0 bytes",
                got=str(self.byte_offset),
                do="Count the offset from the start of the storage.",
            )
        if self.byte_offset % self.dtype.itemsize:
            raise MisalignedWindowError(
                "A window's byte offset is not a multiple of its itemsize.",
                which=f"{self.dtype} window of size {self.size}",
                expected=f"a multiple of {self.dtype.itemsize} bytes",
                got=f"{self.byte_offset} bytes",
                do="Pad the field before it, so that this one starts on its own alignment.",
            )

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Window:
        """Return the window of a plain strided tensor over its whole storage.

        Raises:
            UnsupportedTensorError: The tensor is sparse, nested, quantized or otherwise has
                no strided bytes, or carries a conjugate or negative bit that bytes lack.

        Examples:
            >>> import torch
            >>> Window.of(torch.zeros(4, 6, dtype=torch.int16)[1:, ::2])
            Window(torch.int16, (3, 3), (6, 2), byte_offset=12)
        """
        check_strided(tensor)
        itemsize = tensor.dtype.itemsize
        offset = int(tensor.storage_offset()) * itemsize
        return cls(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), offset)

    def __repr__(self) -> str:
        contiguous = self.stride == contiguous_stride(self.size)
        stride = "" if contiguous else f", {self.stride}"
        return f"Window({self.dtype}, {self.size}{stride}, byte_offset={self.byte_offset})"

    def __reduce__(self) -> tuple[object, ...]:
        # Without this, a pickle would also carry the cached properties.
        return (Window, (self.dtype, self.size, self.stride, self.byte_offset))

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the elements, each counted once per index (so expanded ones repeat)."""
        return self.numel * self.dtype.itemsize

    @cached_property
    def byte_stride(self) -> tuple[int, ...]:
        """Step of each dimension, in bytes."""
        return tuple(step * self.dtype.itemsize for step in self.stride)

    @cached_property
    def span(self) -> tuple[int, int]:
        """First byte and one past the last byte; empty windows have an empty span."""
        nbytes = reach(self.size, self.stride) * self.dtype.itemsize
        return (self.byte_offset, self.byte_offset + nbytes)

    def check_bounds(self, nbytes: int) -> None:
        """Raise `WindowOutOfBoundsError` unless the window lies in ``nbytes`` bytes."""
        # Not by `span` and `numel`, which are kept under a lock, and Dynamo traces no locks.
        low, high = self.byte_offset, self.byte_offset
        high += reach(self.size, self.stride) * self.dtype.itemsize
        if high > nbytes and 0 not in self.size:
            raise WindowOutOfBoundsError(
                "A window reaches past the end of its byte buffer.",
                which=repr(self),
                expected=f"bytes within [0, {nbytes})",
                got=f"bytes [{low}, {high})",
                do="Allocate a larger storage, or correct the size, stride or offset.",
            )

    def overlaps(self, other: Window) -> bool:
        """Return whether the two windows share at least one byte (see `overlap.relation`)."""
        return overlaps(self, other)

    def regenerate(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the typed view of this window over a 1-D contiguous ``uint8`` buffer.

        No copy is made. The chain of views is the one that can be traced, see
        Note [Regenerate with as_strided first].

        Raises:
            WindowOutOfBoundsError: The buffer is too short.

        Examples:
            >>> import torch
            >>> buffer = torch.zeros(8, dtype=torch.uint8)
            >>> Window(torch.int16, (2,), byte_offset=4).regenerate(buffer).fill_(257)
            tensor([257, 257], dtype=torch.int16)
            >>> buffer
            tensor([0, 0, 0, 0, 1, 1, 1, 1], dtype=torch.uint8)
        """
        self.check_bounds(buffer.shape[0])
        return regenerate(buffer, self.dtype, self.size, self.stride, self.byte_offset)

    def compose(self, view: Callable[[torch.Tensor], torch.Tensor], nbytes: int = 0) -> Window:
        """Return the window of a view of this window.

        Args:
            view: Any chain of torch view operations, applied to a tensor without data.
            nbytes: Length of the buffer, needed only when ``view`` reaches outside this
                window with `torch.as_strided`.

        Examples:
            >>> import torch
            >>> rows = Window(torch.float32, (4, 8), byte_offset=32)
            >>> rows.compose(lambda tensor: tensor[2:].view(torch.int16)[:, 3])
            Window(torch.int16, (2,), (16,), byte_offset=102)
        """
        buffer = torch.empty(max(nbytes, self.span[1]), dtype=torch.uint8, device="meta")
        return Window.of(view(self.regenerate(buffer)))


def regenerate(
    buffer: torch.Tensor,
    dtype: torch.dtype,
    size: Sequence[int],
    stride: Sequence[int],
    byte_offset: int,
) -> torch.Tensor:
    """Return a typed view of ``buffer`` without checks; sizes may be symbolic.

    Args:
        buffer: 1-D contiguous ``uint8`` tensor.
        dtype: Element type of the view.
        size: Extents, in elements.
        stride: Steps, in elements.
        byte_offset: Offset of the first element, in bytes.
    """
    # Note [Regenerate with as_strided first]
    # A typed view of bytes is as_strided over the bytes, with one more dimension for the bytes
    # of an element, and only then a change of dtype:
    #
    #     buffer.as_strided((*size, itemsize), (*byte_stride, 1), byte_offset)
    #           .view(dtype).squeeze(-1)
    #
    # It covers every strided window. Functionalization accepts writes through it, whereas an
    # as_strided later in a chain of views is banned (pytorch #104505). Slices and views in
    # place of as_strided express fewer windows, and on Inductor each write through them took
    # twenty times longer (685 ms against 35 ms for two writes to 64 MiB, torch 2.13).
    # One-byte dtypes need no extra dimension, which keeps writes to them in one step.
    itemsize = dtype.itemsize
    if itemsize == 1:
        flat = torch.as_strided(buffer, size, stride, byte_offset)
        return flat if dtype == torch.uint8 else flat.view(dtype)
    byte_stride = [step * itemsize for step in stride]
    elements = torch.as_strided(buffer, (*size, itemsize), (*byte_stride, 1), byte_offset)
    return elements.view(dtype).squeeze(-1)


def reach(size: Sequence[Any], stride: Sequence[Any]) -> Any:
    """Return how many elements lie from a view's first one to its last one; 0 of an empty view.

    Args:
        size: Extents, in elements; they may be symbolic, and so ``stride``.
        stride: Steps, in elements.

    Examples:
        >>> reach((3, 2), (4, 1)), reach((0, 2), (4, 1)), reach((), ())
        (10, 0, 1)
    """
    length = 1
    for extent, step in zip(size, stride, strict=True):
        if isinstance(extent, int):
            if extent == 0:
                return 0
            steps = extent - 1
        else:
            can_be_0 = symbol_bounds(extent, 0, 1)[0] < 1
            steps = torch.sym_max(extent - 1, 0) if can_be_0 else extent - 1
        length = length + steps * step
    return length


def check_strided(tensor: torch.Tensor) -> None:
    """Raise `UnsupportedTensorError` unless ``tensor`` is strided bytes and nothing more."""
    problem = None
    if tensor.layout != torch.strided:
        problem = f"layout {tensor.layout}"
    elif tensor.is_quantized:
        problem = f"quantized dtype {tensor.dtype}"
    elif tensor.is_nested:
        problem = "a nested tensor"
    elif tensor.is_conj() or tensor.is_neg():
        problem = "a lazy conjugate or negative bit, which bytes do not carry"
    if problem is not None:
        raise UnsupportedTensorError(
            "A window needs a strided tensor that is described by its bytes alone.",
            expected="a dense strided tensor",
            got=problem,
            do="Materialize it first: to_dense(), dequantize(), resolve_conj() or resolve_neg().",
        )


run_eagerly(globals())
