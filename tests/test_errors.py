"""Every refusal, line by line: the whole texts are in tests/golden/errors.txt.

After a change that is meant to change them: UPDATE_GOLDEN=1 python -m pytest tests/test_errors.py
"""

import ast
import os
import re
from pathlib import Path

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

import aliasstorage
from aliasstorage import ByteStorage, Window, errors, layouts, wrap
from aliasstorage._requirements import Need, check_torch
from aliasstorage.compilation.slice_regeneration import regenerate_by_slices
from aliasstorage.layouts import HybridGeometry, ascend, field, packed, repeated
from tests.support.triton_stand_in import as_triton, write_token

GOLDEN = Path(__file__).parent / "golden" / "errors.txt"
PACKAGE = Path(aliasstorage.__file__).parent


def raw():
    return torch.zeros(64, dtype=torch.uint8)


def window(dtype=torch.float32):
    return wrap(raw().view(dtype))


def compiled(function, *args, **options):
    backend = aliasstorage.backend(**options)
    return torch.compile(function, backend=backend, fullgraph=True)(*args)


def views():
    buffer = raw()
    return buffer.view(torch.float16), buffer[32:].view(torch.float32)


def half_wrapped():
    a, b = views()
    return a, wrap(b)


def write_both(a, b):
    return a.add_(1), b.mul_(2)


