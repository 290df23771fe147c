"""Rewrite a byte graph into in-place writes on typed windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from aliasstorage.bufferize import ops
from aliasstorage.bufferize.custom_ops import MutatingCall, mutating_call
from aliasstorage.bufferize.plan import Copy, Plan, Read, Write, plan, slice_of
from aliasstorage.bufferize.recognize import (
    BufferAccesses,
    ReadNode,
    WriteNode,
    may_alias_argument,
    uses,
)
from aliasstorage.overlap import overlaps
from aliasstorage.window import Window

aten = torch.ops.aten


@dataclass
class BufferReport:
    """What became of one buffer's accesses; `explain` prints it.

    Attributes:
        roots: Typed views the graph is given.
        classes: Alias classes, as lists of indices into ``roots``.
        writes: For each write, its window, how it is done and the operation.
        copies: For each copy, its window and the reason.
        fences: How many fences.
        reason: Why the buffer was not bufferized, None if it was.
    """

    nbytes: int
    roots: list[Window] = field(default_factory=list)
    classes: list[list[int]] = field(default_factory=list)
    reads: list[Window] = field(default_factory=list)
    writes: list[tuple[Window, str, str]] = field(default_factory=list)
    copies: list[tuple[Window, str]] = field(default_factory=list)
    fences: int = 0
    reason: str | None = None


@dataclass
class TypedInput:
    """A placeholder that stands for a root of a buffer."""

    node: torch.fx.Node
    buffer: torch.fx.Node
    window: Window


class BufferEmitter:
    """Rewrites the accesses of one buffer."""

    def __init__(
        self,
        graph: torch.fx.Graph,
        accesses: BufferAccesses,
        preferred_roots: Sequence[Window],
        order: dict[torch.fx.Node, int],
    ) -> None:
        self.graph, self.accesses = graph, accesses
        self.order = order
        self.nodes = list(order)
        self.read_of = {read.node: read for read in accesses.reads if read.user is None}
        self.buffer = accesses.buffer
        self.in_place: dict[torch.fx.Node, torch._ops.OpOverload] = {}  # write -> operation
        self.calls: dict[torch.fx.Node, MutatingCall] = {}  # auto_functionalized -> call
        self.called: dict[torch.fx.Node, torch.fx.Node] = {}  # write -> auto_functionalized
        self.written_value: list[ReadNode] = []  # values that in-place writes leave in memory
        self._choose_in_place()
        self.old_of = self._find_old()  # see _masked_write
        self.reads, self.plan_reads, self.plan_writes = self._describe()
        self.plan: Plan = plan(self.plan_reads, self.plan_writes, preferred_roots)

    # --- analysis ---

    def _choose_in_place(self) -> None:
        for write in self.accesses.writes:
            value = write.value
            call = self._call_of(write)
            if call is not None:
                self.calls[call.node] = call
                self.called[write.node] = call.node
            elif (operation := in_place_overload(value)) is not None:
                base = value.args[0]
                if self._is_current(base, write) and self._used_after(value, write):
                    self.in_place[write.node] = operation
        # A call goes in place only if all of its windows can.
        for call in list(self.calls.values()):
            writes = [w for w in self.accesses.writes if self.called.get(w.node) is call.node]
            if len(writes) != len(call.windows):
                self._drop(call)
        for write in self.accesses.writes:
            if self._is_in_place(write):
                others = [u for u in write.value.users if not self._is_value_chain(u, write)]
                if others:
                    self.written_value.append(ReadNode(write.value, write.version, write.window))

    def _drop(self, call: MutatingCall) -> None:
        del self.calls[call.node]
        self.called = {w: node for w, node in self.called.items() if node is not call.node}

    def _call_of(self, write: WriteNode) -> MutatingCall | None:
        value = write.value
        if getattr(value.target, "__name__", "") != "getitem":
            return None
        call = self.calls.get(value.args[0]) or mutating_call(
            value.args[0], lambda base: base in self.read_of
        )
        if call is None or value.args[1] not in call.windows:
            return None
        base = call.windows[value.args[1]]
        ok = self._is_current(base, write, at=call.node) and self._used_after(value, write)
        return call if ok else None

    def _is_current(
        self, base: Any, write: WriteNode, at: torch.fx.Node | None = None
    ) -> bool:
        """Return whether memory holds ``base`` in the write's window when the write happens."""
        read = self.read_of.get(base)
        if read is None or read.window != write.window:
            known = next((v for v in self.written_value if v.node is base), None)
            if known is None or known.window != write.window:
                return False
            read = known
        between = [
            other
            for other in self.accesses.writes
            if read.version < other.version < write.version
            and overlaps(other.window, write.window)
        ]
        if at is not None and between:
            # Other windows of the same call do not overlap; anything else is in the way.
            return False
        return not between

    def _used_after(self, value: torch.fx.Node, write: WriteNode) -> bool:
        """Return whether all other uses of a written value come after the write."""
        return all(
            self._is_value_chain(user, write) or self.order[user] > self.order[write.node]
            for user in value.users
        )

    def _is_value_chain(self, user: torch.fx.Node, write: WriteNode) -> bool:
        chain = write.node.args[1]
        while isinstance(chain, torch.fx.Node) and chain is not write.value:
            if chain is user:
                return True
            chain = chain.args[0]
        return user is write.node

    def _is_in_place(self, write: WriteNode) -> bool:
        return write.node in self.in_place or write.node in self.called

    def _position(self, write: WriteNode) -> int:
        return self.order[self.called.get(write.node, write.node)]

    def _describe(self) -> tuple[list[ReadNode], list[Read], list[Write]]:
        """Describe the accesses for the planner, at the positions where they will happen."""
        moved: dict[torch.fx.Node, torch.fx.Node] = {}  # an in-place value happens at its write
        targets: dict[torch.fx.Node, set[int]] = {}
        for write in self.accesses.writes:
            if write.node in self.in_place:
                moved[write.value] = write.node
                base = write.value.args[0]
                targets.setdefault(base, set()).add(self.order[write.node])
        for call in self.calls.values():
            for base in call.windows.values():
                targets.setdefault(base, set()).add(self.order[call.node])
        hidden = {
            node
            for write in self.accesses.writes
            for node in self._chain(write)
        }
        reads = [*self.accesses.reads, *self.written_value]
        described = []
        for read in reads:
            users = [read.user] if read.user is not None else uses(read.node)
            positions: set[int] = set()
            escapes = False
            only_target = targets.get(read.node, set()) if read.user is None else set()
            direct: dict[int, int] = {}
            for user in users:
                if user.op == "output":
                    escapes = True
                    positions.add(self.order[user])
                    continue
                if user in hidden and user not in moved:
                    if read in self.written_value:
                        continue
                    if any(user is w.node for w in self.accesses.writes):
                        positions.add(self.order[user])
                        continue
                if user.op == "call_function" and may_alias_argument(user) and user.users:
                    if user not in self.calls:
                        continue
                position = self.order[moved.get(user, user)]
                positions.add(position)
                count = _count_argument(user, read.node)
                direct[position] = direct.get(position, 0) + count
                if count == 0:
                    direct[position] = 2  # through a view: never only the destination
            target_of = frozenset(p for p in only_target if direct.get(p, 0) == 1)
            described.append(
                Read(
                    read.version,
                    read.window,
                    self.order[read.node] if read not in self.written_value else self._write_position(read),
                    tuple(sorted(positions)),
                    target_of,
                    escapes,
                )
            )
        writes = [Write(w.version, w.window, self._position(w)) for w in self.accesses.writes]
        return reads, described, writes

    def _write_position(self, read: ReadNode) -> int:
        write = next(w for w in self.accesses.writes if w.version == read.version)
        return self.order[write.node] + 0

    def _chain(self, write: WriteNode) -> list[torch.fx.Node]:
        nodes = [write.node]
        chain = write.node.args[1]
        while isinstance(chain, torch.fx.Node) and chain is not write.value:
            nodes.append(chain)
            chain = chain.args[0]
        return nodes

    # --- rewriting ---

    def emit(self, after: torch.fx.Node) -> tuple[list[TypedInput], BufferReport]:
        """Rewrite the graph.

        Args:
            after: The placeholder after which the typed inputs go.
        """
        self.inputs = []
        for number, window in enumerate(self.plan.roots):
            with self.graph.inserting_after(self.inputs[-1].node if self.inputs else after):
                node = self.graph.placeholder(f"{self.buffer.name}_window_{number}")
            node.meta["val"] = fake_root(self.buffer.meta["val"], window)
            self.inputs.append(TypedInput(node, self.buffer, window))
        report = BufferReport(self.buffer.meta["val"].shape[0])
        report.roots, report.classes = self.plan.roots, self.plan.classes
        report.reads = [read.window for read in self.accesses.reads]
        self._emit_fences(report)
        self._emit_copies(report)
        self._emit_reads()
        self._emit_writes(report)
        self._emit_calls()
        self._erase()
        return self.inputs, report

    def _emit_fences(self, report: BufferReport) -> None:
        for fence in self.plan.fences:
            with self.graph.inserting_before(self.nodes[fence.position]):
                nodes = [self.inputs[root].node for root in fence.roots]
                self.graph.call_function(ops.fence, (nodes,)).meta["val"] = None
            report.fences += 1

    def _emit_copies(self, report: BufferReport) -> None:
        self.copy_of: dict[int, torch.fx.Node] = {}
        for copy in self.plan.copies:
            read = self.reads[copy.read]
            anchor = self.nodes[copy.position]
            if copy.position == self.plan_reads[copy.read].position:
                anchor = anchor.next if read in self.written_value else anchor
            with self.graph.inserting_before(anchor):
                node = self.graph.call_function(
                    ops.materialize, (self._typed(read.window),)
                )
            node.meta["val"] = _fake(torch.empty_like, self._last_value)
            self.copy_of[copy.read] = node
            report.copies.append((read.window, self._reason(copy)))

    def _reason(self, copy: Copy) -> str:
        if copy.overwritten_by is None:
            return "its value is returned or saved for backward"
        write = self.accesses.writes[copy.overwritten_by]
        return f"its value is used after {write.window} was written"

    def _emit_reads(self) -> None:
        for index, read in enumerate(self.reads):
            if read in self.written_value:
                continue
            typed = self.copy_of.get(index)
            if typed is None:
                with self.graph.inserting_before(read.node):
                    typed = self._typed(read.window)
            if read.user is not None:
                read.user.replace_input_with(read.node, typed)
            else:
                read.node.replace_all_uses_with(typed)

    def _emit_writes(self, report: BufferReport) -> None:
        value_index = {id(read): index for index, read in enumerate(self.reads)}
        for write in self.accesses.writes:
            if write.node in self.called:
                target = self.called[write.node]
                report.writes.append((write.window, "in place", str(target.args[0])))
            else:
                report.writes.append(self._emit_write(write))
            for read in self.written_value:
                if read.node is not write.value:
                    continue
                typed = self.copy_of.get(value_index[id(read)])
                if typed is None:
                    with self.graph.inserting_before(write.node):
                        typed = self._typed(write.window)
                chain = set(self._chain(write))
                write.value.replace_all_uses_with(
                    typed, delete_user_cb=lambda user, chain=chain: user not in chain
                )

    def _emit_write(self, write: WriteNode) -> tuple[Window, str, str]:
        value, operation = write.value, self.in_place.get(write.node)
        with self.graph.inserting_before(write.node):
            target = self._typed(write.window)
            fake = self._last_value
            if operation is not None:
                node = self.graph.call_function(operation, (target, *value.args[1:]), value.kwargs)
                node.meta = dict(value.meta)
                node.meta["val"] = fake
                return write.window, "in place", str(operation)
            masked = self._masked_write(write, target)
            if masked is not None:
                return masked
            node = self.graph.call_function(aten.copy_.default, (target, value))
            node.meta = {k: v for k, v in value.meta.items() if k in ("stack_trace", "nn_module_stack")}
            node.meta["val"] = fake
        return write.window, "computed into place", str(value.target)

    def _masked_write(
        self, write: WriteNode, target: torch.fx.Node
    ) -> tuple[Window, str, str] | None:
        """Write where(mask, new, old) so that the bits of the kept elements stay.

        Compilers compute a whole-window `where` on floats of 16 bits and less in float32, which
        changes the bits of NaNs that the program did not write.
        """
        value = write.value
        small = write.window.dtype.itemsize < 4
        if value.target is not aten.where.self or not small:
            return None
        mask, new, old = value.args
        base = self.old_of.get(value)
        if base is None:
            return None
        if base == 1:
            with self.graph.inserting_before(write.node):
                inverted = self.graph.call_function(aten.logical_not.default, (mask,))
                inverted.meta["val"] = _fake(torch.logical_not, mask.meta["val"])
            mask, new = inverted, old
        node = self.graph.call_function(ops.masked_write_, (target, mask, new))
        node.meta["val"] = None
        return write.window, "in place", "masked write"

    def _emit_calls(self) -> None:
        for call in self.calls.values():
            with self.graph.inserting_before(call.node):
                call.emit(self.graph)

    def _erase(self) -> None:
        final = self.accesses.final_copy
        if final is not None:
            final.replace_all_uses_with(self.buffer)
            self.graph.erase_node(final)

    def _typed(self, window: Window) -> torch.fx.Node:
        """Return a node for a window, as a slice of its root."""
        if not window.numel:
            value = torch.empty_strided  # an empty window touches no byte
            fake = self.buffer.meta["val"]
            node = self.graph.call_function(
                aten.empty_strided.default,
                (window.size, window.stride),
                {"dtype": window.dtype, "device": fake.device},
            )
            with fake.fake_mode:
                node.meta["val"] = value(
                    window.size, window.stride, dtype=window.dtype, device=fake.device
                )
            self._last_value = node.meta["val"]
            return node
        source = self.inputs[self.plan.root_of[window]]
        node = source.node
        if window != source.window:
            node = self._slice(node, source.window, window)
        self._last_value = node.meta["val"]
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
        for position, dim in enumerate(how.dims):
            if dim is None:
                node = self._call(aten.unsqueeze.default, node, position)
        return node

    def _call(self, target: Any, node: torch.fx.Node, *args: Any) -> torch.fx.Node:
        result = self.graph.call_function(target, (node, *args))
        result.meta["val"] = _fake(target, node.meta["val"], *args)
        return result

    def _find_old(self) -> dict[torch.fx.Node, int]:
        found = {}
        for write in self.accesses.writes:
            value = write.value
            if value.target is aten.where.self:
                for position in (2, 1):
                    if self._is_current(value.args[position], write):
                        found[value] = position
                        break
        return found


