"""`ByteStorage`: allocate or adopt a storage, and take typed windows of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch

from aliasstorage._compat import fake_of
from aliasstorage.errors import ExportError
from aliasstorage.subclass.alias_tensor import AliasTensor
from aliasstorage.subclass.functional_buffers import is_traced
from aliasstorage.windows.byte_buffers import byte_buffer
from aliasstorage.windows.memory_map import MemoryMap, memory_map
from aliasstorage.windows.window import Window, check_strided, contiguous_stride, regenerate


class ByteStorage:
    """A storage of bytes from which typed windows are taken.

    Windows may be taken eagerly and passed to compiled functions, or taken inside a compiled
    function, where the storage is then one graph input however many windows there are. A module
    that is exported registers ``storage.buffer`` as a buffer of its own.

    Examples:
        >>> import torch, aliasstorage
        >>> storage = aliasstorage.ByteStorage.zeros(64)
        >>> keys = storage.window(torch.float16, (4, 4))
        >>> state = storage.window(torch.float32, (2, 4), byte_offset=32)
        >>> state.fill_(1.0).sum().item(), storage.buffer[32:36].tolist()
        (8.0, [0, 0, 128, 63])
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        """Take windows of a byte buffer; use `zeros`, `empty` or `adopt` to make one."""
        self._buffer, self._root = buffer, buffer
        if not torch.compiler.is_compiling():
            self._root = AliasTensor(buffer, Window(torch.uint8, (buffer.numel(),)))
            self._buffer = self._root.buffer

    @classmethod
    def zeros(cls, nbytes: int, *, device: torch.device | str | None = None) -> ByteStorage:
        """Allocate ``nbytes`` zero bytes."""
        return cls(torch.zeros(nbytes, dtype=torch.uint8, device=device))

    @classmethod
    def empty(cls, nbytes: int, *, device: torch.device | str | None = None) -> ByteStorage:
        """Allocate ``nbytes`` bytes without initializing them."""
        return cls(torch.empty(nbytes, dtype=torch.uint8, device=device))

    @classmethod
    def adopt(cls, tensor: torch.Tensor) -> ByteStorage:
        """Use the whole storage of an existing tensor of any dtype and offset, without a copy.

        Raises:
            UnsupportedTensorError: The tensor has no strided bytes.

        Examples:
            >>> import torch, aliasstorage
            >>> raw = torch.zeros(2, 8, dtype=torch.bfloat16)
            >>> aliasstorage.ByteStorage.adopt(raw[1]).nbytes
            32
        """
        if isinstance(tensor, AliasTensor):
            return cls(tensor.buffer)
        if torch.compiler.is_compiling():
            return cls(tensor)
        check_strided(tensor)
        return cls(byte_buffer(tensor))

    @property
    def buffer(self) -> torch.Tensor:
        """The byte buffer: a plain 1-D contiguous ``uint8`` tensor, the whole storage."""
        return self._buffer

    @property
    def nbytes(self) -> int:
        """Length of the storage, in bytes."""
        return self._root.shape[0]

    def window(
        self,
        dtype: torch.dtype,
        size: Sequence[int],
        stride: Sequence[int] | None = None,
        byte_offset: int = 0,
    ) -> AliasTensor:
        """Return a typed window.

        Args:
            dtype: Element type.
            size: Extents, in elements.
            stride: Steps, in elements; row-major when omitted.
            byte_offset: Offset of the first element from the start of the storage, in bytes.

        Raises:
            InvalidWindowError: The size, stride or offset makes no sense.
            MisalignedWindowError: The offset is not a multiple of the itemsize.
            WindowOutOfBoundsError: The window reaches past the storage.
        """
        stride = contiguous_stride(size) if stride is None else stride
        if torch.compiler.is_exporting():
            return cast(AliasTensor, regenerate(self._exported(), dtype, size, stride, byte_offset))
        if torch.compiler.is_compiling():
            # Views of the one window over everything, so that the compiled function has one
            # input for the storage. torch checks their bounds as it traces.
            return cast(AliasTensor, regenerate(self._root, dtype, size, stride, byte_offset))
        return AliasTensor(self.buffer, Window(dtype, tuple(size), tuple(stride), byte_offset))

    def _exported(self) -> torch.Tensor:
        """Return the byte buffer as `torch.export` knows it: windows are plain views of it there.

        Raises:
            ExportError: The buffer is not one of the exported module's.
        """
        if torch.compiler.is_dynamo_compiling() or is_traced(self._buffer):
            return self._buffer
        # Export without Dynamo runs the module on fakes of its parameters and buffers; this
        # storage still holds the real ones.
        fake = fake_of(self._buffer)
        if fake is None:
            raise ExportError(
                "An exported module uses a storage whose bytes are not among its buffers.",
                which=repr(self),
                expected="the storage's bytes as a buffer of the module",
                got="a storage that torch.export would take for a constant",
                do='Call self.register_buffer("cache", storage.buffer) where the module is made.',
            )
        return fake

    def memory_map(
        self,
        windows: Mapping[str, Window | AliasTensor],
        *,
        start: int = 0,
        stop: int | None = None,
        cells: int = 64,
    ) -> MemoryMap:
        """Return which bytes the given windows cover: ``print`` it, or ``plot`` it.

        Args:
            windows: Windows by name: a `layouts.Layout`'s, or taken ones.
            start: First byte to show.
            stop: One past the last byte to show; the end of the storage when omitted. One page
                shows more than a thousand.
            cells: Characters in a line.
        """
        shown = {name: w if isinstance(w, Window) else w.window for name, w in windows.items()}
        return memory_map(shown, start, self.nbytes if stop is None else stop, cells)

    def __repr__(self) -> str:
        return f"ByteStorage({self.nbytes} bytes on {self.buffer.device})"
