"""Offsets of windows that change from call to call, while Dynamo traces.

Note [Offsets that change]
Problem: Dynamo makes a size symbolic when it differs from the last trace of the frame, and with it
the storage offset of a plain view. The offset of a tensor subclass is static to it. A window that
moves when its cache grows would be compiled for each offset.
Rule: graphs that this library's backend merges take the offset of such a window as an input, like
any other extent. It is made symbolic here, where Dynamo asks for the fake window. Stock
AOTAutograd has no place for a symbolic offset, so there it stays a number. As with plain views,
the offset of a window of fixed size stays a number.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch

from aliasstorage._compat import (
    DynamoTrace,
    dynamo_trace,
    expression,
    is_faking_input,
    run_eagerly,
    symbol_of,
)
from aliasstorage.errors import BackendUnsupportedError


@dataclass
class _Frame:
    """What is known of a function's windows, for one backend that it is compiled with."""

    compiler: Callable[[], Any]  # a weak reference
    is_ours: bool | None = None  # None before it ended in any backend, False after a stock one
    last: list[int] = field(default_factory=list)  # offsets in bytes, in the order of their faking
    changed: set[int] = field(default_factory=set)  # positions in that order


@dataclass
class _Windows:
    """What is known of the windows of one trace."""

    count: int = 0  # how many were faked
    symbols: set[Any] = field(default_factory=set)  # that stand for offsets


_frames: weakref.WeakKeyDictionary[CodeType, list[_Frame]] = weakref.WeakKeyDictionary()

# By fake mode, of which each trace has its own.
_windows: weakref.WeakKeyDictionary[Any, _Windows] = weakref.WeakKeyDictionary()


def _frame_of(trace: DynamoTrace) -> _Frame:
    frames = _frames.setdefault(trace.code, [])
    frames[:] = [frame for frame in frames if frame.compiler() is not None]
    for frame in frames:
        if frame.compiler() is trace.compiler:
            return frame
    try:
        compiler = weakref.ref(trace.compiler)
    except TypeError:  # there is no weak reference to it: nothing is remembered
        return _Frame(lambda: trace.compiler)
    frames.append(_Frame(compiler))
    return frames[-1]


def compiles_for_us() -> None:
    """Tell that the trace in progress ends in this library's backend."""
    trace = dynamo_trace()
    if trace is not None and (frame := _frame_of(trace)).is_ours is None:
        frame.is_ours = True


def offset_in_trace(dtype: torch.dtype, size: Sequence[int], byte_offset: int) -> int:
    """Return the byte offset of a traced window, as a symbol where it changes from call to call.

    Called by `AliasTensor.__tensor_unflatten__`. See Note [Offsets that change].

    Raises:
        BackendUnsupportedError: The symbol reached a backend that has no place for it.
    """
    trace = dynamo_trace()
    if trace is None:
        return byte_offset
    windows = _windows.setdefault(trace.fake_mode, _Windows())
    if _is_made_of(byte_offset, windows.symbols):
        _frame_of(trace).is_ours = False
        raise BackendUnsupportedError(
            "A window whose offset changes from call to call reached stock AOTAutograd.",
            which=f"a window of {dtype} with {len(size)} dimensions",
            expected="a graph for this library's backend, as an earlier one of the function was",
            got="an offset that is an input of the graph",
            do="Call it again, to compile it for each offset; or always choose the same backend.",
        )
    if not is_faking_input():
        return byte_offset
    # The order of faking stands for the input. Where it is another one than in the last trace,
    # a number may be made a symbol or a symbol a number: both are right.
    position = windows.count
    windows.count += 1
    frame = _frame_of(trace)
    if position == len(frame.last):
        frame.last.append(byte_offset)
    elif frame.last[position] != byte_offset:
        frame.last[position] = byte_offset
        frame.changed.add(position)
    is_fixed = all(isinstance(extent, int) for extent in size)
    if is_fixed or not frame.is_ours or position not in frame.changed:
        return byte_offset
    elements = symbol_of(byte_offset // dtype.itemsize, trace.fake_mode.shape_env)
    if not isinstance(elements, int):
        windows.symbols.add(expression(elements))
    return elements * dtype.itemsize


def _is_made_of(byte_offset: int | torch.SymInt, symbols: Collection[Any]) -> bool:
    if isinstance(byte_offset, int) or not symbols:
        return False
    return not expression(byte_offset).free_symbols.isdisjoint(symbols)


run_eagerly(globals())
