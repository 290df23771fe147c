"""Copies of the graph that Dynamo handed over, which it still uses itself."""

from __future__ import annotations

import torch.fx


def module_like(module: torch.fx.GraphModule, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """Return a module for a changed copy of a graph, with what AOTAutograd asks of the module."""
    copy = torch.fx.GraphModule(module, graph)
    copy.meta = dict(module.meta)
    for name in ("_param_name_to_source", "_source_to_user_stacks"):
        if hasattr(module, name):
            setattr(copy, name, getattr(module, name))
    return copy


def unchanged_copy(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return a copy of a graph that no pass of a compiler reaches."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        node.meta = {}  # example values, which would be kept alive
    return torch.fx.GraphModule(module, graph)
