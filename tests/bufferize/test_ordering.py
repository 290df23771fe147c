"""Reads and writes of one memory in an order that a fusing compiler may get wrong.

CPU Inductor has orders of its own wrong on plain tensors (pytorch #139789, #196570, #198094,
#198095, #198101, #198270): reads that move after a write of the same bytes, writes that depend on
reads of shifted, flipped or gathered elements of their own target, and bytes viewed as bools.
Each function here has one such dependency between windows of one storage.
"""

import pytest
import torch
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import lowerings

import aliasstorage
from aliasstorage import Window, ops
from aliasstorage.bufferize.analyze import PARTIAL_WRITES, in_place_overload
from aliasstorage.bufferize.fusion_hazards import is_opaque_write
from tests.fuzz import bump
from tests.support.matrix import in_matrix

SLOTS, OTHER = torch.tensor([1, 3, 3, 0]), torch.tensor([0, 1, 2, 3])

# a: float16 (8, 8); b: float32 (8, 4) over the same bytes; r: their bytes; f: bools over the
# first half of them.
WINDOWS = (
    Window(torch.float16, (8, 8)),
    Window(torch.float32, (8, 4)),
    Window(torch.uint8, (8, 16)),
    Window(torch.bool, (64,)),
)


def shift(a, b, r, f):
    a[1:] = a[:-1].clone()
    return b + 0


def flip(a, b, r, f):
    a.copy_(a.flip(0))
    b.copy_(b.flip(1))


def transpose(a, b, r, f):
    a.copy_(a.t().clone())
    return r.sum(dtype=torch.int64)


def roll(a, b, r, f):
    r.copy_(torch.roll(r, 3, 1))
    a.copy_(torch.roll(a, 1, 0))


def gather_from_the_target(a, b, r, f):
    a[OTHER] = a[SLOTS]
    b[OTHER + 4] = b[SLOTS] * 2


def swap(a, b, r, f):
    first, second = a[:4].clone(), a[4:].clone()
    a[:4] = second
    a[4:] = first
    return first, b[0]


def swap_across_dtypes(a, b, r, f):
    first = a[0].view(torch.int16).clone()
    a[0].view(torch.int16).copy_(b[7].view(torch.int16))
    b[7].view(torch.int16).copy_(first)


def read_between_two_writes(a, b, r, f):
    a.add_(1)
    x = b * 2
    a.mul_(2)
    y = b * 2
    return x, y, a - 1


def returned_before_and_after(a, b, r, f):
    before = a + 0
    r[0] = 1
    after = a + 0
    r[0] = 2
    return before, after


def running_sum(a, b, r, f):
    b.copy_(b.cumsum(0))
    for i in range(1, 4):
        r[i] = r[i - 1] + r[i]


def reduction_before_a_write_of_its_operand(a, b, r, f):
    total = r.sum(dtype=torch.int64)
    r.zero_()
    return total, a.sum()


def masked_by_itself(a, b, r, f):
    r[r > 30] = 5
    a.masked_fill_(a > 0.5, 0.25)
    return r.sum(dtype=torch.int64)


def bytes_as_bools(a, b, r, f):
    r[0] = 2
    chosen = torch.where(f.view(8, 8), 1, 0)
    f.logical_not_()
    return chosen, f.view(8, 8).sum(), r[:4] + 1


def result_of_a_custom_operation(a, b, r, f):
    old = bump(b)
    twice, rows = torch.cat([b, b]), b[SLOTS]
    b.sub_(old[2].clone())
    return twice, rows


def duplicate_slots(a, b, r, f):
    a[torch.tensor([0, 0, 2])] = a[torch.tensor([5, 5, 6])]
    b.index_add_(0, torch.tensor([1, 1]), b[:2].clone())


def blocks(a, b, r, f):
    a.view(4, 2, 8)[torch.tensor([0, 1])] = a.view(4, 2, 8)[torch.tensor([2, 3])]
    r.view(4, 32)[3].copy_(r.view(4, 32)[0])


FUNCTIONS = [
    value
    for value in list(globals().values())
    if getattr(value, "__code__", None) and value.__module__ == __name__
]


