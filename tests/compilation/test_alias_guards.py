"""Calls of one compiled function whose arguments alias each other in another way."""

from __future__ import annotations

import threading

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import aliasstorage
from aliasstorage import AliasTensor, Window, errors
from aliasstorage._compat import storage_address
from aliasstorage.compilation.alias_guards import parameter_check
from tests.support.two_windows import BACKENDS, OVER_A, A, X, fresh, plains, same, update, windows


def read_after_write(a, b):
    a.add_(1)
    return b + 1, b


def patterns():
    """Argument lists by pattern: the same shapes, aliased differently."""
    shift = Window(torch.int32, (32,), byte_offset=64)
    one = Window(torch.float16, (8, 8))
    return {
        "shared": lambda x, y: (one.regenerate(x), OVER_A.regenerate(x)),
        "distinct": lambda x, y: (one.regenerate(x), OVER_A.regenerate(y)),
        "shifted": lambda x, y: (one.regenerate(x), shift.regenerate(x)),
        "both shifted": lambda x, y: (
            Window(torch.float16, (8, 8), byte_offset=64).regenerate(x),
            shift.regenerate(x),
        ),
    }


ORDERS = [
    ("distinct", "shared", "distinct", "shared"),
    ("shared", "distinct", "shifted", "shared", "shifted"),
    ("shifted", "both shifted", "distinct", "shared", "both shifted", "shifted"),
]


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("carrier", ["plain", "wrapped", "mixed"])
def test_alias_pattern_changes_between_calls(order, carrier):
    """Each new pattern compiles once, and a known one never again."""
    counter = CompileCounterWithBackend(aliasstorage.backend("aot_eager"))
    compiled = torch.compile(read_after_write, backend=counter)
    seen = set()
    for number, name in enumerate(order):
        sides = []
        for run in (read_after_write, compiled):
            x, y = fresh(number), fresh(number + 100)
            args = patterns()[name](x, y)
            if run is compiled and carrier != "plain":
                args = (
                    aliasstorage.wrap(args)
                    if carrier == "wrapped"
                    else (
                        aliasstorage.wrap(args[0]),
                        args[1],
                    )
                )
            sides.append((x, y, run(*args)))
        (x, y, want), (p, q, got) = sides
        assert torch.equal(x, p), (name, number)
        assert torch.equal(y, q), (name, number)
        assert same(want[0], got[0]), (name, number)
        seen.add(name)
        assert counter.frame_count <= len(seen), (name, number)


@pytest.mark.parametrize("carrier", ["plain", "wrapped"])
def test_alias_pattern_is_checked_where_an_engine_drops_all_guards(carrier):
    """Engines that drop Dynamo's guards still get right results for plain aliases."""
    compiled = torch.compile(
        read_after_write,
        backend=aliasstorage.backend(inner="aot_eager"),
        options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe},
    )
    # Of windows, Dynamo's guards are the ones that say which share a buffer.
    names = ORDERS[2] + ORDERS[1] if carrier == "plain" else ["distinct", "distinct"]
    for number, name in enumerate(names):
        x, y, p, q = fresh(number), fresh(9), fresh(number), fresh(9)
        want = read_after_write(*patterns()[name](x, y))
        args = patterns()[name](p, q)
        got = compiled(*(aliasstorage.wrap(args) if carrier == "wrapped" else args))
        assert torch.equal(x, p), (name, number)
        assert torch.equal(y, q), (name, number)
        assert same(want[0], got[0]), (name, number)


def test_a_second_alias_pattern_runs_eagerly_once_and_is_then_compiled():
    counter = CompileCounterWithBackend(aliasstorage.backend("aot_eager"))
    compiled = torch.compile(read_after_write, backend=counter)
    made = []
    for name in ("distinct", "shared", "shared", "distinct", "shared", "distinct"):
        compiled(*patterns()[name](fresh(), fresh(1)))
        made.append(counter.frame_count)
    assert made == [1, 1, 2, 2, 2, 2]


