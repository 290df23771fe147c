"""Random programs on random windows: ``python -m tests.fuzz --count 2000 --seed 1``.

A program is a few lines of Python on windows of one or two buffers of random bytes. It is drawn
and shrunk by hypothesis, run eagerly on plain views, and again compiled; results, whole buffers
and aliasing must agree, also after everything that came back was mutated. Then the same compiled
function is called with windows that lie elsewhere. A failure is printed as a script that runs.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import textwrap
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st

import aliasstorage
from aliasstorage import Window
from tests.support.oracle import as_tuple, assert_buffers, assert_results, relations, scribble

BYTES = 192
DTYPES = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.bool,
    torch.float8_e4m3fn,
]
CONFIGURATIONS = {
    "stock aot_eager, wrapped": ("stock", "wrapped", True),
    "in place, wrapped": ("aot_eager", "wrapped", True),
    "in place, plain": ("aot_eager", "plain", True),
    "in place, mixed": ("aot_eager", "mixed", True),
    "bytes, plain": ("aot_eager", "plain", False),
    "bytes, wrapped": ("aot_eager", "wrapped", False),
}
INDUCTOR_CONFIGURATIONS = {
    "inductor in place, wrapped": ("inductor", "wrapped", True),
    "inductor in place, plain": ("inductor", "plain", True),
    "inductor bytes, wrapped": ("inductor", "wrapped", False),
    "inductor bytes, plain": ("inductor", "plain", False),
    "stock inductor, wrapped": ("stock inductor", "wrapped", False),
}
ALL_CONFIGURATIONS = {**CONFIGURATIONS, **INDUCTOR_CONFIGURATIONS}


@torch.library.custom_op("tests_fuzz::bump", mutates_args=("x",))
def bump(x: torch.Tensor) -> torch.Tensor:
    """Mutate a window behind the compiler's back, and return a new value."""
    old = x.clone()
    x.copy_(torch.flip(x, [0]))
    return old


bump.register_fake(torch.empty_like)


def ramp(x: Any) -> Any:
    """Return new values of a window's shape and dtype."""
    return (torch.arange(x.numel()).reshape(x.shape) % 5).to(x.dtype)


def mask(x: Any) -> Any:
    return torch.arange(x.numel()).reshape(x.shape) % 3 == 0


def rows(*numbers: int) -> Any:
    return torch.tensor(numbers)


NAMES = {
    "torch": torch,
    "bump": bump,
    "ramp": ramp,
    "mask": mask,
    "rows": rows,
    "graph_break": torch._dynamo.graph_break,
}

# {x} and {y} are windows, views or values; {i}, {j} small numbers; {v} a new name.
WRITES = [
    "{x}.fill_({i})",
    "{x}.zero_()",
    "{x}.add_({i})",
    "{x}.mul_(2)",
    "{x}[{i}].fill_({j})",
    "{x}[{i}:].zero_()",
    "{x}[..., {i}].fill_(1)",
    "{x}[::2] = ramp({x}[::2])",
    "{x}[rows({i}, {j})] = 3",
    "{x}[rows({i}, {i})] = {x}[rows({j}, {j})]",
    "{x}[rows({i})] += 1",
    "{x}.copy_(ramp({x}))",
    "{x}.copy_({y}.clone())",
    "{x}[0] = {x}[{i}].clone()",
    "{x}.masked_fill_(mask({x}), {j})",
    "{x}[mask({x})] = 2",
    "{x}.index_add_(0, rows({i}, 0, {i}), ramp({x}[:1]).expand(3, *{x}.shape[1:]))",
    "{x}.index_copy_(0, rows({i}), ramp({x}[:1]))",
    "{x}.index_fill_(0, rows({i}), {j})",
    "{x}.scatter_(0, rows({i}, {j}).reshape(-1, *[1] * ({x}.dim() - 1)), ramp({x}[:2]))",
    "{x}.masked_scatter_(mask({x}), ramp({x}))",
    "{x}.put_(rows({i}), ramp({x}).reshape(-1)[:1])",
    "{x}.index_reduce_(0, rows({i}), ramp({x}[:1]), 'amax')",
    "torch.add(ramp({x}), {i}, out={x})",
    # One tensor: stock torch is wrong on a plain tensor that stands in a foreach twice.
    "torch._foreach_add_([{x}, {x}.clone()], 1)",
    "torch._foreach_copy_([{x}], [ramp({x})])",
    "{x}.t().add_(1)",
    "{x}.logical_not_()",
    "{x}.clamp_(0, {j})",
    "{x}.sub_({y}[{i}].clone())",
]
READS = [
    "{v} = {x}.clone()",
    "{v} = {x}[{i}]",
    "{v} = {x}[{i}:]",
    "{v} = {x}.t()",
    "{v} = {x}.view(-1)",
    "{v} = {x}.reshape(-1)",
    "{v} = {x} + 1",
    "{v} = {x} * {x}",
    "{v} = {x}[rows({i}, {j})]",
    "{v} = {x}.view(torch.uint8)",
    "{v} = {x}.view(torch.int16)",
    "{v} = {x}.view(torch.int32)",
    "{v} = {x}.unsqueeze(0)",
    "{v} = {x}.expand(2, *{x}.shape)",
    "{v} = {x}.contiguous()",
    "{v} = {x}.detach()",
    "{v} = {x}.split(2)[-1]",
    "{v} = {x}.unbind(-1)[0]",
    "{v} = {x} == {x}",
    "{v} = bump({x})",
    "{v} = torch.view_as_real({x})",
    "{v} = torch.cat([{x}, {x}])",
]
# Operations that leave a window as it is. Of plain tensors stock Inductor returns aliases there.
IDENTITIES = [
    "{v} = {x}.repeat(*[1] * max({x}.dim(), 1)).reshape({x}.shape)",
    "{v} = torch.cat([{x}])",
    "{v} = {x}.roll(0, 0)",
    "{v} = torch.stack([{x}]).squeeze(0)",
    "{v} = {x} + torch.zeros_like({x})",
    "{v} = torch.zeros_like({x}).copy_({x})",
]


