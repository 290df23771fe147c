"""Rewrite a byte graph into in-place writes on typed windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from aliasstorage import ops
from aliasstorage.bufferize.analyze import Analysis, scatter_chain
from aliasstorage.bufferize.plan import Copy, slice_of
from aliasstorage.bufferize.recognize import WriteNode
from aliasstorage.bufferize.report import BufferReport, WriteReport
from aliasstorage.bufferize.symbolic_windows import AnyWindow, SymbolicWindow
from aliasstorage.windows.window import Window, reach

aten = torch.ops.aten


@dataclass
class TypedInput:
    """A placeholder that stands for a root of a buffer."""

    node: torch.fx.Node
    buffer: torch.fx.Node
    window: AnyWindow


class BufferEmitter:
    """Rewrites the accesses of one buffer."""

    def __init__(
        self, graph: torch.fx.Graph, analysis: Analysis, names: Mapping[Window, str]
    ) -> None:
        self.graph, self.analysis, self.names = graph, analysis, names
        self.accesses, self.plan = analysis.accesses, analysis.plan
        self.buffer = analysis.accesses.buffer
        self.nodes = list(analysis.order)
        self.inputs: list[TypedInput] = []
        self.copy_of: dict[int, torch.fx.Node] = {}
        self.now: dict[torch.fx.Node, torch.fx.Node] = {}  # what a read has become
        self.report = BufferReport(
            static_length(self.buffer),
            self.plan.roots,
            self.plan.classes,
            [read.window for read in self.accesses.reads],
        )

    def emit(self) -> tuple[list[TypedInput], BufferReport]:
        """Rewrite the graph; the typed inputs go after all other placeholders."""
        self._add_inputs()
        self._emit_fences()
        self._emit_copies()
        self._emit_reads()
        for write in self.accesses.writes:
            self.report.writes.append(self._emit_write(write))
        self._emit_left_in_memory()
        for call in self.analysis.calls.values():
            with self.graph.inserting_before(call.node):
                call.emit(
                    self.graph,
                    {
                        key: self._typed(self.analysis.window_of(read))
                        for key, read in call.windows.items()
                    },
                )
        final = self.accesses.final_copy
        if final is not None:
            final.replace_all_uses_with(self.buffer)
            self.graph.erase_node(final)
        return self.inputs, self.report

    def _add_inputs(self) -> None:
        after = self.graph.find_nodes(op="placeholder")[-1]
        for number, window in enumerate(self.plan.roots):
            with self.graph.inserting_after(after):
                source = self.names.get(window)
                # A prefix, since compilers have names of their own: self, torch, buf0, ...
                name = f"window_{source}" if source else f"{self.buffer.name}_window_{number}"
                after = self.graph.placeholder(name)
            after.target = after.name  # the argument's name, which fx makes unique only as a node's
            after.meta["val"] = fake_root(self.buffer.meta["val"], window)
            self.inputs.append(TypedInput(after, self.buffer, window))
            self.report.names.append(after.name)

    def _emit_fences(self) -> None:
        for fence in self.plan.fences:
            with self.graph.inserting_before(self.nodes[fence.position]):
                nodes = [self.inputs[root].node for root in fence.roots]
                self.graph.call_function(ops.fence, (nodes,)).meta["val"] = None
            self.report.fences += 1

    def _emit_copies(self) -> None:
        for copy in self.plan.copies:
            read = self.analysis.reads[copy.read]
            anchor = self.nodes[copy.position]
            if read in self.analysis.left_in_memory:
                anchor = anchor.next  # after the write that leaves the value
            with self.graph.inserting_before(anchor):
                self.copy_of[copy.read] = self._call(ops.materialize, self._typed(read.window))
            if not self.analysis.is_own_copy(copy):
                self.report.copies.append((read.window, self._reason(copy)))

    def _reason(self, copy: Copy) -> str:
        if copy.overwritten_by is None:
            return "its value is returned or saved for backward"
        written = self.accesses.writes[copy.overwritten_by].window
        return f"its value is used after a write to {written}"

    def _emit_reads(self) -> None:
        for index, read in enumerate(self.accesses.reads):
            typed = self.copy_of.get(index)
            if typed is None:
                with self.graph.inserting_before(read.node):
                    typed = self._typed(read.window)
            if read.user is not None:
                read.user.replace_input_with(read.node, typed)
            else:
                read.node.replace_all_uses_with(typed)
                self.now[read.node] = typed

    def _emit_left_in_memory(self) -> None:
        """Let the other uses of a value that was written in place read it from memory."""
        for index, read in enumerate(self.analysis.reads):
            if read not in self.analysis.left_in_memory:
                continue
            write = self.analysis.write_of(read)
            typed = self.copy_of.get(index)
            if typed is None:
                with self.graph.inserting_before(write.node):
                    typed = self._typed(write.window)
            chain = scatter_chain(write)
            write.value.replace_all_uses_with(
                typed, delete_user_cb=lambda user, chain=chain: user not in chain
            )

    def _emit_write(self, write: WriteNode) -> WriteReport:
        caller = self.analysis.called.get(write.node)
        if caller is not None:
            return WriteReport(write.window, "in place", self.analysis.calls[caller].name)
        value = self.now.get(write.value, write.value)
        operation = self.analysis.in_place.get(write.node)
        with self.graph.inserting_before(write.node):
            target = self._typed(write.window)
            if operation is not None:
                self._write(operation, target, value, *value.args[1:], **value.kwargs)
                return WriteReport(write.window, "in place", str(operation))
            if self.analysis.needs_mask(write):
                self._emit_masked_write(write, target)
                return WriteReport(write.window, "in place", "masked write")
            self._write(aten.copy_.default, target, value, value)
        return WriteReport(write.window, "computed into place", str(value.target))

    def _write(
        self,
        operation: Any,
        target: torch.fx.Node,
        origin: torch.fx.Node,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        node = self.graph.call_function(operation, (target, *args), kwargs)
        # Errors and profiles point at the user's line that wrote.
        node.meta = {k: v for k, v in origin.meta.items() if k in _PROVENANCE}
        node.meta["val"] = target.meta["val"]

    def _emit_masked_write(self, write: WriteNode, target: torch.fx.Node) -> None:
        mask, new, old = write.value.args
        if self.analysis.kept_by[write.value] == 1:
            mask, new = self._call(aten.logical_not.default, mask), old
        node = self.graph.call_function(ops.masked_write_, (target, mask, new))
        node.meta["val"] = None

    # --- windows as nodes ---

    def _typed(self, window: AnyWindow) -> torch.fx.Node:
        """Return a node for a window: its root, or a view of it."""
        if isinstance(window, Window) and not window.numel:
            return self._empty(window)
        source = self.inputs[self.plan.root_of[window]]
        if window == source.window:
            return source.node
        assert isinstance(window, Window)  # noqa: S101  (a symbolic one is its own root)
        assert isinstance(source.window, Window)  # noqa: S101
        return self._slice(source.node, source.window, window)

    def _empty(self, window: Window) -> torch.fx.Node:
        """Return a tensor for a window without elements, which touches no byte."""
        fake = self.buffer.meta["val"]
        options = {"dtype": window.dtype, "device": fake.device}
        args = (window.size, window.stride)
        node = self.graph.call_function(aten.empty_strided.default, args, options)
        with fake.fake_mode:
            node.meta["val"] = torch.empty_strided(*args, **options)
        return node

    def _slice(self, node: torch.fx.Node, root: Window, window: Window) -> torch.fx.Node:
        how = slice_of(window, root)
        assert how is not None  # noqa: S101  (the planner chose this root for it)
        kept = [dim for dim in how.dims if dim is not None]
        for dim, (start, length, step) in enumerate(how.ranges):
            if dim in kept and (start, length, step) != (0, root.size[dim], 1):
                end = start + (length - 1) * step + 1
                node = self._call(aten.slice.Tensor, node, dim, start, end, step)
        for dim in reversed(range(len(how.ranges))):
            if dim not in kept:
                node = self._call(aten.select.int, node, dim, how.ranges[dim][0])
        rank = {dim: number for number, dim in enumerate(sorted(kept))}
        permutation = [rank[dim] for dim in kept]
        if permutation != sorted(permutation):
            node = self._call(aten.permute.default, node, permutation)
        for position, extent in enumerate(how.dims):
            if extent is None:
                node = self._call(aten.unsqueeze.default, node, position)
        if tuple(node.meta["val"].shape) != window.size:
            node = self._call(aten.expand.default, node, window.size)
        return node

    def _call(self, target: Any, node: torch.fx.Node, *args: Any) -> torch.fx.Node:
        result = self.graph.call_function(target, (node, *args))
        with node.meta["val"].fake_mode:
            result.meta["val"] = target(node.meta["val"], *args)
        return result


_PROVENANCE = frozenset({"stack_trace", "nn_module_stack", "source_fn_stack", "custom"})


def fake_root(buffer: torch.Tensor, window: AnyWindow) -> torch.Tensor:
    """Return a fake typed view with a storage of its own, aligned as the real one is.

    Inner compilers assume that inputs of one graph do not share a storage, and Inductor's cache
    on disk ignores whether they do.
    """
    itemsize, start = window.dtype.itemsize, 0
    size: Sequence[Any] = window.size
    stride: Sequence[Any] = window.stride
    if isinstance(window, SymbolicWindow):
        size, stride, byte_offset = window.values
        if buffer.device.type != "cpu":
            # Of an unknown offset, no alignment may be assumed.
            known = isinstance(byte_offset, int)
            start = byte_offset % 16 // itemsize if known else int(itemsize < 16)
    elif buffer.device.type != "cpu":
        start = window.byte_offset % 16 // itemsize
    with buffer.fake_mode:
        flat = torch.empty(start + reach(size, stride), dtype=window.dtype, device=buffer.device)
        return flat.as_strided(size, stride, start)


def static_length(buffer: torch.fx.Node) -> int | None:
    """Return a buffer's length in bytes, None if it is symbolic."""
    length = buffer.meta["val"].shape[0]
    return length if isinstance(length, int) else None
