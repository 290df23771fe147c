"""Which inputs of a Dynamo graph share a storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.fx

from aliasstorage._compat import (
    FakeTensor,
    ambient_fake_mode,
    source_name,
    storage_key,
)
from aliasstorage.compilation.mutated_inputs import written_inputs
from aliasstorage.errors import RequiresGradError, UnsupportedTensorError
from aliasstorage.subclass.alias_tensor import AliasTensor
from aliasstorage.windows.window import Window, reach

Extent = int | torch.SymInt


@dataclass
class Member:
    """An input of the Dynamo graph that is a view of a merged storage."""

    index: int  # position among the graph's inputs
    node: torch.fx.Node
    wrapped: bool
    dtype: torch.dtype
    size: tuple[Extent, ...]
    stride: tuple[Extent, ...]
    byte_offset: Extent


@dataclass
class MergedStorage:
    """The inputs of one storage, and the node of the buffer that replaces them."""

    members: list[Member]
    buffer_value: torch.Tensor  # fake
    buffer_node: torch.fx.Node | None = None


def find_storages(graph: torch.fx.Graph, example_inputs: Sequence[Any]) -> list[MergedStorage]:
    """Return the storages of a Dynamo graph that must become one input each.

    A storage is merged when a window of it is an input or when two plain inputs share it. So is
    that of one plain input that shows an element twice, which AOTAutograd cannot write back, or
    that is written and shows part of its storage: a cache in a storage with others.
    Plain inputs of which one requires gradients are left to AOTAutograd, which handles them as
    long as they are of one dtype.

    Args:
        graph: The Dynamo graph.
        example_inputs: Its example inputs. A fake storage may be shorter than the real one,
            whose length is therefore taken.
    """
    groups: dict[int, list[Member]] = {}
    for index, node in enumerate(graph.find_nodes(op="placeholder")):
        value = node.meta.get("example_value")
        if is_strided_input(value):
            groups.setdefault(value_storage(value), []).append(_member(index, node, value))
    storages, written = [], written_inputs(graph)
    for members in groups.values():
        values = [member.node.meta["example_value"] for member in members]
        wrapped = [value for value in values if isinstance(value, AliasTensor)]
        if (
            not wrapped
            and len(members) == 1
            and not (
                shows_elements_twice(values[0])
                or (members[0].node in written and shows_part(example_inputs[members[0].index]))
            )
        ):
            continue
        dtypes = {value.dtype for value in values}
        if any(value.requires_grad for value in values):
            if wrapped or len(dtypes) > 1:
                raise _gradient_error(members)
            continue
        for member, value in zip(members, values, strict=True):
            _check_no_lazy_bits(member, value)
        first = values[0]
        nbytes: Extent
        if wrapped:
            nbytes = wrapped[0]._buffer.shape[0]
        elif all(static_window(member) for member in members):
            nbytes = example_inputs[members[0].index].untyped_storage().nbytes()
        else:
            # The real storage may be longer, by a length that no symbol stands for.
            nbytes = reduce(torch.sym_max, map(_end, members))
        with ambient_fake_mode():
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=first.device)
        storages.append(MergedStorage(members, buffer))
    return storages


def is_strided_input(value: Any) -> bool:
    """Return whether an example value is a tensor with strided bytes."""
    if isinstance(value, AliasTensor):
        return True
    return (
        isinstance(value, FakeTensor)
        and value.layout == torch.strided
        and not value.is_quantized
        and not value.is_nested
    )


def _member(index: int, node: torch.fx.Node, value: torch.Tensor) -> Member:
    byte_offset = value.storage_offset() * value.dtype.itemsize
    size, stride = tuple(value.shape), tuple(value.stride())
    wrapped = isinstance(value, AliasTensor)
    return Member(index, node, wrapped, value.dtype, size, stride, byte_offset)


def shows_part(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has fewer bytes than its storage."""
    return tensor.numel() * tensor.dtype.itemsize < tensor.untyped_storage().nbytes()


def shows_elements_twice(value: torch.Tensor) -> bool:
    """Return whether two indices of a tensor may name one element, as in expanded tensors.

    Examples:
        >>> import torch
        >>> row = torch.zeros(4)
        >>> shows_elements_twice(row), shows_elements_twice(row.expand(2, 4))
        (False, True)
    """
    if any(extent == 0 for extent in value.shape if isinstance(extent, int)):
        return False
    dims = [
        (step, extent)
        for extent, step in zip(value.shape, value.stride(), strict=True)
        if isinstance(extent, int) and isinstance(step, int) and extent > 1
    ]
    reach = 0  # of the dimensions with smaller steps
    for step, extent in sorted(dims):
        if step <= reach:
            return True
        reach += step * (extent - 1)
    return False


def _end(member: Member) -> Extent:
    """Return one past the last byte of a member."""
    return member.byte_offset + reach(member.size, member.stride) * member.dtype.itemsize


def _check_no_lazy_bits(member: Member, value: torch.Tensor) -> None:
    if value.is_conj() or value.is_neg():
        raise UnsupportedTensorError(
            "An input with a lazy conjugate or negative bit shares its storage with another one.",
            which=f"input {source_name(member.node._dynamo_source)}",
            expected="inputs that are described by their bytes",
            got=f"{value.dtype} of shape {tuple(value.shape)}",
            do="Pass the tensor without the bit, and conjugate or negate inside the function.",
        )


def _gradient_error(members: list[Member]) -> RequiresGradError:
    names = ", ".join(source_name(member.node._dynamo_source) for member in members)
    return RequiresGradError(
        "Inputs of several dtypes share a storage, and one of them requires gradients.",
        which=f"inputs {names}",
        expected="caches and states that do not require gradients",
        got="requires_grad=True on a view of the storage",
        do="Keep trainable parameters outside the byte buffer, or pass tensor.detach().",
    )


def value_storage(value: torch.Tensor) -> int:
    """Return an identity of the storage whose bytes an example value shows."""
    return storage_key(value._buffer if isinstance(value, AliasTensor) else value)


def static_window(member: Member) -> Window | None:
    """Return a member's window when none of its extents is symbolic."""
    extents = (*member.size, *member.stride, member.byte_offset)
    if not all(isinstance(extent, int) for extent in extents):
        return None
    return Window(member.dtype, member.size, member.stride, member.byte_offset)  # type: ignore
