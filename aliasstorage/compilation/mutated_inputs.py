"""Which inputs a Dynamo graph writes, as far as its nodes show."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx

_IN_PLACE_OPERATORS = frozenset(
    {
        operator.setitem,
        operator.iadd,
        operator.iand,
        operator.ifloordiv,
        operator.ilshift,
        operator.imod,
        operator.imul,
        operator.ior,
        operator.ipow,
        operator.irshift,
        operator.isub,
        operator.itruediv,
        operator.ixor,
    }
)


def written_inputs(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Return placeholders that the graph writes, directly or through what is made of them.

    Neither complete (an operation may write an argument without saying so in its name or
    schema) nor exact (what is made of an input need not be a view of it): it serves to choose
    between two ways that are both right.
    """
    written = set()
    for node in graph.nodes:
        for target in _targets(node):
            while target.op in ("call_function", "call_method") and target.args:
                first = target.args[0]
                if isinstance(first, (list, tuple)) and first:
                    first = first[0]
                if not isinstance(first, torch.fx.Node):
                    break
                target = first
            if target.op == "placeholder":
                written.add(target)
    return written


def _targets(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    out = node.kwargs.get("out")
    yield from _nodes(out)
    if node.op == "call_method":
        name = str(node.target)
        if name.endswith("_") and not name.endswith("__"):
            yield from _nodes(node.args[0])
    elif node.op == "call_function":
        schemas = _schemas(node.target)
        if schemas:
            if any(schema.is_mutable for schema in schemas):
                yield from _nodes((node.args, tuple(node.kwargs.values())))
        elif node.target in _IN_PLACE_OPERATORS or _named_in_place(node.target):
            yield from _nodes(node.args[:1])


def _schemas(target: Any) -> list[Any]:
    """Return the schemas of an operator, or of all overloads of one."""
    if hasattr(target, "overloads"):
        return [getattr(target, overload)._schema for overload in target.overloads()]
    return [target._schema] if hasattr(target, "_schema") else []


def _named_in_place(target: Any) -> bool:
    name = getattr(target, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def _nodes(value: Any) -> Iterator[torch.fx.Node]:
    if isinstance(value, torch.fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _nodes(item)