@pytest.mark.usefixtures("compiler_threads")
@pytest.mark.parametrize("carrier", ["plain", "wrapped"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_inductor_keeps_the_order(function, carrier):
    compiled = torch.compile(
        function, backend="aliasstorage", options={"emulate_precision_casts": True}
    )
    with torch.no_grad():
        for seed in (0, 1):
            sides = []
            for run in (function, compiled):
                generator = torch.Generator().manual_seed(seed)
                raw = torch.randint(0, 0x3F, (128,), dtype=torch.uint8, generator=generator)
                args = [window.regenerate(raw) for window in WINDOWS]
                if run is compiled and carrier == "wrapped":
                    args = aliasstorage.wrap(args)
                results = run(*args)
                sides.append((raw, results if isinstance(results, tuple) else (results,)))
            (want_raw, want), (raw, got) = sides
            assert torch.equal(want_raw, raw)
            for left, right in zip(want, got, strict=True):
                if isinstance(left, torch.Tensor):
                    torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-5)


def compare(step, compiled, arguments, where=""):
    """Run both on views of equal bytes and compare; return the compiled side's bytes and result."""
    sides = []
    for run in (step, compiled):
        raw = torch.arange(160, dtype=torch.uint8) % 0x3F
        with torch.no_grad():
            sides.append((raw, run(*arguments(raw))))
    (want_raw, want), (raw, got) = sides
    assert torch.equal(want_raw, raw), where
    torch.testing.assert_close(want, got, msg=lambda text: f"{where}: {text}")
    return raw, got


@torch.library.custom_op("tests_ordering::reverse", mutates_args=("x",))
def reverse(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Mutate a window by a kernel that no compiler looks into."""
    x.copy_(torch.flip(x, [0]) * weight)


reverse.register_fake(lambda x, weight: None)

WRITES = {
    "index_put": lambda w: w.index_put_((SLOTS,), w.new_full((4, 4), 3)),
    "index_put of a mask": lambda w: w.index_put_((w > 5,), w.new_full((), 3)),
    "accumulate": lambda w: w.index_put_((SLOTS,), w.new_full((4, 4), 3), accumulate=True),
    "index_add": lambda w: w.index_add_(0, SLOTS, w.new_full((4, 4), 3)),
    "index_copy": lambda w: w.index_copy_(0, OTHER, w.new_full((4, 4), 3)),
    "index_reduce": lambda w: w.index_reduce_(0, SLOTS, w.new_full((4, 4), 3), "prod"),
    "scatter": lambda w: w.scatter_(0, OTHER[:, None], 3),
    "scatter_reduce": lambda w: w.scatter_reduce_(0, OTHER[:, None], w.new_full((4, 1), 3), "amax"),
    "put": lambda w: w.put_(SLOTS, w.new_full((4,), 3)),
    "masked_scatter": lambda w: w.masked_scatter_(OTHER % 2 == 0, torch.arange(32.0).to(w.dtype)),
    "masked_fill": lambda w: w.masked_fill_(OTHER % 2 == 0, 3),
    "where": lambda w: w.copy_(torch.where(w > 5, 3, w)),
    "mul": lambda w: w[1:].mul_(3),
    "copy": lambda w: w[1:].copy_(w[:-1].clone()),
    "fill": lambda w: w[2].fill_(3),
    "custom operation": lambda w: reverse(w, torch.ones(())),
    "custom operation of itself": lambda w: reverse(w, w.clone()),
}
IN_EVERY_RUN = ("index_put", "masked_scatter", "copy", "fill", "custom operation")
KEPT = {
    "clone": lambda w: w.clone(),
    "repeat": lambda w: w.repeat(1, 1),
    "computed": lambda w: w * 2,
    "rows": lambda w: w[SLOTS],
    "sum": lambda w: w.sum(0),
}


@pytest.mark.usefixtures("compiler_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("write", in_matrix(WRITES, but=IN_EVERY_RUN))
def test_what_was_read_before_a_write_and_is_used_after_it(write, dtype):
    """Inductor computes a value where it is needed, and moves nodes next to their users."""

    def step(keep, w, tail):
        kept = keep(w)
        WRITES[write](w)
        used = kept.add_(1)
        tail.fill_(2)  # it moves nodes before the last copy only
        return used

    options = {"emulate_precision_casts": True}
    compiled = torch.compile(step, backend="aliasstorage", options=options)
    for name, keep in KEPT.items():
        compare(
            step,
            compiled,
            lambda raw, keep=keep: (
                keep,
                raw[:128].view(dtype)[:32].view(8, 4),
                raw[128:].view(torch.int64),
            ),
            name,
        )


def test_inductor_is_told_of_every_kernel_that_it_calls_in_place():
    """What it is not told of, it calls as well, but not under continuous integration."""
    ops.register_inductor_lowerings()
    graph = torch.fx.Graph()
    called = set()
    for name in PARTIAL_WRITES:
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            value = graph.call_function(getattr(packet, overload))
            if is_opaque_write(value) and overload != "out":
                called.add(in_place_overload(value))
    assert called - {None} <= lowerings.keys()


ROWS = torch.tensor([0, 2])
VALUES = {
    "index_put": lambda w: w.index_put((ROWS,), w.new_full((2, 4), 7)),
    "scatter": lambda w: w.scatter(0, ROWS[:, None], 7),
    "index_add": lambda w: w.index_add(0, ROWS, w.new_full((2, 4), 7)),
    "select_scatter": lambda w: w.select_scatter(w.new_full((4,), 7), 0, 1),
    "slice_scatter": lambda w: w.slice_scatter(w.new_full((2, 4), 7), 0, 1, 3),
    "a clone that is written": lambda w: w.clone().index_fill_(0, ROWS, 7),
    "a row of a clone": lambda w: (v := w.clone())[1].fill_(7) * 0 + v,
    "a clone that keeps its values": lambda w: (v := w.clone())[0].copy_(v[0].clone()) * 0 + v,
    "a custom operation on a clone": lambda w: (v := w.clone(), bump(v))[0],
}


def pieces(module, inputs):
    """Compile as an engine's backend does that hands a graph to Inductor."""
    inner = compile_fx_inner(module, list(inputs))
    return lambda *args: inner(list(args))


@pytest.mark.usefixtures("compiler_threads")
@pytest.mark.parametrize("inner", ["inductor", "pieces"])
@pytest.mark.parametrize("value", VALUES)
def test_values_that_are_made_of_a_written_window(value, inner):
    """Inductor makes them in the memory of an input that nobody looks at any more."""

    def step(write, w):
        write(w)
        return VALUES[value](w)

    backend = aliasstorage.backend()
    if inner == "pieces":
        table = select_decomp_table()
        backend = aliasstorage.backend(pieces, form="windows", decompositions=table)
    compiled = torch.compile(step, backend=backend)
    for write in (lambda w: w.add_(1), lambda w: w[2:].zero_(), lambda w: w.t().mul_(2)):
        raw, got = compare(
            step,
            compiled,
            lambda raw, write=write: (write, raw[16:144].view(torch.float32).view(8, 4)),
        )
        before = raw.clone()
        got.fill_(9)
        assert torch.equal(before, raw)
