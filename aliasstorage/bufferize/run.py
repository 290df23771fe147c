"""Bufferize a graph, compile it, and call the result with typed views of the real buffers."""

from __future__ import annotations

import logging
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
                # A clone that lays the elements out anew is no no-op to anyone.
                if user.target is torch.ops.aten.clone.default and (
                    user.meta["val"].stride() == user.args[0].meta["val"].stride()
                ):
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
    return with_typed_views(compiler(module, inputs, static), len(placeholders), kept, sources)


def with_typed_views(
    compiled: Callable[[list[Any]], Any],
    count: int,
    kept: Sequence[int],
    sources: Sequence[tuple[int, Window]],
) -> Callable[[list[Any]], Any]:
    """Return a function that calls a compiled graph with typed views of its buffers.

    The views are made once for each buffer object and die with it.

    Args:
        compiled: Takes a list: the kept arguments, then the typed views.
        count: Number of arguments of the function, which takes them as a list and empties it.
        kept: Positions of the arguments that are passed on.
        sources: For each typed view, the position of its buffer, and its window.
    """
    windows: dict[int, list[Window]] = {}
    for index, window in sources:
        windows.setdefault(index, []).append(window)
    scope: dict[str, Any] = {"compiled": compiled}
    names = [f"t{index}" for index in range(count)]
    lines = ["def call(args):", f"    {', '.join(names)}, = args", "    args.clear()"]
    inputs = [names[index] for index in kept]
    for index, roots in windows.items():
        scope[f"find{index}"], scope[f"make{index}"] = _views_of_buffers(roots)
        lines += [
            f"    views{index} = find{index}(id(t{index}))",
            f"    if views{index} is None:",
            f"        views{index} = make{index}(t{index})",
        ]
        inputs.append(f"*views{index}")
    lines.append(f"    return compiled([{', '.join(inputs)}])")
    # Generated, since its time is paid at each step of an engine.
    exec(compile("\n".join(lines), "<aliasstorage>", "exec"), scope)  # noqa: S102
    call: Callable[[list[Any]], Any] = scope["call"]
    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _views_of_buffers(
    roots: Sequence[Window],
) -> tuple[
    Callable[[int], Sequence[torch.Tensor] | None],
    Callable[[torch.Tensor], Sequence[torch.Tensor]],
]:
    """Return how to find the typed views of a buffer by its id, and how to make them."""
    made: PerTensor[Sequence[torch.Tensor]] = PerTensor()

    def make(buffer: torch.Tensor) -> Sequence[torch.Tensor]:
        views = tuple(root.regenerate(buffer) for root in roots)
        made.set(buffer, views)
        return views

    return made.by_id.get, make
