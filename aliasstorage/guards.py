"""The alias pattern of a graph's inputs, and the checks that a call has it.

Note [The alias pattern is checked in two places]
Dynamo guards the dtype, size and stride of each input, and that windows have the same buffer
object; it does not guard that two plain tensors share a storage, nor where in it they start.
A graph compiled for disjoint inputs would silently run on overlapping ones. The pattern, which
inputs share a storage and at which bytes, is therefore checked at each call, by the function
that calls the compiled graph (`calling`): there it costs a fraction of a microsecond.

A call with another pattern runs the graph eagerly, which is right for every pattern, and from
then on the pattern is also a guard of the frame. A guard written in Python costs several
microseconds a call, so only frames pay for it that have met two patterns. Dynamo then compiles
each new pattern once, and a known one finds its own graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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


class AliasGuard:
    """The alias pattern that a graph is compiled for.

    Args:
        tensors: The real tensor inputs of this compilation, by their position in the graph.
        sources: The Dynamo source of each.
        symbolic_offsets: Positions of inputs whose storage offset is an input of the graph.
        lengths: For inputs of a storage that the graph has as a whole, its length in bytes.

    Attributes:
        tensors: The positions.
        pattern: The pattern.
        groups: Positions of the inputs to check, by storage: plain ones, and of the windows
            of a storage one, since Dynamo guards that they have one buffer. Empty when there
            is one storage with one such input.
    """

    def __init__(
        self,
        tensors: Mapping[int, torch.Tensor],
        sources: Mapping[int, Any],
        symbolic_offsets: Collection[int],
        lengths: Mapping[int, int],
    ) -> None:
        self.tensors = list(tensors)
        self.pattern = alias_pattern(list(tensors.values()))
        self._names = {index: source_name(source) for index, source in sources.items()}
        self._roots: list[tuple[Any, dict[str, Any]]] = []
        self._installed = False
        groups: dict[int, list[int]] = {}
        self._offsets: dict[int, int] = {}
        for (index, tensor), (ordinal, offset) in zip(tensors.items(), self.pattern, strict=True):
            group = groups.setdefault(ordinal, [])
            if isinstance(tensor, AliasTensor):
                # First, so that all others are compared with it.
                if not any(isinstance(tensors[other], AliasTensor) for other in group):
                    group.insert(0, index)
                continue
            group.append(index)
            if offset >= 0 and index not in symbolic_offsets:
                self._offsets[index] = offset
        self.groups = list(groups.values())
        # Of windows, Dynamo guards the size of the buffer.
        plain = [
            group[0] for group in self.groups if not isinstance(tensors[group[0]], AliasTensor)
        ]
        self._lengths = {index: lengths[index] for index in plain if index in lengths}
        if sum(map(len, self.groups)) < 2:
            self.groups = []
        elif (guards := current_guards()) is not None:
            guards.add(Guard(next(iter(sources.values())), self._remember))

    def condition(self, names: Mapping[int, str]) -> str:
        """Return an expression that tells whether tensors have the pattern; "" if all do.

        Args:
            names: For each position, the name of a variable that holds the tensor. The
                expression also uses ``address``.
        """
        if not self.groups:
            return ""
        conditions, keys = [], []
        for number, group in enumerate(self.groups):
            keys.append(f"(key{number} := address({names[group[0]]}))")
            conditions += [f"address({names[other]}) == key{number}" for other in group[1:]]
        distinct = f"len({{{', '.join(keys)}}}) == {len(keys)}" if len(keys) > 1 else keys[0]
        conditions.insert(0, distinct)
        conditions += [f"{names[i]}.storage_offset() == {n}" for i, n in self._offsets.items()]
        return " and ".join(conditions)

    def refuse_other_patterns(self) -> None:
        """Make Dynamo compile the frame anew for inputs of another pattern, from now on."""
        if self._installed:
            return
        self._installed = True
        for root, scope in self._roots:
            self._install(root, scope)

    def _remember(self, builder: Any, guard: Guard) -> None:
        # Dynamo may build the guards of a frame more than once.
        root, scope = builder.guard_manager.root, source_scope(builder)
        self._roots.append((root, scope))
        if self._installed:
            self._install(root, scope)

    def _install(self, root: Any, scope: dict[str, Any]) -> None:
        exec(compile(self.check_source(), "<aliasstorage>", "exec"), scope)  # noqa: S102
        root.add_lambda_guard(scope["check"], [f"alias pattern {self.pattern}"], None)

    def check_source(self) -> str:
        """Return the code of the guard, ``check(L)``, on a frame's locals.

        It runs before the guards on the types of the inputs, so an expression may fail on
        inputs that another compiled graph is for; those are not this graph's.
        """
        used = [index for group in self.groups for index in group]
        names = {index: f"t{index}" for index in used}
        condition = self.condition(names)
        for index, nbytes in self._lengths.items():
            condition += f" and t{index}.untyped_storage().nbytes() == {nbytes}"
        lines = ["def check(L):", "    try:"]
        lines += [f"        t{index} = {self._names[index]}" for index in used]
        lines += [f"        return bool({condition})"]
        lines += ["    except failures:", "        return False"]
        return "\n".join(lines)
