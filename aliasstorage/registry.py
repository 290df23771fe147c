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
