"""What higher-order operators do with windows.

Note [Higher-order operators take plain views]
Problem: a higher-order operator (`flex_attention`, `while_loop`, the call of a Triton kernel) does
not pass through ``__torch_dispatch__``. torch looks for a rule by the type of an argument.
Rule: one rule serves all operators. It replaces windows by typed views and calls the operator
again. torch asks the first argument that is not a plain tensor, which need not be a window. Before
that it asks the fake mode, which accepts no other kind of tensor. The rule is therefore registered
for these types as well, and leaves calls without windows alone.
"""

from __future__ import annotations

from typing import Any

from aliasstorage._compat import (
    FakeTensorMode,
    FunctionalTensor,
    below_autograd,
    has_schema,
    higher_order_operators,
    mutated_by_triton_kernel,
    pytree,
    run_eagerly,
    triton_kernel_name,
)
from aliasstorage.errors import UnsupportedOpError
from aliasstorage.subclass import functional_buffers
from aliasstorage.subclass.alias_tensor import AliasTensor
from aliasstorage.subclass.window_arguments import call_on_copies, overlapping_pair

_registered: set[str] = set()


def register_rules() -> None:
    """Give every higher-order operator that exists by now its rule for windows."""
    operators = higher_order_operators()
    if len(operators) == len(_registered):
        return
    for name, operator in operators.items():
        if name not in _registered:
            _registered.add(name)
            _register(name, operator)


def _register(name: str, operator: Any) -> None:
    table = operator.python_key_table
    rule = _triton_rule(operator) if name == "triton_kernel_wrapper_mutation" else _rule(operator)
    for kind in (AliasTensor, FunctionalTensor):
        if kind not in table:
            operator.py_impl(kind)(rule)
    if FakeTensorMode in table:
        table[FakeTensorMode] = _under_fake_mode(table[FakeTensorMode])


def _windows(values: Any) -> list[AliasTensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if type(leaf) is AliasTensor]


def _typed(values: Any) -> Any:
    return pytree.tree_map_only(AliasTensor, AliasTensor._typed, values)


def _rule(operator: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        windows = _windows((args, kwargs))
        if not windows:
            return NotImplemented
        with below_autograd():
            if functional_buffers.is_traced(windows[0]._buffer):
                written = _written(operator, args, kwargs)
                if written:
                    return _write(operator, args, kwargs, written)
            args, kwargs = _typed((args, kwargs))
            return operator(*args, **kwargs)

    return call


# Note [Branches, loops and regions that write windows]
# Problem: functionalization describes what a subgraph writes as a view of its base, by an offset in
# the whole storage. That offset is another one once the base is a typed view.
# Rule: a nested region that writes windows is traced where it is called. Branches and loops write
# copies, which are written back after them.


def _written(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[AliasTensor]:
    """Return the windows that the subgraphs of an operator write."""
    if not has_schema(operator):
        return []
    typed_args, typed_kwargs = _typed((args, kwargs))
    arguments = operator.gen_schema(*typed_args, **typed_kwargs).arguments
    leaves = pytree.tree_leaves(args)
    return [
        leaf
        for leaf, argument in zip(leaves, arguments, strict=False)
        if type(leaf) is AliasTensor and argument.is_write
    ]


def _write(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[AliasTensor]
) -> Any:
    """Call an operator whose subgraphs write windows."""
    if operator.name() == "invoke_subgraph":
        region, _, *operands = args
        return region(*operands)
    return call_on_copies(operator, args, kwargs, written)


def _under_fake_mode(known: Any) -> Any:
    def call(mode: Any, *args: Any, **kwargs: Any) -> Any:
        if _windows((args, kwargs)):
            with mode:
                args, kwargs = _typed((args, kwargs))
        return known(mode, *args, **kwargs)

    return call


def _triton_rule(operator: Any) -> Any:
    def call(**kwargs: Any) -> Any:
        arguments = kwargs["kwargs"]
        windows = {key: value for key, value in arguments.items() if type(value) is AliasTensor}
        if not windows:
            return NotImplemented
        with below_autograd():
            copied: list[AliasTensor] = []
            buffer = next(iter(windows.values()))._buffer
            if functional_buffers.is_traced(buffer):
                written = mutated_by_triton_kernel(**{**kwargs, "kwargs": _typed(arguments)})
                mutated = [windows[key] for key in written if key in windows]
                _refuse_overlap(kwargs["kernel_idx"], windows, mutated)
                copied = mutated if functional_buffers.stays_a_byte_graph(buffer) else []
            return call_on_copies(operator, (), kwargs, copied)

    return call


def _refuse_overlap(
    kernel: int, windows: dict[str, AliasTensor], mutated: list[AliasTensor]
) -> None:
    """Refuse a kernel that mutates a window and takes another one over the same bytes."""
    overlap = overlapping_pair(list(windows.values()), mutated)
    if overlap is None:
        return
    first, second = overlap
    names = [key for key, window in windows.items() if window is first or window is second]
    raise UnsupportedOpError(
        "A Triton kernel mutates a window and takes another one over the same bytes.",
        which=f"{triton_kernel_name(kernel)}, arguments {' and '.join(names)}",
        expected="arguments that share no byte with a mutated one",
        got=f"{first.window} and {second.window}",
        do="Launch two kernels, or pass a clone of the one that is only read.",
    )


run_eagerly(globals())
