"""Calls of custom operations that mutate windows.

Functionalization turns a call of an operator with mutated arguments into
``auto_functionalized_v2``, which returns new values for the mutated bases. In a byte graph each
mutated window is a base of its own, so the call can be made again as it was written, on the
typed windows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from aliasstorage import ops
from aliasstorage._compat import OpOverload
from aliasstorage.bufferize.recognize import UnrecognizedError


@dataclass
class MutatingCall:
    """A functionalized call, and which of its results are windows.

    Attributes:
        node: The functionalized call.
        windows: For each position in its result that is the new value of a window, the read
            that is the window's old value.
        others: The same for mutated arguments that are not windows.
    """

    node: torch.fx.Node
    windows: dict[int, torch.fx.Node]
    others: dict[int, torch.fx.Node]
    first_base: int

    @property
    def name(self) -> str:
        """What is called, for reports."""
        return str(self.node.args[0])

    def emit(self, graph: torch.fx.Graph, windows: Mapping[int, torch.fx.Node]) -> None:
        """Make the call on its windows.

        Other arguments, those that only read a window among them, already are what they must be:
        typed views, or copies of what is used after the call as well.
        """
        node = self.node
        bases = list(node.kwargs["_all_bases"])
        for position, window in windows.items():
            bases[position - self.first_base] = window
        for position, base in self.others.items():
            bases[position - self.first_base] = clone_of(graph, base)
        kwargs = _arguments(node, bases)
        call = graph.call_function(node.args[0], (), kwargs)
        if node.args[0]._schema.returns:
            # Inductor moves nodes next to their users, those that write as well, until the next
            # write. Here is one, of nothing.
            graph.call_function(ops.fence, ([],)).meta["val"] = None
        call.meta = dict(node.meta)
        # Inductor lays out the arguments of a custom operation as they were in eager mode.
        values = torch.fx.map_arg(kwargs, lambda argument: argument.meta["val"])
        call.meta["eager_input_vals"] = ((), values)
        returns = len(node.args[0]._schema.returns)
        value = node.meta["val"]
        call.meta["val"] = (
            None if returns == 0 else value[0] if returns == 1 else tuple(value[:returns])
        )
        for user in list(node.users):
            position = user.args[1]
            if position >= self.first_base:
                if position in self.others:
                    user.replace_all_uses_with(bases[position - self.first_base])
                continue
            if returns == 1:
                user.replace_all_uses_with(call)
            else:
                item = graph.call_function(operator.getitem, (call, position))
                item.meta = dict(user.meta)
                user.replace_all_uses_with(item)


def mutating_call(
    node: torch.fx.Node, is_window: Callable[[torch.fx.Node], bool]
) -> MutatingCall | None:
    """Return a functionalized call that can be made in place, or None.

    Raises:
        UnrecognizedError: It describes an argument by an offset in the storage of its base.
    """
    if node.target is not torch.ops.higher_order.auto_functionalized_v2:
        return None
    overload = node.args[0]
    if any(key.endswith("_storage_offset") for key in node.kwargs):
        # The offset is one in the whole storage, which a typed view does not start.
        raise UnrecognizedError(f"an argument of {overload} is a view by an offset in its storage")
    if not isinstance(overload, OpOverload) or len(node.args) != 1:
        return None
    bases = node.kwargs["_all_bases"]
    if len(set(bases)) != len(bases):
        return None
    known = set()
    for argument in overload._schema.arguments:
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        names = [argument.name]
        if f"_{argument.name}_length" in node.kwargs:
            length: Any = node.kwargs[f"_{argument.name}_length"]
            known.add(f"_{argument.name}_length")
            names = [f"{argument.name}_{number}" for number in range(length or 0)]
        known.update(f"_{name}_base_index" for name in names)
    plain = {argument.name for argument in overload._schema.arguments} | {"_all_bases"}
    if any(key not in known and key not in plain for key in node.kwargs):
        return None  # an argument is a view of its base
    first = max(1, len(overload._schema.returns))
    windows = {first + i: base for i, base in enumerate(bases) if is_window(base)}
    others = {first + i: base for i, base in enumerate(bases) if not is_window(base)}
    return MutatingCall(node, windows, others, first)


def written_bases(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return what a functionalized call of an operator would write; nothing of other nodes."""
    if node.target is not torch.ops.higher_order.auto_functionalized_v2:
        return []
    return list(node.kwargs["_all_bases"])


def clone_of(graph: torch.fx.Graph, value: torch.fx.Node) -> torch.fx.Node:
    """Return a clone of a tensor that is no window, for a call to write."""
    copy = graph.call_function(torch.ops.aten.clone.default, (value,))
    with value.meta["val"].fake_mode:
        copy.meta["val"] = value.meta["val"].clone()
    return copy


def _arguments(node: torch.fx.Node, bases: list[torch.fx.Node]) -> dict[str, Any]:
    """Return the keyword arguments of the original call."""
    kwargs: dict[str, Any] = {}

    def base_of(name: str) -> Any:
        index = node.kwargs[f"_{name}_base_index"]
        return None if index is None else bases[index]

    for argument in node.args[0]._schema.arguments:
        name = argument.name
        if name in node.kwargs:
            kwargs[name] = node.kwargs[name]
        elif f"_{name}_length" in node.kwargs:
            length = node.kwargs[f"_{name}_length"]
            kwargs[name] = (
                None if length is None else [base_of(f"{name}_{i}") for i in range(length)]
            )
        elif f"_{name}_base_index" in node.kwargs:
            kwargs[name] = base_of(name)
    return kwargs
