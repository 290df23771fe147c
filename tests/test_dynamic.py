"""Sizes that change from call to call: of parts of a window, of windows, and of their storage."""

import pytest
import torch

import aliasstorage
from aliasstorage import Window
from tests.oracle import buffer_reports


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


# The offset of a wrapped window is static: see test_offsets_of_wrapped_windows.
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    ("layout", "carrier"),
    [(overlapping, "plain"), (overlapping, "wrapped"), (side_by_side, "plain")],
)
@pytest.mark.parametrize("bufferize", [True, False])
@pytest.mark.parametrize("step", [slices, rows_by_number])
def test_sizes_that_change(layout, step, bufferize, carrier, inner):
    """One compilation for the first sizes, one more for each kind of size that changes."""
    compiles = []
    backend = aliasstorage.backend(inner=inner, bufferize=bufferize)

    def counting(module, inputs):
        compiles.append(1)
        return backend(module, inputs)

    compiled = torch.compile(step, backend=counting)
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
    assert len(compiles) <= 3
    assert not any(report.reason for report in reports)
    assert reports or not bufferize


def test_offsets_of_wrapped_windows():
    """A wrapped window whose offset changes is compiled for each offset, once."""
    compiles = []
    backend = aliasstorage.backend(inner="aot_eager")

    def counting(module, inputs):
        compiles.append(1)
        return backend(module, inputs)

    compiled = torch.compile(slices, backend=counting)
    for rows in (8, 12, 8, 12, 8):
        want, got = random_bytes(rows * 64, 1), random_bytes(rows * 64, 1)
        x = torch.ones(rows, 8).half()
        slices(*side_by_side(want, rows), 3, x)
        compiled(*aliasstorage.wrap(side_by_side(got, rows)), 3, x)
        assert torch.equal(want, got), rows
    assert len(compiles) == 2


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_mark_dynamic_and_dynamic_true(inner):
    def step(a, b, slots):
        a[slots] = 1
        b[slots] += 2
        return a[slots] * 2, b.sum()

    for options, mark in (({"dynamic": True}, False), ({}, True)):
        torch._dynamo.reset()
        compiles = []
        backend = aliasstorage.backend(inner=inner)

        def counting(module, inputs, compiles=compiles, backend=backend):
            compiles.append(1)
            return backend(module, inputs)

        compiled = torch.compile(step, backend=counting, **options)
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
        assert len(compiles) == 1


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
