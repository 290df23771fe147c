"""`torch.compile(..., backend="aliasstorage")`: sound on mixed-dtype aliases, and fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

CompilerFn = Callable[..., Callable[..., Any]]


def backend(inner: str | CompilerFn = "inductor", **options: Any) -> CompilerFn:
    """Return a Dynamo backend that handles aliased caches and hands the rest to ``inner``.

    Args:
        inner: A backend's name, or a callable ``(graph_module, example_inputs) -> callable``.
        options: ``form`` is what ``inner`` is given: "windows", "bytes", "slices" or "arrays", see
            `lowering_forms`; ``bufferize=False`` keeps the byte graph as it is;
            ``decompositions`` is the table that AOTAutograd takes operations apart with, in the
            forms "windows" and "arrays". All other options are Inductor's, and need
            ``inner="inductor"``.

    Raises:
        BackendUnsupportedError: An option that the inner backend does not take.

    Examples:
        >>> import torch, aliasstorage
        >>> raw = torch.zeros(12, dtype=torch.uint8)
        >>> @torch.compile(backend=aliasstorage.backend(inner="aot_eager"))
        ... def step(a, b):
        ...     a.add_(1)
        ...     return b.fill_(2)
        >>> step(raw[:4].view(torch.int16), raw[4:].view(torch.int32)), raw.tolist()
        (tensor([2, 2], dtype=torch.int32), [1, 0, 1, 0, 2, 0, 0, 0, 2, 0, 0, 0])
    """

    def aliasstorage(
        module: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Callable[..., Any]:
        return aliasstorage_backend(
            module, example_inputs, options={"inner": inner, **options}, **kwargs
        )

    return aliasstorage


def aliasstorage_backend(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph; the entry point behind ``backend="aliasstorage"``.

    Args:
        module: The graph Dynamo captured.
        example_inputs: Its inputs.
        options: ``torch.compile``'s options: ``inner``, ``bufferize``, and Inductor's own.
        mode: ``torch.compile``'s mode, for Inductor.
    """
    # Imported here: the compiler's own modules take a second to import.
    from aliasstorage.compilation.compile_graph import compile_graph

    return compile_graph(module, example_inputs, options or {}, mode)
