"""The alias pattern of a graph's inputs, and the checks that a call has it.

Note [The alias pattern is checked in two places]
Problem: Dynamo guards the dtype, size and stride of each input, and that windows have the same
buffer object. It does not guard that two plain tensors share a storage, nor where in it they
start. A graph that was compiled for disjoint inputs would silently run on overlapping ones.
Rule: the pattern says which inputs share a storage, and at which bytes. The function that calls
the compiled graph (`runtime_wrapper`) checks it at each call, which takes a fraction of a
microsecond. A call with another pattern runs the graph eagerly, which is right for every pattern.
From then on the pattern is a guard of the frame as well: Dynamo compiles each new pattern once,
and a known pattern finds its own graph.
Reason: a guard in Python takes several microseconds at each call. Only frames that have met two
patterns pay for it.

Note [Parameters stay where they are]
Problem: a model's parameters are inputs of its graph, hundreds of them. Like any tensor, they
could be pointed at a cache's bytes.
Rule: their data pointers are compared with those of the last call, all at once. Only if one
changed are they looked at one by one. On devices whose tensors have no data pointers, the storages
are compared at each call.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from aliasstorage._compat import (
    Guard,
    current_guards,
    data_pointers_equal,
    inputs_by_source,
    replace_subclass_guards,
    source_name,
    source_scope,
    storage_address,
)
from aliasstorage.subclass.alias_tensor import AliasTensor

# For each tensor input: which storage it is in, counted in order of appearance, and its storage
# offset when it shares that storage. In elements, since the dtype is guarded anyway.
AliasPattern = tuple[tuple[int, int], ...]


def alias_pattern(tensors: Sequence[torch.Tensor]) -> AliasPattern:
    """Return the alias pattern of a sequence of real tensors.

    Examples:
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
        symbolic_offsets: Positions of windows whose storage offset is an input of the graph.
        numbers: Positions of windows whose storage offset is a number in the graph. A window that
            is alone in its storage can be one of them.
        lengths: For inputs of a storage that the graph has as a whole, its length in bytes.

    Attributes:
        tensors: The positions.
        pattern: The pattern.
        groups: Positions of the inputs to check, by storage: plain ones, and of the windows
            of a storage one, since Dynamo guards that they have one buffer. Empty when there
            is one storage with one such input, which may start anywhere.
        parameters: Positions of the parameters that are alone in their storage and no window
            of it, which are not in ``groups``.
    """

    def __init__(
        self,
        tensors: Mapping[int, torch.Tensor],
        sources: Mapping[int, Any],
        symbolic_offsets: Collection[int],
        numbers: Collection[int],
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
            if index in numbers or (offset >= 0 and index not in symbolic_offsets):
                self._offsets[index] = int(tensor.storage_offset())
        merged = {*symbolic_offsets, *numbers}
        self.parameters = [
            group[0]
            for group in groups.values()
            if len(group) == 1
            and isinstance(tensors[group[0]], torch.nn.Parameter)
            and group[0] not in merged
        ]
        self.groups = [g for g in groups.values() if g[0] not in self.parameters]
        # Of windows, Dynamo guards the size of the buffer.
        plain = [
            group[0] for group in self.groups if not isinstance(tensors[group[0]], AliasTensor)
        ]
        self._lengths = {index: lengths[index] for index in plain if index in lengths}
        if sum(map(len, self.groups)) + len(self.parameters) < 2 and not self._offsets:
            self.groups, self.parameters = [], []
        elif (guards := current_guards()) is not None:
            guards.add(Guard(next(iter(sources.values())), self._remember))

    def condition(self, names: Mapping[int, str], alone: Sequence[int] = ()) -> str:
        """Return an expression that tells whether tensors have the pattern; "" if all do.

        It assigns ``key0``, ``key1``, … the addresses of the storages.

        Args:
            alone: Positions of more inputs, each in a storage of its own.
            names: For each position, the name of a variable that holds the tensor. The
                expression also uses ``address``.
        """
        groups = [*self.groups, *([index] for index in alone)]
        if not groups:
            return ""
        conditions, keys = [], []
        for number, group in enumerate(groups):
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
        used = [*(index for group in self.groups for index in group), *self.parameters]
        names = {index: f"t{index}" for index in used}
        condition = self.condition(names, self.parameters)
        for index, nbytes in self._lengths.items():
            condition += f" and t{index}.untyped_storage().nbytes() == {nbytes}"
        lines = ["def check(L):", "    try:"]
        lines += [f"        t{index} = {self._names[index]}" for index in used]
        lines += [f"        return bool({condition})"]
        lines += ["    except failures:", "        return False"]
        return "\n".join(lines)


def lighten_window_guards() -> None:
    """Guard windows by one short Python call each, instead of several, in the frame being compiled.

    Note [What is guarded of a window]
    Problem: for a tensor subclass, Dynamo guards in Python that ``__tensor_flatten__`` returns the
    same names and the same context: here ``["_buffer"]`` and (dtype, byte offset).
    Rule: only the offset is guarded, unless it is symbolic.
    Reason: the names are the same for every `AliasTensor`, whose type is guarded. The dtype is
    guarded like that of any tensor.
    """
    replacements: dict[Any, Guard | None] = {}
    for source, fake in inputs_by_source().items():
        if isinstance(fake, AliasTensor):
            offset: int | torch.SymInt = fake.storage_offset()
            replacements[source] = (
                Guard(source, partial(_guard_offset, offset)) if isinstance(offset, int) else None
            )
    replace_subclass_guards(replacements)


def _guard_offset(offset: int, builder: Any, guard: Guard) -> None:
    manager = builder.get_guard_manager(guard)
    manager.add_lambda_guard(
        lambda window: window.storage_offset() == offset,
        [f"{source_name(guard.originating_source)}.storage_offset() == {offset}"],
        guard.user_stack,
    )


def parameter_check() -> Callable[..., bool]:
    """Return a function that tells whether parameters share memory with nothing else.

    See Note [Parameters stay where they are]. It takes the parameters, the addresses of the
    other inputs' storages, and the byte buffers.
    """
    # Replaced as a whole, since several threads may call one compiled function.
    known: tuple[list[int], list[int], list[int], set[int]] = ([], [], [], set())

    def check(
        parameters: list[torch.Tensor], keys: Collection[int], buffers: Sequence[torch.Tensor]
    ) -> bool:
        nonlocal known
        pointers, positions, in_order, addresses = known
        if not pointers or not data_pointers_equal(parameters, pointers, positions):
            pointers = [parameter.data_ptr() for parameter in parameters]
            positions, in_order = list(range(len(parameters))), sorted(pointers)
            addresses = set(map(storage_address, parameters))
            if all(pointers):
                known = (pointers, positions, in_order, addresses)
        if len(addresses) != len(pointers) or not addresses.isdisjoint(keys):
            return False
        for buffer in buffers:
            start = buffer.data_ptr()
            if not start:
                continue  # memory is opaque, and storages were compared
            next_one = bisect_left(in_order, start)
            if next_one < len(in_order) and in_order[next_one] < start + buffer.numel():
                return False
        return True

    return check
