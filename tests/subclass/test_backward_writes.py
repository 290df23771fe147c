"""State that is written in a backward pass, or between the two passes (pytorch #154820)."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import aliasstorage
from aliasstorage.errors import BackwardWriteError

INNERS = ["aot_eager", "inductor"]
CARRIERS = ["plain", "wrapped"]


OVERWRITTEN = "modified by an inplace operation"  # eager's own error


@contextmanager
def allowed(message):
    """Let an error with this message pass, inside another one or not."""
    try:
        yield
    except Exception as error:
        if message not in str(error):
            raise


class Scale(torch.autograd.Function):
    """Multiplies by 2, and by 3 in backward; writes states as told."""

    @staticmethod
    def forward(ctx, x, forward_state, backward_states):
        if forward_state is not None:
            forward_state.add_(1)
        ctx.states = backward_states
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        for state in ctx.states:
            state.mul_(2)
        return gradient * 3, None, None


def views(carrier):
    """Return 256 random bytes, a float window, and one of another dtype that overlaps it."""
    raw = torch.randint(
        0, 64, (256,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    windows = (raw[:128].view(torch.float32).view(8, 4), raw.view(torch.int16)[60:92])
    return raw, (aliasstorage.wrap(windows) if carrier == "wrapped" else windows)


def backends(inner):
    yield aliasstorage.backend(inner=inner)
    yield aliasstorage.backend(inner=inner, bufferize=False)
    if inner == "aot_eager":
        yield aliasstorage.backend(inner=inner, form="bytes")


def double(state):
    state.mul_(2)


WRITERS = {
    "in backward only": lambda x, s, o: Scale.apply(x, None, (s,)),
    "in both": lambda x, s, o: Scale.apply(x, s, (s,)),
    "another window in backward": lambda x, s, o: Scale.apply(x, s, (o,)),
    "two windows in backward": lambda x, s, o: Scale.apply(x, None, (s, o)),
    "a view in backward": lambda x, s, o: Scale.apply(x, None, (s[1:3],)),
}


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("writer", WRITERS)
def test_writes_in_a_backward_pass_are_refused_before_anything_is_written(inner, carrier, writer):
    def step(x, s, o):
        o.add_(1)
        return WRITERS[writer](x, s, o)

    choices = list(backends(inner)) if inner == "aot_eager" else [aliasstorage.backend(inner=inner)]
    if carrier == "wrapped":
        choices.append(inner)  # stock
    for backend in choices:
        torch._dynamo.reset()
        raw, windows = views(carrier)
        before = raw.clone()
        x = torch.ones(4, requires_grad=True)
        with pytest.raises(Exception, match="writes a window in its backward pass") as caught:
            torch.compile(step, backend=backend)(x, *windows)
        assert isinstance(getattr(caught.value, "inner_exception", None), BackwardWriteError)
        assert torch.equal(raw, before)


def gradients(step, carrier, between=lambda s, o: None):
    raw, windows = views(carrier)
    x = torch.ones(8, 4, requires_grad=True)
    y = step(x, *windows)
    between(*windows)
    y.sum().backward()
    return raw, x.grad, y.detach()


def saved_and_written(x, s, o):
    y = x * s.nan_to_num()
    with torch.no_grad():
        o.add_(1)
    return y


def write_in_graph(name):
    def saved(x, s, o):
        y = x * s
        with torch.no_grad():
            {"itself": s, "an overlapping one": o, "a view of it": s[1:3]}[name].add_(1)
        return y

    return saved


def overwritten_later(x, s, o):
    return x * s


def overwritten_later_beside_a_write(x, s, o):
    y = x * s.nan_to_num()
    with torch.no_grad():
        o.add_(1)
    return y


SAVED = {
    "itself": write_in_graph("itself"),
    "an overlapping one": write_in_graph("an overlapping one"),
    "a view of it": write_in_graph("a view of it"),
    "later": overwritten_later,
    "later, beside a write": overwritten_later_beside_a_write,
}


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("saved", SAVED)
def test_a_window_that_is_saved_for_backward_and_overwritten(inner, carrier, saved):
    """Eager raises; so do we, or the gradient is that of the values that were saved."""

    def overwrite(s, o):
        if saved.startswith("later"):
            s.fill_(7)

    want = views("plain")[1][0].nan_to_num()
    for backend in backends(inner):
        torch._dynamo.reset()
        compiled = torch.compile(SAVED[saved], backend=backend)
        grad = None
        with allowed(OVERWRITTEN):
            _, grad, _ = gradients(compiled, carrier, overwrite)
        assert grad is None or torch.equal(grad, want)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("inner", INNERS)
def test_checkpointing_beside_writes(inner, carrier, use_reentrant):
    def step(x, s, o):
        with torch.no_grad():
            o.add_(1)
        scale = s.nan_to_num().clone()
        y = checkpoint(lambda x: torch.sin(x * scale) * 2, x, use_reentrant=use_reentrant)
        with torch.no_grad():
            s.fill_(3)
        return y

    want = gradients(step, "plain")
    for backend in backends(inner):
        torch._dynamo.reset()
        got = gradients(torch.compile(step, backend=backend), carrier)
        assert torch.equal(got[0], want[0])
        torch.testing.assert_close(got[1:], want[1:])


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("carrier", CARRIERS)
def test_checkpointed_regions_that_write_are_refused(carrier, use_reentrant):
    """Eager writes once more when it computes the region again."""

    def step(x, s, o):
        def region(x):
            with torch.no_grad():
                s[1:3].add_(1)
            return torch.sin(x * 2)

        return checkpoint(region, x, use_reentrant=use_reentrant) + o[0]

    choices = [*backends("aot_eager"), *(["aot_eager"] if carrier == "wrapped" else [])]
    for backend in choices:
        torch._dynamo.reset()
        raw, windows = views(carrier)
        before = raw.clone()
        x = torch.ones(8, 4, requires_grad=True)
        with pytest.raises(Exception, match="writes a window in its backward pass"):
            torch.compile(step, backend=backend)(x, *windows)
        assert torch.equal(raw, before)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_double_backward_is_refused_by_torch_as_without_windows(carrier):
    _, windows = views(carrier)
    x = torch.ones(8, 4, requires_grad=True)
    y = torch.compile(
        overwritten_later_beside_a_write, backend=aliasstorage.backend(inner="aot_eager")
    )(x, *windows)
    (gradient,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("inner", INNERS)
def test_a_hook_outside_the_graph_writes_a_window(inner, carrier):
    def run(step, carrier):
        raw, windows = views(carrier)
        x = torch.ones(8, 4, requires_grad=True)
        y = step(x, *windows)
        y.register_hook(lambda gradient: double(windows[1]))
        y.sum().backward()
        return raw, x.grad

    def step(x, s, o):
        scale = s.nan_to_num().clone()
        with torch.no_grad():
            o.add_(1)
        return x * scale

    want = run(step, "plain")
    for number, backend in enumerate(backends(inner)):
        torch._dynamo.reset()
        got = None
        # Without typed windows the backward pass makes the copy again, as stock's does.
        with allowed(OVERWRITTEN) if number else nullcontext():
            got = run(torch.compile(step, backend=backend), carrier)
        assert got is None or all(map(torch.equal, got, want))


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_hook_inside_the_graph_writes_a_window(carrier):
    def step(x, s, o):
        y = x * 2
        y.register_hook(lambda gradient: double(s))
        o.add_(1)
        return y

    want = gradients(step, "plain")
    for backend in backends("aot_eager"):
        torch._dynamo.reset()
        raw, windows = views(carrier)
        x = torch.ones(8, 4, requires_grad=True)
        before = raw.clone()
        try:
            y = torch.compile(step, backend=backend)(x, *windows)
        except Exception:
            assert torch.equal(raw, before)
            continue
        y.sum().backward()
        assert torch.equal(raw, want[0])
        torch.testing.assert_close(x.grad, want[1])


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_function_that_is_compiled_during_a_backward_pass_writes_windows(carrier):
    """Its writes are those of its own forward pass."""

    def write(s, o):
        s.add_(1)
        o.mul_(2)

    raw, windows = views(carrier)
    want_raw, want_windows = views("plain")
    write(*want_windows)
    compiled = torch.compile(write, backend=aliasstorage.backend(inner="aot_eager"))
    x = torch.ones(4, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: compiled(*windows))
    y.sum().backward()
    assert torch.equal(raw, want_raw)
