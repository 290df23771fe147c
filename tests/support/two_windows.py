"""Two windows of different dtypes over one buffer, and what tests do with them."""

from __future__ import annotations

import contextlib

import torch

from aliasstorage import AliasTensor, Window
from tests.support.oracle import as_bytes

A = Window(torch.float16, (8, 8))
B = Window(torch.float32, (8, 4), byte_offset=128)
OVER_A = Window(torch.int32, (32,))
BYTES = 256
BACKENDS = {
    "stock": lambda f, **kw: torch.compile(f, backend="aot_eager", **kw),
    "ours": lambda f, **kw: torch.compile(
        f, backend="aliasstorage", options={"inner": "aot_eager"}, **kw
    ),
}
# Stock torch refuses plain views of different dtypes; that is what this library is for.
CARRIED = [("stock", "wrapped"), ("ours", "wrapped"), ("ours", "plain")]


def fresh(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (BYTES,), dtype=torch.uint8, generator=generator)


def windows(buffer):
    return AliasTensor(buffer, A), AliasTensor(buffer, B)


def plains(buffer):
    return A.regenerate(buffer), B.regenerate(buffer)


def update(a, b, x):
    a[x] = a[x] + 1
    b[x] += 2
    return a[0], b * 1.0


def same(left, right):
    return torch.equal(as_bytes(left), as_bytes(right))


X = torch.tensor([1, 3])
MODES = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "grad": contextlib.nullcontext,
}


@torch.library.custom_op("tests::scale_pair", mutates_args=("a", "more", "none"))
def scale_pair(
    a: torch.Tensor, more: list[torch.Tensor], none: torch.Tensor | None
) -> torch.Tensor:
    a.mul_(2)
    for tensor in more:
        tensor.add_(1)
    return a + 1


@scale_pair.register_fake
def _(a, more, none):
    return torch.empty_like(a)
