"""The graph after each stage, in the log: ``TORCH_LOGS="+aliasstorage"``.

torch takes the name of any package in that variable, and gives its logger a handler and the level
of the sign: ``+`` for all graphs, none for one line about each thing that a user may want to know.
"""

from __future__ import annotations

import logging

import torch.fx

log = logging.getLogger("aliasstorage")


def log_graph(stage: str, module: torch.fx.GraphModule) -> None:
    """Log a graph as Python, with the dtype and the shape of each value, at level DEBUG."""
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s:\n%s", stage, module.print_readable(print_output=False))
