"""Move the tensors of an existing object, such as a model's cache, into one storage.

Note [Where large tensors start]
Problem: large allocations, of the storage and of kernels' results, start at the same few bytes
into a page of memory. A kernel that copies a tensor to a new one, as models do that repeat the
heads of their keys, then reads and writes at addresses that are equal in their low bits. By these
bits CPUs tell whether a read depends on a write that is still under way.
Rule: large tensors start half a page into a page, counted from the start of the storage.
Reason: such copies became 2 to 3 percent faster on an AMD EPYC. All offsets from 1,600 bytes on
did so, and none of the smaller ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from aliasstorage._compat import never_traced
from aliasstorage.caches.byte_storage import ByteStorage
from aliasstorage.errors import RequiresGradError, UnsupportedTensorError
from aliasstorage.subclass.alias_tensor import AliasTensor
from aliasstorage.windows.window import Window, check_strided

# Storages start at multiples of this many bytes: the alignment of torch's own allocator on the CPU,
# which vectorized kernels and matrix products like.
ALIGNMENT = 64

# In bytes; see Note [Where large tensors start]. To 16 pages, a page of padding adds little.
PAGE = 4096
LARGE = 16 * PAGE

Replace = Callable[[Any], None]


@never_traced("it allocates the storage that compiled functions are given")
def consolidate_(target: Any, *, wrapped: bool = True) -> ByteStorage:
    """Move every tensor that an object holds into one new storage, in place.

    Attributes, list items and dict values are followed, through objects of any class but modules.
    Tensors that shared a storage share the same bytes afterwards. What the object holds are
    windows from then on: in-place writes by the object's own methods go on working.

    Args:
        target: The object, such as a ``StaticCache`` of transformers after the prefill.
        wrapped: Whether it holds windows (`AliasTensor`), or plain typed views of the storage.

    Returns:
        The storage.

    Raises:
        UnsupportedTensorError: A tensor has no strided bytes, tensors lie on several devices, or
            there is none.
        RequiresGradError: A tensor requires gradients.

    Examples:
        >>> import torch, aliasstorage
        >>> class Cache:
        ...     def __init__(self):
        ...         self.length = torch.tensor(3)
        ...         self.states = {0: torch.ones(2, 3), 1: torch.zeros(4, dtype=torch.bfloat16)}
        >>> cache = Cache()
        >>> storage = aliasstorage.consolidate_(cache)
        >>> storage.nbytes, cache.length.item(), cache.states[0].window
        (136, 3, Window(torch.float32, (2, 3), byte_offset=64))
    """
    found = list(_tensors(target, type(target).__name__, set()))
    devices = {tensor.device for _, tensor, _ in found}
    if len(devices) != 1:
        raise UnsupportedTensorError(
            "Tensors on one device, and at least one, can move into a storage.",
            which=", ".join(name for name, _, _ in found) or type(target).__name__,
            expected="tensors on one device",
            got=", ".join(map(str, devices)) or "no tensors",
            do="Initialize the cache first (run the prefill), and consolidate each device's part.",
        )
    plain = [_plain(name, tensor) for name, tensor, _ in found]
    starts: dict[int, int] = {}
    end = 0
    for tensor in plain:
        key = tensor.untyped_storage().data_ptr()
        if key not in starts:
            nbytes = tensor.untyped_storage().nbytes()
            starts[key] = _start(end, nbytes)
            end = starts[key] + nbytes
    storage = ByteStorage.zeros(end, device=devices.pop())
    copied: set[int] = set()
    for (_, old, replace), tensor in zip(found, plain, strict=True):
        window = Window.of(tensor)
        key = tensor.untyped_storage().data_ptr()
        if key not in copied:
            copied.add(key)
            everything = ByteStorage.adopt(tensor).buffer
            start = starts[key]
            storage.buffer[start : start + everything.numel()].copy_(everything)
        moved = Window(window.dtype, window.size, window.stride, window.byte_offset + starts[key])
        new: torch.Tensor = AliasTensor(storage.buffer, moved)
        if not wrapped:
            new = moved.regenerate(storage.buffer)
        # Marks such as mark_static_address, which CUDA graphs go by.
        vars(new).update({k: v for k, v in vars(old).items() if k.startswith("_dynamo_")})
        replace(new)
    return storage


def _start(end: int, nbytes: int) -> int:
    """Return where a tensor of ``nbytes`` bytes starts, behind others that end at ``end``."""
    if nbytes < LARGE:
        return end + -end % ALIGNMENT
    return end + (PAGE // 2 - end) % PAGE


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, AliasTensor):
        return tensor.window.regenerate(tensor.buffer)
    check_strided(tensor)
    if tensor.requires_grad:
        raise RequiresGradError(
            "A tensor that requires gradients cannot become a window.",
            which=name,
            expected="caches and states that do not require gradients",
            got="requires_grad=True",
            do="Run the prefill under torch.no_grad(), or detach the tensor.",
        )
    return tensor.detach()


def _tensors(target: Any, name: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor, Replace]]:
    """Yield each tensor that an object holds, its name, and how to put another in its place."""
    if id(target) in seen:
        return
    seen.add(id(target))
    items: list[tuple[str, Any, Replace]] = []
    if isinstance(target, dict):
        items = [(f"{name}[{k!r}]", v, partial(target.__setitem__, k)) for k, v in target.items()]
    elif isinstance(target, list):
        items = [(f"{name}[{i}]", v, partial(target.__setitem__, i)) for i, v in enumerate(target)]
    elif hasattr(target, "__dict__") and not isinstance(target, (torch.nn.Module, type)):
        items = [(f"{name}.{k}", v, partial(setattr, target, k)) for k, v in vars(target).items()]
    for where, value, replace in items:
        if isinstance(value, torch.Tensor):
            yield where, value, replace
        elif not callable(value):
            yield from _tensors(value, where, seen)
