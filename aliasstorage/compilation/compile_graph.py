"""The steps from a Dynamo graph to the function that each call runs, one after the other."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from aliasstorage import _compat
from aliasstorage.compilation.alias_guards import AliasGuard, lighten_window_guards
from aliasstorage.compilation.eager_aliasing import match_eager_aliasing
from aliasstorage.compilation.graph_copies import unchanged_copy
from aliasstorage.compilation.graph_listeners import notify
from aliasstorage.compilation.inner_compilers import inner_compiler
from aliasstorage.compilation.input_storages import MergedStorage, find_storages, static_window
from aliasstorage.compilation.lowering_forms import (
    Form,
    check_dtypes,
    form_of,
)
from aliasstorage.compilation.merge_inputs import make_window, merge
from aliasstorage.compilation.mutated_inputs import written_inputs
from aliasstorage.compilation.runtime_wrapper import bind
from aliasstorage.compilation.slice_regeneration import regenerate_by_slices
from aliasstorage.stage_logs import log_graph
from aliasstorage.subclass.functional_buffers import backward_write_error
from aliasstorage.subclass.higher_order_operators import register_rules
from aliasstorage.subclass.symbolic_offsets import compiles_for_us
from aliasstorage.version import __version__
from aliasstorage.windows.window import Window, regenerate

aten = torch.ops.aten


def compile_graph(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: dict[str, Any],
    mode: str | None,
) -> Callable[..., Any]:
    """Merge the inputs of each storage, and compile the result with the inner backend."""
    inner = options.get("inner", "inductor")
    form = form_of(inner, options.get("form"))
    in_place = options.get("bufferize", True) and form in ("windows", "arrays")
    register_rules()
    original = unchanged_copy(module)
    log_graph("Dynamo's graph", module)
    module = match_eager_aliasing(module)
    storages = find_storages(module.graph, example_inputs)
    roots = _named_windows(storages)
    check_dtypes(inner, (member.dtype for storage in storages for member in storage.members))
    compiler = inner_compiler(inner, form, options, mode, roots)
    guard = _alias_guard(module, example_inputs, storages)
    compiles_for_us()
    lighten_window_guards()
    # The caches on disk ignore aliasing, and hold entries of stock compilations: with the pattern
    # in the key, an entry made for other aliases is never found; nor is one that another release
    # of this library made, or the same one with other options.
    ours = f"aliasstorage {__version__} {form} {in_place} {guard.pattern}"
    tag = f"{torch.compiler.config.cache_key_tag} {ours}"
    with torch.compiler.config.patch(cache_key_tag=tag):
        if not storages:
            return bind(compiler(module, example_inputs), original, guard, None)
        merged = merge(module, example_inputs, storages, _MAKE[form])
        if form in ("bytes", "slices"):
            _refuse_writes_in_backward(module)
            notify([], merged.module)
        log_graph("merged graph, each storage one input", merged.module)
        compiled = compiler(merged.module, merged.example_inputs)
        return bind(compiled, original, guard, merged, longer=in_place)


_MAKE: dict[Form, Callable[..., torch.Tensor]] = {
    "windows": make_window,
    "arrays": make_window,
    "bytes": regenerate,
    "slices": regenerate_by_slices,
}


def _named_windows(storages: Sequence[MergedStorage]) -> dict[Window, str]:
    """Return the windows that the function takes, and a name for each, from its source.

    A window that is taken of two storages has no name.
    """
    names: dict[Window, str] = {}
    for storage in storages:
        mine: dict[Window, str] = {}
        for member in storage.members:
            window = static_window(member)
            if window is not None and window not in mine:
                source = _compat.source_name(member.node._dynamo_source)
                mine[window] = re.sub(r"\W+", "_", source.removeprefix("L")).strip("_")
        names.update({window: "" if window in names else name for window, name in mine.items()})
    return names


def _alias_guard(
    module: torch.fx.GraphModule, example_inputs: Sequence[Any], storages: Sequence[MergedStorage]
) -> AliasGuard:
    tensors, sources = {}, {}
    placeholders = module.graph.find_nodes(op="placeholder")
    for index, (node, value) in enumerate(zip(placeholders, example_inputs, strict=True)):
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            tensors[index], sources[index] = value, node._dynamo_source
    members = [member for storage in storages for member in storage.members]
    numbers = {m.index for m in members if isinstance(m.byte_offset, int)}
    symbolic = {m.index for m in members} - numbers
    lengths = {
        member.index: storage.buffer_value.shape[0]
        for storage in storages
        for member in storage.members
        if isinstance(storage.buffer_value.shape[0], int)
    }
    return AliasGuard(tensors, sources, symbolic, numbers, lengths)


def _refuse_writes_in_backward(module: torch.fx.GraphModule) -> None:
    """Refuse what other forms find out while they trace; here other compilers do.

    See Note [Writes in a backward pass].
    """
    for node in module.graph.find_nodes(op="get_attr"):
        body = getattr(module, str(node.target), None)
        if not isinstance(body, torch.fx.GraphModule):
            continue
        for user in node.users:
            name = str(user.target)
            is_backward = "autograd_function" in name and user.args[1:2] == (node,)
            if (is_backward or "checkpoint" in name) and written_inputs(body.graph):
                raise backward_write_error(name)
