"""The only file that imports private torch names.

Beside each name stands what it is for. `_requirements` lists all of them, and looks them up when
this file is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any, NamedTuple, TypeVar

import torch

from aliasstorage._requirements import check_torch

check_torch()  # before the imports below, of which each would fail by itself

# The containers that higher-order operators are given, those of fx among them.
import torch.utils._pytree as pytree

# What makes operations on symbolic sizes run outside a trace, as Dynamo does.
from torch._dispatch.python import enable_python_dispatcher

# What the compilation in progress knows: its fake mode, its guards.
from torch._guards import Guard, TracingContext

# The type of an operator overload, which __torch_dispatch__ and fx nodes hold.
from torch._ops import OpOverload

# The type of a tensor while Dynamo and AOTAutograd trace: a buffer of one of these types is
# traced, a buffer of type torch.Tensor holds real bytes.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor

# Arithmetic on tensors without data in the middle of a trace.
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

# Points a view's outer storage at its base's, which functionalization compares to learn that
# an output aliases an input.
from torch.utils._python_dispatch import return_and_correct_aliasing

# Names that only a compilation needs. They are imported on first use, because the compiler
# takes a second to import and eager users do not need it.
_ON_FIRST_USE = {
    # Names of inputs, for guards and for AOTAutograd's bookkeeping.
    "AttrSource": "torch._dynamo.source",
    "TensorProperty": "torch._dynamo.source",
    "TensorPropertySource": "torch._dynamo.source",
    # What torch.compiler.disable wrapped.
    "innermost_fn": "torch._dynamo.eval_frame",
    # Backends by name, AOTAutograd's entry point, and aot_eager's compiler.
    "aot_autograd": "torch._dynamo.backends.common",
    "boxed_nop": "torch._dynamo.backends.debugging",
    "lookup_backend": "torch._dynamo.backends.registry",
    "min_cut_rematerialization_partition": "torch._functorch.partitioners",
    # Inductor's entry points, modes and decompositions.
    "compile_fx": "torch._inductor.compile_fx",
    "compile_fx_inner": "torch._inductor.compile_fx",
    "list_mode_options": "torch._inductor",
    "select_decomp_table": "torch._inductor.decomposition",
}

# Modules of Inductor, for the operations that bufferized graphs add to it, and for its options.
_MODULES = {
    "inductor_config": "torch._inductor.config",
    "inductor_ir": "torch._inductor.ir",
    "inductor_lowering": "torch._inductor.lowering",
    "inductor_virtualized": "torch._inductor.virtualized",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    module = _ON_FIRST_USE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value


__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "Guard",
    "OpOverload",
    "TracingContext",
    "disable_current_modes",
    "enable_python_dispatcher",
    "pytree",
    "return_and_correct_aliasing",
    *_ON_FIRST_USE,
    *_MODULES,
]

# Autograd has seen to an operator before its rules for tensor types are asked.
below_autograd = torch._C._AutoDispatchBelowADInplaceOrView

disabled_torch_function = torch._C._disabled_torch_function_impl


def is_composite(func: torch._ops.OpOverload) -> bool:
    """Return whether an operator is implemented by calls of others, in every dispatch key."""
    return func._can_decompose()


def is_higher_order(target: Any) -> bool:
    """Return whether a node's target is a higher-order operator."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def is_functorch_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one of a transform such as vmap, which has no storage."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def concrete_extent(extent: Any) -> int | None:
    """Return an extent's value, or that of the call being compiled; None if only data tells."""
    return extent if isinstance(extent, int) else extent.node.hint


Function = TypeVar("Function", bound=Callable[..., Any])


def higher_order_operators() -> Mapping[str, Any]:
    """Return the higher-order operators that exist by now, by name."""
    return torch._ops._higher_order_ops


def has_schema(operator: Any) -> bool:
    """Return whether a higher-order operator tells what its subgraphs write."""
    return import_module("torch._higher_order_ops.utils")._has_gen_schema(operator)


def mutated_by_triton_kernel(
    kernel_idx: int,
    constant_args_idx: int,
    kwargs: dict[str, Any],
    tma_descriptor_metadata: Any,
    **_: Any,
) -> list[str]:
    """Return which arguments a Triton kernel writes, from the arguments of its operator."""
    module = import_module("torch._higher_order_ops.triton_kernel_wrap")
    return module.get_mutated_tensors(
        kernel_idx, constant_args_idx, kwargs, tma_descriptor_metadata
    )


def triton_kernel_name(kernel_idx: int) -> str:
    """Return the name of the function that a Triton kernel was made of."""
    module = import_module("torch._higher_order_ops.triton_kernel_wrap")
    kernel = module.kernel_side_table.get_kernel(kernel_idx)
    while not hasattr(kernel, "__name__") and hasattr(kernel, "fn"):
        kernel = kernel.fn  # autotuners and heuristics
    return getattr(kernel, "__name__", "a Triton kernel")


