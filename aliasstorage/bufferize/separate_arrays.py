"""Call a bufferized graph with separate arrays, copied from the windows and back.

For backends that take nothing but arrays of their own. Copying back after the call is right only
if no two windows share a byte, which is checked when the graph is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from aliasstorage.bufferize.report import BufferReport
from aliasstorage.errors import BackendUnsupportedError
from aliasstorage.subclass.exact_writes import INTEGERS


def check_separable(reports: Sequence[BufferReport]) -> None:
    """Raise `BackendUnsupportedError` unless all windows can be arrays of their own."""
    for report in reports:
        sharing = [roots for roots in report.classes if len(roots) > 1]
        if report.reason is None and not sharing:
            continue
        windows = [str(report.roots[index]) for roots in sharing for index in roots]
        raise BackendUnsupportedError(
            "Windows cannot be handed over as separate arrays.",
            which=" and ".join(windows) or "a byte buffer",
            expected="windows that share no byte, all of them known before the graph runs",
            got=report.reason or "windows over the same bytes",
            do='Choose another form, such as form="bytes" or form="slices".',
        )


def with_copies(compiled: Callable[[list[Any]], Any], count: int) -> Callable[[list[Any]], Any]:
    """Return a function that copies its arguments after the first ``count``, and copies back."""

    def call(arguments: list[Any]) -> Any:
        windows = arguments[count:]
        copies = [window.clone(memory_format=torch.contiguous_format) for window in windows]
        result = compiled(arguments[:count] + copies)
        for window, copy in zip(windows, copies, strict=True):
            # On integers, so that every bit comes back.
            integer = INTEGERS.get(window.dtype.itemsize, window.dtype)
            window.view(integer).copy_(copy.view(integer))
        return result

    return call
