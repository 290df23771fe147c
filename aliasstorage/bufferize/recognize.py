"""Read the windows, reads and writes of a byte graph.

Every access of a window is traced in one form (see Note [Regenerate with as_strided first] and
Note [A traced view is a window of the buffer]), so a byte graph looks like this:

    read:   squeeze(view.dtype(as_strided(version, bytes of the window), dtype), -1)
    write:  next version = as_strided_scatter(version, view.dtype(unsqueeze(value, -1), uint8), …)
    end:    copy_(buffer, last version)

Whatever else touches a version is a use of the whole buffer. What cannot be read as windows, such
as a size that is computed inside the graph, makes the buffer unrecognized, with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from aliasstorage._compat import expression
from aliasstorage.bufferize.symbolic_windows import (
    AnyWindow,
    SymbolicWindow,
    reinterpret,
    squeeze_last,
    symbol_sources,
    window_at,
)

aten = torch.ops.aten


_WINDOW_ACCESSES = (aten.as_strided.default, aten.as_strided_scatter.default)


class UnrecognizedError(Exception):
    """Why a buffer's accesses are not windows; never leaves this package."""


@dataclass
class ReadNode:
    """A node whose value is a view of one version of a buffer."""

    node: torch.fx.Node
    version: int
    window: AnyWindow
    user: torch.fx.Node | None = None  # the one user that reads, when others do not


@dataclass
class WriteNode:
    """A scatter, with the typed value that it writes."""

    node: torch.fx.Node
    version: int  # the one it makes
    window: AnyWindow
    value: torch.fx.Node


@dataclass
class BufferAccesses:
    """All accesses of one buffer of a graph."""

    buffer: torch.fx.Node
    reads: list[ReadNode] = field(default_factory=list)
    writes: list[WriteNode] = field(default_factory=list)
    final_copy: torch.fx.Node | None = None
    returned: bool = False


