"""While AOTAutograd traces: one functional buffer per byte buffer.

Note [One mutated input per storage]
Stock `torch.compile` flattens each window to its own graph input, the buffer. Dynamo fakes one
real buffer object to one fake object, so all windows of a storage get one proxy: N
placeholders, of which one is used. But AOTAutograd then wraps each of them in a
FunctionalTensor of its own, and a write through one window would not be seen through another.
Three hooks close this, all reached through the subclass:

1. `__tensor_unflatten__` hands back, per functional mode, the *first* FunctionalTensor made
   for a fake buffer (`canonical_buffer`). All windows then write one functional buffer.
2. AOTAutograd's epilogue writes each mutated window back with ``old.copy_(new)``. All of these
   stand for one write of the buffer, which `is_written_back` emits once.
3. Views go through `return_and_correct_aliasing`, so that a returned view is recognized.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from aliasstorage._compat import (
    FakeTensor,
    FunctionalTensor,
    current_functional_mode,
    fake_tensors_sharing_storage,
    functional_value,
    is_proxy_tracing,
    run_eagerly,
    storage_key,
)
from aliasstorage.errors import MixedAliasError


def is_traced(buffer: torch.Tensor) -> bool:
    """Return whether a buffer stands for bytes in a trace, rather than holding them."""
    return type(buffer) is not torch.Tensor and isinstance(buffer, (FakeTensor, FunctionalTensor))


class _FunctionalBuffer:
    """The functional buffer of a fake buffer, and whether it was written back."""

    __slots__ = ("fake", "functional", "written")

    def __init__(self, fake: torch.Tensor, functional: FunctionalTensor) -> None:
        self.fake, self.functional = fake, functional
        self.written: torch.Tensor | None = None


# Functional mode -> the functional buffers made under it, by identity of the fake buffer. The
# epilogue runs after the mode ended, so the latest modes are searched there.
_by_mode: weakref.WeakKeyDictionary[Any, dict[int, _FunctionalBuffer]]
_by_mode = weakref.WeakKeyDictionary()


def canonical_buffer(buffer: torch.Tensor) -> torch.Tensor:
    """Return the one functional buffer for a fake buffer, under the active functional mode.

    Raises:
        MixedAliasError: A plain tensor over the same storage is also an input of the trace.
    """
    mode = current_functional_mode()
    if mode is None or not isinstance(buffer, FunctionalTensor):
        return buffer
    fake = functional_value(buffer)
    buffers = _by_mode.setdefault(mode, {})
    entry = buffers.get(id(fake))
    if entry is None:
        _refuse_mixed_inputs(fake)
        entry = buffers[id(fake)] = _FunctionalBuffer(fake, buffer)
    return entry.functional


def is_written_back(args: tuple[Any, ...]) -> bool:
    """Recognize AOTAutograd's epilogue ``old.copy_(new)`` and emit its one buffer copy.

    Returns:
        True when the copy was the epilogue's and is done. A ``copy_`` that a user wrote between
        two windows, of equal spec or not, is never recognized: its right side does not hold the
        current value of the left side's functional buffer.
    """
    target, value = args[0], args[1]
    if not (type(target) is type(value) and is_proxy_tracing()):
        return False
    fake, current = target._buffer, value._buffer
    if type(fake) is not FakeTensor or type(current) is not FakeTensor:
        return False
    for buffers in list(_by_mode.values()):
        entry = buffers.get(id(fake))
        if entry is None or functional_value(entry.functional) is not current:
            continue
        if entry.written is not current:
            fake.copy_(current)
            entry.written = current
        return True
    return False


# Fake mode -> storages already checked. AOTAutograd traces several times and adds fakes of its
# own to the mode, so only the first look sees exactly what Dynamo was given.
_checked: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()


_writes_are_in_place: ContextVar[bool] = ContextVar("writes_are_in_place", default=False)


@contextmanager
def for_own_backend(in_place: bool) -> Iterator[None]:
    """Trace for the backend of this library.

    Args:
        in_place: Whether it makes in-place writes of the functional ones, and of clones copies
            that no compiler drops.
    """
    token = _writes_are_in_place.set(in_place)
    try:
        yield
    finally:
        _writes_are_in_place.reset(token)


def stays_a_byte_graph(buffer: torch.Tensor) -> bool:
    """Return whether writes of ``buffer`` in the graph being traced stay functional ones."""
    return not _writes_are_in_place.get() and isinstance(buffer, FunctionalTensor)


def _refuse_mixed_inputs(fake: torch.Tensor) -> None:
    if not isinstance(fake, FakeTensor):
        return
    checked = _checked.setdefault(fake.fake_mode, set())
    if storage_key(fake) in checked:
        return
    checked.add(storage_key(fake))
    others = fake_tensors_sharing_storage(fake)
    if others:
        shapes = ", ".join(f"{t.dtype} of shape {tuple(t.shape)}" for t in others)
        raise MixedAliasError(
            "Windows and plain tensors over one storage are inputs of one compiled function.",
            which=f"a byte buffer of {fake.shape[0]} bytes",
            expected="every view of the storage wrapped, or none",
            got=f"windows together with plain {shapes}",
            do='Wrap them together with aliasstorage.wrap, or use backend="aliasstorage".',
        )


# Note [Caches on disk ignore aliasing]
# AOTAutograd's cache key describes each input by itself, so a graph compiled for windows of one
# buffer would also be found for windows of two. Each window therefore adds to the key which
# buffer it has, counted in the order in which the inputs of one compilation are hashed.
_ordinals: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()


def buffer_ordinal(buffer: torch.Tensor) -> int:
    """Return which buffer of its compilation this is, from 0."""
    scope = getattr(buffer, "fake_mode", None)
    if scope is None:
        return -1
    ordinals = _ordinals.setdefault(scope, {})
    return ordinals.setdefault(id(buffer), len(ordinals))


run_eagerly(globals())
