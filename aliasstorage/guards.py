"""Check the alias pattern of the inputs at each call.

Note [The alias pattern is guarded here]
Dynamo guards the dtype, size and stride of each input, and that windows have the same buffer
object; it does not guard that two plain tensors share a storage, nor where in it they start.
A graph compiled for disjoint inputs would silently run on overlapping ones. The pattern, which
inputs share a storage and at which bytes, is therefore one more guard of the frame: a new
pattern makes Dynamo compile again, a known one finds its own graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from aliasstorage._compat import (
    Guard,
    current_guards,
    source_name,
    source_scope,
    storage_address,
)
from aliasstorage.tensor import AliasTensor

# For each tensor input: which storage it is in, counted in order of appearance, and its storage
# offset when it shares that storage (a storage with one view may start anywhere). In elements,
# since the dtype is guarded anyway.
AliasPattern = tuple[tuple[int, int], ...]


def alias_pattern(tensors: Sequence[torch.Tensor]) -> AliasPattern:
    """Return the alias pattern of a sequence of real tensors.

    >>> import torch
    >>> raw = torch.zeros(8, dtype=torch.uint8)
    >>> alias_pattern([raw[:4], torch.zeros(2), raw[4:].view(torch.int16)])
    ((0, 0), (1, -1), (0, 2))
    """
    addresses = [storage_address(tensor) for tensor in tensors]
    ordinals: dict[int, int] = {}
    return tuple(
        (
            ordinals.setdefault(address, len(ordinals)),
            int(tensor.storage_offset()) if addresses.count(address) > 1 else -1,
        )
        for tensor, address in zip(tensors, addresses, strict=True)
    )


def install_alias_guard(sources: Sequence[Any], tensors: Sequence[torch.Tensor]) -> AliasPattern:
    """Make the frame being compiled depend on the alias pattern of its tensor inputs.

    Args:
        sources: The Dynamo source of each input.
        tensors: The real inputs of this compilation.

    Returns:
        The pattern.
    """
    guards = current_guards()
    expected = alias_pattern(tensors)
    if guards is None or len(tensors) < 2:
        return expected
    # A merged graph has the whole storage as an input, so its length is part of the pattern.
    lengths = {
        index: tensor.untyped_storage().nbytes()
        for index, (tensor, (_, offset)) in enumerate(zip(tensors, expected, strict=True))
        if offset >= 0 and not isinstance(tensor, AliasTensor)
    }
    names = [source_name(source) for source in sources]
    code = compile(pattern_check_source(names, expected, lengths), "", "exec")

    def create(builder: Any, guard: Guard) -> None:
        scope = source_scope(builder)
        exec(code, scope)  # noqa: S102  (built from Dynamo's own source expressions)
        description = [f"alias pattern {expected}"]
        builder.guard_manager.root.add_lambda_guard(scope["check"], description, None)

    guards.add(Guard(sources[0], create))
    return expected


def pattern_check_source(
    names: Sequence[str], expected: AliasPattern, lengths: Mapping[int, int]
) -> str:
    """Return the code of a function that tells whether a frame's inputs have a pattern.

    Args:
        names: Each input as an expression.
        expected: The pattern.
        lengths: For some inputs, the length of their storage in bytes.

    The function runs before the guards on the types of the inputs, so an expression may fail
    on inputs that another compiled graph is for; those are not this graph's.

    >>> print(pattern_check_source(["L['a']", "L['b']"], ((0, 0), (0, 2)), {0: 8}))
    def check(L):
        try:
            t0 = L['a']
            t1 = L['b']
            keys = (address(t0), address(t1))
            return (len({*keys}) == 1 and keys[1] == keys[0] and t0.storage_offset() == 0
                and t1.storage_offset() == 2
                and t0.untyped_storage().nbytes() == 8)
        except failures:
            return False
    """
    first_of: dict[int, int] = {}
    conditions = []
    for index, (ordinal, _) in enumerate(expected):
        first = first_of.setdefault(ordinal, index)
        if first != index:
            conditions.append(f"keys[{index}] == keys[{first}]")
    conditions.insert(0, f"len({{*keys}}) == {len(first_of)}")
    for index, (_, offset) in enumerate(expected):
        if offset >= 0:
            conditions.append(f"t{index}.storage_offset() == {offset}")
    checked: set[int] = set()
    for index, nbytes in lengths.items():
        if expected[index][0] not in checked:
            checked.add(expected[index][0])
            conditions.append(f"t{index}.untyped_storage().nbytes() == {nbytes}")
    lines = ["def check(L):", "    try:"]
    lines += [f"        t{index} = {name}" for index, name in enumerate(names)]
    keys = ", ".join(f"address(t{index})" for index in range(len(names)))
    lines.append(f"        keys = ({keys})")
    head, tail = conditions[:3], conditions[3:]
    lines.append("        return (" + " and ".join(head))
    lines += [f"            and {condition}" for condition in tail]
    lines[-1] += ")"
    lines += ["    except failures:", "        return False"]
    return "\n".join(lines)
