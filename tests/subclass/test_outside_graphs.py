"""Outside a compiled graph: each does what it does on the plain view, or is refused by name."""

import copy
import threading

import numpy as np
import pytest
import torch
import torch.multiprocessing

import aliasstorage
from aliasstorage import AliasTensor, errors


class Holder(torch.nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.register_buffer("a", a)
        self.register_buffer("b", b)


def views():
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 0x3F, (96,), dtype=torch.uint8, generator=generator)
    return raw, raw[:48].view(torch.float16).view(4, 6), raw[24:].view(torch.float32)


def swapped(a, b):
    other = torch.ones(4, 6).half()
    torch.utils.swap_tensors(a, other)
    other.add_(1)
    return a, other


def through_a_queue(a, b):
    queue = torch.multiprocessing.get_context("fork").SimpleQueue()
    queue.put(b)
    return queue.get()


def autocast(a, b):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return b.view(2, 9) @ b.view(9, 2)


def module(change):
    def run(a, b):
        holder = Holder(a, b)
        change(holder)
        holder.a.add_(1)
        return holder.a, holder.b

    return run


def loaded(assign):
    def run(a, b):
        holder = Holder(a, b)
        values = {"a": torch.ones(4, 6).half(), "b": torch.arange(18.0)}
        holder.load_state_dict(values, assign=assign)
        holder.a.mul_(2)
        return holder.a, holder.b, a, b

    return run


def parametrized(a, b):
    holder = Holder(a, b)
    torch.nn.utils.parametrize.register_parametrization(holder, "a", torch.nn.Identity())
    return holder.a + 1


def written_by_another_thread(a, b):
    thread = threading.Thread(target=lambda: a[1].fill_(2))
    thread.start()
    thread.join()
    return b


def written_through_numpy(a, b):
    b.numpy()[3:5] = 7
    np.asarray(a)[0] = 1
    return a, b


LIFE = {
    "copy": lambda a, b: copy.copy(a).add_(1),
    "deepcopy": lambda a, b: [t.add_(1) for t in copy.deepcopy([a, b])],
    "swap_tensors": swapped,
    "multiprocessing queue": through_a_queue,
    "share_memory_": lambda a, b: (b.share_memory_().is_shared(), a.add_(1), b),
    "numpy": written_through_numpy,
    "dlpack": lambda a, b: (torch.from_dlpack(b).fill_(1), a),
    "memoryview": lambda a, b: (memoryview(b.numpy()).nbytes, list(memoryview(b.numpy()))),
    "a thread": written_by_another_thread,
    "module.to(dtype)": module(lambda m: m.to(torch.float32)),
    "module.half": module(lambda m: m.half()),
    "module.to(device)": module(lambda m: m.to("cpu")),
    "module.to_empty": lambda a, b: Holder(a, b).to_empty(device="meta").a.shape,
    "module.to(meta)": lambda a, b: Holder(a, b).to("meta").a.stride(),
    "module.share_memory": module(lambda m: m.share_memory()),
    "module.requires_grad_": module(lambda m: m.requires_grad_(False)),
    "load_state_dict": loaded(False),
    "load_state_dict(assign)": loaded(True),
    "parametrize": parametrized,
    "Buffer": lambda a, b: torch.nn.Buffer(b).add_(1),
    "Parameter(requires_grad=False)": lambda a, b: torch.nn.Parameter(b, False).add_(1),
    "to the same": lambda a, b: (a.to(a.dtype) is a, a.cpu() is a, a.type(a.dtype) is a),
    "to another dtype": lambda a, b: (a.float().add_(1), a.type_as(b), a.double(), a.bool()),
    "metadata": lambda a, b: (a.nbytes, a.itemsize, a.element_size(), a.is_contiguous(), a.layout),
    "protocols": lambda a, b: (len(a), float(b[0]), b[1].item(), bool(b[0] > 0), b[2:4].tolist()),
    "identity": lambda a, b: (a in {a}, [a].index(a), a.is_set_to(a), a.is_set_to(b)),
    "iteration": lambda a, b: [row.add_(1) for row in a],
    "autocast": autocast,
    "vmap": lambda a, b: torch.vmap(lambda row: row * 2)(a),
    "vmap in place": lambda a, b: (torch.vmap(lambda row: row.mul_(2))(a), b),
    "grad of another input": lambda a, b: torch.func.grad(lambda w: (w * b).sum())(torch.ones(18)),
    "grad of the values": lambda a, b: torch.func.grad(lambda w: (w * w).sum())(b),
    "jvp": lambda a, b: torch.func.jvp(lambda w: w * b, (torch.ones(18),), (torch.ones(18),)),
    "functional_call": lambda a, b: torch.func.functional_call(
        torch.nn.Linear(9, 2, bias=False), {"weight": b.view(2, 9)}, (torch.ones(9),)
    ),
    "sparse": lambda a, b: b.to_sparse().to_dense(),
    "real parts": lambda a, b: (
        torch.view_as_complex(b.view(9, 2)).imag.add_(1),
        torch.view_as_complex(b.view(9, 2)).real,
        b.conj(),
        b.resolve_neg(),
    ),
}


