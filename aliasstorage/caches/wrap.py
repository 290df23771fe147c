"""`wrap` and `unwrap` over pytrees and over modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import optree
import torch

from aliasstorage._compat import never_traced, run_eagerly
from aliasstorage.errors import AliasStorageError, RequiresGradError, UnsupportedTensorError
from aliasstorage.subclass.alias_tensor import AliasTensor
from aliasstorage.windows.byte_buffers import byte_buffer
from aliasstorage.windows.window import Window, check_strided

Tree = TypeVar("Tree")
Module = TypeVar("Module", bound=torch.nn.Module)


@never_traced("aliasstorage.wrap inspects storages; wrap before compiling")
def wrap(tree: Tree) -> Tree:
    """Turn every tensor leaf into a window over its storage's byte buffer, without a copy.

    Args:
        tree: A tensor, or any pytree that optree knows. Other leaves are left as they are, and
            so are windows.

    Raises:
        UnsupportedTensorError: A leaf is sparse, quantized, nested or another subclass.
        RequiresGradError: A leaf requires gradients.

    Examples:
        >>> import torch, aliasstorage
        >>> raw = torch.zeros(16, dtype=torch.int8)
        >>> views = {"k": raw[:8].view(torch.float16), "v": raw[8:].view(torch.float32)}
        >>> caches = aliasstorage.wrap(views)
        >>> caches["v"].window, caches["k"].buffer is caches["v"].buffer
        (Window(torch.float32, (2,), byte_offset=8), True)
    """
    return cast(Tree, optree.tree_map_with_path(_wrap_leaf, cast(Any, tree)))


@never_traced("aliasstorage.unwrap leaves the graph; unwrap after the call")
def unwrap(tree: Tree) -> Tree:
    """Turn every window leaf into the plain typed view of the same bytes, without a copy.

    Examples:
        >>> import torch, aliasstorage
        >>> plain = torch.arange(4.0)
        >>> aliasstorage.unwrap(aliasstorage.wrap([plain]))[0].data_ptr() == plain.data_ptr()
        True
    """
    return cast(Tree, optree.tree_map(_unwrap_leaf, cast(Any, tree)))


def wrap_module_(module: Module, names: Iterable[str] | None = None) -> Module:
    """Wrap the buffers and tensor attributes of a module and its submodules, in place.

    Attributes may be tensors or pytrees of tensors, such as the tuple of key and value caches
    that engines bind to an attention layer. Parameters are left as they are.

    Args:
        module: The module to change.
        names: Dotted names of the attributes to wrap; all of them when omitted.

    Raises:
        AliasStorageError: A name is not a buffer or tensor attribute of the module.

    Examples:
        >>> import torch, aliasstorage
        >>> layer = torch.nn.BatchNorm1d(2)
        >>> aliasstorage.wrap_module_(layer, names=["running_mean"]).running_mean.window
        Window(torch.float32, (2,), byte_offset=0)
    """
    return _map_module(module, names, wrap)


def unwrap_module_(module: Module, names: Iterable[str] | None = None) -> Module:
    """Undo `wrap_module_`."""
    return _map_module(module, names, unwrap)


def _wrap_leaf(path: tuple[Any, ...], leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, AliasTensor):
        return leaf
    name = "the tensor" if not path else "leaf " + "".join(f"[{key!r}]" for key in path)
    if leaf.requires_grad:
        raise RequiresGradError(
            "A tensor that requires gradients cannot be wrapped.",
            which=name,
            expected="a tensor with requires_grad=False",
            got=f"{leaf.dtype} of shape {tuple(leaf.shape)} with requires_grad=True",
            do="Wrap caches and states only, or wrap tensor.detach().",
        )
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise UnsupportedTensorError(
            "A tensor of another subclass cannot be wrapped.",
            which=name,
            expected="a plain torch.Tensor",
            got=type(leaf).__name__,
            do="Wrap the plain tensors that it is made of.",
        )
    check_strided(leaf)
    return AliasTensor(byte_buffer(leaf), Window.of(leaf))


def _unwrap_leaf(leaf: Any) -> Any:
    return leaf._typed() if isinstance(leaf, AliasTensor) else leaf


def _map_module(
    module: Module, names: Iterable[str] | None, convert: Callable[[Any], Any]
) -> Module:
    wanted = None if names is None else set(names)
    seen: set[str] = set()
    for prefix, child in module.named_modules():
        attributes = {name: child._buffers[name] for name in child._buffers}
        attributes |= {
            name: value
            for name, value in vars(child).items()
            if name not in _MODULE_INTERNALS and _has_tensor(value)
        }
        for name, value in attributes.items():
            dotted = f"{prefix}.{name}" if prefix else name
            if value is None or (wanted is not None and dotted not in wanted):
                continue
            seen.add(dotted)
            if name in child._buffers:
                child._buffers[name] = convert(value)
            else:
                setattr(child, name, convert(value))
    if wanted is not None and wanted - seen:
        raise AliasStorageError(
            "Some names are not buffers or tensor attributes of the module.",
            which=", ".join(sorted(wanted - seen)),
            expected="dotted names such as layers.0.kv_cache",
            got=f"a {type(module).__name__} that has no tensor there",
            do="Check the names against module.named_buffers() and vars(submodule).",
        )
    return module


# What a module keeps its parameters, buffers, children and hooks in.
_MODULE_INTERNALS = frozenset(vars(torch.nn.Module()))


def _has_tensor(value: Any) -> bool:
    if isinstance(value, torch.nn.Parameter):
        return False
    return any(isinstance(leaf, torch.Tensor) for leaf in optree.tree_leaves(value))


run_eagerly(globals())
