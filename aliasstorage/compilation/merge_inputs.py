"""Rewrite a Dynamo graph so that each storage is one input.

Placeholders that share a storage, wrapped or plain, become windows of one buffer placeholder,
built in the graph. Outputs that alias such a storage leave the graph: they are rebuilt at run
time from the real buffer, since AOTAutograd would return them as detached copies.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from aliasstorage._compat import AttrSource, TensorProperty, TensorPropertySource
from aliasstorage.compilation.graph_copies import module_like
from aliasstorage.compilation.input_storages import Extent, Member, MergedStorage, value_storage
from aliasstorage.subclass.alias_tensor import AliasTensor
from aliasstorage.windows.window import regenerate


@dataclass
class AliasedOutput:
    """An output that is a view of a merged storage, and how to rebuild it.

    ``size``, ``stride`` and ``byte_offset`` hold integers, or the positions (as `FromGraph`) of
    graph outputs that compute them.
    """

    storage: int
    wrapped: bool
    dtype: torch.dtype
    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any  # in elements

    def rebuild(self, buffer: torch.Tensor, values: Sequence[Any]) -> torch.Tensor:
        """Return the view of the real buffer."""
        size = [_resolve(extent, values) for extent in self.size]
        stride = [_resolve(step, values) for step in self.stride]
        byte_offset = _resolve(self.offset, values) * self.dtype.itemsize
        plain = regenerate(buffer, self.dtype, size, stride, byte_offset)
        return AliasTensor._from_plain(buffer, plain) if self.wrapped else plain


@dataclass(frozen=True)
class FromInput:
    """An output that is one of the original inputs, the same object."""

    index: int


@dataclass(frozen=True)
class FromGraph:
    """The position of a graph output."""

    position: int


def _resolve(value: Any, values: Sequence[Any]) -> int:
    return values[value.position] if isinstance(value, FromGraph) else value


@dataclass
class MergedGraph:
    """A rewritten copy of a Dynamo graph, with what a call must do around it.

    Attributes:
        module: The graph: buffers first, then the other inputs, then symbolic extents.
        storages: The merged storages.
        passed: Positions of the original inputs that are passed on.
        extents: For each added symbolic input, how to compute it from the original inputs.
        example_inputs: Example values of the new inputs.
        outputs: For each original output, where it comes from.
    """

    module: torch.fx.GraphModule
    storages: list[MergedStorage]
    passed: list[int]
    extents: list[Callable[[Sequence[Any]], int]] = field(default_factory=list)
    example_inputs: list[Any] = field(default_factory=list)
    outputs: list[AliasedOutput | FromGraph | FromInput] = field(default_factory=list)


def make_window(
    buffer: torch.Tensor,
    dtype: torch.dtype,
    size: Sequence[int],
    stride: Sequence[int],
    byte_offset: int,
) -> AliasTensor:
    """Return a window, as a node of a merged graph."""
    return AliasTensor._of_buffer(buffer, dtype, size, stride, byte_offset)


def merge(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    storages: list[MergedStorage],
    make: Callable[..., torch.Tensor] = make_window,
) -> MergedGraph:
    """Return a copy of a Dynamo graph in which each of ``storages`` is one input.

    Args:
        module: The graph that Dynamo handed over. Dynamo still uses it, so it is not changed.
        example_inputs: Its example inputs.
        storages: What `find_storages` found.
        make: Builds a window in the graph; plain `regenerate` for compilers that do not trace
            tensor subclasses.
    """
    graph = torch.fx.Graph()
    env: dict[torch.fx.Node, Any] = {}
    merged_of = {
        member.node: (position, member)
        for position, storage in enumerate(storages)
        for member in storage.members
    }
    merged = MergedGraph(torch.fx.GraphModule(torch.nn.Module(), graph), storages, [])
    placeholders = module.graph.find_nodes(op="placeholder")
    for position, storage in enumerate(storages):
        storage.buffer_node = _buffer_placeholder(graph, position, storage)
        merged.example_inputs.append(storage.buffer_value)
    for index, node in enumerate(placeholders):
        if node in merged_of:
            continue
        env[node] = graph.node_copy(node)
        env[node]._dynamo_source = node._dynamo_source
        merged.passed.append(index)
        merged.example_inputs.append(example_inputs[index])
    known = {node._dynamo_source: env[node] for node in placeholders if node in env}
    windows = _SymbolicExtents(graph, merged, known)
    for node in placeholders:
        if node in merged_of:
            windows.declare(merged_of[node][1])
    for node in placeholders:
        if node in merged_of:
            position, member = merged_of[node]
            env[node] = _window_node(graph, storages[position], member, windows, make)
    output = None
    for node in module.graph.nodes:
        if node.op == "output":
            output = node
        elif node.op != "placeholder":
            env[node] = graph.node_copy(node, lambda old: env[old])
    assert output is not None  # noqa: S101  (every fx graph has one)
    _rewrite_outputs(graph, output, env, merged)
    merged.module = module_like(module, graph)
    return merged


def _buffer_placeholder(
    graph: torch.fx.Graph, position: int, storage: MergedStorage
) -> torch.fx.Node:
    first = storage.members[0].node
    node = graph.placeholder(f"byte_buffer_{position}")
    # Three things that AOTAutograd and its cache ask of an input that Dynamo did not make: a
    # source, an example value under the ambient fake mode, and example values on every node
    # that follows (without them a later method call silently bypasses the cache).
    node.meta["example_value"] = storage.buffer_value
    node._dynamo_source = AttrSource(first._dynamo_source, "_buffer")
    static = [m.node.meta.get("tensor_dict", {}) for m in storage.members]
    for tensor_dict in static:
        if "_dynamo_static_input_type" in tensor_dict:
            node.meta["tensor_dict"] = dict(tensor_dict)
    return node


class _SymbolicExtents:
    """Symbolic sizes and strides of windows, as inputs of the merged graph."""

    def __init__(
        self, graph: torch.fx.Graph, merged: MergedGraph, known: dict[Any, torch.fx.Node]
    ) -> None:
        self.graph, self.merged = graph, merged
        self.known = known  # inputs by source; Dynamo passes some extents already
        self.nodes: dict[tuple[int, str, int], torch.fx.Node] = {}

    def declare(self, member: Member) -> None:
        """Add an input for each symbolic extent of a window."""
        for kind, values in (("size", member.size), ("stride", member.stride)):
            for dim, value in enumerate(values):
                if not isinstance(value, int):
                    self._add(member, kind, dim, value)
        if not isinstance(member.byte_offset, int):
            self._add(member, "offset", 0, member.node.meta["example_value"].storage_offset())

    def _add(self, member: Member, kind: str, dim: int, value: torch.SymInt) -> None:
        index = member.index
        prop = {
            "size": TensorProperty.SIZE,
            "stride": TensorProperty.STRIDE,
            "offset": TensorProperty.STORAGE_OFFSET,
        }[kind]
        tensor_source = member.node._dynamo_source
        source = TensorPropertySource(tensor_source, prop, None if kind == "offset" else dim)
        if source in self.known:
            self.nodes[index, kind, dim] = self.known[source]
            return
        node = self.graph.placeholder(f"{kind}_{index}_{dim}")
        node.meta["example_value"] = value
        node._dynamo_source = source
        self.nodes[index, kind, dim] = node
        self.merged.example_inputs.append(value)
        read: Callable[[Sequence[Any]], int]
        if kind == "size":
            read = lambda args: args[index].size(dim)  # noqa: E731
        elif kind == "stride":
            read = lambda args: args[index].stride(dim)  # noqa: E731
        else:
            read = lambda args: args[index].storage_offset()  # noqa: E731
        self.merged.extents.append(read)

    def get(self, member: Member, kind: str, values: Sequence[Extent]) -> tuple[Any, ...]:
        """Return extents, each an integer or the node of an input."""
        return tuple(
            self.nodes.get((member.index, kind, dim), value) for dim, value in enumerate(values)
        )


def _window_node(
    graph: torch.fx.Graph,
    storage: MergedStorage,
    member: Member,
    extents: _SymbolicExtents,
    make: Callable[..., torch.Tensor],
) -> torch.fx.Node:
    size = extents.get(member, "size", member.size)
    stride = extents.get(member, "stride", member.stride)
    (offset,) = extents.get(member, "offset", (member.byte_offset,))
    if isinstance(offset, torch.fx.Node):  # in elements
        offset = graph.call_function(operator.mul, (offset, member.dtype.itemsize))
        offset.meta["example_value"] = member.byte_offset
    node = graph.call_function(make, (storage.buffer_node, member.dtype, size, stride, offset))
    node.meta["example_value"] = make(
        storage.buffer_value, member.dtype, member.size, member.stride, member.byte_offset
    )
    return node


def _rewrite_outputs(
    graph: torch.fx.Graph, output: torch.fx.Node, env: dict[torch.fx.Node, Any], merged: MergedGraph
) -> None:
    inputs = {
        id(member.node.meta["example_value"]): member.index
        for storage in merged.storages
        for member in storage.members
    }
    storage_of = {
        value_storage(member.node.meta["example_value"]): position
        for position, storage in enumerate(merged.storages)
        for member in storage.members
    }
    results: list[Any] = []

    def emit(value: Any) -> FromGraph:
        results.append(value)
        return FromGraph(len(results) - 1)

    for old in output.args[0]:
        value = old.meta.get("example_value") if isinstance(old, torch.fx.Node) else None
        position = None
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            position = storage_of.get(value_storage(value))
        if position is None:
            merged.outputs.append(emit(env[old] if isinstance(old, torch.fx.Node) else old))
            continue
        if id(value) in inputs:
            merged.outputs.append(FromInput(inputs[id(value)]))
            continue
        node = env[old]

        def extent(
            read: Any, value: Any, *args: int, node: torch.fx.Node = node
        ) -> int | FromGraph:
            if isinstance(value, int):
                return value
            added = graph.call_function(read, (node, *args))
            added.meta["example_value"] = value
            return emit(added)

        dims = range(value.dim())
        merged.outputs.append(
            AliasedOutput(
                position,
                isinstance(value, AliasTensor),
                value.dtype,
                tuple(extent(torch.ops.aten.sym_size.int, value.size(d), d) for d in dims),
                tuple(extent(torch.ops.aten.sym_stride.int, value.stride(d), d) for d in dims),
                extent(torch.ops.aten.sym_storage_offset.default, value.storage_offset()),
            )
        )
    graph.output(tuple(results))
