"""Compile a merged graph with an inner backend, in the form that it is given."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.fx

from aliasstorage import _compat, ops
from aliasstorage.bufferize.recognize import byte_buffers
from aliasstorage.bufferize.report import BufferReport
from aliasstorage.bufferize.run import compile_bufferized
from aliasstorage.calling import bind
from aliasstorage.eager_aliasing import match_eager_aliasing
from aliasstorage.errors import BackendUnsupportedError
from aliasstorage.forms import AOT_EAGER, BACKEND_OPTIONS, Form, check_dtypes, form_of
from aliasstorage.grouping import MergedStorage, find_storages, static_window
from aliasstorage.guards import AliasGuard, lighten_window_guards
from aliasstorage.higher_order import register_rules
from aliasstorage.merge import make_window, merge
from aliasstorage.mutations import written_inputs
from aliasstorage.offsets import compiles_for_us
from aliasstorage.slices import regenerate_by_slices
from aliasstorage.tracing import backward_write_error, for_own_backend
from aliasstorage.version import __version__
from aliasstorage.window import Window, regenerate

aten = torch.ops.aten

_OWN_OPTIONS = ("inner", "bufferize", "form", "decompositions")

Compiler = Callable[..., Callable[..., Any]]

GraphListener = Callable[[list[BufferReport], torch.fx.GraphModule], None]
_graph_listeners: list[GraphListener] = []


@contextmanager
def listening(listener: GraphListener) -> Iterator[None]:
    """Call ``listener`` with each graph that is handed to an inner backend meanwhile.

    It gets the reports on the graph's byte buffers, and the graph.
    """
    _graph_listeners.append(listener)
    try:
        yield
    finally:
        _graph_listeners.remove(listener)


def compile_graph(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: dict[str, Any],
    mode: str | None,
) -> Callable[..., Any]:
    """Merge the inputs of each storage, and compile the result with the inner backend."""
    inner = options.get("inner", "inductor")
    form = form_of(inner, options.get("form"))
    in_place = options.get("bufferize", True) and form in ("windows", "arrays")
    register_rules()
    original = _unchanged_copy(module)
    module = match_eager_aliasing(module)
    storages = find_storages(module.graph, example_inputs)
    roots = _named_windows(storages)
    check_dtypes(inner, (member.dtype for storage in storages for member in storage.members))
    compiler = _inner_compiler(inner, form, options, mode, roots)
    guard = _alias_guard(module, example_inputs, storages)
    compiles_for_us()
    lighten_window_guards()
    # The caches on disk ignore aliasing, and hold entries of stock compilations: with the pattern
    # in the key, an entry made for other aliases is never found; nor is one that another release
    # of this library made, or the same one with other options.
    ours = f"aliasstorage {__version__} {form} {in_place} {guard.pattern}"
    tag = f"{torch.compiler.config.cache_key_tag} {ours}"
    with torch.compiler.config.patch(cache_key_tag=tag):
        if not storages:
            return bind(compiler(module, example_inputs), original, guard, None)
        merged = merge(module, example_inputs, storages, _MAKE[form])
        if form in ("bytes", "slices"):
            _refuse_writes_in_backward(module)
            _notify([], merged.module)
        compiled = compiler(merged.module, merged.example_inputs)
        return bind(compiled, original, guard, merged, longer=in_place)


_MAKE: dict[Form, Callable[..., torch.Tensor]] = {
    "windows": make_window,
    "arrays": make_window,
    "bytes": regenerate,
    "slices": regenerate_by_slices,
}


def _named_windows(storages: Sequence[MergedStorage]) -> dict[Window, str]:
    """Return the windows that the function takes, and a name for each, from its source.

    A window that is taken of two storages has no name.
    """
    names: dict[Window, str] = {}
    for storage in storages:
        mine: dict[Window, str] = {}
        for member in storage.members:
            window = static_window(member)
            if window is not None and window not in mine:
                source = _compat.source_name(member.node._dynamo_source)
                mine[window] = re.sub(r"\W+", "_", source.removeprefix("L")).strip("_")
        names.update({window: "" if window in names else name for window, name in mine.items()})
    return names


def _alias_guard(
    module: torch.fx.GraphModule, example_inputs: Sequence[Any], storages: Sequence[MergedStorage]
) -> AliasGuard:
    tensors, sources = {}, {}
    placeholders = module.graph.find_nodes(op="placeholder")
    for index, (node, value) in enumerate(zip(placeholders, example_inputs, strict=True)):
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            tensors[index], sources[index] = value, node._dynamo_source
    members = [member for storage in storages for member in storage.members]
    numbers = {m.index for m in members if isinstance(m.byte_offset, int)}
    symbolic = {m.index for m in members} - numbers
    lengths = {
        member.index: storage.buffer_value.shape[0]
        for storage in storages
        for member in storage.members
        if isinstance(storage.buffer_value.shape[0], int)
    }
    return AliasGuard(tensors, sources, symbolic, numbers, lengths)


def _refuse_writes_in_backward(module: torch.fx.GraphModule) -> None:
    """Refuse what other forms find out while they trace; here other compilers do.

    See Note [Writes in a backward pass].
    """
    for node in module.graph.find_nodes(op="get_attr"):
        body = getattr(module, str(node.target), None)
        if not isinstance(body, torch.fx.GraphModule):
            continue
        for user in node.users:
            name = str(user.target)
            is_backward = "autograd_function" in name and user.args[1:2] == (node,)
            if (is_backward or "checkpoint" in name) and written_inputs(body.graph):
                raise backward_write_error(name)


def _unchanged_copy(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return a copy of a graph that no pass of a compiler reaches."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        node.meta = {}  # example values, which would be kept alive
    return torch.fx.GraphModule(module, graph)


def _inner_compiler(
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


def _notify(reports: list[BufferReport], module: torch.fx.GraphModule) -> None:
    for listener in _graph_listeners:
        listener(reports, module)


def _layout_patches(module: torch.fx.GraphModule, options: dict[str, Any]) -> dict[str, bool]:
    """Return what changes in Inductor's options for the layouts of values of a graph."""
    # Note [States are not images]
    # Inductor lays values of four dimensions that flow into or out of a convolution as images,
    # channels last, whatever the convolution's own number of dimensions is. In a hybrid model,
    # these are the recurrent states of the layers before a short convolution: they are computed
    # in an order across their heads, and transposed when they are written to their windows.
    # Where all convolutions are one-dimensional, there are no images.
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
                _notify,
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
            on_report=_notify,
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
