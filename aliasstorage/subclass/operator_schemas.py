"""What `__torch_dispatch__` must know of an operation, read once from its schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aliasstorage._compat import OpOverload, is_composite, run_eagerly
from aliasstorage.errors import MetadataMutationError, UnsupportedOpError

aten = torch.ops.aten


@dataclass(frozen=True)
class Argument:
    """Where an argument stands in a call: by position, or by name after the positions end."""

    index: int
    name: str

    def get(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the argument's value, None when it was left out."""
        return args[self.index] if self.index < len(args) else kwargs.get(self.name)


@dataclass(frozen=True)
class OpInfo:
    """How one operation treats the memory of its arguments.

    Attributes:
        arguments: All arguments.
        viewed: The argument that results alias, for view operations.
        mutated: Arguments that are written.
        outs: The written arguments that are ``out=`` arguments, which torch may resize.
        returned: For each result, the mutated argument that it is, or None for a new value.
        refusal: Makes the reason why windows refuse the operation.
        composite: Whether the operation is made of others, which arrive one by one except in
            inference mode. Its schema may claim a view where it copies (reshape, contiguous).
    """

    arguments: tuple[Argument, ...]
    viewed: Argument | None
    mutated: tuple[Argument, ...]
    outs: tuple[Argument, ...]
    returned: tuple[Argument | None, ...]
    refusal: Callable[[], Exception] | None
    composite: bool


_infos: dict[Any, OpInfo] = {}


def op_info(func: OpOverload) -> OpInfo:
    """Return the `OpInfo` of an operator overload."""
    info = _infos.get(func)
    if info is None:
        info = _infos[func] = _read_schema(func)
    return info


def _read_schema(func: OpOverload) -> OpInfo:
    written: dict[str, Argument] = {}
    read: dict[str, Argument] = {}
    outs: list[Argument] = []
    arguments = [Argument(i, a.name) for i, a in enumerate(func._schema.arguments)]
    for argument, schema in zip(arguments, func._schema.arguments, strict=True):
        alias = schema.alias_info
        if alias is None:
            continue
        # torch's parser drops the names of a list's alias sets; the argument's own will do.
        for name in alias.before_set or {schema.name}:
            (written if alias.is_write else read)[name] = argument
        if schema.is_out:
            outs.append(argument)
    viewed = None
    returned: list[Argument | None] = []
    for result in func._schema.returns:
        alias = result.alias_info
        names = sorted(alias.before_set) if alias is not None else []
        if alias is not None and not alias.is_write and names and names[0] in read:
            viewed = read[names[0]]
        returned.append(written.get(names[0]) if names else None)
    if viewed is None and read:
        # torch's parser drops the alias of a list of views (split, unbind) from the result; the
        # argument still says that it goes into a list.
        viewed = next(iter(read.values()))
    return OpInfo(
        tuple(arguments),
        viewed,
        tuple(written.values()),
        tuple(outs),
        tuple(returned),
        _refusal(func),
        is_composite(func),
    )


def _refusal(func: OpOverload) -> Callable[[], Exception] | None:
    name = func._schema.name
    if func in (aten._conj.default, aten._neg_view.default):
        instead = "conj_physical" if func is aten._conj.default else "neg"
        return lambda: UnsupportedOpError(
            "A lazy conjugate or negative view of a window is not supported.",
            which=name,
            expected="a view that is described by its bytes",
            got="a view that negates on read, which bytes do not carry",
            do=f"Use torch.{instead}(window), or unwrap the window first.",
        )
    inplace_view = torch.Tag.inplace_view in func.tags
    if (inplace_view and func is not aten.detach_.default) or name == "aten::set_":
        return lambda: MetadataMutationError(
            "A window's size, stride, offset and storage cannot be changed in place.",
            which=name,
            expected="an operation that writes elements, or one that returns a new view",
            got="an operation that changes the metadata of its argument",
            do="Use the form that returns a view (t() for t_()), or take a new window.",
        )
    return None


run_eagerly(globals())
