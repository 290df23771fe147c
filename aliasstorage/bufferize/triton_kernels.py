"""Calls of Triton kernels that mutate windows.

Functionalization turns the call of a kernel into ``triton_kernel_wrapper_functional``, which copies
the tensors that the kernel writes and returns the copies. On typed windows the kernel is called as
it was written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx.node import has_side_effect

from aliasstorage._compat import triton_kernel_name
from aliasstorage.bufferize.custom_ops import clone_of


@dataclass
class TritonCall:
    """A functionalized call of a kernel, and which of its results are windows.

    Attributes:
        node: The functionalized call.
        windows: For each argument that the kernel writes and that is a window, the read that is
            the window's old value.
        others: The same for written arguments that are not windows.
    """

    node: torch.fx.Node
    windows: dict[str, torch.fx.Node]
    others: dict[str, torch.fx.Node]

    @property
    def name(self) -> str:
        """What is called, for reports."""
        return f"Triton kernel {triton_kernel_name(self.node.kwargs['kernel_idx'])}"

    def emit(self, graph: torch.fx.Graph, windows: Mapping[str, torch.fx.Node]) -> None:
        """Call the kernel on its windows. Other arguments already are what they must be."""
        node = self.node
        arguments = dict(node.kwargs["kwargs"])
        arguments.update(windows)
        for key, value in self.others.items():
            arguments[key] = clone_of(graph, value)
        kwargs = {key: value for key, value in node.kwargs.items() if key != "tensors_to_clone"}
        kwargs["kwargs"] = arguments
        kernel = torch.ops.higher_order.triton_kernel_wrapper_mutation
        has_side_effect(kernel)  # compilers drop what nothing uses
        call = graph.call_function(kernel, (), kwargs)
        call.meta = {**node.meta, "val": None}
        for user in list(node.users):
            if user.args[1] in self.others:
                user.replace_all_uses_with(arguments[user.args[1]])


def triton_call(
    node: torch.fx.Node, is_window: Callable[[torch.fx.Node], bool]
) -> TritonCall | None:
    """Return a functionalized call of a kernel that can be made in place, or None."""
    written = written_arguments(node)
    if not written:
        return None
    arguments: dict[str, Any] = node.kwargs["kwargs"]
    tensors = [value for value in arguments.values() if isinstance(value, torch.fx.Node)]
    if any(tensors.count(value) > 1 for value in written.values()):
        return None
    windows = {key: value for key, value in written.items() if is_window(value)}
    others = {key: value for key, value in written.items() if not is_window(value)}
    return TritonCall(node, windows, others)


def written_arguments(node: torch.fx.Node) -> dict[str, torch.fx.Node]:
    """Return what a functionalized call of a kernel would write; nothing of other nodes."""
    if getattr(node.target, "__name__", "") != "triton_kernel_wrapper_functional":
        return {}
    return {key: node.kwargs["kwargs"][key] for key in node.kwargs["tensors_to_clone"]}
