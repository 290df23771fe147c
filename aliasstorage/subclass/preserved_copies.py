"""Copies of windows that a compiler would drop, and that must stay copies.

Note [A copy of a window must stay a copy]
Problem: Inductor drops operations that leave their argument as it is: a clone, a repeat by ones, a
cat of one tensor, a sum with zeros, a conversion there and back. It keeps them only where the
argument is an input. On a byte graph, a written buffer is not an input: the functional write made
a new tensor. Later Inductor writes the input in place of that tensor. The "copy" then is an alias
of the buffer, and later writes show in it. Stock `torch.compile` does the same to plain tensors:
``x[:3] = 3; return x.repeat(1, 1)`` returns an alias of ``x``.
Rule: where a byte graph goes to a compiler as it is, the result of such an operation is computed
once more, on its bits, by an operation that changes nothing and that no pass recognizes. A clone
is computed in this way to begin with. Graphs that this library bufferizes use `ops.materialize`.
Reason: working on bits also keeps the bits of NaNs.
"""

from __future__ import annotations

from typing import Any

import optree
import torch

from aliasstorage._compat import OpOverload, run_eagerly
from aliasstorage.subclass import functional_buffers
from aliasstorage.subclass.alias_tensor import AliasTensor
from aliasstorage.subclass.exact_writes import INTEGERS

_COPIES = frozenset({torch.ops.aten.clone.default, torch.ops.aten._to_copy.default})
# Pointwise operations that are the identity for some arguments, or that are taken apart into one.
_POINTWISE = {
    *("add", "sub", "rsub", "mul", "div", "pow", "positive", "where"),
    *("ceil", "floor", "round", "trunc", "nan_to_num", "conj_physical", "sgn"),
    *("clone", "copy", "_to_copy"),
}


def is_plain_copy(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation copies a window of a byte graph that stays one."""
    if func not in _COPIES:
        return False
    source = args[0]
    return (
        type(source) is AliasTensor
        and functional_buffers.stays_a_byte_graph(source._buffer)
        and kwargs.get("dtype") in (None, source.dtype)
        and kwargs.get("device") in (None, source.device)
        and kwargs.get("memory_format") in (None, torch.preserve_format)
    )


def clone_bytes(source: AliasTensor) -> torch.Tensor:
    """Copy a window on its bytes."""
    itemsize = source.dtype.itemsize
    size, stride = (*source.shape, itemsize), [step * itemsize for step in source.stride()]
    values = torch.as_strided(source._buffer, size, (*stride, 1), source._byte_offset)
    return (values ^ 0).view(source.dtype).squeeze(-1)


def may_be_identity(func: OpOverload) -> bool:
    """Return whether an operation's result may be its argument, for some arguments."""
    if func.namespace != "aten":
        return False
    name = func._schema.name.removeprefix("aten::").rstrip("_")
    return name in _POINTWISE or torch.Tag.pointwise not in func.tags


def keep_apart(result: Any, windows: list[AliasTensor]) -> Any:
    """Return an operation's results, computed once more where they may be one of its windows."""
    if isinstance(result, (list, tuple)):
        return type(result)([keep_apart(item, windows) for item in result])
    if not isinstance(result, torch.Tensor) or not _may_hold_one(result, windows):
        return result
    return identity(result)


def typed_apart(arguments: Any, written: list[AliasTensor]) -> Any:
    """Replace the windows in a container of arguments by typed views, or copies if only read."""
    known = {id(window) for window in written}

    def typed(value: Any) -> Any:
        if type(value) is not AliasTensor:
            return value
        return value._typed() if id(value) in known else identity(value._typed())

    return optree.tree_map(typed, arguments)


def _may_hold_one(result: torch.Tensor, windows: list[AliasTensor]) -> bool:
    """Return whether a result has as many elements as one of the windows."""
    numel = result.numel()
    return not isinstance(numel, int) or any(
        not isinstance(window.numel(), int) or window.numel() <= numel for window in windows
    )


def identity(values: torch.Tensor) -> torch.Tensor:
    """Return a copy that no pass of a compiler knows to be one."""
    dtype = values.dtype
    if dtype == torch.bool:
        return torch.bitwise_xor(values, False)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.bitwise_xor(values, 0)
    if dtype.itemsize not in INTEGERS:
        return torch.view_as_complex(identity(torch.view_as_real(values)))
    return torch.bitwise_xor(values.view(INTEGERS[dtype.itemsize]), 0).view(dtype)


run_eagerly(globals())