def test_a_parameter_that_is_pointed_at_a_cache():
    """Parameters are compared with the last call's; one that moved is looked at."""
    layer = torch.nn.Linear(8, 4, bias=False).requires_grad_(False)

    def step(a, b, x):
        a.add_(1)
        b.mul_(2)
        return layer(x).sum() + layer.weight[0, 0]

    compiled = torch.compile(step, backend=aliasstorage.backend(inner="aot_eager"))
    x = torch.ones(1, 8)
    with torch.no_grad():
        for kind in ("own", "own", "cache", "other", "cache", "own"):
            outcomes = []
            for run in (step, compiled):
                buffer = torch.zeros(256, dtype=torch.uint8)
                a, b = buffer[:128].view(torch.float16), buffer[128:].view(torch.float32)
                weight = {"own": torch.ones(4, 8), "cache": b.view(4, 8)}.get(kind)
                layer.weight.data = torch.full((4, 8), 3.0) if weight is None else weight
                outcomes.append((run(a, b, x), buffer))
            (want, want_buffer), (got, got_buffer) = outcomes
            assert torch.equal(want, got), kind
            assert torch.equal(want_buffer, got_buffer), kind


LONE = {
    "a part": Window(torch.float32, (4, 4)),
    "strided": Window(torch.float16, (4, 4), (8, 1)),
    "one element for many": Window(torch.float32, (4, 4), (1, 0)),
}


def double(a):
    a.mul_(2)
    return a[1:]


def add_beside(a, x):
    a.add_(x)
    return a * 2


def read(a, x):
    return a + x, a[0]


@pytest.mark.parametrize("step", [double, add_beside, read])
@pytest.mark.parametrize("name", LONE)
@pytest.mark.parametrize("carrier", ["plain", "parameter", "wrapped"])
@pytest.mark.parametrize("length", ["static", "dynamic"])
def test_a_window_alone_in_its_storage_starts_anywhere(step, name, carrier, length):
    """As a cache that a function is given one layer or one page of."""
    if name.startswith("one") and step is not read:
        pytest.skip("eager mode refuses to write one element for many")
    carry = {
        "plain": lambda a: a,
        "parameter": lambda a: torch.nn.Parameter(a, requires_grad=False),
        "wrapped": aliasstorage.wrap,
    }[carrier]
    compiled = torch.compile(step, backend=aliasstorage.backend("aot_eager"))
    for number, offset in enumerate([64, 0, 128, 64, 32, 100, 4]):
        buffers, results = [], []
        for run in (step, compiled):
            raw = fresh(number)
            if length == "dynamic" and number % 2:
                raw = torch.cat([raw, raw])
            a = Window(LONE[name].dtype, LONE[name].size, LONE[name].stride, offset).regenerate(raw)
            x = () if step is double else (torch.ones((), dtype=a.dtype),)
            results.append(run(a if run is step else carry(a), *x))
            buffers.append(raw)
        for want, got in zip(*[r if isinstance(r, tuple) else (r,) for r in results], strict=True):
            assert same(want, got), offset
            for result in (want, got):
                result[..., 0].fill_(3)
        assert torch.equal(*buffers), offset


def test_alias_pattern_changes_on_the_stock_path():
    compiled = torch.compile(read_after_write, backend="aot_eager")
    for number, name in enumerate(ORDERS[1] + ORDERS[2]):
        x, y, p, q = fresh(number), fresh(9), fresh(number), fresh(9)
        want = read_after_write(*patterns()[name](x, y))
        got = compiled(*aliasstorage.wrap(patterns()[name](p, q)))
        assert torch.equal(x, p)
        assert torch.equal(y, q)
        assert same(want[0], got[0])