@dataclass
class Program:
    """Windows, lines, and what is returned.

    ``moves`` has, for each further call, the storage and the byte offset of each window, and
    by how much its outermost dimension is longer. ``nbytes`` is the length of each storage.
    """

    windows: list[Window]
    storages: list[int]
    lines: list[str]
    returned: list[str]
    seed: int
    configuration: str
    moves: list[list[tuple[int, int, int]]] = field(default_factory=list)
    nbytes: int = BYTES

    @property
    def function(self) -> str:
        names = ", ".join(f"w{i}" for i in range(len(self.windows)))
        body = [*self.lines, f"return [{', '.join(self.returned)}]"]
        return f"def program({names}):\n" + textwrap.indent("\n".join(body), "    ") + "\n"

    def script(self) -> str:
        """Return the program as a script that runs."""
        return (
            "# A program that went wrong; run it from the root of the repository.\n"
            "import torch\nfrom aliasstorage import Window\n"
            "from tests.fuzz import Program, check\n\n"
            f"check(Program(\n    {self.windows!r},\n    {self.storages}, {self.lines!r},\n"
            f"    {self.returned}, seed={self.seed}, configuration={self.configuration!r},\n"
            f"    moves={self.moves}, nbytes={self.nbytes}))\n"
            + textwrap.indent(self.function, "# ")
        )

    def calls(self) -> list[Program]:
        """Return this program on the windows of each call."""
        moved = [
            replace(
                self,
                windows=[
                    replace(grown(window, more), byte_offset=offset)
                    for window, (_, offset, more) in zip(self.windows, move, strict=True)
                ],
                storages=[storage for storage, _, _ in move],
                seed=self.seed + number,
            )
            for number, move in enumerate(self.moves, 1)
        ]
        return [self, *moved]

    def buffers(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        buffers = [
            torch.randint(0, 256, (self.nbytes,), dtype=torch.uint8, generator=generator)
            for _ in range(2)
        ]
        if not self.in_place:
            # Eager mode makes 1 of an odd bool in some of its copies, and a byte graph in others.
            # What neither writes is compared in tests/subclass/test_exact_writes.py.
            for window, storage in zip(self.windows, self.storages, strict=True):
                if window.dtype == torch.bool:
                    buffers[storage].bitwise_and_(1)
        return buffers

    @property
    def in_place(self) -> bool:
        backend, _, bufferize = CONFIGURATIONS.get(self.configuration, ("stock", "", False))
        return backend == "aot_eager" and bufferize

    @property
    def carrier(self) -> str:
        return ALL_CONFIGURATIONS[self.configuration][1]

    @property
    def takes_bools(self) -> bool:
        """Whether windows of bools compile: on byte graphs not with Inductor, on the CPU."""
        backend, _, bufferize = ALL_CONFIGURATIONS[self.configuration]
        return bufferize or "inductor" not in backend

    def compiled_source(self, name: str) -> Any:
        namespace = dict(NAMES)
        exec(compile(self.function, name, "exec"), namespace)  # noqa: S102
        return namespace["program"]


@st.composite
def windows(draw: Any) -> Window:
    dtype = draw(st.sampled_from(DTYPES))
    dims = draw(st.integers(0, 3))
    size = [
        draw(st.sampled_from([2, 3, 4, 1, 0] if draw(st.booleans()) else [2, 3]))
        for _ in range(dims)
    ]
    order = draw(st.permutations(range(dims)))
    stride, step = [0] * dims, draw(st.sampled_from([1, 1, 2, 3]))
    for dim in order:
        stride[dim] = step
        step *= max(size[dim], 1) + draw(st.sampled_from([0, 0, 1]))
    if dims and draw(st.integers(0, 9)) == 0:
        stride[order[-1]] = 0
    # Stock Dynamo loses writes to a plain 0-dim float64 tensor on the CPU; see docs/promises.md.
    hypothesis.assume(dims or dtype != torch.float64)
    window = Window(dtype, size, stride)
    hypothesis.assume(window.span[1] <= BYTES)
    return replace(window, byte_offset=draw(offsets(window)))


def grown(window: Window, more: int) -> Window:
    """Return a window whose outermost dimension is longer, if there is room for it."""
    if not window.numel or not any(window.stride):
        return window
    outermost = max(range(len(window.size)), key=lambda dim: window.stride[dim])
    size = list(window.size)
    size[outermost] += more
    longer = Window(window.dtype, tuple(size), window.stride)
    return longer if longer.span[1] <= BYTES else window


def offsets(window: Window) -> st.SearchStrategy[int]:
    """Draw where a window starts, in bytes."""
    itemsize = window.dtype.itemsize
    room = (BYTES - (window.span[1] - window.span[0])) // itemsize
    return st.integers(0, min(room, 12)).map(lambda number: number * itemsize)


@st.composite
def programs(draw: Any, configurations: tuple[str, ...]) -> Program:
    """Draw a program whose lines all run, on plain views of its bytes."""
    shown = draw(st.lists(windows(), min_size=1, max_size=4))
    storages = [draw(st.sampled_from([0, 0, 0, 1])) for _ in shown]
    program = Program(shown, storages, [], [], draw(st.integers(0, 99)), "")
    program.configuration = draw(st.sampled_from(configurations))
    program.nbytes += draw(st.sampled_from([0, 0, 1, 2, 4, 8]))
    hypothesis.assume(program.takes_bools or all(window.dtype != torch.bool for window in shown))
    buffers = program.buffers()
    scope = dict(NAMES)
    for index, window in enumerate(shown):
        scope[f"w{index}"] = window.regenerate(buffers[storages[index]])
    names = [f"w{index}" for index in range(len(shown))]
    for _ in range(draw(st.integers(1, 8))):
        template = draw(st.sampled_from([*WRITES, *READS, "graph_break()"]))
        if program.carrier == "wrapped" and draw(st.integers(0, 7)) == 0:
            template = draw(st.sampled_from(IDENTITIES))
        new = f"v{len(names)}"
        x, y = draw(st.sampled_from(names)), draw(st.sampled_from(names))
        if "{y}" in template and not _comparable(scope[x], scope[y]):
            continue
        if template in IDENTITIES and not x.startswith("w"):
            continue
        if template in WRITES and _is_expanded(scope[x]):
            continue
        line = template.format(
            x=x,
            y=y,
            i=draw(st.integers(0, 2)),
            j=draw(st.integers(0, 2)),
            v=new,
        )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # deprecated writes to expanded tensors
                exec(line, scope)  # noqa: S102
        except Exception:  # noqa: S112  (a line that plain views refuse is not drawn)
            continue
        value = scope.get(new)
        if isinstance(value, torch.Tensor) and not value.dim() and value.dtype == torch.float64:
            # After a graph break, an input of the kind that stock Dynamo loses writes to.
            del scope[new]
            continue
        program.lines.append(line)
        if new in scope:
            names.append(new)
    for _ in range(draw(st.sampled_from([0, 0, 1, 2, 3]))):
        more = draw(st.sampled_from([0, 0, 1, 2]))
        move = [
            (
                draw(st.sampled_from([0, 0, 0, 1])),
                draw(offsets(grown(window, more))),
                more if grown(window, more) != window else 0,
            )
            for window in shown
        ]
        # A call with a new alias pattern runs eagerly, and the next one compiled.
        program.moves += [move, move]
    program.returned = draw(st.lists(st.sampled_from(names), max_size=4, unique=True))
    hypothesis.assume(program.lines)
    return program


def _is_expanded(x: Any) -> bool:
    """Return whether writing to x is deprecated; stock torch compiles such writes to garbage."""
    return any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True))


