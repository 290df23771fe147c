"""While AOTAutograd traces: one functional buffer for each byte buffer.

Note [One mutated input per storage]
Problem: stock `torch.compile` flattens each window to its own graph input, the buffer. Dynamo
fakes one real buffer object to one fake object, so that all windows of a storage get one proxy: N
placeholders, of which one is used. But AOTAutograd then wraps each of them in a FunctionalTensor
of its own, and a write through one window would not be seen through another.
Rule: three hooks close this gap. All of them are reached through the subclass.

1. `__tensor_unflatten__` returns, for each functional mode, the *first* FunctionalTensor that was
   made for a fake buffer (`canonical_buffer`). All windows then write one functional buffer.
2. AOTAutograd's epilogue writes each mutated window back with ``old.copy_(new)``. All of these
   copies stand for one write of the buffer, which `is_written_back` emits once.
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
    backward_pass,
    current_functional_mode,
    fake_tensors_sharing_storage,
    functional_value,
    is_computed_again,
    is_proxy_tracing,
    run_eagerly,
    storage_key,
)
from aliasstorage.errors import BackwardWriteError, MixedAliasError


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


def register_window(buffer: torch.Tensor, window: torch.Tensor) -> None:
    """Remember a window of a functional buffer, and in which backward pass the first was made.

    See `is_done_in_backward` and Note [Windows that are saved for a backward pass].
    """
    if not isinstance(buffer, FunctionalTensor):
        return
    if not hasattr(buffer, "_windows"):
        buffer._windows = []  # type: ignore[attr-defined]
        buffer._made_in_pass = backward_pass()  # type: ignore[attr-defined]
    buffer._windows.append(weakref.ref(window))  # type: ignore[attr-defined]


def other_windows(window: Any) -> list[Any]:
    """Return the live windows of a traced window's functional buffer, without itself."""
    found = [alive() for alive in getattr(window._buffer, "_windows", ())]
    return [other for other in found if other is not None and other is not window]


def is_done_in_backward(buffer: torch.Tensor) -> bool:
    """Return whether what is traced of a buffer belongs to the backward pass, or does so as well.

    Note [Writes in a backward pass]
    Problem: AOTAutograd computes what a backward pass writes to an input in the joint graph, from
    what the forward pass left there. The partitioner may move this into the forward pass. The
    backward pass then copies the result into the whole input, which is the whole storage for
    windows. Whatever was written between the two passes is lost. A checkpointed region that writes
    is wrong in another way: eager PyTorch writes once more when it computes the region again.
    Rule: such graphs are refused when they are traced.
    A function may also be compiled while a backward pass runs. It is therefore not enough that one
    runs: the pass in which the first window was made is compared.
    """
    made_in = getattr(buffer, "_made_in_pass", None)
    return made_in is not None and (made_in != backward_pass() or is_computed_again())


def backward_write_error(which: str) -> BackwardWriteError:
    """Return the error for a function that writes a window in its backward pass."""
    return BackwardWriteError(
        "A compiled function writes a window in its backward pass.",
        which=which,
        expected="windows that are written in the forward pass only",
        got="a write in the backward pass, which AOTAutograd does as a copy of the whole storage",
        do="Write in the forward pass, or keep the function out of the graph with "
        "torch.compiler.disable.",
    )


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
# Problem: AOTAutograd's cache key describes each input by itself. A graph that was compiled for
# windows of one buffer would also be found for windows of two.
# Rule: each window adds to the key which buffer it has, counted in the order in which the inputs of
# one compilation are hashed.
_ordinals: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()


def buffer_ordinal(buffer: torch.Tensor) -> int:
    """Return which buffer of its compilation this is, from 0."""
    scope = getattr(buffer, "fake_mode", None)
    if scope is None:
        return -1
    ordinals = _ordinals.setdefault(scope, {})
    return ordinals.setdefault(id(buffer), len(ordinals))


run_eagerly(globals())
