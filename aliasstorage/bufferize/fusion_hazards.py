"""Whether a compiler could fuse a read with a later write of the same memory, and be wrong.

Note [Reads that must not be fused with a write]
Problem: a loop that reads and writes one memory is right if it reads each element where it writes
it. CPU Inductor checks this before it fuses a read with a later write, but only for the first
write of a buffer. After that it looks for the read under a name that the read no longer has (see
``Scheduler.fusable_weak_dep``, torch 2.13 and 2.14): ``b.copy_(b.flip(1))`` reads what it has just
written.
Rule: the planner places a fence between a read at other indices than the write's and the write.
Reads and writes at indices that only data tells are never fused, and need no fence.

Note [Opaque writes]
Problem: Inductor computes a value where it is needed, and before a write of what the value reads.
It notices its own writes in time. It notices the writes of kernels that it only calls, of custom
operations and of ATen, too late: ``x = w * 2; op_that_writes(w); return x + 1`` computes ``x``
after the call.
Rule: a fence stands between any read and such a write.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.fx

aten = torch.ops.aten

_POINTWISE = frozenset(
    {
        aten._to_copy.default,
        aten.clone.default,
        aten.copy.default,
        torch.ops.prims.convert_element_type.default,
    }
)

# For each operation that takes indices, where they stand.
_INDEXED_READS: dict[Any, int] = {
    aten.embedding.default: 1,
    aten.gather.default: 2,
    aten.index.Tensor: 1,
    aten.index_select.default: 2,
}
_INDEXED_WRITES: dict[Any, int] = {
    aten._unsafe_index_put.default: 1,
    aten.index_add.default: 2,
    aten.index_copy.default: 2,
    aten.index_fill.int_Scalar: 2,
    aten.index_fill.int_Tensor: 2,
    aten.index_put.default: 1,
    aten.index_reduce.default: 2,
    aten.scatter.src: 2,
    aten.scatter.value: 2,
    aten.scatter_add.default: 2,
    aten.scatter_reduce.two: 2,
}

# Writes for which compilers generate code, or that they announce before they call a kernel.
_GENERATED_WRITES = frozenset(
    {
        *(_INDEXED_WRITES.keys() - {aten.index_add.default, aten.index_reduce.default}),
        aten.copy.default,
        aten.fill.Scalar,
        aten.fill.Tensor,
        aten.masked_fill.Scalar,
        aten.masked_fill.Tensor,
    }
)


def is_opaque_write(value: torch.fx.Node) -> bool:
    """Return whether a value that is made in place is written by a kernel that is only called."""
    return value.target not in _GENERATED_WRITES


def reads_elementwise(read: torch.fx.Node, ends: Collection[torch.fx.Node]) -> bool:
    """Return whether a read's values are only used at the index where they stand.

    Or at indices that data tells. Values that are computed elementwise are followed, since a
    compiler may compute them where they are used.

    Args:
        read: The read.
        ends: Nodes at which values are written into a window, which are not uses.
    """
    shape = read.meta["val"].shape
    pending, seen = [read], {read}
    while pending:
        node = pending.pop()
        for user in node.users:
            if user in ends or user in seen or user.op == "output":
                continue
            seen.add(user)
            index = _INDEXED_READS.get(user.target)
            if index is not None and depends_on_data(user.args[index]):
                continue
            value = user.meta.get("val")
            same = isinstance(value, torch.Tensor) and value.shape == shape
            if not same or not _is_pointwise(user):
                return False
            pending.append(user)
    return True


def writes_where_data_tells(value: torch.fx.Node) -> bool:
    """Return whether a value is written at indices that only data tells."""
    index = _INDEXED_WRITES.get(value.target)
    return index is not None and depends_on_data(value.args[index])


def depends_on_data(value: object) -> bool:
    """Return whether indices depend on an input or a constant tensor, not on shapes alone."""
    if isinstance(value, (list, tuple)):
        return any(depends_on_data(item) for item in value)
    pending = [value] if isinstance(value, torch.fx.Node) else []
    seen = set(pending)
    while pending:
        node = pending.pop()
        if not isinstance(node.meta.get("val"), torch.Tensor) and node.op != "get_attr":
            continue
        if node.op in ("placeholder", "get_attr"):
            return True
        new = [argument for argument in node.all_input_nodes if argument not in seen]
        seen.update(new)
        pending += new
    return False


def _is_pointwise(node: torch.fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return node.target in _POINTWISE or torch.Tag.pointwise in tags
