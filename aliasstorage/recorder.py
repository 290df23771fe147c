"""A backend that shows the graphs that another backend is handed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from aliasstorage.bufferize.report import BufferReport
from aliasstorage.compilation.backend import CompilerFn, aliasstorage_backend


@dataclass(frozen=True)
class RecordedGraph:
    """One graph, as it was handed to the inner backend.

    Attributes:
        inputs: Name, dtype and shape of each input, in order.
        code: The graph as Python: each operation with the dtype and the shape of its result,
            under the source line that it came from.
    """

    inputs: tuple[tuple[str, torch.dtype | None, tuple[Any, ...]], ...]
    code: str

    def __str__(self) -> str:
        return self.code


class Recorder:
    """A backend for `torch.compile` that compiles with another one and keeps its graphs.

    Args:
        inner: As for `aliasstorage.backend`.
        options: As for `aliasstorage.backend`.

    Attributes:
        graphs: The graphs that were handed over, in order.

    Examples:
        >>> import torch, aliasstorage
        >>> recorder = aliasstorage.Recorder("aot_eager")
        >>> @torch.compile(backend=recorder)
        ... def step(keys, state):
        ...     keys[1] = 1
        ...     return state + 1
        >>> raw = torch.zeros(64, dtype=torch.uint8)
        >>> _ = step(raw[:32].view(4, 8).view(torch.float16), raw[32:].view(torch.float32))
        >>> [name for name, dtype, shape in recorder.graphs[0].inputs]
        ['window_keys', 'window_state']
        >>> "fill_" in str(recorder), "clone" in str(recorder)
        (True, False)
    """

    def __init__(self, inner: str | CompilerFn = "inductor", **options: Any) -> None:
        self._options = {"inner": inner, **options}
        self.graphs: list[RecordedGraph] = []

    def __call__(
        self, module: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Callable[..., Any]:
        """Compile a Dynamo graph, and keep what the inner backend is handed."""
        from aliasstorage.compilation.graph_listeners import listening

        with listening(self._listen):
            return aliasstorage_backend(module, example_inputs, options=self._options, **kwargs)

    def _listen(self, reports: list[BufferReport], module: torch.fx.GraphModule) -> None:
        inputs = []
        for node in module.graph.find_nodes(op="placeholder"):
            value = node.meta.get("val", node.meta.get("example_value"))
            is_tensor = isinstance(value, torch.Tensor)
            dtype, shape = (value.dtype, tuple(value.shape)) if is_tensor else (None, ())
            inputs.append((node.name, dtype, shape))
        code = re.sub(r"; +[\w = ]+ = None\b.*", "", module.print_readable(print_output=False))
        self.graphs.append(RecordedGraph(tuple(inputs), code))

    def __str__(self) -> str:
        titles = (f"# graph {number}\n{graph}" for number, graph in enumerate(self.graphs))
        return "\n".join(titles)
