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

import torch

from aliasstorage._compat import no_inference_mode, storage_key

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


# A plain tensor's id -> the tensor, weakly, and the buffer of its storage. The buffer lives as
# long as the tensor, which holds the storage anyway.
_pinned: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}


def pinned_byte_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Return `byte_buffer`, and keep it alive until ``tensor`` dies.

    A compiled function that is called with the same plain tensors again and again finds one
    buffer object, and with it the typed views that were made of it.
    """
    key = id(tensor)
    entry = _pinned.get(key)
    if entry is not None:
        buffer = entry[1]
        if storage_key(buffer) == storage_key(tensor) and entry[0]() is tensor:
            return buffer
    buffer = byte_buffer(tensor)
    _pinned[key] = (weakref.ref(tensor, lambda _: _pinned.pop(key, None)), buffer)
    return buffer


def _view_as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    nbytes, itemsize = storage.nbytes(), tensor.dtype.itemsize
    # Inference tensors could not be mutated outside inference mode, and have no version counter.
    with no_inference_mode(), torch.no_grad():
        if tensor.is_inference() or nbytes % itemsize:
            empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            return empty.set_(storage, 0, (nbytes,), (1,))
        # A view, so that the buffer shares the tensor's version counter.
        flat = tensor.detach().as_strided((nbytes // itemsize,), (1,), 0)
        return flat.view(torch.uint8).detach()
