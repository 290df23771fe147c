"""An engine's own compile backend, which splits the graph, wrapped by this library.

Engines compile a model in pieces: attention stays an opaque operation between them, so that it
can be captured, scheduled or replaced apart. `piecewise` is such a backend in its shortest form:
it splits at an operation and hands each piece to Inductor. Wrapped in `aliasstorage.backend`, it
gets a graph in which windows of one storage are typed inputs that are written in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch.fx.passes.split_module import split_module

import aliasstorage
from aliasstorage import Window

PAGE = 512  # bytes
HIDDEN = 64


@torch.library.custom_op("piecewise_example::attention", mutates_args=("kv",))
def attention(query: torch.Tensor, kv: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """Write a token's keys and values, and attend to the pages written so far."""
    kv[slot] = query.to(kv.dtype)
    return query + kv[: int(slot) + 1].float().nan_to_num(0, 0, 0).clamp(-2, 2).mean(0)


@attention.register_fake
def _(query: torch.Tensor, kv: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(query)


def step(
    x: torch.Tensor, kv: torch.Tensor, conv: torch.Tensor, state: torch.Tensor, slot: torch.Tensor
) -> torch.Tensor:
    """Linear attention, attention, linear attention: three layers on the same bytes."""
    old = conv[slot]
    conv[slot] = torch.cat([old[:, 1:], x[:, None].to(old.dtype)], 1)
    x = x + old.float().nan_to_num(0, 0, 0).clamp(-2, 2).sum(1)
    x = attention(x, kv, slot)
    state[slot] = state[slot].nan_to_num(0, 0, 0).clamp(-2, 2) * 0.5 + x
    return x + state[slot]


def windows(raw: torch.Tensor) -> list[torch.Tensor]:
    """Return the caches: views of different dtypes over one storage of bytes."""
    pages = raw.numel() // PAGE
    return [
        Window(torch.float16, (pages * 4, HIDDEN)).regenerate(raw),
        Window(torch.float16, (pages, 2, HIDDEN), (PAGE // 2, HIDDEN, 1)).regenerate(raw),
        Window(torch.float32, (pages, HIDDEN), (PAGE // 4, 1), byte_offset=256).regenerate(raw),
    ]


class Piecewise:
    """A backend that compiles the pieces between calls of one operation.

    Attributes:
        pieces: For each piece, whether it was compiled.
    """

    def __init__(self, boundary: Any) -> None:
        self.boundary = boundary
        self.pieces: list[bool] = []

    def __call__(
        self, module: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]
    ) -> torch.fx.GraphModule:
        """Split a graph of ATen operations, and compile each piece."""
        piece_of, piece = {}, 0
        for node in module.graph.nodes:
            if node.target == self.boundary:
                piece_of[node] = piece + 1
                piece += 2
            else:
                piece_of[node] = piece
        split = split_module(
            module, module, piece_of.__getitem__, keep_original_order=True, tuple_return=True
        )
        fake_mode = next(value.fake_mode for value in inputs if hasattr(value, "fake_mode"))
        with fake_mode:
            _CompilePieces(split, self, fake_mode).run(*inputs)
        return split


class _CompilePieces(torch.fx.Interpreter):
    """Runs the split graph on fakes, and replaces each piece that is not the boundary."""

    def __init__(self, split: torch.fx.GraphModule, owner: Piecewise, fake_mode: Any) -> None:
        super().__init__(split)
        self.split, self.owner, self.fake_mode = split, owner, fake_mode

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super().call_module(target, args, kwargs)
        piece = self.fetch_attr(target)
        opaque = any(node.target == self.owner.boundary for node in piece.graph.nodes)
        self.owner.pieces.append(not opaque)
        if not opaque:
            with tracing(TracingContext(self.fake_mode)):
                compiled = compile_fx_inner(piece, list(args))
            setattr(self.split, target, _Compiled(compiled))
        return result


class _Compiled(torch.nn.Module):
    def __init__(self, compiled: Callable[[list[Any]], Any]) -> None:
        super().__init__()
        self.compiled = compiled

    def forward(self, *args: Any) -> Any:
        return self.compiled(list(args))


def compile_piecewise(function: Callable[..., Any]) -> tuple[Callable[..., Any], Piecewise]:
    """Compile a function in pieces, on windows that are written in place."""
    engine = Piecewise(torch.ops.piecewise_example.attention.default)
    backend = aliasstorage.backend(engine, form="windows", decompositions=select_decomp_table())
    return torch.compile(function, backend=backend), engine


def compare_with_eager(nbytes: int, steps: int = 3) -> tuple[Piecewise, int]:
    """Return the engine after some steps, and how many bytes differ from eager mode's.

    Raises:
        AssertionError: A result differs.
    """
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    expected = raw.clone()
    compiled, engine = compile_piecewise(step)
    with torch.no_grad():
        for token in range(steps):
            x, slot = torch.randn(1, HIDDEN), torch.tensor([token])
            want = step(x, *windows(expected), slot)
            got = compiled(x, *windows(raw), slot)
            torch.testing.assert_close(got, want)
    return engine, int((raw != expected).sum())


def main() -> None:
    """Compare three steps with eager mode, byte for byte."""
    engine, differ = compare_with_eager(1 << 20)
    print(f"{sum(engine.pieces)} pieces compiled, {len(engine.pieces)} in all")
    print(f"{differ} bytes differ from eager mode")


if __name__ == "__main__":
    main()
