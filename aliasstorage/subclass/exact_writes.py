"""Writes that are traced as other operations, to keep every bit of what they do not write.

Note [Moves are done on integers]
Problem: a functional graph writes a few elements of a window by computing all of its values anew.
For 16-bit floats and smaller, and for bools, the kernels that copy the other values change the
bits of NaNs and of bools other than 0 and 1. Some kernels of eager ATen do so, and all of CPU
Inductor's.
Rule: where the byte graph is the final form (the stock path), a write that only moves values is
traced on the integer view of the window. A write that computes values, an accumulation, is
computed on a copy; only the elements that it reaches are moved into the window. Where writes
become in-place ones, they touch no other element, and nothing of this is needed.

Note [Storages that end inside an element]
Problem: functionalization turns ``copy_`` into a copy that first clones the storage of the target,
as elements of the target's dtype. It asserts that the storage holds a whole number of them. A
storage of 41 bytes with an int64 window over the first 40 does not.
Rule: copies to such windows, and fills with tensors, are traced on the window's bytes. If the
length is symbolic, a guard decides. On byte graphs no guard can decide, because the real storage
may be longer than the traced buffer; there the copy is always traced on bytes.
"""

from __future__ import annotations

from typing import Any

import torch

from aliasstorage._compat import disable_current_modes, run_eagerly
from aliasstorage.subclass import functional_buffers
from aliasstorage.subclass.alias_tensor import AliasTensor
from aliasstorage.subclass.operator_schemas import Argument, op_info
from aliasstorage.windows.window import regenerate

aten = torch.ops.aten

# For each operation, the argument whose values are moved into the window.
_MOVED = {
    aten.copy_.default: "src",
    aten.fill_.Scalar: "value",
    aten.fill_.Tensor: "value",
    aten.index_copy_.default: "source",
    aten.index_fill_.int_Scalar: "value",
    aten.index_fill_.int_Tensor: "value",
    aten.index_put_.default: "values",
    aten.masked_fill_.Scalar: "value",
    aten.masked_fill_.Tensor: "value",
    aten.masked_scatter_.default: "source",
    aten.scatter_.src: "src",
    aten.scatter_.value: "value",
}
# An integer type for each size of an element, in bytes.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def loses_bits(dtype: torch.dtype) -> bool:
    """Return whether functional kernels may change the bits of values that they keep."""
    return dtype == torch.bool or (dtype.is_floating_point and dtype.itemsize <= 2)


def is_move(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an in-place operation only moves values into its first argument."""
    if func not in _MOVED or is_accumulation(func, args, kwargs):
        return False
    dtype = args[0].dtype
    value = _moved(func).get(args, kwargs)
    if isinstance(value, torch.Tensor):
        return value.dtype == dtype or func in _CONVERTING
    return isinstance(value, (bool, int, float))


# Operations that take values of another dtype and convert them.
_CONVERTING = frozenset(
    {
        aten.copy_.default,
        aten.fill_.Tensor,
        aten.index_fill_.int_Tensor,
        aten.masked_fill_.Tensor,
    }
)


def on_integers(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a move's arguments, typed tensors, as integers of the same size."""
    target = args[0]
    integer = INTEGERS[target.dtype.itemsize]
    argument = _moved(func)
    value = argument.get(args, kwargs)
    if isinstance(value, torch.Tensor):
        value = value.to(target.dtype).view(integer)
    else:
        with disable_current_modes():
            value = int(torch.tensor(value, dtype=target.dtype).view(integer))
    replaced = list(args)
    replaced[0] = target.view(integer)
    if argument.index < len(args):
        replaced[argument.index] = value
    else:
        kwargs = {**kwargs, argument.name: value}
    return tuple(replaced), kwargs


# For each operation that computes some elements, how the same operation marks them with True.
_REACHED = {
    aten.index_add_.default: aten.index_fill.int_Scalar,
    aten.index_reduce_.default: aten.index_fill.int_Scalar,
    aten.index_put_.default: aten.index_put.default,
    aten.scatter_.reduce: aten.scatter.value,
    aten.scatter_.value_reduce: aten.scatter.value,
    aten.scatter_add_.default: aten.scatter.value,
    aten.scatter_reduce_.two: aten.scatter.value,
}


def is_accumulation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an in-place operation computes some elements of its first argument."""
    if func is aten.index_put_.default:
        return bool(op_info(func).arguments[3].get(args, kwargs))  # accumulate
    return func in _REACHED


def accumulate_on_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Do an accumulation on a copy of its first argument, a plain tensor.

    Returns:
        What the first argument becomes, as integers: all other elements have the bits they had.
    """
    target, *rest = args
    computed = target.clone()
    func(computed, *rest, **kwargs)
    nothing = torch.zeros_like(target, dtype=torch.bool)
    if func is aten.index_put_.default:
        true = torch.ones((), dtype=torch.bool, device=target.device)
        reached = aten.index_put.default(nothing, rest[0], true)
    else:
        dim, index = (argument.get(args, kwargs) for argument in op_info(func).arguments[1:3])
        reached = _REACHED[func](nothing, dim, index, True)
    integers = target.view(INTEGERS[target.dtype.itemsize])
    return torch.where(reached, computed.view(integers.dtype), integers)


def may_end_inside_element(window: AliasTensor) -> bool:
    """Return whether the storage of a window may be no whole number of its elements long."""
    nbytes, itemsize = window._buffer.shape[0], window.dtype.itemsize
    if not isinstance(nbytes, int) and functional_buffers.stays_a_byte_graph(window._buffer):
        return itemsize > 1
    return bool(nbytes % itemsize)


# What functionalization or a decomposition makes copies of.
COPIES = frozenset({aten.copy_.default, aten.fill_.Tensor})


def copy_bytes(target: AliasTensor, value: torch.Tensor) -> None:
    """Copy a plain tensor to a window, as ``copy_`` does, on the window's bytes."""
    itemsize = target.dtype.itemsize
    size, stride = target.shape, [step * itemsize for step in target.stride()]
    bytes_ = regenerate(
        target._buffer, torch.uint8, (*size, itemsize), (*stride, 1), target._byte_offset
    )
    elements = value.to(target.device, target.dtype).resolve_conj().resolve_neg()
    bytes_.copy_(elements.unsqueeze(-1).view(torch.uint8))


def _moved(func: Any) -> Argument:
    return next(a for a in op_info(func).arguments if a.name == _MOVED[func])


run_eagerly(globals())