def byte_buffers(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """Return the inputs that are viewed as windows: 1-D ``uint8``, used through as_strided."""
    return [
        node
        for node in graph.find_nodes(op="placeholder")
        if isinstance(value := node.meta.get("val"), torch.Tensor)
        and value.dtype == torch.uint8
        and value.dim() == 1
        and any(user.target in _WINDOW_ACCESSES for user in node.users)
    ]


def recognize(buffer: torch.fx.Node) -> BufferAccesses:
    """Return the accesses of a buffer.

    Raises:
        UnrecognizedError: An access is not a window that is known before the graph runs.
    """
    accesses = BufferAccesses(buffer)
    nbytes = buffer.meta["val"].shape[0]
    versions = {buffer: 0}
    pending = [buffer]
    while pending:
        base = pending.pop(0)
        version = versions[base]
        for user in list(base.users):
            if user.target is aten.as_strided_scatter.default and user.args[0] is base:
                if version + 1 in versions.values():
                    raise UnrecognizedError("two writes start from one version of the buffer")
                versions[user] = version + 1
                accesses.writes.append(_write(user, version + 1))
                pending.append(user)
            elif user.target is aten.as_strided.default:
                window = _as_strided_window(user.args[1], user.args[2], user.args[3:])
                _reads(user, version, window, accesses)
            elif user.target is aten.copy_.default and user.args[0] is buffer:
                if accesses.final_copy is not None and accesses.final_copy is not user:
                    raise UnrecognizedError("the buffer is written back twice")
                accesses.final_copy = user
            elif user.op == "output" and base is buffer:
                accesses.returned = True
            else:
                window = window_at(torch.uint8, (nbytes,), (1,), 0)
                accesses.reads.append(ReadNode(base, version, window, user))
    if accesses.writes and (
        accesses.final_copy is None or versions.get(accesses.final_copy.args[1]) is None
    ):
        raise UnrecognizedError("the last version of the buffer is not written back")
    known = symbol_sources(buffer.graph.find_nodes(op="placeholder"), [buffer])
    for access in (*accesses.reads, *accesses.writes):
        if isinstance(access.window, SymbolicWindow) and not known.keys() >= {
            *access.window.symbols
        }:
            raise UnrecognizedError(f"the size of {access.node.name} is computed inside the graph")
    return accesses


def _as_strided_window(size: Any, stride: Any, offset: tuple[Any, ...]) -> AnyWindow:
    start = offset[0] if offset and offset[0] is not None else 0
    sizes, strides = [_value(extent) for extent in size], [_value(step) for step in stride]
    return window_at(torch.uint8, sizes, strides, _value(start))


def _value(extent: Any) -> Any:
    return extent.meta["val"] if isinstance(extent, torch.fx.Node) else extent


def _reads(node: torch.fx.Node, version: int, window: AnyWindow, accesses: BufferAccesses) -> None:
    """Record the typed view that a chain as_strided, view, squeeze ends in."""
    inner: list[tuple[torch.fx.Node, AnyWindow]] = []
    rest = False
    for user in node.users:
        if user.target is aten.view.dtype and user.args[0] is node:
            inner.append((user, reinterpret(window, user.args[1])))
        elif user.target is aten.squeeze.dim and user.args[1] in (-1, len(window.size) - 1):
            inner.append((user, squeeze_last(window)))
        else:
            rest = True
    if rest or not inner:
        accesses.reads.append(ReadNode(node, version, window))
    for user, typed in inner:
        _reads(user, version, typed, accesses)


def _write(node: torch.fx.Node, version: int) -> WriteNode:
    """Return a scatter's window and value in the value's own dtype."""
    value = node.args[1]
    window = _as_strided_window(node.args[2], node.args[3], node.args[4:])
    if value.target is aten.view.dtype and value.meta["val"].dtype == torch.uint8:
        inner = value.args[0]
        dtype = inner.meta["val"].dtype
        value, window = inner, reinterpret(window, dtype)
        last = len(window.size) - 1
        if value.target is aten.unsqueeze.default and value.args[1] in (-1, last):
            value, window = value.args[0], squeeze_last(window)
    if tuple(map(expression, value.meta["val"].shape)) != window.size:
        raise UnrecognizedError(f"the value of {node.name} has another shape than its window")
    return WriteNode(node, version, window, value)


VIEW_OPS = frozenset(
    {
        aten.alias.default,
        aten.as_strided.default,
        aten.detach.default,
        aten.diagonal.default,
        aten.expand.default,
        aten.permute.default,
        aten.reshape.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.t.default,
        aten.transpose.int,
        aten.unbind.int,
        aten.unfold.default,
        aten.unsqueeze.default,
        aten.view.default,
        aten.view.dtype,
        aten.view_as_complex.default,
        aten.view_as_real.default,
        aten._unsafe_view.default,
        aten._reshape_alias.default,
    }
)


def may_alias_argument(node: torch.fx.Node) -> bool:
    """Return whether a node's value may alias its argument's memory."""
    if node.target in VIEW_OPS:
        return True
    if getattr(node.target, "__name__", "") == "getitem" and node.op == "call_function":
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


# Operations that Inductor replaces by their argument where they leave it as it is, by
# ``noop_registry`` in torch/_inductor/fx_passes/post_grad.py.
NO_OPS = frozenset(
    {
        aten._to_copy.default,
        aten.cat.default,
        aten.ceil.default,
        aten.clone.default,
        aten.constant_pad_nd.default,
        aten.copy.default,
        aten.floor.default,
        aten.pow.Scalar,
        aten.pow.Tensor_Scalar,
        aten.pow.Tensor_Tensor,
        aten.repeat.default,
        aten.round.decimals,
        aten.round.default,
        aten.slice_scatter.default,
        aten.trunc.default,
        torch.ops.prims.convert_element_type.default,
        torch.ops.prims.device_put.default,
    }
)


def may_become_argument(node: torch.fx.Node) -> bool:
    """Return whether a compiler may take a node's value for its argument's memory.

    Note [Copies that a compiler may drop]
    Problem: ``x = w.clone(); w.add_(1); return x * 2`` needs the old values of ``w``, which ``x``
    has. Inductor assumes that a graph writes only at its end, and drops the clone as a no-op.
    Then ``x`` is ``w``, and the product is that of the new values (torch 2.15).
    Rule: a use of such a value is a use of the window itself. If the window is written before it,
    the plan makes a copy that no compiler drops.
    """
    if node.target not in NO_OPS:
        return may_alias_argument(node)
    value = node.meta["val"]
    return any(_same_layout(value, source.meta.get("val")) for source in node.all_input_nodes)


def _same_layout(a: torch.Tensor, b: Any) -> bool:
    return (
        isinstance(b, torch.Tensor)
        and a.dtype == b.dtype
        and list(map(expression, a.shape)) == list(map(expression, b.shape))
        and list(map(expression, a.stride())) == list(map(expression, b.stride()))
    )


def uses(
    node: torch.fx.Node, is_view: Callable[[torch.fx.Node], bool] = may_alias_argument
) -> Iterator[torch.fx.Node]:
    """Yield the nodes that use a view's values, looking through views of it."""
    seen = {node}
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if user in seen:
                continue
            seen.add(user)
            yield user
            if user.op == "call_function" and is_view(user):
                pending.append(user)
