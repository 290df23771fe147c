"""What a program does not write keeps every bit: NaN payloads, odd bools, negative zeros."""

import contextlib
import warnings

import pytest
import torch

import aliasstorage
from aliasstorage import Window

ROWS = torch.tensor([2, 0, 2])
COLUMNS = torch.tensor([[1, 0, 2, 1]])

DTYPES = [
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
]

LAYOUTS = {
    "rows": ((5, 4), (4, 1)),
    "transposed": ((5, 4), (1, 5)),
    "every other": ((5, 4), (9, 2)),
}


def values(window, *shape):
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) % 3).to(window.dtype)


# Name -> (a write, the rows and columns that it may reach).
WRITES = {
    "select fill": (lambda w: w[1].fill_(1), ([1], slice(None))),
    "slice copy": (lambda w: w[1:3].copy_(values(w, 2, 4)), ([1, 2], slice(None))),
    "column zero": (lambda w: w[:, 2].zero_(), (slice(None), [2])),
    "index_put": (lambda w: w.index_put_((ROWS[:2],), values(w, 2, 4)), ([0, 2], slice(None))),
    "index_put accumulate": (
        lambda w: w.index_put_((ROWS,), values(w, 3, 4), accumulate=True),
        ([0, 2], slice(None)),
    ),
    "index_put pairs accumulate": (
        lambda w: w.index_put_((ROWS, ROWS), values(w, 3), accumulate=True),
        ([0, 2], [0, 2]),
    ),
    "index_copy": (lambda w: w.index_copy_(0, ROWS[:2], values(w, 2, 4)), ([0, 2], slice(None))),
    "index_fill": (lambda w: w.index_fill_(1, ROWS, 1), (slice(None), [0, 2])),
    "index_add": (lambda w: w.index_add_(0, ROWS, values(w, 3, 4)), ([0, 2], slice(None))),
    "index_add columns": (
        lambda w: w.index_add_(1, ROWS, values(w, 5, 3), alpha=1),
        (slice(None), [0, 2]),
    ),
    "index_reduce": (
        lambda w: w.index_reduce_(0, ROWS, values(w, 3, 4), "prod"),
        ([0, 2], slice(None)),
    ),
    "scatter": (lambda w: w.scatter_(0, COLUMNS, values(w, 1, 4)), ([0, 1, 2], slice(None))),
    "scatter value": (lambda w: w.scatter_(0, COLUMNS, 1), ([0, 1, 2], slice(None))),
    "scatter multiply": (
        lambda w: w.scatter_(0, COLUMNS, 2, reduce="multiply"),
        ([0, 1, 2], slice(None)),
    ),
    "scatter_add": (
        lambda w: w.scatter_add_(0, COLUMNS, values(w, 1, 4)),
        ([0, 1, 2], slice(None)),
    ),
    "scatter_reduce": (
        lambda w: w.scatter_reduce_(0, COLUMNS, values(w, 1, 4), "amax"),
        ([0, 1, 2], slice(None)),
    ),
    "masked_fill": (
        lambda w: w.masked_fill_(torch.arange(20).reshape(5, 4) < 3, 1),
        ([0], slice(None)),
    ),
    "masked_scatter": (
        lambda w: w.masked_scatter_(torch.arange(20).reshape(5, 4) < 3, values(w, 5, 4)),
        ([0], slice(None)),
    ),
    "add to a row": (lambda w: w[3].add_(1), ([3], slice(None))),
    "out of a row": (lambda w: torch.add(w[3], 1, out=w[4]), ([4], slice(None))),
    "foreach": (lambda w: torch._foreach_copy_([w[3]], [values(w, 4)]), ([3], slice(None))),
}

PATHS = {
    "stock": ({"backend": "aot_eager"}, "wrapped"),
    "byte graph": (
        {"backend": "aliasstorage", "options": {"inner": "aot_eager", "bufferize": False}},
        "plain",
    ),
    "in place": ({"backend": "aliasstorage", "options": {"inner": "aot_eager"}}, "wrapped"),
}


def special_bytes(dtype: torch.dtype, nbytes: int) -> torch.Tensor:
    """Return random bytes; of a float dtype, NaNs, quiet and signalling, and negative zeros."""
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.manual_seed(7))
    if dtype.is_floating_point or dtype.is_complex:
        part = torch.float32 if dtype.is_complex else dtype
        special = float("nan") if dtype == torch.float8_e4m3fn else float("inf")
        exponent = torch.full((1,), special).to(part).view(torch.uint8)
        elements = raw.view(-1, part.itemsize)
        elements |= exponent
        elements[:, 0] |= 1
        elements[::5] = torch.full((1,), -0.0).to(part).view(torch.uint8)
    return raw


def writes_of(dtype: torch.dtype):
    """Return the names of the writes that eager mode has for a dtype."""
    for name, (write, _) in WRITES.items():
        with contextlib.suppress(RuntimeError, NotImplementedError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # index_reduce is in beta
            write(torch.zeros(5, 4, dtype=dtype))
            yield name


def bytes_reached(reached, window: Window, nbytes: int) -> torch.Tensor:
    """Return which bytes of a buffer belong to the elements that a write reaches."""
    buffer = torch.zeros(nbytes, dtype=torch.uint8)
    itemsize = window.dtype.itemsize
    elements = buffer.as_strided(
        (*window.size, itemsize), (*window.byte_stride, 1), window.byte_offset
    )
    rows, columns = (torch.arange(n)[r] for n, r in zip(window.size, reached, strict=True))
    elements[rows[:, None], columns] = 1
    return buffer.bool()


# One byte more: the storage is no whole number of elements long.
@pytest.mark.parametrize(("layout", "more"), [*((name, 0) for name in LAYOUTS), ("every other", 1)])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unwritten_elements_keep_every_bit(dtype, path, layout, more):
    options, carrier = PATHS[path]
    names = list(writes_of(dtype))
    size, stride = LAYOUTS[layout]
    room = 48 * dtype.itemsize
    windows = [Window(dtype, size, stride, room * number) for number in range(len(names))]
    before = special_bytes(dtype, room * len(names))
    before = torch.cat([before, before[:more]])
    sides = []
    for compiled in (False, True):
        after = before.clone()
        views = [window.regenerate(after) for window in windows]

        def function(views):
            for name, view in zip(names, views, strict=True):
                WRITES[name][0](view)

        if compiled:
            views = aliasstorage.wrap(views) if carrier == "wrapped" else views
            function = torch.compile(function, **options)
        function(views)
        sides.append(after)
    eager, ours = sides

    for name, window in zip(names, windows, strict=True):
        # Eager mode's own scatter makes quiet NaNs of all that it keeps; what it leaves, we leave.
        kept = (before == eager) & ~bytes_reached(WRITES[name][1], window, len(before))
        kept[: window.byte_offset] = kept[window.byte_offset + room :] = False
        assert torch.equal(ours[kept], before[kept]), name
        values_ = [window.regenerate(raw).to(torch.complex128) for raw in (eager, ours)]
        torch.testing.assert_close(*values_, equal_nan=True, rtol=0, atol=0, msg=name)
    assert torch.equal(ours[len(before) - more :], before[len(before) - more :])
