"""Results that alias an argument in eager PyTorch but not in a trace, or the other way round.

Note [What eager aliases]
Problem: torch traces some operations by another decomposition than the one that eager PyTorch
runs, and the two do not always alias alike. Outside training, ``dropout`` returns its argument,
and is traced as a clone (pytorch #195422). A later write to the argument shows in one result and
not in the other.
Rule: each operation of the graph is run once more on tensors without data, on the ``meta`` device.
There eager PyTorch's own decomposition runs. All else is as in a trace, so that a difference in
aliasing is one between the two decompositions; the graph is then corrected.
Reason: which operations differ, and under which flags, changes from release to release. A list of
names would be wrong soon.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from aliasstorage._compat import (
    OpOverload,
    concrete_extent,
    disable_current_modes,
    enable_python_dispatcher,
    is_functorch_tensor,
    is_higher_order,
)
from aliasstorage.compilation.graph_copies import module_like
from aliasstorage.compilation.input_storages import value_storage


def match_eager_aliasing(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return a Dynamo graph whose results alias what they alias in eager PyTorch.

    It is the graph itself if they do already, and else a changed copy.
    """
    stand_ins: dict[torch.fx.Node, torch.Tensor] = {}
    aliased: dict[torch.fx.Node, torch.fx.Node] = {}  # in eager only: the argument returned
    copied: set[torch.fx.Node] = set()  # in eager only
    for node in module.graph.nodes:
        candidates = _possible_aliases(node)
        if not candidates:
            continue
        result = _run_on_meta(node, stand_ins)
        if not isinstance(result, torch.Tensor):
            continue
        returned = [arg for arg in candidates if _same_view(result, stand_ins[arg])]
        aliases_any = any(
            _same_storage(result, stand_ins[arg])
            for arg in node.all_input_nodes
            if arg in stand_ins
        )
        traced = any(_storage(node) == _storage(arg) for arg in candidates)
        if returned and not traced:
            aliased[node] = returned[0]
        elif traced and not aliases_any:
            copied.add(node)
    if not aliased and not copied:
        return module
    return _corrected(module, aliased, copied)


def _possible_aliases(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the arguments that a node's result could be, judged by dtype and size."""
    value: Any = node.meta.get("example_value")
    if not _is_plain_result(value) or not _can_run(node):
        return []
    return [
        argument
        for argument in node.all_input_nodes
        if _is_plain_result(argument.meta.get("example_value"))
        and argument.meta["example_value"].dtype == value.dtype
        and _extents(argument.meta["example_value"]) == _extents(value)
    ]


def _is_plain_result(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not is_functorch_tensor(value)
        and value.layout == torch.strided
        and not (value.is_quantized or value.is_nested or value.is_conj() or value.is_neg())
    )


def _extents(value: torch.Tensor) -> list[int | None]:
    return [concrete_extent(extent) for extent in value.shape]


def _can_run(node: torch.fx.Node) -> bool:
    """Return whether a node calls an operation of torch's that writes none of its arguments."""
    target: Any = node.target
    if node.op == "call_method":
        name = str(target)
    elif node.op == "call_function":
        if is_higher_order(target) or (
            isinstance(target, OpOverload) and target.namespace != "aten"
        ):
            return False
        if not str(getattr(target, "__module__", "") or "").startswith("torch"):
            return False
        name = getattr(target, "__name__", "_")
    else:
        return False
    return not name.endswith("_") and "out" not in node.kwargs


def _run_on_meta(node: torch.fx.Node, stand_ins: dict[torch.fx.Node, torch.Tensor]) -> Any:
    """Return an operation's result on stand-ins for its arguments, None if it cannot be run."""

    class Unknown(Exception):
        pass

    def stand_in(argument: torch.fx.Node) -> Any:
        value = argument.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            if argument not in stand_ins:
                extents = [concrete_extent(n) for n in (*value.shape, *value.stride())]
                if any(extent is None for extent in extents) or not _is_plain_result(value):
                    raise Unknown
                stand_ins[argument] = torch.empty_strided(
                    extents[: value.dim()],  # type: ignore[arg-type]
                    extents[value.dim() :],  # type: ignore[arg-type]
                    dtype=value.dtype,
                    device="meta",
                )
            return stand_ins[argument]
        if isinstance(value, (torch.SymInt, int)):
            extent = concrete_extent(value)
            if extent is not None:
                return extent
        raise Unknown

    with disable_current_modes(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            args = torch.fx.map_arg(node.args, stand_in)
            kwargs = torch.fx.map_arg(node.kwargs, stand_in)
            call: Callable[..., Any] = (
                getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target  # type: ignore[assignment]
            )
            return call(*args, **kwargs)
        except Exception:
            return None


def _storage(node: torch.fx.Node) -> int:
    return value_storage(node.meta["example_value"])


def _same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = (a.shape, a.stride(), a.storage_offset()) == (b.shape, b.stride(), b.storage_offset())
    return same and _same_storage(a, b)


def _corrected(
    module: torch.fx.GraphModule,
    aliased: dict[torch.fx.Node, torch.fx.Node],
    copied: set[torch.fx.Node],
) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    new: dict[torch.fx.Node, torch.fx.Node] = {}
    stale: set[int] = set()  # storages of results that are no longer made
    for node in module.graph.nodes:
        if node in aliased:
            stale.add(_storage(node))
            new[node] = new[aliased[node]]
            continue
        new[node] = graph.node_copy(node, lambda old: new[old])
        if hasattr(node, "_dynamo_source"):
            new[node]._dynamo_source = node._dynamo_source
        value = node.meta.get("example_value")
        if node in copied:
            stale.add(_storage(node))
            new[node] = graph.call_function(torch.clone, (new[node],))
            new[node].meta["example_value"] = value
        elif not (isinstance(value, torch.Tensor) and value_storage(value) in stale):
            continue
        if node.op not in ("placeholder", "output"):
            _infer_again(new[node])
    return module_like(module, graph)


def _infer_again(node: torch.fx.Node) -> None:
    """Compute the example value of a node anew, from those of its arguments."""

    def value_of(argument: torch.fx.Node) -> Any:
        return argument.meta["example_value"]

    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value_of)
    call = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
    value: Any = node.meta["example_value"]
    with getattr(value, "_buffer", value).fake_mode, enable_python_dispatcher():
        node.meta["example_value"] = call(*args, **kwargs)  # type: ignore[operator]
