"""Sizes that change from call to call: of parts of a window, of windows, and of their storage."""

import itertools

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.testing import CompileCounterWithBackend

import aliasstorage
from aliasstorage import Window
from tests.support.oracle import buffer_reports


def random_bytes(nbytes, seed):
    """Return random bytes of which no two make a NaN: Inductor may compute others."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 0x3F, (nbytes,), dtype=torch.uint8, generator=generator)


def slices(a, b, n, x):
    a[:n].copy_(x[:n])
    a[n:] += 1
    b[:n, 2:] = 3
    kept = b[n - 1 :].clone()
    b.mul_(2)
    return kept, b[:n], a[:n].flatten()


def rows_by_number(a, b, n, x):
    a[n] = x[n]
    b[n - 1 : n + 1].fill_(n)
    return a[n - 1] + 1, b[n]


def overlapping(buffer, rows):
    return (
        Window(torch.float16, (rows, 8)).regenerate(buffer),
        Window(torch.float32, (rows, 4), (8, 1), byte_offset=8).regenerate(buffer),
    )


def side_by_side(buffer, rows):
    """The second window starts where the first one ends: its offset changes as well."""
    return (
        Window(torch.float16, (rows, 8)).regenerate(buffer),
        Window(torch.float32, (rows, 4), byte_offset=rows * 16).regenerate(buffer),
    )


SIZES = [(3, 8), (4, 8), (5, 8), (2, 8), (6, 12), (5, 16), (4, 10), (3, 8)]


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("carrier", ["plain", "wrapped"])
@pytest.mark.parametrize("layout", [overlapping, side_by_side])
@pytest.mark.parametrize("bufferize", [True, False])
@pytest.mark.parametrize("step", [slices, rows_by_number])
def test_sizes_that_change(layout, step, bufferize, carrier, inner):
    """One compilation for the first sizes, one more for each kind of size that changes."""
    counter = CompileCounterWithBackend(aliasstorage.backend(inner, bufferize=bufferize))
    compiled = torch.compile(step, backend=counter)
    with buffer_reports() as reports:
        for n, rows in SIZES:
            want, got = random_bytes(rows * 64, n), random_bytes(rows * 64, n)
            x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(n)).half()
            args = layout(got, rows)
            args = aliasstorage.wrap(args) if carrier == "wrapped" else args
            expected, results = step(*layout(want, rows), n, x), compiled(*args, n, x)
            for left, right in zip(expected, results, strict=True):
                assert torch.equal(left, aliasstorage.unwrap(right)), (n, rows)
                left.fill_(1)
                right.fill_(1)
            assert torch.equal(want, got), (n, rows)
    assert counter.frame_count <= 3
    assert not any(report.reason for report in reports)
    assert reports or not bufferize


def test_offsets_of_windows_of_fixed_size():
    """A graph for each offset."""
    counter = CompileCounterWithBackend(aliasstorage.backend("aot_eager"))
    compiled = torch.compile(slices, backend=counter)
    for offset in (64, 96, 64, 96, 64):
        want, got = random_bytes(256, 1), random_bytes(256, 1)
        x = torch.ones(4, 8).half()
        windows = Window(torch.float16, (4, 8)), Window(torch.float32, (4, 4), byte_offset=offset)
        slices(*(window.regenerate(want) for window in windows), 3, x)
        compiled(*(aliasstorage.AliasTensor(got, window) for window in windows), 3, x)
        assert torch.equal(want, got), offset
    assert counter.frame_count == 2


def unused_and_nested(caches, x):
    """One window of a layer is written, another one is only passed."""
    for layer in caches:
        layer["keys"][1:] += x
    return caches[0]["keys"].sum(), caches[1]["keys"][:2]


@pytest.mark.parametrize("stock_first", [False, True])
@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.matrix)])
def test_windows_that_move_and_are_not_used(inner, stock_first):
    """They are compiled for once, also where the function was compiled by a stock backend."""
    counter = CompileCounterWithBackend(aliasstorage.backend(inner))
    sizes = (4, 6, 9, 5, 12)
    others = [torch.compile(unused_and_nested, backend=inner)] if stock_first else []
    for compiled in [*others, torch.compile(unused_and_nested, backend=counter)]:
        for rows in sizes:
            want, got = (aliasstorage.ByteStorage.zeros(rows * 64) for _ in range(2))
            want.buffer.copy_(random_bytes(rows * 64, rows))
            got.buffer.copy_(want.buffer)
            caches = [
                [
                    {
                        "unused": storage.window(torch.int8, (rows, 4), byte_offset=32 * rows * i),
                        "keys": storage.window(
                            torch.float32, (rows, 4), byte_offset=32 * rows * i + 16 * rows
                        ),
                    }
                    for i in range(2)
                ]
                for storage in (want, got)
            ]
            expected, results = unused_and_nested(caches[0], 1), compiled(caches[1], 1)
            torch.testing.assert_close(expected[0], results[0])
            results[1].fill_(2)
            expected[1].fill_(2)
            assert torch.equal(want.buffer, got.buffer), rows
    assert counter.frame_count == 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_views_of_windows_of_changing_size_on_the_stock_path(backend):
    """The offset of what is returned is an expression of sizes."""

    def step(a):
        a.add_(1)
        return a.split(2)[-1], a[a.shape[0] - 1]

    compiled = torch.compile(step, backend=backend)
    for rows in (4, 6, 8, 10):
        want, got = random_bytes(rows * 20, rows), random_bytes(rows * 20, rows)
        window = Window(torch.int16, (rows, 2), (2 * rows % 7 + 2, 1), byte_offset=2 * (rows % 5))
        expected = step(window.regenerate(want))
        results = compiled(aliasstorage.AliasTensor(got, window))
        for left, right in zip(expected, results, strict=True):
            assert torch.equal(left, aliasstorage.unwrap(right)), rows
            left.fill_(5)
            right.fill_(5)
        assert torch.equal(want, got), rows


def test_a_backend_that_chooses_another_one():
    """A window that moves reaches stock AOTAutograd: refused once, then a graph for each offset."""
    backends = [aliasstorage.backend(inner="aot_eager"), *[lookup_backend("aot_eager")] * 4]
    compiled = torch.compile(slices, backend=lambda *graph: backends.pop(0)(*graph))
    for rows in (4, 6, 8, 9):
        want, got = random_bytes(rows * 64, rows), random_bytes(rows * 64, rows)
        windows = aliasstorage.wrap(side_by_side(got, rows))
        x = torch.ones(rows, 8).half()
        if rows == 6:
            with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="reached stock"):
                compiled(*windows, 3, x)
        else:
            slices(*side_by_side(want, rows), 3, x)
            compiled(*windows, 3, x)
        assert torch.equal(want, got), rows


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_mark_dynamic_and_dynamic_true(inner):
    def step(a, b, slots):
        a[slots] = 1
        b[slots] += 2
        return a[slots] * 2, b.sum()

    for options, mark in (({"dynamic": True}, False), ({}, True)):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(aliasstorage.backend(inner))
        compiled = torch.compile(step, backend=counter, **options)
        for rows in (10, 12, 18, 9):
            want, got = random_bytes(rows * 64, rows), random_bytes(rows * 64, rows)
            slots = torch.arange(rows // 2)
            args = overlapping(got, rows)
            if mark:
                for tensor in args:
                    torch._dynamo.mark_dynamic(tensor, 0)
                torch._dynamo.mark_dynamic(slots, 0)
            expected, results = step(*overlapping(want, rows), slots), compiled(*args, slots)
            assert torch.equal(expected[0], results[0])
            torch.testing.assert_close(expected[1], results[1])
            assert torch.equal(want, got), rows
        assert counter.frame_count == 1


def test_a_window_taken_inside_with_a_size_that_changes():
    storage = aliasstorage.ByteStorage.zeros(4096)

    def step(n, x):
        keys = storage.window(torch.float16, (n, 8))
        state = storage.window(torch.float32, (n, 4), byte_offset=16 * n)
        keys[1:].add_(x)
        state.fill_(n)
        return keys.sum() + state.sum()

    compiled = torch.compile(step, backend="aliasstorage", options={"inner": "aot_eager"})
    with buffer_reports() as reports:
        for n in (4, 8, 12, 5):
            before = storage.buffer.clone()
            result = compiled(n, 1.0)
            after = storage.buffer.clone()
            storage.buffer.copy_(before)
            assert torch.equal(step(n, 1.0), result)
            assert torch.equal(storage.buffer, after)
    assert not any(report.reason for report in reports)
    assert len(reports) == 2


def copies(a, b, x):
    """Copies of every kind, into windows and parts of them."""
    kept = b.clone()
    b.copy_(a[:1].sum().to(torch.int64) + kept)
    a[1:3] = x[1:3]
    a[-1].fill_(kept[0])
    b[::2] = x[:1]
    torch._foreach_copy_([a[:2]], [x[:2]])
    a.index_copy_(0, torch.tensor([1]), x[3:4].to(a.dtype))
    return kept


LENGTHS = {
    "one": [(5, 1)],
    "changing": [(5, 1), (6, 1), (7, 1), (9, 2), (17, 3), (8, 2)],
}


@pytest.mark.parametrize(
    ("inner", "bufferize"),
    [
        ("aot_eager", True),
        ("aot_eager", False),
        pytest.param("inductor", True, marks=pytest.mark.matrix),
    ],
)
@pytest.mark.parametrize("carrier", ["plain", "wrapped"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_storages_that_end_inside_an_element(lengths, carrier, bufferize, inner):
    """Storages, and what is shown of them, may be no whole number of elements long."""
    counter = CompileCounterWithBackend(aliasstorage.backend(inner, bufferize=bufferize))
    compiled = torch.compile(copies, backend=counter)
    with buffer_reports() as reports:
        for more, (n, m) in itertools.product((0, 3), LENGTHS[lengths]):
            nbytes = max(2 * n, 8 * m) + more
            want, got = random_bytes(nbytes, n), random_bytes(nbytes, n)
            x = torch.arange(n, dtype=torch.int16)
            windows = [Window(torch.int16, (n,)), Window(torch.int64, (m,))]
            args = [window.regenerate(got) for window in windows]
            args = aliasstorage.wrap(args) if carrier == "wrapped" else args
            expected = copies(*(window.regenerate(want) for window in windows), x)
            assert torch.equal(compiled(*args, x), expected)
            assert torch.equal(want, got), (nbytes, n, m)
    assert all(report.reason is None for report in reports)
    if carrier == "plain":
        assert counter.frame_count <= 5, "more than one for each kind of length"


def empty_parts(a, b):
    a[1:].zero_()
    b[:0] += 1
    b[a.shape[0] :].fill_(3)
    return a[2:], b.flatten()


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("carrier", ["plain", "wrapped"])
def test_parts_that_are_empty_and_strides_that_change(carrier, inner):
    compiled = torch.compile(empty_parts, backend=aliasstorage.backend(inner=inner))
    for rows, step in [(1, 6), (1, 7), (1, 9), (2, 7), (3, 8), (1, 5)]:
        want, got = random_bytes(256, step), random_bytes(256, step)
        windows = [
            Window(torch.int16, (rows, 2, 2), (step, 2, 1)),
            Window(torch.int64, (rows, 4), (step, 1), byte_offset=8),
        ]
        args = [window.regenerate(got) for window in windows]
        args = aliasstorage.wrap(args) if carrier == "wrapped" else args
        expected = empty_parts(*(window.regenerate(want) for window in windows))
        for left, right in zip(expected, compiled(*args), strict=True):
            assert torch.equal(left, aliasstorage.unwrap(right)), (rows, step)
        assert torch.equal(want, got), (rows, step)


def one_byte_elements(*views):
    a = views[0]
    a[1:].add_(1)
    views[-1].mul_(2)
    return torch.zeros(a.shape[0]), a.new_ones(a.shape), a + 1, (a == a).zero_()


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dtypes", [(torch.int8,), (torch.uint8,), (torch.uint8, torch.int8)])
def test_sizes_are_not_told_by_the_length_of_a_storage(dtypes, inner):
    """What is shown of a longer storage may be as long as a size: of one-byte elements in a row."""
    compiled = torch.compile(one_byte_elements, backend=aliasstorage.backend(inner=inner))
    for n in (2, 4, 5, 6, 3):
        want, got = random_bytes(64, n), random_bytes(64, n)
        expected = one_byte_elements(*(want[:n].view(dtype) for dtype in dtypes))
        results = compiled(*(got[:n].view(dtype) for dtype in dtypes))
        for left, right in zip(expected, results, strict=True):
            assert torch.equal(left, right), n
        assert torch.equal(want, got), n