@torch.library.custom_op("tests_errors::move", mutates_args=("to",))
def move(to: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    to.copy_(source)
    return source.sum()


move.register_fake(lambda to, source: to.new_empty(()))


def exported(module, *args):
    return torch.export.export(module, args)


class Holder(torch.nn.Module):
    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.storage.window(torch.float32, (4,)) + x


class Passes(torch.nn.Module):
    def forward(self, x):
        return x + 1


def window_that_moves():
    """Compile for sizes and offsets that change, and hand the second graph to another backend."""
    backends = [aliasstorage.backend(inner="aot_eager"), lookup_backend("aot_eager")]
    step = torch.compile(write_both, backend=lambda *graph: backends.pop(0)(*graph))
    for rows in (4, 8):
        storage = ByteStorage.zeros(rows * 8)
        first = storage.window(torch.int32, (rows,))
        step(first, storage.window(torch.float32, (rows,), byte_offset=4 * rows))


class DoublesLater(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, state):
        ctx.state = state
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        ctx.state.mul_(2)
        return gradient, None


def written_in_backward():
    x = torch.ones(4, requires_grad=True)
    compiled(lambda x, a, b: DoublesLater.apply(x, a) + b[0], x, *views(), inner="aot_eager")


CONV = field("conv", torch.bfloat16, (9,))
GRADIENT = torch.ones(16, requires_grad=True)

REFUSALS = {
    "no dtype": lambda: Window("float16", (2,)),
    "lengths differ": lambda: Window(torch.float16, (2, 3), (1,)),
    "negative size": lambda: Window(torch.float16, (-2,)),
    "negative stride": lambda: Window(torch.float16, (2,), (-1,)),
    "negative offset": lambda: Window(torch.float16, (2,), byte_offset=-2),
    "misaligned": lambda: Window(torch.float32, (2,), byte_offset=6),
    "past the end": lambda: ByteStorage.zeros(8).window(torch.float32, (4,)),
    "sparse": lambda: Window.of(torch.zeros(2, 2).to_sparse()),
    "conjugate": lambda: Window.of(torch.zeros(2, dtype=torch.complex64).conj()),
    "not a buffer": lambda: ByteStorage(raw()[8:]),
    "t_": lambda: window().t_(),
    "data": lambda: setattr(window(), "data", torch.zeros(3)),
    "requires_grad_": lambda: window().requires_grad_(),
    "a view that negates": lambda: torch._neg_view(window()),
    "a view that conjugates": lambda: window(torch.complex64).conj(),
    "out= of another shape": lambda: torch.add(torch.ones(3), 1, out=window()),
    "a value that requires gradients": lambda: window().copy_(GRADIENT),
    "wrap what requires gradients": lambda: wrap(GRADIENT),
    "wrap a subclass": lambda: wrap(torch.nn.UninitializedBuffer()),
    "names of a module": lambda: aliasstorage.wrap_module_(Holder(a=raw()), names=["b"]),
    "consolidate nothing": lambda: aliasstorage.consolidate_({}),
    "consolidate gradients": lambda: aliasstorage.consolidate_({"x": GRADIENT}),
    "a page too small": lambda: packed(CONV, nbytes=16),
    "pages that overlap": lambda: repeated(CONV, 2, stride=16),
    "one name twice": lambda: packed(CONV, CONV),
    "a storage too short": lambda: repeated(CONV, 2).on(ByteStorage.zeros(20)),
    "an odd conv before float32": lambda: packed(CONV, field("ssm", torch.float32, (2,))),
    "a page of odd length": lambda: repeated(field("x", torch.float32, (2,)), 3, stride=10),
    "no linear layers": lambda: HybridGeometry((0,), (), 1, 16, (3, 4), (2, 2)),
    "keys unlike states": lambda: ascend.contiguous_regions(
        HybridGeometry((1,), (0,), 1, 16, (3, 4), (2, 5, 5)), 8
    ),
    "slices that do not nest": lambda: regenerate_by_slices(raw(), torch.int16, (4, 4), (2, 1), 0),
    "no such form": lambda: compiled(write_both, *views(), inner="eager", form="pages"),
    "a form that is wrong": lambda: compiled(
        write_both, *views(), inner="openvino", form="windows"
    ),
    "a dtype that is wrong": lambda: compiled(
        lambda a, b: (a.fill_(True), b.mul_(2)),
        (shared := raw()).view(torch.bool),
        shared[:8].view(torch.float32),
        inner="openvino",
    ),
    "an option of Inductor": lambda: compiled(
        write_both, *views(), inner="eager", max_autotune=True
    ),
    "decompositions": lambda: compiled(
        write_both, *views(), inner="eager", form="bytes", decompositions={}
    ),
    "arrays that overlap": lambda: compiled(write_both, *views(), inner="aot_eager", form="arrays"),
    "inputs that require gradients": lambda: compiled(
        lambda a, b: b.mul_(2) + a.sum(),
        (base := torch.zeros(8)).requires_grad_(),
        base.detach().view(torch.int32),
        inner="aot_eager",
    ),
    "inputs that conjugate": lambda: compiled(
        lambda a, b: (a + 1, b.mul_(2)),
        (base := torch.zeros(8, dtype=torch.complex64)).conj(),
        torch.view_as_real(base),
        inner="aot_eager",
    ),
    "windows and plain tensors": lambda: torch.compile(write_both, backend="aot_eager")(
        *half_wrapped()
    ),
    "one call, overlapping windows": lambda: compiled(
        move,
        (shared := window())[:8],
        shared[4:12],
        inner="aot_eager",
    ),
    "one Triton kernel, overlapping windows": lambda: torch.compile(
        write_token,
        fullgraph=True,
        backend=as_triton(aliasstorage.backend(inner="aot_eager")),
    )((shared := window(torch.float16))[:8], shared[4:12], torch.ones(()), 1),
    "another backend for a window that moves": window_that_moves,
    "export of a window": lambda: exported(Passes(), window()),
    "export of a constant": lambda: exported(Holder(storage=ByteStorage.zeros(16)), torch.zeros(4)),
    "a write in backward": written_in_backward,
    "another torch": lambda: check_torch((Need("_guards", "Moved"),), version="2.99.0"),
}


def refusal(name):
    with pytest.raises(Exception) as caught:
        REFUSALS[name]()
    error = getattr(caught.value, "inner_exception", caught.value)
    while not isinstance(error, errors.AliasStorageError) and error.__cause__ is not None:
        error = error.__cause__
    assert isinstance(error, errors.AliasStorageError), repr(error)
    # What fx adds names the node.
    return f"{type(error).__name__}: {error}".split("\n\nWhile executing")[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSALS)
def test_message(name):
    text = refusal(name)
    known = dict(re.findall(r"^## (.*?)\n(.*?)\n\n", GOLDEN.read_text(), re.S | re.M))
    if os.environ.get("UPDATE_GOLDEN"):
        known[name] = text
        ordered = [(key, known[key]) for key in REFUSALS if key in known]
        GOLDEN.write_text("".join(f"## {key}\n{value}\n\n" for key, value in ordered))
    assert text == known[name]
    labels = [line.split(":")[0].strip() for line in text.splitlines()[1:]]
    assert [label for label in labels if label != "which"] == ["expected", "got", "do"]


def raised():
    """Yield file, line and first sentence of each error that the package makes."""
    names = {name for name in vars(errors) if name.endswith("Error")}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") in names):
                continue
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant):
                yield path.name, node.lineno, re.escape(first.value)
            elif isinstance(first, ast.JoinedStr):
                parts = (
                    re.escape(v.value) if isinstance(v, ast.Constant) else ".*"
                    for v in first.values
                )
                yield path.name, node.lineno, "".join(parts)


def test_every_error_of_the_package_is_here():
    text = GOLDEN.read_text()
    missing = [
        f"{file}:{line}: {what}" for file, line, what in raised() if not re.search(what, text)
    ]
    assert not missing, "\n".join(missing)


def test_layout_errors_are_errors_of_values():
    with pytest.raises(ValueError, match="two windows|Two windows"):
        layouts.packed(CONV, CONV)
