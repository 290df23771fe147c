"""What `_compat` needs of torch's private names, as data, and a check of all of it at once.

Note [A torch that moved a name]
A release of torch may rename what it never promised to keep. Found one at a time, that is an
AttributeError in the middle of a trace. When this library is imported, all names are therefore
looked up at once. Modules that torch has imported by then are asked; of the compiler's modules,
which take a second to import, the source text is read: that takes a few milliseconds.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from aliasstorage.errors import IncompatibleTorchError

# The first release and the newest one that the whole suite of tests passes on.
OLDEST, NEWEST = (2, 13), (2, 15)


class Need(NamedTuple):
    """A private name.

    Attributes:
        module: Where it is, below ``torch``.
        name: The name, with dots for attributes.
        parameters: Names of parameters that it is called with, or by whose position it is.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()


NEEDED = (
    Need("_C", "_AutoDispatchBelowADInplaceOrView"),
    Need("_C", "_TorchDispatchModeKey.FUNCTIONAL"),
    Need("_C", "_TorchDispatchModeKey.PROXY"),
    Need("_C", "_current_graph_task_id"),
    Need("_C", "_disabled_torch_function_impl"),
    Need("_C", "_dynamo.eval_frame.set_code_exec_strategy"),
    Need("_C", "_dynamo.eval_frame._FrameAction.SKIP"),
    Need("_C", "_dynamo.eval_frame._FrameExecStrategy"),
    Need("_C", "_functorch.is_functorch_wrapped_tensor"),
    Need("_C", "_get_dispatch_mode"),
    Need("_C", "_storage_address"),
    Need("_dispatch.python", "enable_python_dispatcher"),
    Need("_dynamo.backends.common", "aot_autograd"),
    Need("_dynamo.backends.debugging", "boxed_nop", ("fx_g", "example_inputs")),
    Need("_dynamo.backends.registry", "lookup_backend", ("compiler_fn",)),
    Need("_dynamo.eval_frame", "innermost_fn", ("fn",)),
    Need("_dynamo.guards", "_get_closure_vars"),
    Need("_dynamo.source", "AttrSource"),
    Need("_dynamo.source", "SubclassAttrListSource"),
    Need("_dynamo.source", "TensorProperty"),
    Need("_dynamo.source", "TensorPropertySource"),
    Need("_dynamo.symbolic_convert", "tls"),
    Need("_functorch.partitioners", "min_cut_rematerialization_partition"),
    Need("_guards", "Guard"),
    Need("_guards", "TracingContext.try_get"),
    Need("_guards", "detect_fake_mode", ("inputs",)),
    Need("_higher_order_ops.triton_kernel_wrap", "get_mutated_tensors"),
    Need("_higher_order_ops.triton_kernel_wrap", "kernel_side_table"),
    Need("_higher_order_ops.utils", "_has_gen_schema", ("op",)),
    Need("_inductor", "list_mode_options", ("mode",)),
    Need("_inductor.compile_fx", "compile_fx", ("inner_compile", "config_patches")),
    Need("_inductor.compile_fx", "compile_fx_inner", ("gm", "example_inputs")),
    Need("_inductor.debug", "RECORD_GRAPH_EXECUTION"),
    Need("_inductor.decomposition", "select_decomp_table"),
    Need("_inductor.ir", "ExternKernel"),
    Need("_inductor.ir", "FallbackKernel"),
    Need("_inductor.ir", "MutationOutput"),
    Need("_inductor.ir", "NoneLayout"),
    Need("_inductor.lowering", "lowerings"),
    Need("_inductor.lowering", "make_fallback", ("op", "warn", "override_decomp")),
    Need("_inductor.lowering", "register_lowering", ("aten_fn", "type_promotion_kind")),
    Need("_inductor.virtualized", "V"),
    Need("_ops", "HigherOrderOperator"),
    Need("_ops", "OpOverload._can_decompose"),
    Need("_ops", "_higher_order_ops"),
    Need("_subclasses.fake_tensor", "FakeTensor"),
    Need("_subclasses.fake_tensor", "FakeTensorMode"),
    Need("_subclasses.functional_tensor", "FunctionalTensor"),
    Need("fx.traceback", "get_current_meta"),
    Need("utils._python_dispatch", "_disable_current_modes"),
    Need(
        "utils._python_dispatch",
        "return_and_correct_aliasing",
        ("func", "args", "kwargs", "out"),
    ),
    Need("utils._pytree", "tree_map_only"),
    Need("utils._sympy.printers", "PythonPrinter"),
)