def _fake(function: Any, value: torch.Tensor, *args: Any) -> torch.Tensor:
    with value.fake_mode:
        return function(value, *args)


def _count_argument(user: torch.fx.Node, node: torch.fx.Node) -> int:
    count = 0

    def visit(argument: torch.fx.Node) -> torch.fx.Node:
        nonlocal count
        count += argument is node
        return argument

    torch.fx.map_arg((user.args, user.kwargs), visit)
    return count


def fake_root(buffer: torch.Tensor, window: Window) -> torch.Tensor:
    """Return a fake typed view with a storage of its own, aligned as the real one is.

    Inner compilers assume that inputs of one graph do not share a storage, and Inductor's cache
    on disk ignores whether they do.
    """
    itemsize = window.dtype.itemsize
    start = 0 if buffer.device.type == "cpu" else window.byte_offset % 16 // itemsize
    length = (window.span[1] - window.span[0]) // itemsize
    with buffer.fake_mode:
        flat = torch.empty(start + length, dtype=window.dtype, device=buffer.device)
        return flat.as_strided(window.size, window.stride, start)


# Functional operations that write part of their first argument and keep the rest.
PARTIAL_WRITES = (
    "index_put",
    "_unsafe_index_put",
    "index_copy",
    "index_add",
    "index_fill",
    "index_reduce",
    "scatter",
    "scatter_add",
    "scatter_reduce",
    "masked_fill",
    "masked_scatter",
    "put",
    "copy",
    "fill",
)


def in_place_overload(value: torch.fx.Node) -> torch._ops.OpOverload | None:
    """Return the in-place form of an operation that writes part of its first argument."""
    if value.op != "call_function" or not isinstance(value.target, torch._ops.OpOverload):
        return None
    namespace, name = value.target._schema.name.split("::")
    if namespace != "aten" or name not in PARTIAL_WRITES:
        return None
    name = {"_unsafe_index_put": "index_put"}.get(name, name)
    packet = getattr(aten, name + "_", None)
    overload = value.target._overloadname
    if packet is None or overload not in packet.overloads():
        return None
    return getattr(packet, overload)
