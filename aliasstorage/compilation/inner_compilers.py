"""How each inner backend is driven: Inductor, AOTAutograd's eager backends, all others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.fx

from aliasstorage import _compat, ops
from aliasstorage.bufferize.driver import compile_bufferized
from aliasstorage.bufferize.recognize import byte_buffers
from aliasstorage.compilation.graph_listeners import notify
from aliasstorage.compilation.lowering_forms import (
    AOT_EAGER,
    BACKEND_OPTIONS,
    Form,
)
from aliasstorage.errors import BackendUnsupportedError
from aliasstorage.subclass.functional_buffers import for_own_backend
from aliasstorage.windows.window import Window

aten = torch.ops.aten

_OWN_OPTIONS = ("inner", "bufferize", "form", "decompositions")

Compiler = Callable[..., Callable[..., Any]]


def inner_compiler(
    inner: Any, form: Form, options: dict[str, Any], mode: str | None, roots: Mapping[Window, str]
) -> Compiler:
    """Return ``(module, example_inputs) -> callable`` for an inner backend."""
    bufferize = options.get("bufferize", True)
    inner_options = {key: value for key, value in options.items() if key not in _OWN_OPTIONS}
    decompositions = options.get("decompositions")
    drives_aot = form in ("windows", "arrays") and inner != "inductor"
    if decompositions is not None and not drives_aot:
        raise BackendUnsupportedError(
            "Decompositions are only applied where this library drives AOTAutograd.",
            which="decompositions",
            expected='form="windows" or form="arrays", with another inner backend than Inductor',
            got=f"inner={inner!r}, form={form!r}",
            do="Leave decompositions out; the inner backend applies its own.",
        )
    if form == "windows" and inner == "inductor":
        return _inductor(inner_options, mode, bufferize, roots)
    if inner_options or mode not in (None, "default"):
        raise BackendUnsupportedError(
            "An option is only known to Inductor.",
            which=", ".join(inner_options) or f"mode={mode!r}",
            expected=f"one of {', '.join(_OWN_OPTIONS)}",
            got=f"inner={inner!r}, form={form!r}",
            do="Bind other options to the inner backend with functools.partial.",
        )
    if not drives_aot:
        return _lookup(inner)
    named = inner if isinstance(inner, str) and inner in AOT_EAGER else None
    if named is None and not isinstance(inner, str):
        # An engine's compiler may hand pieces of the graph to Inductor.
        ops.register_inductor_lowerings()
    return _through_aot(
        _boxed(_lookup(inner)) if named is None else _compat.boxed_nop,
        named or "aot_eager",
        bufferize,
        roots,
        arrays=form == "arrays",
        for_inductor=form == "windows" and not isinstance(inner, str),
        decompositions=decompositions,
    )


def _lookup(inner: Any) -> Compiler:
    if not isinstance(inner, str):
        return inner
    compiler = _compat.lookup_backend(inner)
    options = BACKEND_OPTIONS.get(inner)
    return partial(compiler, options=options) if options else compiler


def _boxed(compiler: Compiler) -> Compiler:
    """Return a compiler whose compiled functions take a list of arguments."""

    def compile_boxed(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled = compiler(module, list(inputs))
        return lambda arguments: compiled(*arguments)

    return compile_boxed


def _layout_patches(module: torch.fx.GraphModule, options: dict[str, Any]) -> dict[str, bool]:
    """Return what changes in Inductor's options for the layouts of values of a graph."""
    # Note [States are not images]
    # Problem: Inductor lays values of four dimensions that flow into or out of a convolution as
    # images, channels last, whatever the convolution's own number of dimensions is. In a hybrid
    # model, these are the recurrent states of the layers before a short convolution. They are
    # computed in an order across their heads, and transposed when they are written.
    # Rule: where all convolutions are one-dimensional, there are no images, and the layout
    # optimization is left out.
    if "layout_optimization" in options or _compat.inductor_config.force_layout_optimization:
        return {}
    inputs = [
        node.args[0].meta.get("val")
        for submodule in module.modules()
        if isinstance(submodule, torch.fx.GraphModule)
        for node in submodule.graph.find_nodes(op="call_function", target=aten.convolution.default)
    ]
    one_dimensional = all(value is not None and value.dim() == 3 for value in inputs)
    if inputs and one_dimensional and byte_buffers(module.graph):
        return {"layout_optimization": False}
    return {}


def _inductor(
    options: dict[str, Any], mode: str | None, bufferize: bool, roots: Mapping[Window, str]
) -> Compiler:
    patches = dict(options)
    if mode not in (None, "default"):
        patches = {**_compat.list_mode_options(mode), **patches}

    def inner_compile(
        module: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Callable[..., Any]:
        static = kwargs.pop("static_input_idxs", ())

        def compiler(
            module: torch.fx.GraphModule, inputs: Sequence[Any], static: Sequence[int]
        ) -> Callable[..., Any]:
            return _compat.compile_fx_inner(module, inputs, static_input_idxs=static, **kwargs)

        with _compat.inductor_config.patch(_layout_patches(module, patches)):
            return compile_bufferized(
                module,
                example_inputs,
                compiler,
                roots,
                static,
                notify,
                bufferize,
                for_inductor=True,
            )

    def compile_with_inductor(
        module: torch.fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        ops.register_inductor_lowerings()
        with for_own_backend(bufferize):
            return _compat.compile_fx(
                module, example_inputs, inner_compile=inner_compile, config_patches=patches
            )

    return compile_with_inductor


def _through_aot(
    compile_aten: Compiler,
    inner: str,
    bufferize: bool,
    roots: Mapping[Window, str],
    arrays: bool,
    for_inductor: bool,
    decompositions: dict[Any, Callable[..., Any]] | None,
) -> Compiler:
    """Return a compiler that runs AOTAutograd as an aot_eager backend does.

    Args:
        compile_aten: ``(module, example_inputs) -> callable`` on a list, for ATen graphs.
        inner: Whose partitioner and decompositions to take.
        bufferize: Whether to write windows in place.
        roots: See `plan.choose_roots`.
        arrays: Whether to hand over copies of the windows.
        for_inductor: Whether ``compile_aten`` may hand pieces of the graph to Inductor.
        decompositions: What to take operations apart with, instead of what ``inner`` does.
    """

    def compiler(
        module: torch.fx.GraphModule, inputs: Sequence[Any], static: Sequence[int]
    ) -> Callable[..., Any]:
        return compile_aten(module, inputs)

    def forward(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_bufferized(
            module,
            inputs,
            compiler,
            roots,
            on_report=notify,
            enabled=bufferize or arrays,
            as_arrays=arrays,
            for_inductor=for_inductor,
        )

    options: dict[str, Any] = {}
    if inner != "aot_eager_default_partitioner":
        options["partition_fn"] = _compat.min_cut_rematerialization_partition
    if decompositions is not None:
        options["decompositions"] = decompositions
    elif inner == "aot_eager_decomp_partition":
        options["decompositions"] = _compat.select_decomp_table
    compile_with_aot_eager = _compat.aot_autograd(
        fw_compiler=forward, bw_compiler=forward, keep_inference_input_mutations=True, **options
    )

    def compile_for_own_backend(
        module: torch.fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        with for_own_backend(bufferize):
            return compile_with_aot_eager(module, example_inputs)

    return compile_for_own_backend
