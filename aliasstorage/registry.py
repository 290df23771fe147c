"""One byte buffer object per storage.

Note [One buffer object per storage]
Dynamo and AOTAutograd recognize that two inputs share a buffer by the identity of the buffer
*object*. Two `wrap` calls on one storage must therefore hand out the same object, and nothing
may keep the storage alive for it: the registry holds buffers weakly, under the identity of
their storage, which cannot be reused while a buffer holds the storage.
"""

from __future__ import annotations

import threading
import weakref
from typing import Generic, TypeVar

import torch

from aliasstorage._compat import run_eagerly, storage_address, storage_key

_buffers: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def byte_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Return the byte buffer of a plain tensor's storage: 1-D contiguous ``uint8``, all of it.

    The same object is returned for every tensor over the storage, as long as somebody holds
    it. A storage that was resized gets a new buffer.
    """
    key = storage_key(tensor)
    buffer = _buffers.get(key)
    if buffer is not None and buffer.numel() == tensor.untyped_storage().nbytes():
        return buffer
    with _lock:
        buffer = _buffers.get(key)
        if buffer is None or buffer.numel() != tensor.untyped_storage().nbytes():
            buffer = _view_as_bytes(tensor)
            _buffers[key] = buffer
    return buffer


Value = TypeVar("Value")


class PerTensor(Generic[Value]):
    """A value for each tensor object, dropped when the object dies.

    A weak-key dictionary would compare keys, and comparing tensors makes tensors.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[torch.Tensor], Value]] = {}

    def get(self, tensor: torch.Tensor) -> Value | None:
        """Return the tensor's value, or None."""
        entry = self._entries.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def set(self, tensor: torch.Tensor, value: Value) -> None:
        """Give the tensor a value. It must not refer to the tensor itself."""
        key, entries = id(tensor), self._entries
        entries[key] = (weakref.ref(tensor, lambda _: entries.pop(key, None)), value)

    def __len__(self) -> int:
        return len(self._entries)


_pinned: PerTensor[torch.Tensor] = PerTensor()


def pinned_byte_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Return `byte_buffer`, and keep it alive until ``tensor`` dies.

    A compiled function that is called with the same plain tensors again and again finds one
    buffer object, and with it the typed views that were made of it. The tensor holds the
    storage anyway.
    """
    buffer = _pinned.get(tensor)
    if buffer is None or storage_address(buffer) != storage_address(tensor):
        buffer = byte_buffer(tensor)
        _pinned.set(tensor, buffer)
    return buffer


def _view_as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    nbytes, itemsize = storage.nbytes(), tensor.dtype.itemsize
    # Inference tensors could not be mutated outside inference mode, and have no version counter.
    with torch.inference_mode(False), torch.no_grad():
        if tensor.is_inference() or nbytes % itemsize:
            empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            return empty.set_(storage, 0, (nbytes,), (1,))
        # A view, so that the buffer shares the tensor's version counter.
        flat = tensor.detach().as_strided((nbytes // itemsize,), (1,), 0)
        return flat.view(torch.uint8).detach()


run_eagerly(globals())
