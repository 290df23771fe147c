"""What a compiled graph does at each call: check the alias pattern, find the buffers, call.

The function for a graph is generated, since its time is paid at each step of an engine: one
test that the inputs alias as they did when the graph was compiled, and one lookup for each
storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from aliasstorage._compat import innermost_fn, storage_address
from aliasstorage.compilation.alias_guards import AliasGuard, parameter_check
from aliasstorage.compilation.merge_inputs import AliasedOutput, FromGraph, FromInput, MergedGraph
from aliasstorage.stage_logs import log
from aliasstorage.windows.byte_buffers import live_buffers, pinned_byte_buffer
from aliasstorage.windows.window import Window

Compiled = Callable[..., Sequence[Any]]


def bind(
    compiled: Compiled,
    module: torch.fx.GraphModule,
    guard: AliasGuard,
    merged: MergedGraph | None,
    longer: bool = False,
) -> Compiled:
    """Return a function of a Dynamo graph's inputs that calls the compiled graph.

    Args:
        compiled: What the inner backend made of the merged graph, or of the graph itself.
        module: The graph that Dynamo handed over, unchanged, for calls whose inputs alias in
            another way.
        guard: The alias pattern that was compiled for.
        merged: The merged graph, None when nothing was merged.
        longer: Whether the compiled graph takes a buffer that is longer than it was told.
    """
    if merged is None and not guard.groups and not guard.parameters:
        return compiled
    # Dynamo never compiles the frames of the function returned here, and so none of what it
    # calls: the compiled graph's own wrapper to the same end is left out.
    call = innermost_fn(compiled)
    finish = None if merged is None else _finish(merged)

    def otherwise(*args: Any) -> Sequence[Any]:
        # See Note [The alias pattern is checked in two places].
        log.info("inputs alias in a new way; this call runs eagerly, the next one compiles")
        guard.refuse_other_patterns()
        return module(*args)

    def find(tensor: torch.Tensor, nbytes: int | None) -> torch.Tensor | None:
        buffer = pinned_byte_buffer(tensor)
        return buffer if nbytes is None or buffer.numel() == nbytes else None

    scope = {
        "address": storage_address,
        "buffers": live_buffers,
        "find": find,
        "compiled": call,
        "finish": finish,
        "otherwise": otherwise,
        "unshared": parameter_check(),
        "shorten": shorten,
        "extents": [] if merged is None else merged.extents,
    }
    count = len(module.graph.find_nodes(op="placeholder"))
    source = call_source(count, guard, merged, longer)
    exec(compile(source, "<aliasstorage>", "exec"), scope)  # noqa: S102
    return scope["call"]  # type: ignore[return-value]


def shorten(buffer: torch.Tensor, *members: torch.Tensor) -> torch.Tensor:
    """Return the part of a buffer up to the last byte of the given tensors."""
    return buffer[: max(Window.of(member).span[1] for member in members)]


def call_source(
    count: int, guard: AliasGuard, merged: MergedGraph | None, longer: bool = False
) -> str:
    """Return the code of the function for a graph of ``count`` inputs.

    It uses ``buffers``, ``find`` and ``shorten`` for the buffer of a storage;
    ``extents``; ``compiled``; ``finish`` for outputs that alias a buffer, and ``otherwise`` for
    inputs of another alias pattern, which it finds with ``address`` and ``unshared``.
    """
    names = [f"t{index}" for index in range(count)]
    everything = ", ".join(names)
    lines = [f"def call({everything}):"]
    condition = guard.condition({index: names[index] for index in guard.tensors})
    if condition:
        lines += [f"    if not ({condition}):", f"        return otherwise({everything})"]
    keys = {group[0]: f"key{number}" for number, group in enumerate(guard.groups)}
    buffers: list[str] = []
    for number, storage in enumerate([] if merged is None else merged.storages):
        member = next((m for m in storage.members if m.wrapped), storage.members[0])
        tensor, buffer = names[member.index], f"buffer{number}"
        buffers.append(buffer)
        if member.wrapped:
            lines.append(f"    {buffer} = {tensor}._buffer")
            continue
        # A storage that was resized has a stale buffer, whose length differs.
        nbytes = storage.buffer_value.shape[0]
        length = nbytes if isinstance(nbytes, int) else None
        real = f"{tensor}.untyped_storage().nbytes()" if length is None else length
        lines += [
            f"    found = buffers.get({keys.get(member.index, f'address({tensor})')})",
            f"    {buffer} = None if found is None else found()",
            f"    if {buffer} is None or {buffer}.numel() != {real}:",
            f"        {buffer} = find({tensor}, {length})",
            f"        if {buffer} is None:",
            f"            return otherwise({everything})",
        ]
        if length is None and not longer:
            members = ", ".join(names[m.index] for m in storage.members)
            lines.append(f"    {buffer} = shorten({buffer}, {members})")
    if guard.parameters:
        parameters = ", ".join(names[index] for index in guard.parameters)
        others = "".join(f"{key}, " for key in keys.values())
        found = "".join(f"{buffer}, " for buffer in buffers)
        lines += [
            f"    if not unshared([{parameters}], ({others}), ({found})):",
            f"        return otherwise({everything})",
        ]
    if merged is None:
        lines.append(f"    return compiled({everything})")
        return "\n".join(lines)
    passed = [names[index] for index in merged.passed]
    if merged.extents:
        passed.append(f"*[extent(({everything},)) for extent in extents]")
    result = f"compiled({', '.join(buffers + passed)})"
    if not _unchanged(merged):
        result = f"finish(({everything},), ({', '.join(buffers)},), {result})"
    lines.append(f"    return {result}")
    return "\n".join(lines)


def _unchanged(merged: MergedGraph) -> bool:
    return all(output == FromGraph(position) for position, output in enumerate(merged.outputs))


def _finish(merged: MergedGraph) -> Callable[..., tuple[Any, ...]]:
    outputs = merged.outputs

    def finish(
        args: Sequence[Any], buffers: Sequence[torch.Tensor], values: Sequence[Any]
    ) -> tuple[Any, ...]:
        def one(output: AliasedOutput | FromGraph | FromInput) -> Any:
            if isinstance(output, FromGraph):
                return values[output.position]
            if isinstance(output, FromInput):
                return args[output.index]
            return output.rebuild(buffers[output.storage], values)

        return tuple([one(output) for output in outputs])

    return finish
