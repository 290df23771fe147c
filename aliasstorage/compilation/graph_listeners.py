"""Who is shown the graphs that inner backends are handed: `explain`, `Recorder`, logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.fx

from aliasstorage.bufferize.report import BufferReport

GraphListener = Callable[[list[BufferReport], torch.fx.GraphModule], None]
_graph_listeners: list[GraphListener] = []


@contextmanager
def listening(listener: GraphListener) -> Iterator[None]:
    """Call ``listener`` with each graph that is handed to an inner backend meanwhile.

    It gets the reports on the graph's byte buffers, and the graph.
    """
    _graph_listeners.append(listener)
    try:
        yield
    finally:
        _graph_listeners.remove(listener)


def notify(reports: list[BufferReport], module: torch.fx.GraphModule) -> None:
    """Show a graph that is handed to an inner backend, and the reports on its buffers."""
    for listener in _graph_listeners:
        listener(reports, module)
