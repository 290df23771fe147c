"""What an operation does to windows.

Over real bytes, operations run on the plain typed views. While torch traces, each regenerates its
windows from their buffers. Views stay windows, written arguments are returned as they came, and
everything else is a new plain tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from aliasstorage._compat import (
    OpOverload,
    disable_current_modes,
    return_and_correct_aliasing,
    run_eagerly,
)
from aliasstorage.errors import GradientWriteError, MetadataMutationError, UnsupportedOpError
from aliasstorage.subclass import functional_buffers
from aliasstorage.subclass.alias_tensor import AliasTensor, set_dispatch
from aliasstorage.subclass.exact_writes import (
    COPIES,
    accumulate_on_copy,
    copy_bytes,
    is_accumulation,
    is_move,
    loses_bits,
    may_end_inside_element,
    on_integers,
)
from aliasstorage.subclass.higher_order_operators import register_rules
from aliasstorage.subclass.operator_schemas import OpInfo, op_info
from aliasstorage.subclass.preserved_copies import (
    clone_bytes,
    is_plain_copy,
    keep_apart,
    may_be_identity,
    typed_apart,
)
from aliasstorage.subclass.window_arguments import call_on_copies, overlapping_pair, tell_autograd
from aliasstorage.windows.window import regenerate


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do an operation of which some arguments are windows."""
    info = op_info(func)
    if info.refusal is not None:
        raise info.refusal()
    if info.composite:
        return func.decompose(*args, **kwargs)
    if info.viewed is not None:
        return _view(func, info, args, kwargs)
    if not info.mutated:
        if is_plain_copy(func, args, kwargs):
            return clone_bytes(args[0])
        result = func(*_map_typed(args), **_map_typed(kwargs))
        if type(result) is not torch.Tensor and may_be_identity(func):
            # See Note [A copy of a window must stay a copy].
            windows = _windows((args, tuple(kwargs.values())))
            if windows and functional_buffers.stays_a_byte_graph(windows[0]._buffer):
                return keep_apart(result, windows)
        return result
    return _mutate(func, info, args, kwargs)


_CONTAINERS = frozenset({tuple, list, dict})


def _map_typed(values: Any) -> Any:
    """Replace the windows in a container of arguments by their plain typed views."""
    if type(values) is dict:
        return dict(zip(values, _map_typed(list(values.values())), strict=True)) if values else {}
    return type(values)(
        [
            value._typed()
            if type(value) is AliasTensor
            else (_map_typed(value) if type(value) in _CONTAINERS else value)
            for value in values
        ]
    )


