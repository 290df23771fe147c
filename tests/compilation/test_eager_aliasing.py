"""Results that alias an argument in eager PyTorch must do so in compiled functions, and no others.

The kind is found by `tests.operator_sweep` in torch's own operator database; here are the
operations that it found, and a slice of the sweep.
"""

import pytest
import torch
import torch.nn.functional as F

import aliasstorage
from tests.operator_sweep import compare, compiler, everything, is_random, leaves_argument
from tests.support.oracle import Case, check

UNCHANGED = {
    "dropout outside training": lambda a: F.dropout(a, training=False),
    "dropout of nothing": lambda a: F.dropout(a, p=0.0, training=True),
    "torch.dropout": lambda a: torch.dropout(a, 0.5, False),
    "a module": torch.nn.Dropout().eval(),
    "alpha dropout": lambda a: F.alpha_dropout(a, training=False),
    "in place": lambda a: F.dropout(a, training=False, inplace=True),
    "of a view": lambda a: F.dropout(a[1:3], training=False),
    "viewed": lambda a: F.dropout(a, training=False)[2].view(-1),
    "twice": lambda a: F.dropout(F.dropout(a, training=False), p=0.0),
    "and written": lambda a: F.dropout(a, training=False).add_(1),
    "and computed with": lambda a: F.dropout(a, training=False) * 2,
    "contiguous": lambda a: a.contiguous(),
    "a conversion": lambda a: a.to(a.dtype),
    "an expansion": lambda a: a.expand_as(a),
    "broadcasting": lambda a: torch.broadcast_tensors(a, a)[0],
    "atleast_2d": torch.atleast_2d,
    "reshape": lambda a: a.reshape(8, 4),
    "a clone": lambda a: a.clone(),
}


@pytest.mark.parametrize("carrier", ["plain", "wrapped"])
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_what_returns_its_argument_in_eager_pytorch_does_so_in_a_graph(inner, carrier):
    for name, unchanged in UNCHANGED.items():

        def step(a, f, rows, unchanged=unchanged):
            y = unchanged(a)
            a[rows] = 2
            f.add_(1)
            return y

        case = Case(name, step, "AF", lambda: (torch.tensor([1, 2]),))
        for bufferize in (True, False):
            torch._dynamo.reset()
            backend = aliasstorage.backend(inner=inner, bufferize=bufferize)
            check(case, lambda f, b=backend: torch.compile(f, backend=b), carrier, bitwise=False)


@pytest.mark.parametrize("carrier", ["plain", "wrapped"])
def test_symbolic_sizes(carrier):
    def step(a, b):
        y = F.dropout(a, training=False)[1:]
        b.fill_(1)
        return y

    compiled = torch.compile(step, backend=aliasstorage.backend(inner="aot_eager"), dynamic=True)
    for rows in (4, 6, 8):
        want_raw, got_raw = (torch.arange(128, dtype=torch.uint8) for _ in range(2))
        views = [
            (raw[: rows * 8].view(torch.int32), raw.view(torch.int16)[:6])
            for raw in (want_raw, got_raw)
        ]
        want = step(*views[0])
        got = compiled(*(aliasstorage.wrap(views[1]) if carrier == "wrapped" else views[1]))
        assert torch.equal(want, got)
        assert got.data_ptr() == views[1][0][1:].data_ptr()
        assert torch.equal(want_raw, got_raw)


def sweep(found, inner, modes, identities):
    wrong = []
    for number, sample in enumerate(found):
        try:
            random, leaves = is_random(sample), leaves_argument(sample)
        except Exception:  # noqa: S112  (not an operation of windows)
            continue
        if identities and not leaves:
            continue
        for mode in modes:
            carrier, _, form = mode.partition("-")
            outcome = compare(sample, compiler(inner, not form, carrier), carrier, random)
            if outcome.kind == "wrong":
                wrong.append((sample.name, number, mode, outcome.text))
    return wrong


@pytest.mark.matrix
def test_a_slice_of_the_operator_database():
    """Operations that leave some argument as it is, one sample each."""
    wrong = []
    for found in list(everything(1))[::24]:
        wrong += sweep(found, "aot_eager", ["plain"], identities=True)
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("part", range(8))
def test_the_operator_database(part, inner, monkeypatch):
    monkeypatch.setattr(torch._inductor.config, "fallback_random", True)
    wrong = []
    for found in list(everything(2))[part::8]:
        wrong += sweep(found, inner, ["plain", "wrapped"], identities=inner == "inductor")
    assert not wrong
