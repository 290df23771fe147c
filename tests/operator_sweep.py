"""Every operation of torch's own operator database, on windows that are written afterwards.

A compiler may take an operation's result for its argument although eager PyTorch copies, or copy
where eager returns the argument itself, as ``dropout`` does outside training (pytorch #195422).
For each operation and sample input this puts the tensor arguments into one storage as windows,
runs the operation, overwrites every byte of the storage, and compares what the operation returned
and all bytes with eager. Then it writes the results and compares the bytes again.

    python -m tests.operator_sweep --inner aot_eager --table sweep.md
"""

from __future__ import annotations

import argparse
import copy
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree

import aliasstorage

MOST_BYTES = 1 << 14  # of the windows of one sample
WRITTEN = 65  # the byte that is written; 0x41414141 is 12.08 as float32
DTYPES = (torch.float32, torch.int64, torch.complex64, torch.bool, torch.float64)


@dataclass
class Sample:
    """One call of an operation, without the memory of its tensors.

    Attributes:
        name: Of the operation.
        make_call: Returns what takes the leaves of the arguments, with a state of its own.
        leaves: The arguments, flattened.
        windows: Positions of the leaves that become windows.
    """

    name: str
    make_call: Callable[[], Callable[[Sequence[Any]], Any]]
    leaves: list[Any]
    windows: list[int]


