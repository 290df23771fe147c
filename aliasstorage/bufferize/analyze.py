"""Decide which writes of a buffer happen in place, and describe the rest for the planner.

A write's value is made *in place* when the operation that computes it has an in-place form and
its first argument is what memory holds in the written window at that point. Any other value is
computed first and then copied into the window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from aliasstorage._compat import OpOverload
from aliasstorage.bufferize.custom_ops import MutatingCall, mutating_call
from aliasstorage.bufferize.fusion_hazards import (
    is_opaque_write,
    reads_elementwise,
    writes_where_data_tells,
)
from aliasstorage.bufferize.plan import Copy, Plan, Read, Write, hazard, overlaps, plan
from aliasstorage.bufferize.recognize import (
    BufferAccesses,
    ReadNode,
    WriteNode,
    may_alias_argument,
    may_become_argument,
    uses,
)
from aliasstorage.bufferize.symbolic_windows import AnyWindow
from aliasstorage.bufferize.triton_kernels import TritonCall, triton_call
from aliasstorage.windows.window import Window

aten = torch.ops.aten

# Functional operations that write part of their first argument and keep the rest.
PARTIAL_WRITES = frozenset(
    {
        "_unsafe_index_put",
        "copy",
        "fill",
        "index_add",
        "index_copy",
        "index_fill",
        "index_put",
        "index_reduce",
        "masked_fill",
        "masked_scatter",
        "put",
        "scatter",
        "scatter_add",
        "scatter_reduce",
    }
)


class Analysis:
    """How the accesses of one buffer are done in place.

    Attributes:
        accesses: What was recognized.
        order: Position of each node of the graph.
        in_place: For each scatter done in place, the in-place operation.
        calls: The functionalized calls that are made on windows, by node.
        called: For each scatter whose value such a call leaves in memory, the call's node.
        kept_by: For each ``where`` that keeps old values of its window, which argument is the
            old one.
        left_in_memory: Values that in-place writes leave in memory and that have other uses;
            they are reads of the version that the write makes.
        reads: The recognized reads, and after them those of ``left_in_memory``.
        planned_reads: ``reads`` as the planner sees them.
        plan: The plan.
    """

    def __init__(
        self,
        accesses: BufferAccesses,
        order: dict[torch.fx.Node, int],
        preferred_roots: Sequence[Window],
    ) -> None:
        self.accesses, self.order = accesses, order
        self.in_place: dict[torch.fx.Node, OpOverload] = {}
        self.calls: dict[torch.fx.Node, MutatingCall | TritonCall] = {}
        self.called: dict[torch.fx.Node, torch.fx.Node] = {}
        self.left_in_memory: list[ReadNode] = []
        self._read_of = {read.node: read for read in accesses.reads if read.user is None}
        self._choose_in_place()
        self._require_whole_calls()
        self.kept_by = self._find_masked_writes()
        self.reads = [*accesses.reads, *self._find_left_in_memory()]
        self._described_without_no_ops = self._describe_reads(may_alias_argument)
        self.planned_reads = self._describe_reads(may_become_argument)
        self._writes = [
            Write(
                w.version,
                w.window,
                self.position(w),
                self._writes_in_order(w),
                self._is_opaque(w),
            )
            for w in accesses.writes
        ]
        self.plan: Plan = plan(self.planned_reads, self._writes, preferred_roots)

    def is_own_copy(self, copy: Copy) -> bool:
        """Return whether the program itself makes a copy, which must not be dropped.

        See Note [Copies that a compiler may drop].
        """
        return hazard(copy.read, self._described_without_no_ops[copy.read], self._writes) is None

    def position(self, write: WriteNode) -> int:
        """Return where a write happens: at its scatter, or at the call that does it."""
        return self.order[self.called.get(write.node, write.node)]

    def _writes_in_order(self, write: WriteNode) -> bool:
        if write.node in self.called:
            return False  # custom operations are not fused
        return write.node not in self.in_place or not writes_where_data_tells(write.value)

    def _is_opaque(self, write: WriteNode) -> bool:
        if write.node in self.in_place:
            return is_opaque_write(write.value)
        return write.node in self.called or self.needs_mask(write)

    def needs_mask(self, write: WriteNode) -> bool:
        """Return whether a write must leave the elements alone that it keeps.

        Note [Kept elements keep their bits]
        Problem: a masked write is a `where` over the whole window that keeps old values. Compilers
        compute it in float32 for floats of 16 bits and less, and as 0 and 1 for bools. The bits of
        NaNs and odd bools that the program did *not* write would change.
        Rule: dtypes of less than four bytes are written by ``masked_write_``.
        """
        return write.window.dtype.itemsize < 4 and write.value in self.kept_by

    # --- in place or not ---

    def _choose_in_place(self) -> None:
        for write in self.accesses.writes:
            value = write.value
            if not self._used_only_after(value, write):
                continue
            operation = in_place_overload(value)
            if operation is not None and self._is_current(value.args[0], write):
                self.in_place[write.node] = operation
            elif getattr(value.target, "__name__", "") == "getitem":
                self._choose_call(write)

    def _choose_call(self, write: WriteNode) -> None:
        node, index = write.value.args
        is_window = self._read_of.__contains__
        call = (
            self.calls.get(node) or mutating_call(node, is_window) or triton_call(node, is_window)
        )
        if call is not None and self._is_current(call.windows.get(index), write):
            self.calls[node] = call
            self.called[write.node] = node

    def _require_whole_calls(self) -> None:
        """Make a call in place only if every window that it mutates can be."""
        for node, call in list(self.calls.items()):
            writes = [scatter for scatter, caller in self.called.items() if caller is node]
            if len(writes) != len(call.windows):
                del self.calls[node]
                for scatter in writes:
                    del self.called[scatter]

    def _is_current(self, base: Any, write: WriteNode) -> bool:
        """Return whether memory holds ``base`` in the written window just before the write."""
        version = self._version_of(base, write.window)
        return version is not None and not any(
            version < other.version < write.version and overlaps(other.window, write.window)
            for other in self.accesses.writes
        )

    def _version_of(self, base: Any, window: AnyWindow) -> int | None:
        read = self._read_of.get(base)
        if read is not None:
            return read.version if read.window == window else None
        for write in self.accesses.writes:
            if write.value is base and self.is_in_place(write) and write.window == window:
                return write.version
        return None

    def window_of(self, read: torch.fx.Node) -> AnyWindow:
        """Return the window that a read shows."""
        return self._read_of[read].window

    def is_in_place(self, write: WriteNode) -> bool:
        """Return whether the write's value is never anywhere but in the window."""
        return write.node in self.in_place or write.node in self.called

    def _used_only_after(self, value: torch.fx.Node, write: WriteNode) -> bool:
        chain = scatter_chain(write)
        scatter = self.order[write.node]
        return all(user in chain or self.order[user] > scatter for user in value.users)

    def _find_masked_writes(self) -> dict[torch.fx.Node, int]:
        found = {}
        for write in self.accesses.writes:
            if write.value.target is aten.where.self:
                for position in (2, 1):
                    if self._is_current(write.value.args[position], write):
                        found[write.value] = position
        return found

    # --- for the planner ---

    def _find_left_in_memory(self) -> list[ReadNode]:
        for write in self.accesses.writes:
            if self.is_in_place(write) and set(write.value.users) - scatter_chain(write):
                read = ReadNode(write.value, write.version, write.window)
                self.left_in_memory.append(read)
        return self.left_in_memory

    def write_of(self, read: ReadNode) -> WriteNode:
        """Return the write that left a value in memory."""
        return next(w for w in self.accesses.writes if w.version == read.version)

    def _describe_reads(self, is_view: Callable[[torch.fx.Node], bool]) -> list[Read]:
        # An in-place operation happens at its scatter, whatever its functional form's place.
        moved = {w.value: w.node for w in self.accesses.writes if w.node in self.in_place}
        ends = {node for w in self.accesses.writes for node in scatter_chain(w)}
        ends.update(moved, self.calls)
        targets: dict[torch.fx.Node, set[int]] = {}
        for value, scatter in moved.items():
            targets.setdefault(value.args[0], set()).add(self.order[scatter])
        for node, call in self.calls.items():
            for base in call.windows.values():
                targets.setdefault(base, set()).add(self.order[node])
        return [
            self._describe(read, moved, targets.get(read.node, set()), ends, is_view)
            for read in self.reads
        ]

    def _describe(
        self,
        read: ReadNode,
        moved: dict[torch.fx.Node, torch.fx.Node],
        targets: set[int],
        ends: set[torch.fx.Node],
        is_view: Callable[[torch.fx.Node], bool],
    ) -> Read:
        left = read in self.left_in_memory
        own_scatter = self.write_of(read).node if left else None
        times_used: dict[int, int] = {}
        escapes = False
        for user in [read.user] if read.user is not None else uses(read.node):
            if user is own_scatter:
                continue
            if user.op == "output":
                escapes = True
            elif user.op == "call_function" and may_alias_argument(user) and user.users:
                continue  # a view: what uses it is visited as well
            position = self.order[moved.get(user, user)]
            # A use through a view counts twice: it is not just the destination of a write.
            direct = _count_argument(user, read.node)
            times_used[position] = times_used.get(position, 0) + (direct or 2)
        if read.user is None:
            # See Note [Copies that a compiler may drop].
            for user in uses(read.node, is_view):
                if user is not own_scatter:
                    times_used.setdefault(self.order[moved.get(user, user)], 2)
        return Read(
            read.version,
            read.window,
            self.position(self.write_of(read)) if left else self.order[read.node],
            tuple(sorted(times_used)),
            frozenset(p for p in targets if times_used.get(p) == 1),
            escapes,
            read.user is None and reads_elementwise(read.node, ends),
        )


def scatter_chain(write: WriteNode) -> set[torch.fx.Node]:
    """Return the scatter and the nodes that turn the typed value into its bytes."""
    chain = {write.node}
    node = write.node.args[1]
    while node is not write.value:
        chain.add(node)
        node = node.args[0]
    return chain


def in_place_overload(value: torch.fx.Node) -> OpOverload | None:
    """Return the in-place form of an operation that writes part of its first argument."""
    if value.op != "call_function" or not isinstance(value.target, OpOverload):
        return None
    namespace, name = value.target._schema.name.split("::")
    if namespace != "aten" or name not in PARTIAL_WRITES:
        return None
    packet = getattr(aten, {"_unsafe_index_put": "index_put"}.get(name, name) + "_", None)
    overload = value.target._overloadname
    if packet is None or overload not in packet.overloads():
        return None
    return getattr(packet, overload)


def _count_argument(user: torch.fx.Node, node: torch.fx.Node) -> int:
    count = 0

    def visit(argument: torch.fx.Node) -> torch.fx.Node:
        nonlocal count
        count += argument is node
        return argument

    torch.fx.map_arg((user.args, user.kwargs), visit)
    return count