def never_traced(reason: str) -> Callable[[Function], Function]:
    """Do what ``torch.compiler.disable`` does, without importing the compiler."""

    def mark(function: Function) -> Function:
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return function

    return mark


def run_eagerly(namespace: dict[str, Any]) -> None:
    """Keep Dynamo from compiling the functions of a module as frames of their own.

    After a graph break, the frames that run between two compiled graphs are offered to Dynamo,
    those of ``__torch_dispatch__`` included. This marks code, at no cost per call, and does not
    keep Dynamo from inlining a function into a graph.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    for value in list(namespace.values()):
        if getattr(value, "__module__", None) != namespace["__name__"]:
            continue
        members = vars(value).values() if isinstance(value, type) else (value,)
        for member in members:
            function = getattr(member, "__func__", None) or getattr(member, "fget", member)
            function = getattr(function, "func", function)
            if isinstance(function, FunctionType):
                frames.set_code_exec_strategy(function.__code__, skip)


def current_functional_mode() -> Any:
    """Return the active functionalization mode, or None outside AOTAutograd's tracing."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)


def is_proxy_tracing() -> bool:
    """Return whether operations are being recorded into an fx graph by make_fx."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def is_compile_tracing() -> bool:
    """Return whether Dynamo or AOTAutograd is compiling on this thread."""
    return TracingContext.try_get() is not None


def is_describing() -> bool:
    """Return whether the caller's caller describes a tensor in order to fake it.

    Outside a compilation, `torch.export` and ``FakeTensorMode.from_tensor`` do that.
    """
    return sys._getframe(2).f_code.co_name == "describe_tensor"


def is_faking_input() -> bool:
    """Return whether the caller's caller is asked for a fake wrapper that stands for an input."""
    return sys._getframe(3).f_code.co_name == "_empty_create_subclass"


def backward_pass() -> int:
    """Return a number for the backward pass that is running on this thread, -1 if none is."""
    return torch._C._current_graph_task_id()


def is_computed_again() -> bool:
    """Return whether a node of a checkpointed region is being traced."""
    return "recompute" in import_module("torch.fx.traceback").get_current_meta()


def functional_value(tensor: FunctionalTensor) -> torch.Tensor:
    """Return the tensor a functional wrapper currently stands for."""
    return torch._from_functional_tensor(tensor.elem)


def expression(extent: Any) -> Any:
    """Return an extent as an integer, or as a sympy expression if it is symbolic."""
    if isinstance(extent, int):
        return extent
    expr = extent.node.expr
    return int(expr) if expr.is_number else expr


def symbol_bounds(extent: Any, low: int, high: int) -> tuple[int, int]:
    """Return the least and the largest value that an extent can have, within bounds."""
    if isinstance(extent, int):
        return extent, extent
    # Expanded, so that what cancels does: the end of a[n:] does not depend on n.
    bounds = extent.node.shape_env.bound_sympy(extent.node.expr.expand())
    least, most = (value if value.is_Integer else None for value in (bounds.lower, bounds.upper))
    return (
        low if least is None else max(low, int(least)),
        high if most is None else min(high, int(most)),
    )


def python_source(extent: Any) -> str:
    """Return an integer or a sympy expression as Python code over its symbols."""
    if isinstance(extent, int):
        return str(extent)
    return import_module("torch.utils._sympy.printers").PythonPrinter().doprint(extent)


def storage_key(tensor: torch.Tensor) -> int:
    """Return an identity of the tensor's storage, unique while the storage lives."""
    return tensor.untyped_storage()._cdata


def ambient_fake_mode() -> Any:
    """Return the fake mode of the compilation in progress."""
    return TracingContext.get().fake_mode