def flat(value):
    if isinstance(value, (tuple, list)):
        return [item for entry in value for item in flat(entry)]
    return [value]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LIFE)
def test_as_the_plain_view(name):
    want_raw, *plain = views()
    raw, *views_ = views()
    want, got = flat(LIFE[name](*plain)), flat(LIFE[name](*aliasstorage.wrap(views_)))
    assert len(want) == len(got)
    for left, right in zip(want, got, strict=True):
        if isinstance(left, torch.Tensor):
            assert torch.equal(left, aliasstorage.unwrap(right))
            assert left.dtype == right.dtype
            # What came back is a copy or the same memory, as it is of the plain view.
            left.detach().fill_(1)
            right.detach().fill_(1)
        else:
            assert left == right
    assert torch.equal(want_raw, raw)


REFUSED = {
    "set_": (lambda a, b: a.set_(torch.zeros(3).half()), errors.MetadataMutationError),
    "resize_as_": (lambda a, b: a.resize_as_(b), errors.MetadataMutationError),
    "data": (lambda a, b: setattr(a, "data", b), errors.MetadataMutationError),
    "Parameter": (lambda a, b: torch.nn.Parameter(b), errors.RequiresGradError),
    "requires_grad_": (
        lambda a, b: Holder(a, b).a.requires_grad_(),
        errors.RequiresGradError,
    ),
    "lazy conj": (
        lambda a, b: torch.view_as_complex(b.view(9, 2)).conj(),
        errors.UnsupportedOpError,
    ),
    "lazy neg": (lambda a, b: torch._neg_view(b), errors.UnsupportedOpError),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_written(name):
    """One taxonomy: what, which, expected, got, and what to do, each on a line of its own."""
    raw, *plain = views()
    before = raw.clone()
    run, kind = REFUSED[name]
    with pytest.raises(kind) as caught:
        run(*aliasstorage.wrap(plain))
    assert isinstance(caught.value, errors.AliasStorageError)
    first, *fields = str(caught.value).splitlines()
    assert first.endswith(".")
    assert [line.split(":")[0].strip() for line in fields] == ["which", "expected", "got", "do"]
    assert all(line.split(":", 1)[1].strip() for line in fields)
    assert torch.equal(raw, before)


def test_a_window_keeps_its_kind():
    """Where the plain view would be the same tensor or a view, a window stays a window."""
    _, *plain = views()
    a, b = aliasstorage.wrap(plain)
    for value in (
        copy.copy(a),
        a.cpu(),
        a.detach(),
        a[0],
        torch.nn.Buffer(b),
        through_a_queue(a, b),
    ):
        assert isinstance(value, AliasTensor)
    for value in (a.clone(), a.float(), a + 1, torch.stack([a, a])):
        assert type(value) is torch.Tensor
