"""Writes that move values without computing, done on integers of the same size.

Note [Moves are done on integers]
A functional graph writes a few elements of a window by making all of the window's values anew.
For 16-bit floats and smaller, and for bools, the kernels that keep the other values change the
bits of NaNs and of bools other than 0 and 1: eager ATen's some of them, CPU Inductor's all.
Where a byte graph is the final form, on the stock path, such a write is therefore traced on the
integer view of the window. Where writes become in-place ones, they touch nothing else anyway.
"""

from __future__ import annotations

from typing import Any

import torch

from aliasstorage._compat import disable_current_modes, run_eagerly
from aliasstorage.schemas import Argument, op_info

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
_INTEGER = {1: torch.uint8, 2: torch.int16}


def is_move(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an in-place operation only moves values into its first argument."""
    if func not in _MOVED or args[0].dtype.itemsize > 2:
        return False
    dtype = args[0].dtype
    if dtype != torch.bool and not dtype.is_floating_point:
        return False
    if func is aten.index_put_.default and (args[3] if len(args) > 3 else kwargs.get("accumulate")):
        return False
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
    integer = _INTEGER[target.dtype.itemsize]
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


def _moved(func: Any) -> Argument:
    return next(a for a in op_info(func).arguments if a.name == _MOVED[func])


run_eagerly(globals())