def version_of(text: str) -> tuple[int, ...]:
    """Return a release of torch as numbers.

    Examples:
        >>> version_of("2.15.0+cpu"), version_of("2.16.0a0+git12ab")
        ((2, 15), (2, 16))
    """
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def check_torch(needed: Sequence[Need] = NEEDED, version: str = torch.__version__) -> None:
    """Check that torch has what this library needs of it.

    Warns:
        UserWarning: torch is newer than the newest release that was tested.

    Raises:
        IncompatibleTorchError: Names are missing; it lists all of them.
    """
    missing = missing_names(needed)
    oldest, newest = (".".join(map(str, release)) for release in (OLDEST, NEWEST))
    if missing or version_of(version) < OLDEST:
        raise IncompatibleTorchError(
            "This release of torch lacks what aliasstorage needs.",
            which=f"torch {version}",
            expected=f"torch {oldest} to {newest}, or a later one with the same private names",
            got="; ".join(missing) or "an older release",
            do=f"Install torch {newest}, or a release of aliasstorage that knows this torch.",
        )
    if version_of(version) > NEWEST:
        warnings.warn(
            f"aliasstorage was tested with torch {oldest} to {newest}, and this is {version}. "
            "Run `python -m aliasstorage.doctor` to see whether it works.",
            stacklevel=2,
        )


def missing_names(needed: Sequence[Need] = NEEDED) -> list[str]:
    """Return what is missing, one phrase each."""
    found: list[str] = []
    for need in needed:
        module = f"torch.{need.module}"
        loaded = sys.modules.get(module)
        problem = _ask(loaded, need) if loaded is not None else _read(module, need)
        if problem is None:
            found.append(f"{module} has no {need.name}")
        elif problem:
            found.append(f"{module}.{need.name} has no parameter {', '.join(problem)}")
    return found


def _ask(module: Any, need: Need) -> list[str] | None:
    """Return the parameters that a name of an imported module lacks, None without the name."""
    value = module
    for part in need.name.split("."):
        if not hasattr(value, part):
            return None
        value = getattr(value, part)
    if not need.parameters:
        return []
    known = inspect.signature(value).parameters
    return [name for name in need.parameters if name not in known]


_sources: dict[str, str] = {}


def _read(module: str, need: Need) -> list[str] | None:
    """Return the same of a module that is not imported, from its source text."""
    if module not in _sources:
        # Not by importlib, which would import the packages around the module.
        path = Path(torch.__file__).parent.joinpath(*module.split(".")[1:])
        files = [path.with_suffix(".py"), path / "__init__.py"]
        source = next((file for file in files if file.exists()), None)
        _sources[module] = "" if source is None else source.read_text(encoding="utf-8")
    text, name = _sources[module], need.name.split(".")[0]
    definition = re.search(rf"^(?:async )?(?:def|class) {name}\b[^(:]*\(?", text, re.MULTILINE)
    if definition is None:
        return [] if re.search(rf"\b{name}\b", text) else None
    if not need.parameters:
        return []
    parameters = _parameters(text, definition.end() - 1)
    return [parameter for parameter in need.parameters if parameter not in parameters]


def _parameters(text: str, start: int) -> set[str]:
    """Return the names of the parameters in the parentheses that open at ``start``."""
    depth = 0
    for end in range(start, len(text)):
        depth += (text[end] in "([{") - (text[end] in ")]}")
        if not depth:
            function = ast.parse(f"def f{text[start : end + 1]}: ...").body[0]
            assert isinstance(function, ast.FunctionDef)  # noqa: S101
            given = function.args
            return {arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    return set()
