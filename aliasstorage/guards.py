"""Check the alias pattern of the inputs at each call.

Note [The alias pattern is guarded here]
Dynamo guards the dtype, size and stride of each input, and that windows have the same buffer
object; it does not guard that two plain tensors share a storage, nor where in it they start.
A graph compiled for disjoint inputs would silently run on overlapping ones. The pattern, which
inputs share a storage and at which bytes, is therefore one more guard of the frame: a new
pattern makes Dynamo compile again, a known one finds its own graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from aliasstorage._compat import Guard, current_guards, source_name, storage_key
from aliasstorage.tensor import AliasTensor

# For each tensor input: which storage it is in, counted in order of appearance, and its byte
# offset when it shares that storage (a storage with one view may start anywhere).
AliasPattern = tuple[tuple[int, int], ...]


def alias_pattern(tensors: Sequence[Any]) -> AliasPattern:
    """Return the alias pattern of a sequence of real tensors.

    >>> import torch
    >>> raw = torch.zeros(8, dtype=torch.uint8)
    >>> alias_pattern([raw[:4], torch.zeros(2), raw[4:].view(torch.int16)])
    ((0, 0), (1, -1), (0, 4))
    """
    keys = [storage_key(t._buffer if type(t) is AliasTensor else t) for t in tensors]
    ordinals: dict[int, int] = {}
    shared = len(set(keys)) != len(keys)
    pattern = []
    for tensor, key in zip(tensors, keys, strict=True):
        ordinal = ordinals.setdefault(key, len(ordinals))
        offset = -1
        if shared and keys.count(key) > 1:
            offset = tensor.storage_offset() * tensor.dtype.itemsize
        pattern.append((ordinal, offset))
    return tuple(pattern)


def install_alias_guard(sources: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
    """Make the frame being compiled depend on the alias pattern of its tensor inputs.

    Args:
        sources: The Dynamo source of each input.
        tensors: The real inputs of this compilation.
    """
    guards = current_guards()
    if guards is None or len(tensors) < 2:
        return
    expected = alias_pattern(tensors)
    code = compile("(" + ", ".join(map(source_name, sources)) + ",)", "<alias pattern>", "eval")

    def create(builder: Any, guard: Guard) -> None:
        scope = {"G": builder.scope["G"], **builder_closure_vars(builder)}
        check = _pattern_check(code, scope, expected)
        builder.guard_manager.root.add_lambda_guard(check, [f"alias pattern {expected}"], None)

    guards.add(Guard(sources[0], create))


def builder_closure_vars(builder: Any) -> dict[str, Any]:
    """Return the names, other than L and G, that Dynamo's source expressions may use."""
    from aliasstorage._compat import _get_closure_vars

    return {**builder.scope.get("__builtins__", {}), **_get_closure_vars()}


def _pattern_check(
    code: Any, scope: dict[str, Any], expected: AliasPattern
) -> Callable[[dict[str, Any]], bool]:
    def check(local_scope: dict[str, Any]) -> bool:
        # This runs before the guards on the types of the inputs, so the expression may fail on
        # inputs that another compiled graph is for; those are not ours.
        try:
            return alias_pattern(eval(code, scope, {"L": local_scope})) == expected  # noqa: S307
        except (AttributeError, KeyError, IndexError, TypeError, NameError, RuntimeError):
            return False

    return check