def _comparable(x: Any, y: Any) -> bool:
    """Return whether values of y may go into x and still be compared bit for bit.

    Copying bools makes 1 of an odd byte in some kernels only, and a float that an integer cannot
    hold becomes anything.
    """
    if not (isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)):
        return False
    if torch.bool in (x.dtype, y.dtype):
        return False
    return not (y.is_floating_point() or y.is_complex()) or x.dtype == y.dtype


def check(program: Program) -> None:
    """Run a program both ways and compare."""
    backend, _, bufferize = ALL_CONFIGURATIONS[program.configuration]
    torch._dynamo.reset()
    eager = program.compiled_source("eager")
    compiled = torch.compile(program.compiled_source("compiled"), **_options(backend, bufferize))
    for number, call in enumerate(program.calls()):
        check_call(call, eager, compiled, f"call {number}, ")


def check_call(program: Program, eager: Any, compiled: Any, where: str) -> None:
    """Call a program both ways on fresh buffers, and compare."""
    sides = []
    for function in (eager, compiled):
        buffers = program.buffers()
        args = [
            window.regenerate(buffers[storage])
            for window, storage in zip(program.windows, program.storages, strict=True)
        ]
        if function is compiled and program.carrier == "wrapped":
            args = aliasstorage.wrap(args)
        elif function is compiled and program.carrier == "mixed":
            args = [aliasstorage.wrap(a) if i % 2 else a for i, a in enumerate(args)]
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            try:
                results = as_tuple(function(*args))
            except Exception as error:
                if function is compiled and _is_refusal(error):
                    return
                if function is eager and not where.startswith("call 0"):
                    return  # a view in a wider dtype asks for an offset that it divides
                raise
        sides.append((buffers, args, results))
    (want_buffers, want_args, want), (buffers, args, got) = sides
    # A byte graph's kernels may compute other bits of a NaN than eager's in-place ones.
    exact = program.in_place
    shown = program.windows
    assert_results(want, got, True, exact, f"{where}results")
    assert_buffers(want_buffers, buffers, shown, exact, f"{where}buffer")
    assert relations(want, want_args, want_buffers) == relations(got, args, buffers), (
        f"{where}aliasing"
    )
    for index, (left, right) in enumerate(zip(want, got, strict=True)):
        with contextlib.suppress(RuntimeError):
            scribble(left)
            scribble(right)
        after = f"{where}after mutating result {index}"
        assert_buffers(want_buffers, buffers, shown, exact, after)
        assert_results(want, got, True, exact, after)


