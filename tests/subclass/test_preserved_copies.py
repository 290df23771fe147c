"""Operations that leave a window as it is give copies all the same, whatever a compiler drops.

See Note [A copy of a window must stay a copy].
"""

import pytest
import torch

import aliasstorage
from aliasstorage import Window
from tests.support.matrix import in_matrix
from tests.support.oracle import buffer_reports

STATE = Window(torch.float32, (8, 4), byte_offset=128)
KEYS = Window(torch.float16, (8, 8))

COPIES = {
    "clone": lambda t: t.clone(),
    "clone_of_bits": lambda t: t.view(torch.int32).clone(),
    "clone_of_halves": lambda t: t.view(torch.float16).clone(),
    "clone_of_a_view": lambda t: t.unsqueeze(0).clone().squeeze(0),
    "view_of_a_clone": lambda t: t.clone().t(),
    "to": lambda t: t.to(t.dtype, copy=True),
    "there_and_back": lambda t: t.to(torch.float64).to(torch.float32),
    "repeat": lambda t: t.repeat(1, 1),
    "repeat_and_squeeze": lambda t: t.repeat(1, 1, 1).squeeze(0),
    "repeat_interleave": lambda t: t.repeat_interleave(1, dim=0),
    "cat": lambda t: torch.cat([t]),
    "stack": lambda t: torch.stack([t])[0],
    "cat_with_nothing": lambda t: torch.cat([t, t[:0]]),
    "pad": lambda t: torch.nn.functional.pad(t, (0, 0)),
    "roll": lambda t: t.roll(0, 0),
    "flip": lambda t: t.flip([]),
    "copy_": lambda t: torch.zeros_like(t).copy_(t),
    "assigned": lambda t: _assigned(t),
    "cat_out": lambda t: torch.cat([t], out=torch.zeros_like(t)),
    "foreach": lambda t: torch._foreach_add([t], [torch.zeros_like(t)])[0],
    "foreach_copy": lambda t: _foreach_copied(t),
    "plus_zeros": lambda t: t + torch.zeros_like(t),
    "zeros_plus": lambda t: torch.zeros_like(t).add_(t),
    "minus_zeros": lambda t: t - torch.zeros_like(t),
    "times_ones": lambda t: t * torch.ones_like(t),
    "over_ones": lambda t: t / torch.ones_like(t),
    "plus_zero": lambda t: t + 0,
    "power": lambda t: t**1,
    "floor_of_bits": lambda t: t.view(torch.int32).floor(),
    "nan_to_num_of_bits": lambda t: t.view(torch.int32).nan_to_num(),
    "conj_physical": lambda t: t.conj_physical(),
    "positive": lambda t: (+t).clone(),
    "eval_dropout": lambda t: torch.native_dropout(t, 0.5, False)[0],
    "where": lambda t: torch.where(torch.ones_like(t, dtype=torch.bool), t, 0.0),
    "bools": lambda t: t.view(torch.bool).clone(),
    "slice_scatter": lambda t: torch.slice_scatter(torch.zeros_like(t), t),
    "amax_of_nothing": lambda t: t.unsqueeze(0).sum(0),
    "complex": lambda t: torch.view_as_complex(t.unflatten(1, (2, 2))).repeat(1, 1),
}


def _assigned(t):
    fresh = torch.zeros_like(t)
    fresh[:] = t
    return fresh


def _foreach_copied(t):
    fresh = [torch.zeros_like(t), torch.zeros_like(t)]
    torch._foreach_copy_(fresh, [t, t])
    return fresh[1]


def step(names):
    """Return a function that copies the state between two writes of it."""

    def write_and_copy(keys, state, x):
        state[:3, 2:] = 3
        kept = [COPIES[name](state[2:]) for name in names]
        state.mul_(x)
        keys[1] = 2
        return kept

    return write_and_copy


def add_at_computed(keys, x):
    """Write a window that is not known before the graph runs: see `explain`."""
    count = int(x.sum().item())
    torch._check(count >= 0)
    torch._check(count <= 8)
    keys.as_strided((2, 4), (8, 1), count).add_(1)


def step_on_a_computed_window(names):
    """The same beside a window that is not known before the graph runs."""
    inner = step(names)

    def computed(keys, state, x):
        add_at_computed(keys, x)
        return inner(keys, state, x)

    return computed