def _view(func: OpOverload, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    assert info.viewed is not None  # noqa: S101  (the caller asked)
    base = info.viewed.get(args, kwargs)
    if not isinstance(base, AliasTensor):
        return func(*_map_typed(args), **_map_typed(kwargs))
    buffer = base._buffer
    if not functional_buffers.is_traced(buffer):
        result = func(*_map_typed(args), **_map_typed(kwargs))
        if isinstance(result, torch.Tensor):
            return AliasTensor._from_plain(buffer, result)
        return [AliasTensor._from_plain(buffer, item) for item in result]
    # Note [A traced view is a window of the buffer]
    # Rule: the view's size, stride and offset are computed on a tensor without data, outside the
    # trace. The result is regenerated from the buffer when it is used.
    # Reason: a chain of views does not become a chain in the graph, and a write through it is one
    # scatter at exactly its own bytes.
    with disable_current_modes():
        nbytes = buffer.shape[0]
        bytes_ = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        stand_in = regenerate(bytes_, base.dtype, base.shape, base.stride(), base._byte_offset)
        meta_args = [stand_in if item is base else item for item in args]
        meta_kwargs = {k: stand_in if item is base else item for k, item in kwargs.items()}
        shapes = func(*meta_args, **meta_kwargs)

    def window(shape: torch.Tensor) -> AliasTensor:
        offset: Any = shape.storage_offset() * shape.dtype.itemsize
        return AliasTensor._from_traced(buffer, shape.dtype, shape.shape, shape.stride(), offset)

    single = isinstance(shapes, torch.Tensor)
    result = window(shapes) if single else [window(shape) for shape in shapes]
    return return_and_correct_aliasing(func, args, kwargs, result)


def _mutate(func: OpOverload, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = info.mutated[0].get(args, kwargs)
    if type(target) is AliasTensor and type(target._buffer) is torch.Tensor and not info.outs:
        # Over real bytes the operation does on the plain views what it does anywhere.
        if torch.is_grad_enabled():
            _check_no_gradient(func, info, args, kwargs)
        result = func(*_map_typed(args), **_map_typed(kwargs))
        return _returned(info, args, kwargs, result)
    if func is torch.ops.aten.copy_.default and functional_buffers.is_written_back(args):
        return args[0]
    for written in _windows([argument.get(args, kwargs) for argument in info.mutated]):
        if functional_buffers.is_done_in_backward(written._buffer):
            raise functional_buffers.backward_write_error(func._schema.name)
        tell_autograd(written)
    if torch.is_grad_enabled():
        _check_no_gradient(func, info, args, kwargs)
    if len(info.mutated) + len(args) + len(kwargs) > 1:
        overlap = _overlapping_arguments(func, info, args, kwargs)
        if overlap is not None:
            if func._schema.name.startswith("aten::_foreach_"):
                return _foreach_one_by_one(func, args, kwargs)
            raise _overlap_error(func, *overlap)
    if func is torch.ops.aten._foreach_copy_.default and any(
        functional_buffers.is_traced(copied._buffer) for copied in _windows(args[:1])
    ):
        # Each is written in place; and see Note [Storages that end inside an element].
        for copied, value in zip(*args[:2], strict=True):
            copied.copy_(value)
        return None
    outs = [(argument, argument.get(args, kwargs)) for argument in info.outs]
    outs = [(argument, out) for argument, out in outs if type(out) is AliasTensor]
    if func.namespace != "aten":
        windows = _windows([argument.get(args, kwargs) for argument in info.mutated])
        if windows and functional_buffers.stays_a_byte_graph(windows[0]._buffer):
            return _returned(info, args, kwargs, call_on_copies(func, args, kwargs, windows))
    typed_args, typed_kwargs = _map_typed(args), _map_typed(kwargs)
    if func in COPIES and type(target) is AliasTensor and may_end_inside_element(target):
        # See Note [Storages that end inside an element].
        copy_bytes(target, typed_args[1])
        return target
    if (
        type(target) is AliasTensor
        and loses_bits(target.dtype)
        and functional_buffers.stays_a_byte_graph(target._buffer)
    ):
        # See Note [Moves are done on integers].
        if is_move(func, typed_args, typed_kwargs):
            typed_args, typed_kwargs = on_integers(func, typed_args, typed_kwargs)
        elif is_accumulation(func, typed_args, typed_kwargs):
            values = accumulate_on_copy(func, typed_args, typed_kwargs)
            return target.copy_(values.view(target.dtype))
    if type(target) is not AliasTensor and may_be_identity(func):
        windows = _windows((args, tuple(kwargs.values())))
        if windows and functional_buffers.stays_a_byte_graph(windows[0]._buffer):
            # See Note [A copy of a window must stay a copy].
            targets = _windows([argument.get(args, kwargs) for argument in info.mutated])
            typed_args, typed_kwargs = typed_apart(args, targets), typed_apart(kwargs, targets)
    eager_outs = [entry for entry in outs if not functional_buffers.is_traced(entry[1]._buffer)]
    for argument, out in eager_outs:
        # torch would resize an out= tensor of another shape; let it resize a scratch tensor.
        typed_kwargs[argument.name] = torch.empty(0, dtype=out.dtype, device=out.device)
    result = func(*typed_args, **typed_kwargs)
    for argument, out in eager_outs:
        _check_same_shape(func, argument.name, out, typed_kwargs[argument.name])
    for argument, out in eager_outs:
        out._typed().copy_(typed_kwargs[argument.name])
    return _returned(info, args, kwargs, result)


def _returned(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Return the results of an operation, the written arguments among them as they came."""
    if not info.returned:
        return result
    if len(info.returned) == 1:
        source = info.returned[0]
        return result if source is None else source.get(args, kwargs)
    return tuple(
        value if source is None else source.get(args, kwargs)
        for source, value in zip(info.returned, result, strict=True)
    )


def _overlapping_arguments(
    func: OpOverload, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[AliasTensor, AliasTensor] | None:
    """Return a mutated window and another window argument that share bytes, while tracing.

    See Note [One call, overlapping windows].
    """
    foreach = func._schema.name.startswith("aten::_foreach_")
    if func.namespace == "aten" and not foreach:
        return None
    everything = _windows((args, tuple(kwargs.values())))
    if len(everything) < 2 or not functional_buffers.is_traced(everything[0]._buffer):
        return None
    mutated = _windows([argument.get(args, kwargs) for argument in info.mutated])
    return overlapping_pair(everything, mutated)


def _windows(value: Any) -> list[AliasTensor]:
    return [tensor for tensor in _tensors(value) if type(tensor) is AliasTensor]


def _foreach_one_by_one(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    length = len(args[0])

    def item(value: Any, index: int) -> Any:
        is_list = isinstance(value, (list, tuple)) and len(value) == length
        return [value[index]] if is_list else value

    for index in range(length):
        func(
            *(item(value, index) for value in args),
            **{name: item(value, index) for name, value in kwargs.items()},
        )


def _overlap_error(func: OpOverload, first: AliasTensor, second: AliasTensor) -> UnsupportedOpError:
    return UnsupportedOpError(
        "An operation mutates a window and takes another window over the same bytes.",
        which=func._schema.name,
        expected="arguments that share no byte with a mutated one",
        got=f"{first.window} and {second.window}",
        do="Make two calls, or pass a clone of the one that is only read.",
    )


def _check_same_shape(func: OpOverload, name: str, out: AliasTensor, scratch: torch.Tensor) -> None:
    if out.shape != scratch.shape:
        raise MetadataMutationError(
            "An out= window has another shape than the result, and cannot be resized.",
            which=f"{name}= of {func._schema.name}",
            expected=f"a window of shape {tuple(scratch.shape)}",
            got=f"shape {tuple(out.shape)}",
            do="Pass a window of the result's shape.",
        )


def _check_no_gradient(
    func: OpOverload, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse to write a value that requires gradients into a window."""
    values = [
        value
        for value in _tensors((*args, *kwargs.values()))
        if type(value) is not AliasTensor and value.requires_grad
    ]
    if not values:
        return
    targets = [argument.get(args, kwargs) for argument in info.mutated]
    if not any(type(target) is AliasTensor for target in _tensors(targets)):
        return
    raise GradientWriteError(
        "A value that requires gradients cannot be written into a window.",
        which=func._schema.name,
        expected="a value that does not require gradients, or torch.no_grad()",
        got=f"a tensor of shape {tuple(values[0].shape)} with requires_grad=True",
        do="Write value.detach(), or write under torch.no_grad().",
    )


def _tensors(values: Any) -> list[torch.Tensor]:
    """Return the tensors in a sequence, those in its lists and tuples included."""
    found: list[torch.Tensor] = []
    for item in values:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            found += _tensors(item)
    return found


run_eagerly(globals())
set_dispatch(dispatch, register_rules)
