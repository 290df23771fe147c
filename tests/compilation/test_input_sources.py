"""Where caches come from: arguments, modules, closures, graph breaks, views taken before."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import aliasstorage
from aliasstorage import AliasTensor, ByteStorage, Window
from tests.support.two_windows import (
    BACKENDS,
    CARRIED,
    MODES,
    A,
    X,
    fresh,
    plains,
    same,
    update,
    windows,
)


@dataclasses.dataclass
class Caches:
    a: torch.Tensor
    b: torch.Tensor


class Layer(torch.nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.register_buffer("a", a)
        self.caches = [{"b": b}]

    def forward(self, x):
        return update(self.a, self.caches[0]["b"], x)


GLOBAL_CACHES: dict[str, torch.Tensor] = {}


def through_arguments(a, b):
    return lambda compile_: compile_(update)(a, b, X)


def through_kwargs(a, b):
    return lambda compile_: compile_(lambda *, b, x, a: update(a, b, x))(a=a, b=b, x=X)


def through_nesting(a, b):
    return lambda compile_: compile_(lambda t: update(t[0]["k"][1], t[1], t[2]))(
        [{"k": (None, a)}, b, X]
    )


def through_dataclass(a, b):
    return lambda compile_: compile_(lambda c, x: update(c.a, c.b, x))(Caches(a, b), X)


def through_module(a, b):
    return lambda compile_: compile_(Layer(a, b))(X)


def through_closure(a, b):
    return lambda compile_: compile_(lambda x: update(a, b, x))(X)


def through_globals(a, b):
    GLOBAL_CACHES.update(a=a, b=b)

    def step(x):
        return update(GLOBAL_CACHES["a"], GLOBAL_CACHES["b"], x)

    return lambda compile_: compile_(step)(X)


def through_default_argument(a, b):
    def step(x, a=a, b=b):
        return update(a, b, x)

    return lambda compile_: compile_(step)(X)


SOURCES = [value for name, value in sorted(globals().items()) if name.startswith("through_")]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("backend", "carrier"), CARRIED)
@pytest.mark.parametrize("source", SOURCES, ids=lambda f: f.__name__)
def test_sources(source, backend, carrier, mode):
    with MODES[mode]():
        want_buffer, got_buffer = fresh(), fresh()
        want = source(*plains(want_buffer))(lambda f: f)
        make = windows if carrier == "wrapped" else plains
        got = source(*make(got_buffer))(BACKENDS[backend])
        assert torch.equal(want_buffer, got_buffer)
        assert all(same(x, y) for x, y in zip(want, got, strict=True))
        want[0].fill_(1)
        got[0].fill_(1)
        assert torch.equal(want_buffer, got_buffer)


def test_caches_rebound_on_a_module_between_calls():
    layer = Layer(*windows(fresh()))
    compiled = BACKENDS["ours"](layer)
    for seed in range(3):
        want_buffer, buffer = fresh(seed), fresh(seed)
        layer.a, layer.caches[0]["b"] = windows(buffer)
        compiled(X)
        update(*plains(want_buffer), X)
        assert torch.equal(want_buffer, buffer)


@pytest.mark.parametrize("backend", BACKENDS)
def test_windows_made_inside(backend):
    """A storage is one input, however many windows are taken in the function."""

    def step(storage, x):
        a = storage.window(torch.float16, (8, 8))
        b = storage.window(torch.float32, (8, 4), byte_offset=128)
        return update(a, b, x)

    want_buffer, storage = fresh(), ByteStorage.adopt(fresh())
    want = update(*plains(want_buffer), X)
    compiled = BACKENDS[backend](step, fullgraph=True)
    got = compiled(storage, X)
    assert torch.equal(want_buffer, storage.buffer)
    assert all(same(x, y) for x, y in zip(want, got, strict=True))
    want[0].fill_(1)
    got[0].fill_(1)
    assert torch.equal(want_buffer, storage.buffer)
    other = ByteStorage.adopt(fresh(1))
    compiled(other, X)
    expected = fresh(1)
    update(*plains(expected), X)
    assert torch.equal(expected, other.buffer)


@pytest.mark.parametrize(
    ("backend", "carrier"), [*CARRIED, ("stock", "inside"), ("ours", "inside")]
)
def test_graph_break_with_a_window_alive_across_it(backend, carrier):
    def step(a, b):
        row = a[1]
        row.add_(1)
        bits = b.view(torch.int32)
        torch._dynamo.graph_break()
        row.mul_(2)
        bits[2] = 7
        torch._dynamo.graph_break()
        a[2] = row
        return row, bits

    want_buffer, buffer = fresh(), fresh()
    want = step(*plains(want_buffer))
    if carrier == "inside":
        storage = ByteStorage.adopt(buffer)

        def from_storage():
            return step(
                storage.window(torch.float16, (8, 8)),
                storage.window(torch.float32, (8, 4), byte_offset=128),
            )

        got = BACKENDS[backend](from_storage)()
    else:
        make = windows if carrier == "wrapped" else plains
        got = BACKENDS[backend](step)(*make(buffer))
    assert torch.equal(want_buffer, buffer)
    for left, right in zip(want, got, strict=True):
        left.fill_(3)
        right.fill_(3)
        assert torch.equal(want_buffer, buffer)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_disabled_region_writes_the_buffer(backend):
    @torch.compiler.disable
    def outside(a):
        a[3].fill_(5)

    def step(a, b):
        a.add_(1)
        outside(a)
        b.add_(1)
        return a[3] + 1

    want_buffer, buffer = fresh(), fresh()
    want, got = step(*plains(want_buffer)), BACKENDS[backend](step)(*windows(buffer))
    assert same(want, got)
    assert torch.equal(want_buffer, buffer)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_of_another_input(backend):
    def step(a, b, w):
        with torch.no_grad():
            a[1] = 2
        out = (w * b.nan_to_num(1.0, 2.0, 3.0).clamp(-3, 3)).tanh().sum() * a[1, 0].float()
        with torch.no_grad():
            b.mul_(0)
        return out

    grads = []
    for compile_, make in ((lambda f: f, plains), (BACKENDS[backend], windows)):
        buffer = fresh()
        weight = torch.linspace(-1, 1, 32).view(8, 4).requires_grad_()
        compile_(step)(*make(buffer), weight).backward()
        grads.append((buffer, weight.grad))
    assert torch.equal(grads[0][0], grads[1][0])
    torch.testing.assert_close(grads[0][1], grads[1][1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_value_that_requires_grad_is_refused(backend):
    def step(a, w):
        a.copy_(w)
        return a.sum()

    buffer = fresh()
    before = buffer.clone()
    weight = torch.ones(8, 8, dtype=torch.float16, requires_grad=True)
    with pytest.raises(Exception, match="cannot be written into a window"):
        BACKENDS[backend](step)(AliasTensor(buffer, A), weight)
    assert torch.equal(before, buffer)


@pytest.mark.parametrize("backend", BACKENDS)
def test_automatic_dynamic_shapes_of_other_inputs(backend):
    def step(a, b, slots, x):
        a[slots] = x
        b[slots] += 1
        return a[slots] * 2, x.shape[0]

    inner = "aot_eager" if backend == "stock" else aliasstorage.backend("aot_eager")
    counter = CompileCounterWithBackend(inner)
    compiled = torch.compile(step, backend=counter)
    for count in (3, 2, 4, 5, 6, 7):
        want_buffer, buffer = fresh(count), fresh(count)
        slots, x = torch.arange(count), torch.randn(count, 8).half()
        want, got = step(*plains(want_buffer), slots, x), compiled(*windows(buffer), slots, x)
        assert same(want[0], got[0])
        assert got[1] == count
        assert torch.equal(want_buffer, buffer)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", [True, None])
def test_windows_of_changing_size(backend, dynamic):
    """The number of blocks of a cache changes from call to call."""

    def step(a, b):
        a[1:].add_(1)
        b.mul_(2)
        return a[2:], b + 1

    compiled = BACKENDS[backend](step, dynamic=dynamic)
    for rows in (4, 8, 6, 5):
        wanted, got = [], []
        for results, make in ((wanted, lambda b, w: w.regenerate(b)), (got, AliasTensor)):
            buffer = torch.arange(rows * 32, dtype=torch.int64).to(torch.uint8)
            a = make(buffer, Window(torch.float16, (rows, 8)))
            b = make(buffer, Window(torch.float32, (rows, 4), byte_offset=rows * 16))
            run = step if results is wanted else compiled
            results.extend([*run(a, b), buffer])
        for left, right in zip(wanted, got, strict=True):
            assert left.shape == right.shape
            assert all(type(extent) is int for extent in right.shape)
            assert same(left, right)
        wanted[0].fill_(1)
        got[0].fill_(1)
        assert torch.equal(wanted[-1], got[-1])


@pytest.mark.parametrize("bufferize", [True, False])
def test_a_lone_plain_input_that_shows_elements_twice(bufferize):
    """Stock AOTAutograd cannot write such an input back."""

    def step(x):
        x[:1].add_(2)
        x.split(2)[-1][..., -1:].fill_(7)
        return x + 1, x[0]

    compiled = torch.compile(step, backend=aliasstorage.backend("aot_eager", bufferize=bufferize))
    for make in (lambda b: b[:2].expand(3, 2), lambda b: b.unfold(0, 4, 2)):
        want, got = torch.arange(8.0), torch.arange(8.0)
        for left, right in zip(step(make(want)), compiled(make(got)), strict=True):
            assert torch.equal(left, right)
        assert torch.equal(want, got)


VIEWS_AS_INPUTS = {
    "narrow": lambda t: t.narrow(0, 2, 4),
    "split": lambda t: t.split(4)[1],
    "select": lambda t: t[3],
    "expand": lambda t: t.unsqueeze(0).expand(2, 8, 8),
    "two_dimensional_slice": lambda t: t[1:5, 2:6],
    "transposed": lambda t: t.t(),
    "another_dtype": lambda t: t.view(torch.int16),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", VIEWS_AS_INPUTS)
def test_views_of_windows_as_inputs(name, backend, dynamic, mode):
    """A view taken in eager mode is an input beside the window it was taken of."""

    def step(view, whole, other):
        whole.add_(1)
        other[1] = 2
        return view + 1, view

    with MODES[mode]():
        results = []
        for compile_, make in ((lambda f: f, plains), (None, windows)):
            buffer = fresh()
            a, b = make(buffer)
            compiled = compile_ or (lambda f: BACKENDS[backend](f, dynamic=dynamic))
            results.append((compiled(step)(VIEWS_AS_INPUTS[name](a), a, b), buffer))
        (want, want_buffer), (got, buffer) = results
        assert torch.equal(want_buffer, buffer)
        assert all(same(x, y) for x, y in zip(want, got, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_storage_allocated_in_inference_mode(backend):
    with torch.inference_mode():
        raw = fresh()
        wrapped = aliasstorage.wrap(plains(raw))
    want_buffer = fresh()
    with torch.no_grad():
        want = update(*plains(want_buffer), X)
        got = BACKENDS[backend](update)(*wrapped, X)
    assert all(same(x, y) for x, y in zip(want, got, strict=True))
    assert torch.equal(want_buffer, wrapped[0].buffer)