def fake_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the fake tensor that stands for a real one in the trace in progress, if any."""
    mode = import_module("torch._guards").detect_fake_mode()
    return None if mode is None else mode.fake_tensor_converter._get_memo(tensor)


class DynamoTrace(NamedTuple):
    """A function that Dynamo is tracing."""

    code: CodeType
    compiler: Any  # the backend that gets the graph
    fake_mode: Any
    inputs: list[Any]  # the inputs that were faked, each with its source


def dynamo_trace() -> DynamoTrace | None:
    """Return what Dynamo is tracing on this thread, a call of its backend included."""
    module = sys.modules.get("torch._dynamo.symbolic_convert")
    translator = None if module is None else getattr(module.tls, "current_tx", None)
    if translator is None:
        return None
    output = translator.output
    code, fake_mode = output.root_tx.f_code, output.fake_mode
    return DynamoTrace(code, output.compiler_fn, fake_mode, output.tracked_fakes)


def symbol_of(value: int, shape_env: Any) -> Any:
    """Return the symbolic integer that new extents of this value get, or the value itself.

    There is one unless the value is 0 or 1, or torch is configured to share no symbols. Before a
    wrapper is made, Dynamo has made the symbol of its storage offset, if a size is symbolic.
    """
    symbol = shape_env.val_to_var.get(value)
    return value if symbol is None else shape_env.create_symintnode(symbol, hint=value)


def inputs_by_source() -> Mapping[Any, torch.Tensor]:
    """Return the fake tensors that stand for inputs of the function that Dynamo is tracing.

    Inputs that the graph does not use are among them: they are guarded as well.
    """
    trace = dynamo_trace()
    inputs = [] if trace is None else trace.inputs
    return {tracked.source: tracked.fake for tracked in inputs}


def current_guards() -> Any:
    """Return the set of guards of the frame being compiled, or None outside a compilation."""
    context = TracingContext.try_get()
    return None if context is None else context.guards_context.dynamo_guards


def replace_subclass_guards(replacements: Mapping[Any, Guard | None]) -> None:
    """Replace what Dynamo guards of tensor subclasses as such, in the frame being compiled.

    Args:
        replacements: For each source of a subclass, the guard to put in the place of those on
            its metadata and on the names of its inner tensors; None for no guard.
    """
    guards = current_guards()
    if guards is None:
        return
    attribute_list = import_module("torch._dynamo.source").SubclassAttrListSource
    kept = []
    for guard in guards:
        source = guard.originating_source
        if type(source) is attribute_list and source.base in replacements:
            continue
        if guard.create_fn_name() != "TENSOR_SUBCLASS_METADATA_MATCH" or source not in replacements:
            kept.append(guard)
        elif (replacement := replacements[source]) is not None:
            replacement.stack, replacement.user_stack = guard.stack, guard.user_stack
            kept.append(replacement)
    guards.clear()
    for guard in kept:
        guards.add(guard)


# An identity of a real tensor's storage, in one call into C++.
storage_address: Callable[[torch.Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]


def steady_call(compiled: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Return a function that calls what Inductor compiled with less work at each call.

    Inductor's own entry looks at each call for the autotuning of the first one, to end it, and
    for records of it, to write them: two microseconds that only first calls need. Calls that are
    profiled or recorded go through it as well. Other functions are returned as they are.
    """
    if not {"current_callable", "_compile_context"} <= getattr(compiled, "__dict__", {}).keys():
        return compiled
    graph: Any = compiled
    profiler, debug = torch.autograd.profiler, import_module("torch._inductor.debug")

    def call(inputs: list[Any]) -> Any:
        if (
            graph._compile_context is None
            and not profiler._is_profiler_enabled
            and not debug.RECORD_GRAPH_EXECUTION
        ):
            return graph.current_callable(inputs)
        return graph(inputs)

    return call


def _data_pointers_equal(
    tensors: list[torch.Tensor], pointers: list[int], positions: list[int]
) -> bool:
    return list(map(torch.Tensor.data_ptr, tensors)) == pointers


# Compares the data pointers of all tensors of a list with known ones. Builds with CUDA do it in
# one call into C++.
data_pointers_equal: Callable[[Any, Any, Any], bool] = getattr(
    torch._C, "_tensors_data_ptrs_at_indices_equal", _data_pointers_equal
)


def source_scope(builder: Any) -> dict[str, Any]:
    """Return the names that a guard on source expressions may use, besides L."""
    names = import_module("torch._dynamo.guards")._get_closure_vars()
    return {
        **builder.scope["__builtins__"],
        **names,
        "G": builder.scope["G"],
        "address": storage_address,
        "failures": (AttributeError, KeyError, IndexError, NameError, RuntimeError, TypeError),
    }


def source_name(source: Any) -> str:
    """Return a source as a Python expression over L (locals) and G (globals)."""
    name = source.name
    return name() if callable(name) else name


def fake_tensors_sharing_storage(fake: FakeTensor) -> list[torch.Tensor]:
    """Return the other fake inputs of a trace that share a fake buffer's storage.

    Dynamo fakes the inputs of a frame through one converter, whose memo holds them all.
    """
    memo = fake.fake_mode.fake_tensor_converter.meta_converter.tensor_memo
    key = storage_key(fake)
    others: list[torch.Tensor] = []
    for other in list(memo.values()):
        if other is None or other is fake or not isinstance(other, FakeTensor):
            continue
        if storage_key(other) == key:
            others.append(other)
    return others
