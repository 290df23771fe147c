"""One oracle: eager PyTorch on plain typed views of the same bytes.

`check` runs a function on views of a buffer of random bytes, eagerly, and again compiled, on
another copy of the bytes. It compares the results, the *whole* buffer as bytes, what aliases
what, and then mutates everything that came back and compares once more: a result that only looks
like a view is found there. It does all of that twice, so that a stale second call is found too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import aliasstorage
from aliasstorage import AliasTensor, Window
from aliasstorage.bufferize.report import BufferReport
from aliasstorage.compilation.graph_listeners import listening

BYTES = 256

# Windows over 256 bytes. A and I are the same bytes in two dtypes; H straddles A and F; T is A
# transposed; S shows every other float; the element ranges of A and F overlap although their
# bytes do not, and those of P and X do not overlap although their bytes do.
WINDOWS = {
    "A": Window(torch.float16, (8, 4)),
    "B": Window(torch.float16, (8, 4)),
    "F": Window(torch.float32, (4, 4), byte_offset=64),
    "I": Window(torch.int32, (4, 4)),
    "H": Window(torch.int16, (4, 8), byte_offset=32),
    "U": Window(torch.uint8, (256,)),
    "T": Window(torch.float16, (4, 8), (1, 4)),
    "S": Window(torch.float32, (4, 2), (4, 2), byte_offset=64),
    "C": Window(torch.complex64, (4, 2), byte_offset=128),
    "R": Window(torch.float32, (4, 4), byte_offset=128),
    "P": Window(torch.bfloat16, (4, 4), byte_offset=64),
    "X": Window(torch.float32, (2, 4), byte_offset=64),
    "Z": Window(torch.float32, (0, 4), byte_offset=64),
    "E": Window(torch.float16, (8, 4), (0, 1), byte_offset=192),
    "N": Window(torch.int64, (), byte_offset=200),
    "Q": Window(torch.float8_e4m3fn, (8, 4), byte_offset=208),
    "G": Window(torch.uint8, (8, 4), byte_offset=208),
    "L": Window(torch.bool, (4, 4), byte_offset=240),
    "D": Window(torch.float64, (4,), byte_offset=160),
}


@dataclass
class Case:
    """A function of windows, and of plain tensors after them.

    Attributes:
        name: Identifies the case.
        function: Takes the windows, then the extra tensors.
        windows: One letter of `WINDOWS` for each window.
        extra: Makes the plain tensors.
        storages: Which storage each window is in, all in one by default.
        exact: Whether results are compared exactly, as all but float reductions are.
        grad: Whether the case makes sense with gradients enabled.
    """

    name: str
    function: Callable[..., Any]
    windows: str
    extra: Callable[[], Sequence[torch.Tensor]] = lambda: ()
    storages: str = ""
    exact: bool = True
    grad: bool = True

    def make(self, seed: int, carrier: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the buffers, and the arguments as ``carrier`` says."""
        generator = torch.Generator().manual_seed(seed)
        groups = self.storages or "0" * len(self.windows)
        buffers = [
            torch.randint(0, 256, (BYTES,), dtype=torch.uint8, generator=generator)
            for _ in sorted(set(groups))
        ]
        order = sorted(set(groups))
        views = [
            WINDOWS[letter].regenerate(buffers[order.index(group)])
            for letter, group in zip(self.windows, groups, strict=True)
        ]
        if carrier == "wrapped":
            views = aliasstorage.wrap(views)
        elif carrier == "mixed":
            views = [
                aliasstorage.wrap(view) if i % 2 == 0 else view for i, view in enumerate(views)
            ]
        torch.manual_seed(seed)
        return buffers, [*views, *self.extra()]


def check(
    case: Case, compile_: Callable[[Any], Any], carrier: str, bitwise: bool, calls: int = 2
) -> None:
    """Compare a compiled function with the oracle.

    Args:
        case: What to run.
        compile_: Returns the compiled function.
        carrier: ``wrapped``, ``plain`` or ``mixed``.
        bitwise: Whether NaNs must have equal bits; compilers may compute 16-bit floats in
            float32, which changes the bits of a *computed* NaN.
        calls: How many times to call.
    """
    compiled = compile_(case.function)
    for call in range(calls):
        want_buffers, want_args = case.make(call, "plain")
        got_buffers, got_args = case.make(call, carrier)
        seed_before = torch.initial_seed()
        torch.manual_seed(seed_before)
        want = as_tuple(case.function(*want_args))
        torch.manual_seed(seed_before)
        got = as_tuple(compiled(*got_args))
        where = f"{case.name}, {carrier}, call {call}"
        windows = [WINDOWS[letter] for letter in case.windows]
        assert_results(want, got, case.exact, bitwise, where)
        assert_buffers(want_buffers, got_buffers, windows, bitwise, f"{where}: the buffer")
        assert relations(want, want_args, want_buffers) == relations(got, got_args, got_buffers), (
            f"{where}: what aliases what"
        )
        for index, (left, right) in enumerate(zip(want, got, strict=True)):
            if not isinstance(left, torch.Tensor) or left.requires_grad:
                continue
            scribble(left)
            scribble(right)
            what = f"{where}: after mutating result {index}"
            assert_buffers(want_buffers, got_buffers, windows, bitwise, what)
            assert_results(want, got, case.exact, bitwise, what)