def random_bytes():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 0x3F, (256,), dtype=torch.uint8, generator=generator)


PATHS = {
    "stock": ("inductor", True),
    "bytes, plain": (aliasstorage.backend(bufferize=False), False),
    "bytes, wrapped": (aliasstorage.backend(bufferize=False), True),
    "in place, plain": (aliasstorage.backend(), False),
    "in place, wrapped": (aliasstorage.backend(), True),
}


@pytest.mark.usefixtures("compiler_threads")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "make", in_matrix([step, step_on_a_computed_window], but=[step]), ids=lambda f: f.__name__
)
def test_copies_stay_copies(make, path):
    backend, wrapped = PATHS[path]
    names = [name for name in COPIES if name != "bools" or path.startswith("in place")]
    function = make(names)
    x = torch.ones(1)
    want_buffer, buffer = random_bytes(), random_bytes()
    views = KEYS.regenerate(buffer), STATE.regenerate(buffer)
    if wrapped:
        views = aliasstorage.wrap(views)
    with torch._dynamo.config.patch(capture_scalar_outputs=True), buffer_reports() as reports:
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        want = function(KEYS.regenerate(want_buffer), STATE.regenerate(want_buffer), x)
        got = compiled(*views, x)
    if make is step_on_a_computed_window and path.startswith("in place"):
        assert any(report.reason for report in reports)
    assert torch.equal(want_buffer, buffer)
    different = [n for n, a, b in zip(names, want, got, strict=True) if not torch.equal(a, b)]
    assert not different
    aliases = []
    for name, left, right in zip(names, want, got, strict=True):
        left.zero_()
        right.zero_()
        if not torch.equal(want_buffer, buffer):
            aliases.append(name)
            want_buffer.copy_(buffer)
    assert not aliases


@pytest.mark.usefixtures("compiler_threads")
@pytest.mark.parametrize("path", PATHS)
def test_copies_that_a_backward_pass_uses(path):
    """What is saved for it is what the window held then."""
    backend, wrapped = PATHS[path]

    def function(keys, state, x):
        with torch.no_grad():
            state[:3, 2:] = 3
            kept = state.repeat(1, 1)
        y = (x * kept).sum()
        with torch.no_grad():
            state.mul_(2)
        return y

    gradients = []
    for run in (function, torch.compile(function, backend=backend)):
        buffer = random_bytes()
        views = KEYS.regenerate(buffer), STATE.regenerate(buffer)
        x = torch.ones(8, 4, requires_grad=True)
        run(*(aliasstorage.wrap(views) if run is not function and wrapped else views), x).backward()
        gradients.append((x.grad, buffer))
    (want, want_buffer), (got, buffer) = gradients
    assert torch.equal(want_buffer, buffer)
    assert torch.equal(want, got)


@torch.library.custom_op("tests_copies::swap", mutates_args=("a", "more"))
def swap(a: torch.Tensor, more: list[torch.Tensor]) -> None:
    a.copy_(a.flip(0))
    for tensor in more:
        tensor.mul_(2)


swap.register_fake(lambda a, more: None)


def swapped(keys, state, x):
    keys[0] = 1
    swap(state, [keys[2:, 1:], keys[1]])
    return state + x


def swapped_beside_a_computed_window(keys, state, x):
    add_at_computed(keys, x)
    swap(state, [keys[2:, 1:], keys[1]])
    swap(keys[4:], [state[1:3]])
    return state + x


@pytest.mark.usefixtures("compiler_threads")
@pytest.mark.parametrize("function", [swapped, swapped_beside_a_computed_window])
@pytest.mark.parametrize("path", PATHS)
def test_a_custom_operation_after_a_write(path, function):
    """Of a buffer that was written, the right bytes: Note [Custom operations get copies ...]."""
    backend, wrapped = PATHS[path]
    sides = []
    for run in (function, torch.compile(function, backend=backend, fullgraph=True)):
        buffer = random_bytes()
        views = KEYS.regenerate(buffer), STATE.regenerate(buffer)
        views = aliasstorage.wrap(views) if run is not function and wrapped else views
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            sides.append((run(*views, torch.ones(1)), buffer))
    (want, want_buffer), (got, buffer) = sides
    assert torch.equal(want_buffer, buffer)
    assert torch.equal(want, got)
