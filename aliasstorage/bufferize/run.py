"""Bufferize a graph, compile it, and call the result with typed views of the real buffers."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from aliasstorage.bufferize import ops
from aliasstorage.bufferize.analyze import Analysis
from aliasstorage.bufferize.emit import BufferEmitter, TypedInput
from aliasstorage.bufferize.recognize import UnrecognizedError, byte_buffers, recognize, uses
from aliasstorage.bufferize.report import BufferReport
from aliasstorage.registry import PerTensor
from aliasstorage.window import Window

log = logging.getLogger("aliasstorage")


def bufferize(
    module: torch.fx.GraphModule, preferred_roots: Sequence[Window] = ()
) -> tuple[list[TypedInput], list[BufferReport]]:
    """Rewrite a byte graph in place.

    Returns:
        The typed inputs that were added after the other placeholders, in order, and a report
        for each buffer. A buffer that could not be bufferized has its reason in the report and
        stays as it was.
    """
    graph = module.graph
    typed: list[TypedInput] = []
    reports: list[BufferReport] = []
    for buffer in byte_buffers(graph):
        try:
            accesses = recognize(buffer)
        except UnrecognizedError as error:
            length = buffer.meta["val"].shape[0]
            reports.append(BufferReport(length, reason=str(error)))
            log.info("not bufferized, so each write copies the whole buffer: %s", error)
            continue
        order = {node: position for position, node in enumerate(graph.nodes)}
        inputs, report = BufferEmitter(graph, Analysis(accesses, order, preferred_roots)).emit()
        typed += inputs
        reports.append(report)
        eliminate_dead_code(graph)
    return typed, reports


def keep_clones(graph: torch.fx.Graph) -> None:
    """Make clones of windows copies that no pass drops, in a graph that stays a byte graph.

    See Note [A clone of a window must stay a copy].
    """
    for buffer in byte_buffers(graph):
        versions, pending = {buffer}, [buffer]
        while pending:
            for user in pending.pop().users:
                is_write = user.target is torch.ops.aten.as_strided_scatter.default
                if is_write and user not in versions:
                    versions.add(user)
                    pending.append(user)
        for version in versions:
            for user in list(uses(version)):
                if user.target is torch.ops.aten.clone.default:
                    user.target, user.kwargs = ops.materialize, {}


def eliminate_dead_code(graph: torch.fx.Graph) -> None:
    """Erase what nothing uses, keeping every node that writes."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not node.is_impure():
            schema = getattr(node.target, "_schema", None)
            if schema is None or not schema.is_mutable:
                graph.erase_node(node)


def compile_bufferized(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    compiler: Callable[..., Callable[..., Any]],
    preferred_roots: Sequence[Window] = (),
    static_inputs: Sequence[int] = (),
    on_report: Callable[[list[BufferReport], torch.fx.GraphModule], None] | None = None,
    enabled: bool = True,
) -> Callable[..., Any]:
    """Bufferize a graph, if enabled, and compile it.

    Args:
        module: A graph from AOTAutograd; it is changed.
        example_inputs: Its inputs.
        compiler: ``(module, example_inputs, static_inputs) -> callable`` on a list.
        preferred_roots: See `plan.choose_roots`.
        static_inputs: Positions of inputs whose addresses do not change from call to call.
        on_report: Called with the reports and the rewritten graph.
        enabled: Whether to bufferize.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    typed, reports = bufferize(module, preferred_roots) if enabled else ([], [])
    keep_clones(module.graph)
    if not typed:
        module.recompile()
        if on_report is not None and reports:
            on_report(reports, module)
        return compiler(module, example_inputs, static_inputs)
    buffers = {item.buffer for item in typed}
    dropped = {node for node in buffers if not node.users}
    kept = [i for i, node in enumerate(placeholders) if node not in dropped]
    position = {node: i for i, node in enumerate(placeholders)}
    sources = [(position[item.buffer], item.window) for item in typed]
    for node in dropped:
        module.graph.erase_node(node)
    module.graph.lint()
    module.recompile()
    if on_report is not None:
        on_report(reports, module)
    inputs = [example_inputs[i] for i in kept] + [item.node.meta["val"] for item in typed]
    static = [number for number, i in enumerate(kept) if i in static_inputs]
    static += [len(kept) + number for number, (i, _) in enumerate(sources) if i in static_inputs]
    return BufferizedCall(compiler(module, inputs, static), kept, sources)


def picker(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that picks items, as fast as Python can."""
    if not indices:
        return lambda items: ()
    if len(indices) == 1:
        (index,) = indices
        return lambda items: (items[index],)
    return operator.itemgetter(*indices)


class BufferizedCall:
    """Calls a compiled graph with typed views of the buffers among its arguments.

    The views are made once for each buffer object and die with it.
    """

    _boxed_call = True

    def __init__(
        self,
        compiled: Callable[[list[Any]], Any],
        kept: list[int],
        sources: list[tuple[int, Window]],
    ) -> None:
        self._compiled, self._pick = compiled, picker(kept)
        windows: dict[int, list[Window]] = {}
        for index, window in sources:
            windows.setdefault(index, []).append(window)
        self._buffers: list[tuple[int, list[Window], PerTensor[list[torch.Tensor]]]]
        self._buffers = [(index, roots, PerTensor()) for index, roots in windows.items()]

    def __call__(self, args: list[Any]) -> Any:
        """Call with a list of arguments, which is emptied."""
        inputs = list(self._pick(args))
        for index, windows, cache in self._buffers:
            buffer = args[index]
            views = cache.get(buffer)
            if views is None:
                views = [window.regenerate(buffer) for window in windows]
                cache.set(buffer, views)
            inputs += views
        args.clear()
        return self._compiled(inputs)