def as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def scribble(tensor: torch.Tensor) -> None:
    """Overwrite a result."""
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    if any(extent > 1 and not step for extent, step in dims):
        return  # an expanded view cannot be written
    with torch.no_grad():
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            with torch.inference_mode():
                tensor.fill_(1)
        else:
            tensor.fill_(1)


def plain(value: Any) -> Any:
    return aliasstorage.unwrap(value) if isinstance(value, AliasTensor) else value


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    tensor = plain(tensor).detach().resolve_conj().resolve_neg()
    contiguous = torch.empty(tensor.shape, dtype=tensor.dtype)
    contiguous.copy_(tensor)
    return contiguous.reshape(-1).view(torch.uint8)


def assert_results(want: Any, got: Any, exact: bool, bitwise: bool, where: str) -> None:
    assert len(want) == len(got), where
    for index, (left, right) in enumerate(zip(want, got, strict=True)):
        what = f"{where}: result {index}"
        if not isinstance(left, torch.Tensor):
            assert left == right, what
            assert type(left) is type(right), what
            continue
        assert left.dtype == right.dtype, what
        assert left.shape == right.shape, what
        assert all(type(extent) is int for extent in right.shape), what
        if left.dtype == torch.bool:
            assert torch.equal(plain(left) != 0, plain(right) != 0), what
        elif bitwise and exact:
            assert torch.equal(as_bytes(left), as_bytes(right)), what
        elif left.dtype in (torch.float8_e4m3fn,):
            torch.testing.assert_close(
                plain(right).float(), left.float(), equal_nan=True, rtol=0, atol=0, msg=what
            )
        else:
            tolerance = {} if not exact else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(
                plain(right), left, equal_nan=True, msg=lambda m, w=what: f"{w}: {m}", **tolerance
            )


def assert_buffers(
    want: list[torch.Tensor],
    got: list[torch.Tensor],
    windows: list[Window],
    bitwise: bool,
    where: str,
) -> None:
    for left, right in zip(want, got, strict=True):
        differ = left != right
        for window in windows:
            if window.dtype == torch.bool and window.numel:
                # Copying a bool makes 1 of an odd byte in some of eager's kernels, and not in
                # others; a bool that the program wrote is compared as a bool.
                differ &= ~_both_true(window, left, right)
        if not bitwise:
            for window in windows:
                if window.dtype.is_floating_point and window.numel:
                    differ &= ~_both_nan(window, left, right)
        assert not differ.any(), f"{where}: bytes {differ.nonzero().flatten().tolist()}"


def _both_true(window: Window, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    marked = torch.zeros_like(left)
    as_byte = Window(torch.uint8, window.size, window.stride, window.byte_offset)
    both = (as_byte.regenerate(left) != 0) & (as_byte.regenerate(right) != 0)
    as_byte.regenerate(marked)[both] = 1
    return marked != 0


def _both_nan(window: Window, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return which bytes belong to elements that are NaN in both buffers."""
    nan = window.regenerate(left).float().isnan() & window.regenerate(right).float().isnan()
    marked = torch.zeros_like(left)
    mark = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[window.dtype.itemsize]
    view = Window(mark, window.size, window.stride, window.byte_offset).regenerate(marked)
    if mark == torch.uint8:
        view[nan] = 1
    else:
        view[nan] = -1
    return marked != 0


def relations(results: Sequence[Any], args: Sequence[Any], buffers: Sequence[Any]) -> list[Any]:
    """Return what each result is: an argument, a window of a buffer, or new."""
    described = []
    for result in results:
        if not isinstance(result, torch.Tensor):
            described.append(None)
            continue
        same = [index for index, arg in enumerate(args) if result is arg]
        view = plain(result)
        inside = [
            index
            for index, buffer in enumerate(buffers)
            if buffer.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
        ]
        # The step of a dimension of extent 1 names no byte, and meta kernels choose another one.
        stride = tuple(n for n, extent in zip(view.stride(), view.shape, strict=True) if extent > 1)
        window = (view.dtype, view.shape, stride, view.storage_offset()) if inside else None
        described.append((same, inside, window if view.numel() else None))
    return described


def total(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sum that NaNs and infinities do not swallow."""
    return tensor.float().nan_to_num(1.0, 2.0, 3.0).clamp(-4, 4).sum()


@contextmanager
def buffer_reports() -> Iterator[list[BufferReport]]:
    """Collect the reports on every graph that is handed to an inner backend meanwhile."""
    reports: list[BufferReport] = []
    with listening(lambda found, module: reports.extend(found)):
        yield reports
