"""Choose what an inner backend is handed, and drive it.

Inductor and the aot_eager family are driven through AOTAutograd here, on windows that are
traced as `AliasTensor`; any other backend is handed a graph of plain torch operations on one
byte buffer per storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from aliasstorage._compat import boxed_nop  # noqa: F401
from aliasstorage.errors import BackendUnsupportedError
from aliasstorage.guards import install_alias_guard
from aliasstorage.merge import MergedGraph, find_storages, make_window, merge
from aliasstorage.window import regenerate

_OWN_OPTIONS = ("inner", "bufferize")


def compile_graph(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: dict[str, Any],
    mode: str | None,
) -> Callable[..., Any]:
    """Merge the inputs of each storage, and compile the result with the inner backend."""
    inner = options.get("inner", "inductor")
    inner_options = {key: value for key, value in options.items() if key not in _OWN_OPTIONS}
    compiler = _inner_compiler(inner, inner_options, mode, options.get("bufferize", True))
    placeholders = module.graph.find_nodes(op="placeholder")
    tensors = [
        (node._dynamo_source, value)
        for node, value in zip(placeholders, example_inputs, strict=True)
        if isinstance(value, torch.Tensor) and value.layout == torch.strided
    ]
    install_alias_guard([source for source, _ in tensors], [value for _, value in tensors])
    storages = find_storages(module.graph)
    if not storages:
        return compiler(module, example_inputs)
    make = make_window if _traces_subclasses(inner) else regenerate
    merged = merge(module, example_inputs, storages, make)
    compiled = compiler(merged.module, merged.example_inputs)
    return _call_merged(merged, compiled)


def _call_merged(merged: MergedGraph, compiled: Callable[..., Any]) -> Callable[..., Any]:
    if all(not isinstance(output, torch.Tensor) for output in merged.outputs):
        pass

    def call(*args: Any) -> tuple[Any, ...]:
        buffers, inputs = merged.inputs(args)
        return merged.results(buffers, compiled(*inputs))

    return torch.compiler.disable(call, reason="the alias rewriting around a compiled graph")


_AOT_EAGER = ("aot_eager", "aot_eager_default_partitioner", "aot_eager_decomp_partition")


def _traces_subclasses(inner: Any) -> bool:
    return inner == "eager" or inner == "inductor" or inner in _AOT_EAGER


def _inner_compiler(
    inner: Any, options: dict[str, Any], mode: str | None, bufferize: bool
) -> Callable[..., Callable[..., Any]]:
    """Return ``(module, example_inputs) -> callable`` for an inner backend."""
    from aliasstorage import _compat

    if inner == "inductor":
        patches = dict(options)
        if mode not in (None, "default"):
            patches = {**torch._inductor.list_mode_options(mode), **patches}

        def compile_with_inductor(module: Any, example_inputs: Any) -> Callable[..., Any]:
            return _compat.compile_fx(module, example_inputs, config_patches=patches)

        return compile_with_inductor
    if options or mode not in (None, "default"):
        raise BackendUnsupportedError(
            "An option is only known to Inductor.",
            which=", ".join(options) or f"mode={mode!r}",
            expected=f"one of {', '.join(_OWN_OPTIONS)}",
            got=f"inner={inner!r}",
            do="Bind other options to the inner backend with functools.partial.",
        )
    if isinstance(inner, str):
        return _compat.lookup_backend(inner)
    return inner
