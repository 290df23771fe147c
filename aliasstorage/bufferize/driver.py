"""Bufferize a graph, compile it, and call the result with typed views of the real buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.fx

from aliasstorage import ops
from aliasstorage._compat import expression
from aliasstorage.bufferize.analyze import Analysis
from aliasstorage.bufferize.custom_ops import written_bases
from aliasstorage.bufferize.emit import BufferEmitter, TypedInput, static_length
from aliasstorage.bufferize.recognize import (
    UnrecognizedError,
    byte_buffers,
    may_alias_argument,
    recognize,
    uses,
)
from aliasstorage.bufferize.report import BufferReport
from aliasstorage.bufferize.separate_arrays import check_separable, with_copies
from aliasstorage.bufferize.simplify import (
    drop_copies_of_copies,
    drop_self_writes,
    eliminate_dead_code,
)
from aliasstorage.bufferize.symbolic_windows import symbol_sources
from aliasstorage.bufferize.triton_kernels import written_arguments
from aliasstorage.bufferize.typed_views import with_typed_views
from aliasstorage.stage_logs import log, log_graph
from aliasstorage.windows.window import Window


def bufferize(
    module: torch.fx.GraphModule, preferred_roots: Mapping[Window, str] = MappingProxyType({})
) -> tuple[list[TypedInput], list[BufferReport]]:
    """Rewrite a byte graph in place.

    Returns:
        The typed inputs that were added after the other placeholders, in order, and a report
        for each buffer. A buffer that could not be bufferized has its reason in the report and
        stays as it was.
    """
    graph = module.graph
    drop_self_writes(graph)
    typed: list[TypedInput] = []
    reports: list[BufferReport] = []
    for buffer in byte_buffers(graph):
        try:
            order = {node: position for position, node in enumerate(graph.nodes)}
            analysis = Analysis(recognize(buffer), order, list(preferred_roots))
        except UnrecognizedError as error:
            reports.append(BufferReport(static_length(buffer), reason=str(error)))
            log.info("not bufferized, so each write copies the whole buffer: %s", error)
            continue
        inputs, report = BufferEmitter(graph, analysis, preferred_roots).emit()
        typed += inputs
        reports.append(report)
        drop_copies_of_copies(graph)
        eliminate_dead_code(graph)
    return typed, reports


def _may_become_alias(node: torch.fx.Node) -> bool:
    """Return whether a value is a view, or a conversion, of which Inductor drops pairs."""
    return may_alias_argument(node) or node.target in (
        torch.ops.prims.convert_element_type.default,
        torch.ops.aten._to_copy.default,
    )


def _copy_of(node: torch.fx.Node) -> torch.fx.Node:
    """Return a copy of a value that no pass drops."""
    with node.graph.inserting_after(node):
        copy = node.graph.call_function(ops.materialize, (node,))
    copy.meta = dict(node.meta)
    return copy


def keep_copies(graph: torch.fx.Graph) -> None:
    """Make copies of windows copies that no pass drops, in a graph that stays a byte graph.

    Clones are made such copies. Other operations that leave a window as it is may have been
    dropped before, and then the graph returns a view of a buffer that it wrote: it is copied. So is
    a view that is saved for a backward pass: on Inductor it would not be seen to be overwritten.
    See Note [A copy of a window must stay a copy]. Functionalized calls get copies to write: see
    Note [Custom operations get copies on byte graphs].
    """
    outputs = set(graph.output_node().all_input_nodes)
    for buffer in byte_buffers(graph):
        versions, pending = {buffer}, [buffer]
        while pending:
            for user in pending.pop().users:
                is_write = user.target is torch.ops.aten.as_strided_scatter.default
                if is_write and user not in versions:
                    versions.add(user)
                    pending.append(user)
        for version in versions:
            users = list(uses(version, _may_become_alias))
            views = {user for user in users if _may_become_alias(user)}
            for user in users:
                if user in outputs and user in views:
                    graph.output_node().replace_input_with(user, _copy_of(user))
                for written in (*written_bases(user), *written_arguments(user).values()):
                    if written in views:
                        user.replace_input_with(written, _copy_of(written))
                # A clone that lays the elements out anew is no no-op to anyone.
                if user.target is torch.ops.aten.clone.default and (
                    user.meta["val"].stride() == user.args[0].meta["val"].stride()
                ):
                    user.target, user.kwargs = ops.materialize, {}


def forget_mutation_regions(module: torch.fx.GraphModule) -> None:
    """Let Inductor count anew after which mutations each node stands.

    It numbers the stretches of a graph between two mutations, and moves and matches nodes within
    one. The functional graph that was rewritten had only one, and its nodes kept that number: a
    copy of a window moved behind a write that came after it.
    """
    for submodule in module.modules():
        if isinstance(submodule, torch.fx.GraphModule):
            for node in submodule.graph.nodes:
                node.meta.pop("mutation_region_id", None)


def write_by_own_operation(windows: Sequence[torch.fx.Node]) -> None:
    """Write windows by an operation of this library instead of ``aten.copy_``.

    See Note [Writes that Inductor takes for the last one].
    """
    for window in windows:
        for user in window.users:
            if user.target is torch.ops.aten.copy_.default and user.args[0] is window:
                user.target, user.meta["val"] = ops.write_, None


def compile_bufferized(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    compiler: Callable[..., Callable[..., Any]],
    preferred_roots: Mapping[Window, str] = MappingProxyType({}),
    static_inputs: Sequence[int] = (),
    on_report: Callable[[list[BufferReport], torch.fx.GraphModule], None] | None = None,
    enabled: bool = True,
    as_arrays: bool = False,
    for_inductor: bool = False,
) -> Callable[..., Any]:
    """Bufferize a graph, if enabled, and compile it.

    Args:
        module: A graph from AOTAutograd; it is changed.
        example_inputs: Its inputs.
        compiler: ``(module, example_inputs, static_inputs) -> callable`` on a list.
        preferred_roots: See `plan.choose_roots`; their names become the inputs' names.
        static_inputs: Positions of inputs whose addresses do not change from call to call.
        on_report: Called with the reports and the rewritten graph.
        enabled: Whether to bufferize.
        as_arrays: Whether the compiled graph is called with copies of the windows.
        for_inductor: Whether Inductor compiles the graph, or may compile parts of it.

    Raises:
        BackendUnsupportedError: Windows share bytes, or are not recognized, and may not be copied.
    """
    log_graph("byte graph", module)
    placeholders = module.graph.find_nodes(op="placeholder")
    buffers = byte_buffers(module.graph) if enabled else []
    symbols = symbol_sources(placeholders, buffers)
    typed, reports = bufferize(module, preferred_roots) if enabled else ([], [])
    keep_copies(module.graph)
    done = {item.buffer for item in typed}
    dropped = {node for node in done if not node.users}
    kept = [i for i, node in enumerate(placeholders) if node not in dropped]
    position = {node: i for i, node in enumerate(placeholders)}
    roots = [(position[item.buffer], item.window) for item in typed]
    lengths = {
        position[buffer]: expression(buffer.meta["val"].shape[0])
        for buffer in buffers
        if static_length(buffer) is None and buffer not in dropped
    }
    for node in dropped:
        module.graph.erase_node(node)
    forget_mutation_regions(module)
    module.graph.lint()
    module.recompile()
    log_graph("graph for the inner backend", module)
    if on_report is not None:
        on_report(reports, module)
    if for_inductor:
        write_by_own_operation([item.node for item in typed])
    if as_arrays:
        check_separable(reports)
    if not roots and not lengths:
        return compiler(module, example_inputs, static_inputs)
    inputs = [example_inputs[i] for i in kept] + [item.node.meta["val"] for item in typed]
    static = [number for number, i in enumerate(kept) if i in static_inputs]
    static += [len(kept) + number for number, (i, _) in enumerate(roots) if i in static_inputs]
    compiled = compiler(module, inputs, static)
    if as_arrays:
        compiled = with_copies(compiled, len(kept))
    return with_typed_views(compiled, len(placeholders), kept, roots, symbols, lengths)
