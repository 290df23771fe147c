"""One byte buffer object for each storage.

Note [One buffer object per storage]
Problem: Dynamo and AOTAutograd recognize that two inputs share a buffer by the identity of the
buffer *object*. Two `wrap` calls on one storage must therefore return the same object. But the
object must not keep the storage alive.
Rule: a registry holds the buffers weakly, under the identity of their storage.
Reason: that identity cannot be reused while a buffer holds the storage.
"""

from __future__ import annotations

import threading
import weakref
from typing import Generic, TypeVar

import torch

from aliasstorage._compat import run_eagerly, storage_address

# By storage, the buffers that somebody holds. The functions that call compiled graphs look here
# at each call; a buffer of a storage that was resized meanwhile has the old length.
live_buffers: dict[int, weakref.ref[torch.Tensor]] = {}
_lock = threading.Lock()


def byte_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Return the byte buffer of a plain tensor's storage: 1-D contiguous ``uint8``, all of it.

    The same object is returned for every tensor over the storage, as long as somebody holds
    it. A storage that was resized gets a new buffer.
    """
    buffer = _find(tensor)
    if buffer is not None:
        return buffer
    with _lock:
        buffer = _find(tensor)
        if buffer is None:
            buffer = _view_as_bytes(tensor)
            key = storage_address(tensor)
            live_buffers[key] = weakref.ref(buffer, lambda dead: _forget(key, dead))
    return buffer


def _find(tensor: torch.Tensor) -> torch.Tensor | None:
    found = live_buffers.get(storage_address(tensor))
    buffer = None if found is None else found()
    if buffer is None or buffer.numel() != tensor.untyped_storage().nbytes():
        return None
    return buffer


def _forget(key: int, dead: weakref.ref[torch.Tensor]) -> None:
    if live_buffers.get(key) is dead:  # and not the buffer of a later storage, or a longer one
        del live_buffers[key]


Value = TypeVar("Value")


class PerTensor(Generic[Value]):
    """A value for each tensor object, dropped when the object dies, before its id is reused.

    A weak-key dictionary would compare keys, and comparing tensors makes tensors.

    Attributes:
        by_id: The values, by the id of their tensor.
    """

    def __init__(self) -> None:
        self.by_id: dict[int, Value] = {}
        self._alive: dict[int, weakref.ref[torch.Tensor]] = {}

    def get(self, tensor: torch.Tensor) -> Value | None:
        """Return the tensor's value, or None."""
        return self.by_id.get(id(tensor))

    def set(self, tensor: torch.Tensor, value: Value) -> None:
        """Give the tensor a value. It must not refer to the tensor itself."""
        key, by_id, alive = id(tensor), self.by_id, self._alive

        def forget(dead: weakref.ref[torch.Tensor]) -> None:
            if alive.pop(key, None) is not None:
                del by_id[key]

        by_id[key], alive[key] = value, weakref.ref(tensor, forget)

    def __len__(self) -> int:
        return len(self.by_id)


_pinned: PerTensor[torch.Tensor] = PerTensor()


def pinned_byte_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Return `byte_buffer`, and keep it alive until ``tensor`` dies.

    A compiled function that is called with the same plain tensors again and again finds one
    buffer object, and with it the typed views that were made of it. The tensor holds the
    storage anyway.
    """
    buffer = byte_buffer(tensor)
    if _pinned.get(tensor) is not buffer:
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
