"""The windows among the arguments of one call: which overlap, and calls that get copies of some.

Note [One call, overlapping windows]
Problem: in a functional graph, an operation reads all of its arguments before it writes, and
writes each mutated argument as a whole. If a mutated window shares bytes with another argument,
this is not what the operation does on memory: old bytes of one argument could undo what the other
wrote.
Rule: ATen's own operations define their result for such arguments, or refuse them. A foreach
operation is done one tensor at a time, as eager mode does it. Other operations and Triton kernels
are refused while tracing.
Reason: nobody can know what those read first.

Note [Custom operations get copies on byte graphs]
Problem: Inductor copies what a custom operation mutates, unless it can avoid it, by as_strided
with an offset in the whole storage. If the argument is a view in another dtype of a buffer that
was written in the graph, Inductor takes the offset from that view, and the operation writes other
bytes.
Rule: the operation gets real copies, which are written back after it. The copy must not be a view
in another dtype either: Inductor would reuse its memory while it is still read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from aliasstorage._compat import pytree, run_eagerly
from aliasstorage.ops import materialize
from aliasstorage.subclass import functional_buffers
from aliasstorage.subclass.alias_tensor import AliasTensor


def overlapping_pair(
    windows: Sequence[AliasTensor], mutated: Collection[AliasTensor]
) -> tuple[AliasTensor, AliasTensor] | None:
    """Return two windows that share bytes, one of them mutated; of symbolic ones nothing is said.

    See Note [One call, overlapping windows].
    """
    written = {id(window) for window in mutated}
    for number, first in enumerate(windows):
        for second in windows[number + 1 :]:
            if first._buffer is not second._buffer or not {id(first), id(second)} & written:
                continue
            if not first._is_static or not second._is_static:
                continue
            if first.window.overlaps(second.window):
                return first, second
    return None


def tell_autograd(written: AliasTensor) -> None:
    """Count a traced write as one of every window that shares bytes with the written one.

    Note [Windows that are saved for a backward pass]
    Problem: autograd saves a window that the backward pass needs as the window itself, and reads it
    later. By then its buffer may have been written through another window. Plain views share a
    version counter, by which eager PyTorch notices the write and raises an error. Traced windows
    have one counter each.
    Rule: a write is counted in the counters of all windows over its bytes.
    """
    for other in functional_buffers.other_windows(written):
        if not (written._is_static and other._is_static) or written.window.overlaps(other.window):
            increment_version(other)


def call_on_copies(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mutated: Sequence[AliasTensor],
) -> Any:
    """Call with typed views for windows, and copies of the mutated ones, which are written back.

    See Note [Custom operations get copies on byte graphs].
    """
    copies = {id(window): materialize(window._typed()) for window in mutated}

    def typed(window: AliasTensor) -> torch.Tensor:
        copy = copies.get(id(window))
        return window._typed() if copy is None else copy

    arguments: Any = pytree.tree_map_only(AliasTensor, typed, (args, kwargs))
    result = function(*arguments[0], **arguments[1])
    for window in mutated:
        window.copy_(copies[id(window)])
    return result


run_eagerly(globals())
