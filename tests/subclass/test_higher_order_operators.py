"""Higher-order operators on windows: attention, loops, branches, regions, Triton kernels."""

from __future__ import annotations

import pytest
import torch
import torch._higher_order_ops.triton_kernel_wrap as triton_kernel_wrap
from torch._dynamo.backends.registry import lookup_backend
from torch._higher_order_ops import associative_scan, scan
from torch.nn.attention.flex_attention import flex_attention

import aliasstorage
from aliasstorage import AliasTensor, Window
from tests.support.oracle import buffer_reports
from tests.support.triton_stand_in import KERNEL, as_triton, write_token
from tests.support.two_windows import CARRIED

# 16 keys: with fewer, the CPU template of stock flex_attention reads memory that nobody wrote, on
# some processors and of plain tensors too (torch 2.13.0).
KEYS = Window(torch.float32, (1, 2, 16, 16))
VALUES = Window(torch.float32, (1, 2, 16, 16), byte_offset=512)  # overlaps the keys
STATE = Window(torch.float16, (8, 16), byte_offset=256)  # and so does the state
BYTES = 2560
BACKENDS = {
    "stock": lookup_backend("aot_eager"),
    "ours": aliasstorage.backend(inner="aot_eager"),
}


def storage():
    """Return random bytes that are no NaN as floats: sums reorder, and would spread one."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 60, (BYTES,), dtype=torch.uint8, generator=generator)


QUERIES = torch.arange(128.0).sin().view(1, 2, 4, 16)


def attention(keys, values, state):
    state[1] = 1.0
    return flex_attention(QUERIES, keys, values)


def attention_of_windows(keys, values, state):
    keys[:, :, 2] = 1.0
    return flex_attention(keys, keys, values)


def attention_with_a_bias(keys, values, state):
    state[1] = 1.0

    def bias(score, batch, head, row, column):
        return score + state[row, column]

    return flex_attention(QUERIES, keys, values, score_mod=bias)


def loop(keys, values, state):
    state[1] = 1.0
    start = (torch.tensor(0), keys * 1.0)
    return torch.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x + keys), start)[1]


def branch(keys, values, state):
    state[1] = 1.0
    return torch.cond(keys.sum() > 0, lambda x: x[0] * 2, lambda x: x[0] * 3, (keys,))


def scanned(keys, values, state):
    keys[:, :, 2] = 1.0
    return scan(lambda carry, x: (carry + x, carry * x), state[0] * 1, state)[1]


def scanned_by_halves(keys, values, state):
    keys[:, :, 2] = 1.0
    return associative_scan(lambda x, y: x + y, values[0, 0], 0, combine_mode="generic")


@torch.compiler.nested_compile_region
def read_region(state):
    return state * 2


@torch.compiler.nested_compile_region
def write_region(state):
    state[2] = 3.0
    return state * 2


def region(keys, values, state):
    keys[:, :, 2] = 1.0
    return read_region(state) + read_region(state)


def region_that_writes(keys, values, state):
    keys[:, :, 2] = 1.0
    first = write_region(state)
    keys[:, :, 3] = 2.0
    return first + write_region(state)


def branch_that_writes(keys, values, state):
    keys[:, :, 2] = 1.0

    def double(x):
        x[2] = 3.0
        return x * 2

    result = torch.cond(keys.sum() > 0, double, lambda x: x * 3, (state,))
    keys[:, :, 3] = 2.0
    return result


def loop_that_writes(keys, values, state):
    keys[:, :, 2] = 1.0

    def body(i, x):
        state.index_fill_(0, i.reshape(1), 3.0)
        return i + 1, x + state[:, 0].float()

    return torch.while_loop(lambda i, x: i < 3, body, (torch.tensor(0), torch.zeros(8)))[1]


def checkpointed(keys, values, state):
    state[1] = 1.0
    return torch.utils.checkpoint.checkpoint(lambda x: (x * 2).sin(), keys, use_reentrant=False)


FUNCTIONS = [
    attention,
    attention_of_windows,
    attention_with_a_bias,
    loop,
    branch,
    scanned,
    scanned_by_halves,
    region,
    region_that_writes,
    branch_that_writes,
    loop_that_writes,
    checkpointed,
]
CASES = [
    (function, backend, carrier)
    for function in FUNCTIONS
    for backend, carrier in CARRIED
    # Dynamo does not take tensor subclasses into a loop, and says so.
    if not (function in (loop, loop_that_writes) and carrier == "wrapped")
]


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    ("function", "backend", "carrier"), CASES, ids=lambda value: getattr(value, "__name__", value)
)
def test_as_on_plain_views(function, backend, carrier, inner):
    if function is scanned and inner == "inductor":
        pytest.skip("Inductor does not compile a scan on the CPU, of plain tensors neither")
    want, got = storage(), storage()
    with torch.no_grad():
        expected = function(*(w.regenerate(want) for w in (KEYS, VALUES, STATE)))
        args = [w.regenerate(got) for w in (KEYS, VALUES, STATE)]
        options = {"backend": inner}
        if backend == "ours":
            options = {"backend": "aliasstorage", "options": {"inner": inner}}
        compiled = torch.compile(function, fullgraph=True, **options)
        result = compiled(*(aliasstorage.wrap(args) if carrier == "wrapped" else args))
    torch.testing.assert_close(result, expected)
    assert torch.equal(got, want)
    assert type(result) is torch.Tensor
    result.fill_(0)
    assert torch.equal(got, want)


@torch.compiler.nested_compile_region
def product(queries, keys):
    return queries * keys[:, :, :4]


LEARNED = {
    "branch": lambda q, k, v: torch.cond(
        q.sum() > 0, lambda a, b: a * b[:, :, :4], lambda a, b: a - b[:, :, :4], (q, k)
    ),
    "region": lambda q, k, v: product(q, k) + product(q, v),
    "checkpoint": lambda q, k, v: torch.utils.checkpoint.checkpoint(
        lambda a, b: (a * b[:, :, :4]).sin(), q, v, use_reentrant=False
    ),
}


@pytest.mark.parametrize(("backend", "carrier"), CARRIED)
@pytest.mark.parametrize("name", LEARNED)
def test_gradients_flow_past_windows(name, backend, carrier):
    def run(compiled):
        raw, queries = storage(), QUERIES.clone().requires_grad_()
        args = [w.regenerate(raw) for w in (KEYS, VALUES, STATE)]
        if compiled and carrier == "wrapped":
            args = aliasstorage.wrap(args)

        def step(queries, keys, values, state):
            state[1] = 1.0
            return LEARNED[name](queries, keys, values)

        function = torch.compile(step, backend=BACKENDS[backend]) if compiled else step
        result = function(queries, *args)
        result.square().sum().backward()
        return result.detach(), queries.grad, raw

    torch.testing.assert_close(run(True), run(False))


# --- Triton kernels, as the operator that Dynamo makes of their calls ---


TOKENS = Window(torch.float16, (8, 16))
STATES = Window(torch.float32, (8, 16), byte_offset=256)


def launched(keys, state, values):
    before = state[1] * 2
    write_token(keys, state, values, 1)
    write_token(keys, state, values * 2, 3)
    return before, keys[1].float() + state[3]


@pytest.fixture
def known_writes(monkeypatch):
    """Say what the kernel writes, which torch reads from the code of a real one."""
    monkeypatch.setattr(
        triton_kernel_wrap, "get_mutated_tensors", lambda *_, **__: ["keys", "state"]
    )


@pytest.mark.usefixtures("known_writes")
@pytest.mark.parametrize("bufferize", [True, False])
@pytest.mark.parametrize(("backend", "carrier"), CARRIED)
def test_a_triton_kernel_takes_windows(backend, carrier, bufferize):
    want, got = storage(), storage()
    values = torch.arange(16.0)
    expected = launched(TOKENS.regenerate(want), STATES.regenerate(want), values)
    args = TOKENS.regenerate(got), STATES.regenerate(got)
    inner = aliasstorage.backend(inner="aot_eager", bufferize=bufferize)
    compiled = torch.compile(
        launched,
        fullgraph=True,
        backend=as_triton(inner if backend == "ours" else BACKENDS["stock"]),
    )
    result = compiled(*(aliasstorage.wrap(args) if carrier == "wrapped" else args), values)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert torch.equal(got, want)


@pytest.mark.usefixtures("known_writes")
def test_a_triton_kernel_writes_windows_in_place():
    raw = storage()
    compiled = torch.compile(launched, fullgraph=True, backend=as_triton(BACKENDS["ours"]))
    with buffer_reports() as reports:
        compiled(TOKENS.regenerate(raw), STATES.regenerate(raw), torch.arange(16.0))
    (report,) = reports
    assert [write.how for write in report.writes] == ["in place"] * 4
    assert {write.operation for write in report.writes} == {"Triton kernel write_token"}
    assert not report.copies


def test_a_triton_kernel_whose_writes_are_unknown():
    """Torch then takes it to write every argument."""
    want, got = storage(), storage()
    values = torch.arange(16.0)
    launched(TOKENS.regenerate(want), STATES.regenerate(want), values)
    compiled = torch.compile(launched, fullgraph=True, backend=as_triton(BACKENDS["ours"]))
    compiled(TOKENS.regenerate(got), STATES.regenerate(got), values)
    assert torch.equal(got, want)
    assert torch.equal(values, torch.arange(16.0))


@pytest.mark.usefixtures("known_writes")
@pytest.mark.parametrize(("backend", "carrier"), CARRIED)
def test_a_triton_kernel_on_overlapping_windows_is_refused(backend, carrier):
    raw = storage()
    before = raw.clone()
    args = TOKENS.regenerate(raw), Window(torch.float32, (8, 16), byte_offset=128).regenerate(raw)
    compiled = torch.compile(launched, fullgraph=True, backend=as_triton(BACKENDS[backend]))
    with pytest.raises(Exception, match="write_token, arguments keys and state") as caught:
        compiled(*(aliasstorage.wrap(args) if carrier == "wrapped" else args), torch.ones(16))
    assert "UnsupportedOpError" in str(caught.value)
    assert torch.equal(raw, before)


def test_a_window_over_real_bytes_is_handed_over_as_it_is():
    window = AliasTensor(storage(), TOKENS)
    kernel = triton_kernel_wrap.kernel_side_table.add_kernel(KERNEL)
    constants = triton_kernel_wrap.kernel_side_table.add_constant_args({"slot": 2})
    state = torch.zeros(8, 16)
    triton_kernel_wrap.triton_kernel_wrapper_mutation(
        kernel_idx=kernel,
        constant_args_idx=constants,
        grid=[(1, 1, 1)],
        tma_descriptor_metadata={},
        kwargs={"keys": window, "state": state, "values": torch.ones(16)},
    )
    assert window[2].tolist() == [1.0] * 16