def _options(backend: str, bufferize: bool) -> dict[str, Any]:
    if backend == "stock":
        return {"backend": "aot_eager"}
    if backend == "stock inductor":
        return {"backend": "inductor", "options": {"emulate_precision_casts": True}}
    options: dict[str, Any] = {"inner": backend, "bufferize": bufferize}
    if backend == "inductor":
        options["emulate_precision_casts"] = True
    return {"backend": "aliasstorage", "options": options}


def _is_refusal(error: Exception) -> bool:
    inner = getattr(error, "inner_exception", error)
    # Stock torch raises these: for a custom operation on a view of a plain input that nothing else
    # shares a storage with; in its decomposition of index_fill, for indices of empty dimensions;
    # for a write to an empty plain tensor that was viewed in another dtype; for a write to a part
    # of a new float8 tensor, on Inductor.
    texts = (
        r"out of bounds for storage of size",
        r"out of bounds for dimension with size 0",
        r"self\.stride\(\d+\) must be divisible by \d+ to view",
        r"Promotion for Float8 Types is not supported",
    )
    if "reached stock AOTAutograd" in str(inner):
        return False  # no program asks for that
    return any(re.search(text, str(error)) for text in texts) or isinstance(
        inner, aliasstorage.AliasStorageError
    )


def run(count: int, seed: int, configurations: tuple[str, ...]) -> None:
    """Check ``count`` programs."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
    )
    @hypothesis.given(programs(configurations))
    def all_programs(program: Program) -> None:
        hypothesis.note(program.script())
        check(program)

    all_programs()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inductor", action="store_true", help="compile with Inductor")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = INDUCTOR_CONFIGURATIONS if arguments.inductor else CONFIGURATIONS
    run(arguments.count, arguments.seed, tuple(chosen))
    print(f"{arguments.count} programs, seed {arguments.seed}: all as eager PyTorch")


if __name__ == "__main__":
    main()
