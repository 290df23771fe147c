"""Simplify a byte graph, before and after its writes become in-place writes."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from aliasstorage import ops

aten = torch.ops.aten


def drop_self_writes(graph: torch.fx.Graph) -> None:
    """Remove writes that give a window the value it has.

    ``window[i] += x`` is three steps in Python: take the view, add to it, and assign it to the
    place where it already is. The last one is a write of a read of the same version.
    """
    for node in graph.find_nodes(op="call_function", target=aten.as_strided_scatter.default):
        value = node.args[1]
        if value.target is aten.view.dtype:
            value = value.args[0]
        if value.target is aten.unsqueeze.default:
            value = value.args[0]
        if value.target is aten.copy.default and _same_kind(*value.args[:2]):
            value = value.args[1]
        if value.meta["val"].dtype != torch.bool and _reads(value, node.args[0], node.args[2:]):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _same_kind(a: Any, b: Any) -> bool:
    left, right = a.meta["val"], b.meta["val"]
    return left.dtype == right.dtype and left.shape == right.shape


def _reads(value: torch.fx.Node, version: torch.fx.Node, window: tuple[Any, ...]) -> bool:
    """Return whether a value is the window of bytes of a version, in any dtype."""
    for target in (aten.squeeze.dim, aten.view.dtype):
        if value.target is target:
            value = value.args[0]
    if value.target is not aten.as_strided.default:
        return False
    return value.args[0] is version and tuple(value.args[1:]) == tuple(window)


def drop_copies_of_copies(graph: torch.fx.Graph) -> None:
    """Erase clones of values that were copied for them alone.

    ``w.clone()`` is copied once more where a compiler may drop the clone; see Note [Copies that a
    compiler may drop].
    """
    for node in graph.find_nodes(op="call_function", target=aten.clone.default):
        copy = node.args[0]
        if copy.target is not ops.materialize or len(copy.users) != 1:
            continue
        if node.meta["val"].stride() == copy.meta["val"].stride():
            node.replace_all_uses_with(copy)
            graph.erase_node(node)


def eliminate_dead_code(graph: torch.fx.Graph) -> None:
    """Erase what nothing uses, keeping every node that writes."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not node.is_impure():
            schema = getattr(node.target, "_schema", None)
            if schema is None or not schema.is_mutable:
                graph.erase_node(node)