def samples(operation: Any, most: int) -> Iterator[Sample]:
    """Yield the sample inputs of an `OpInfo` that windows can carry."""
    dtype = next((d for d in DTYPES if operation.supports_dtype(d, "cpu")), None)
    if dtype is None:
        return
    try:
        inputs = list(operation.sample_inputs("cpu", dtype, requires_grad=False))
    except Exception:
        return
    function = _public_function(operation)
    step = max(1, len(inputs) // most)
    for sample in inputs[::step][:most]:
        args, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
        yield from _sample(operation.formatted_name, lambda: function, args, kwargs, dtype)


def module_samples(info: Any, most: int) -> Iterator[Sample]:
    """Yield the sample inputs of a `ModuleInfo`, in training and out of it."""
    dtype = torch.float32
    for training in (False, True):
        try:
            inputs = info.module_inputs_func(info, "cpu", dtype, False, training)
        except Exception:
            return
        for sample in inputs[:most]:
            made, given = sample.constructor_input, sample.forward_input
            try:
                module = info.module_cls(*made.args, **made.kwargs).train(training)
            except Exception:  # noqa: S112  (a sample of an error)
                continue
            name = f"{info.name}, {'training' if training else 'evaluation'}"
            make = partial(copy.deepcopy, module)
            yield from _sample(name, make, given.args, given.kwargs, dtype)


def _sample(
    name: str, make: Callable[[], Any], args: Any, kwargs: Any, dtype: torch.dtype
) -> Iterator[Sample]:
    leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
    windows = [i for i, leaf in enumerate(leaves) if _fits(leaf, dtype)]
    if not windows or sum(_span(leaves[i]) for i in windows) > MOST_BYTES:
        return

    def make_call() -> Callable[[Sequence[Any]], Any]:
        function = make()

        def call(values: Sequence[Any]) -> Any:
            args, kwargs = pytree.tree_unflatten(list(values), spec)
            return function(*args, **kwargs)

        return call

    yield Sample(name, make_call, leaves, windows)


def _public_function(operation: Any) -> Callable[..., Any]:
    """Return what users call. The database wraps random operations, which compiles none of them."""
    found: Any = torch
    for part in operation.name.split("."):
        found = getattr(found, part, None)
    is_wrapped = getattr(operation.op, "__name__", "") == "<lambda>"
    return found if is_wrapped and callable(found) else operation.op


def _fits(leaf: Any, dtype: torch.dtype) -> bool:
    return (
        type(leaf) is torch.Tensor
        and leaf.dtype == dtype
        and leaf.layout == torch.strided
        and leaf.numel() > 0
        and not leaf.is_conj()
        and not leaf.is_neg()
    )


def _span(tensor: torch.Tensor) -> int:
    """Return how many bytes a tensor needs, rounded up so that the next one is aligned."""
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return -(-reach * tensor.dtype.itemsize // 16) * 16


def place(sample: Sample, separate: bool = False) -> tuple[list[Any], list[torch.Tensor]]:
    """Return a sample's leaves with fresh memory, and the bytes of it.

    Args:
        sample: The sample.
        separate: Whether each window gets a storage of its own.
    """
    leaves = [x.clone() if isinstance(x, torch.Tensor) else x for x in sample.leaves]
    spans = [_span(sample.leaves[i]) for i in sample.windows]
    shared = torch.zeros(sum(spans), dtype=torch.uint8)
    buffers, start = [], 0
    for position, span in zip(sample.windows, spans, strict=True):
        tensor = sample.leaves[position]
        buffer = torch.zeros(span, dtype=torch.uint8) if separate else shared[start : start + span]
        start += span
        window = buffer.view(tensor.dtype).as_strided(
            tensor.shape, tensor.stride(), buffer.view(tensor.dtype).storage_offset()
        )
        if not _repeats(window):
            window.copy_(tensor)
        leaves[position] = window
        buffers.append(buffer)
    return leaves, buffers if separate else [shared]


def _repeats(tensor: torch.Tensor) -> bool:
    return any(n > 1 and not s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def overwrite_after(sample: Sample) -> Callable[..., Any]:
    """Return the function that is compiled: the operation, then a write of every byte."""

    call = sample.make_call()

    def step(leaves: list[Any], buffers: list[torch.Tensor]) -> Any:
        result = call(leaves)
        for buffer in buffers:
            buffer.fill_(WRITTEN)
        return result

    return step


def overwrite_windows_after(sample: Sample) -> Callable[..., Any]:
    """The same for separate tensors: each is written through itself."""

    call = sample.make_call()

    def step(leaves: list[Any]) -> Any:
        result = call(leaves)
        for position in sample.windows:
            leaves[position].zero_()
        return result

    return step


def is_random(sample: Sample) -> bool:
    """Return whether two calls differ, as those of random operations and empty tensors do."""
    if "empty" in sample.name:
        return True
    results = []
    for seed in range(2):
        torch.manual_seed(seed)
        leaves, _ = place(sample)
        results.append(
            [t.detach().clone() for t in tensors_of(sample.make_call()(leaves)) if _dense(t)]
        )
    return not _close(*results)


def _dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested


def _close(want: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> bool:
    if len(want) != len(got):
        return False
    try:
        for left, right in zip(want, got, strict=True):
            right = aliasstorage.unwrap(right)
            torch.testing.assert_close(right, left, equal_nan=True, rtol=1e-3, atol=1e-3)
    except AssertionError:
        return False
    return True


@dataclass
class Outcome:
    """What became of one sample: ``right``, ``wrong: …`` or ``refused: …``."""

    text: str

    @property
    def kind(self) -> str:
        return self.text.split(":")[0]


def compare(sample: Sample, compile_: Callable[[Any], Any], carrier: str, random: bool) -> Outcome:
    """Run a sample eagerly and compiled.

    Args:
        sample: The sample.
        compile_: Returns the compiled function.
        carrier: ``wrapped``, ``plain``, or ``separate`` for tensors with storages of their own.
        random: Whether to leave the values out, which differ from call to call.
    """
    separate = carrier == "separate"
    make = overwrite_windows_after if separate else overwrite_after

    def arguments() -> tuple[list[Any], list[torch.Tensor]]:
        leaves, buffers = place(sample, separate)
        return ([leaves] if separate else [leaves, buffers]), buffers

    torch.manual_seed(0)
    want_args, want_buffers = arguments()
    want = tensors_of(make(sample)(*want_args))
    torch._dynamo.reset()
    torch.manual_seed(0)
    got_args, got_buffers = arguments()
    if carrier == "wrapped":
        for position in sample.windows:
            got_args[0][position] = aliasstorage.wrap(got_args[0][position])
        got_args[1] = aliasstorage.wrap(got_args[1])
    try:
        got = tensors_of(compile_(make(sample))(*got_args))
    except Exception as error:
        return Outcome(f"refused: {type(error).__name__}: {str(error)[:90]!r}")
    pairs = [(a, aliasstorage.unwrap(b)) for a, b in zip(want, got, strict=True) if _dense(a)]
    if not random and not _close(*zip(*pairs, strict=True)) if pairs else False:
        return Outcome("wrong: results")
    if not _close(want_buffers, got_buffers):
        return Outcome("wrong: bytes")
    for number, (left, right) in enumerate(pairs):
        if _repeats(left) or left.is_conj() or left.is_neg():
            continue
        left.fill_(1)
        right.fill_(1)
        if not _close(want_buffers, got_buffers):
            return Outcome(f"wrong: bytes after result {number} was written")
        if not random and not _close(*zip(*pairs, strict=True)):
            return Outcome(f"wrong: results after result {number} was written")
    return Outcome("right")


def leaves_argument(sample: Sample) -> bool:
    """Return whether an operation's result is its argument, a view of it, or equal to it."""
    leaves, buffers = place(sample)
    before = [leaves[i].clone() for i in sample.windows]
    storages = {buffer.untyped_storage().data_ptr() for buffer in buffers}
    for result in tensors_of(sample.make_call()(leaves)):
        if not _dense(result):
            continue
        if result.untyped_storage().data_ptr() in storages:
            return True
        for value in before:
            if result.dtype == value.dtype and result.numel() == value.numel():
                flat, other = result.reshape(-1), value.reshape(-1)
                if torch.equal(flat.resolve_conj(), other.resolve_conj()):
                    return True
    return False


def everything(most: int, only: str = "") -> Iterator[list[Sample]]:
    """Yield the samples of each operation and module in torch's databases."""
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    for operation in op_db:
        if only in operation.formatted_name:
            yield list(samples(operation, most))
    for info in module_db:
        if only in info.name:
            yield list(module_samples(info, most))


def compiler(inner: str, in_place: bool, carrier: str) -> Callable[[Any], Any]:
    if carrier == "separate":
        return lambda f: torch.compile(f, backend=inner)
    if not in_place and carrier == "wrapped" and inner != "inductor":
        return lambda f: torch.compile(f, backend=inner)  # stock, on a byte graph
    chosen = aliasstorage.backend(inner=inner, bufferize=in_place)
    return lambda f: torch.compile(f, backend=chosen)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inner", default="aot_eager")
    parser.add_argument("--most", type=int, default=4, help="samples of an operation")
    parser.add_argument("--only", default="", help="operations whose name has this in it")
    parser.add_argument("--identities", action="store_true", help="only what leaves its argument")
    parser.add_argument("--modes", default="plain,wrapped,plain-bytes,wrapped-bytes")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    torch._logging.set_logs(all=logging.CRITICAL)
    torch._inductor.config.fallback_random = True
    counts: Counter[tuple[str, str]] = Counter()
    names = set()
    for found in everything(options.most, options.only):
        for number, sample in enumerate(found):
            try:
                random, leaves = is_random(sample), leaves_argument(sample)
            except Exception:
                counts["eager cannot run it", ""] += 1
                continue
            if options.identities and not leaves:
                continue
            names.add(sample.name)
            for mode in options.modes.split(","):
                carrier, _, form = mode.partition("-")
                compile_ = compiler(options.inner, not form, carrier)
                outcome = compare(sample, compile_, carrier, random)
                counts[mode, outcome.kind] += 1
                if outcome.kind != "right":
                    separate = compiler(options.inner, False, "separate")
                    stock = compare(sample, separate, "separate", random)
                    print(f"{sample.name}[{number}] {mode}: {outcome.text}", flush=True)
                    print(f"    stock, separate: {stock.text}", flush=True)
                    counts[f"{mode}, stock separate {stock.kind}", outcome.kind] += 1
    print(len(names), "operations")
    for key, count in sorted(counts.items()):
        print(*key, count, sep=" | ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