def test_stock_refuses_windows_beside_plain_aliases():
    buffer = fresh()
    before = buffer.clone()
    with pytest.raises(Exception, match="Windows and plain tensors over one storage") as caught:
        torch.compile(read_after_write, backend="aot_eager")(
            AliasTensor(buffer, A), OVER_A.regenerate(buffer)
        )
    assert isinstance(caught.value.inner_exception, errors.MixedAliasError)  # type: ignore[attr-defined]
    assert torch.equal(before, buffer)


def test_a_buffer_reallocated_at_the_same_address():
    compiled = BACKENDS["ours"](update)
    for seed in range(20):
        want_buffer, buffer = fresh(seed), fresh(seed)
        want, got = update(*plains(want_buffer), X), compiled(*plains(buffer), X)
        assert torch.equal(want_buffer, buffer)
        assert same(want[1], got[1])
        del buffer, got


def test_same_tensor_twice_then_two_tensors():
    compiled = BACKENDS["ours"](read_after_write)
    for pair in ((A, A), (A, OVER_A), (A, A)):
        want_buffer, buffer = fresh(), fresh()
        left = [w.regenerate(want_buffer) for w in pair]
        right = [AliasTensor(buffer, w) for w in pair]
        if pair == (A, A):
            right[1] = right[0]
        assert same(read_after_write(*left)[0], compiled(*right)[0])
        assert torch.equal(want_buffer, buffer)


def test_two_threads_on_different_buffers():
    compiled = BACKENDS["ours"](update)
    compiled(*windows(fresh()), X)
    failures = []

    def work(seed):
        want_buffer, buffer = fresh(seed), fresh(seed)
        for _ in range(50):
            update(*plains(want_buffer), X)
            compiled(*windows(buffer), X)
        if not torch.equal(want_buffer, buffer):
            failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("bufferize", [True, False])
def test_plain_views_of_a_longer_storage_later(bufferize):
    """The length of a storage is part of the alias pattern."""
    compiled = torch.compile(
        read_after_write, backend=aliasstorage.backend(inner="aot_eager", bufferize=bufferize)
    )
    with torch.inference_mode():
        for nbytes in (256, 512, 256, 128 + 128):
            want_buffer, buffer = (torch.arange(nbytes).to(torch.uint8) for _ in range(2))
            want = read_after_write(A.regenerate(want_buffer), OVER_A.regenerate(want_buffer))
            got = compiled(A.regenerate(buffer), OVER_A.regenerate(buffer))
            assert torch.equal(want_buffer, buffer)
            assert same(want[0], got[0])


def test_the_offset_of_a_window_is_guarded():
    """Another offset compiles anew, a known one does not: Note [What is guarded of a window]."""
    compiles = []

    def inner(module, inputs):
        compiles.append(module)
        return module

    def step(window, other):
        other.add_(1)
        return window + 10

    compiled = torch.compile(step, backend=aliasstorage.backend(inner))
    for offset in (0, 16, 0, 16, 32):
        raw = torch.zeros(128, dtype=torch.uint8)
        views = raw[offset : offset + 16].view(torch.int32), raw[64:].view(torch.int16)
        before = len(compiles)
        got = compiled(*aliasstorage.wrap(views))
        assert got.tolist() == [10] * 4
        assert raw[64:66].tolist() == [1, 0]
        assert len(compiles) - before <= 1
    assert len(compiles) == 3


def test_parameters_on_a_device_without_data_pointers():
    buffer = torch.empty(32, dtype=torch.uint8, device="meta")
    cache = buffer.view(torch.float32)
    parameters = [torch.nn.Parameter(torch.empty(4, device="meta")) for _ in range(2)]
    unshared = parameter_check()
    keys = (storage_address(cache),)
    assert unshared(parameters, keys, (buffer,))
    assert unshared(parameters, keys, (buffer,))
    parameters[1].data = cache[4:]
    assert not unshared(parameters, keys, (buffer,))
    parameters[1].data = parameters[0].data
    assert not unshared(parameters, keys, (buffer,))
