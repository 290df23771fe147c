"""Private torch names: all there, and only in one file."""

import re
from pathlib import Path

import pytest
import torch
from torch._inductor.output_code import CompiledFxGraph
from torch.profiler import profile

from aliasstorage import _compat

PACKAGE = Path(_compat.__file__).parent


@pytest.mark.parametrize("name", _compat.__all__)
def test_every_private_name_exists(name):
    assert getattr(_compat, name) is not None


def test_only_compat_imports_private_names():
    pattern = re.compile(r"(from|import) +torch\.[\w.]*\b_\w|torch\._[a-z]")
    for path in PACKAGE.rglob("*.py"):
        if path.name == "_compat.py":
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not pattern.search(line.split("#")[0]), f"{path.name}:{number}: {line.strip()}"


def test_no_import_goes_backwards():
    """The layers import one way."""
    order = [
        "version",
        "errors",
        "_compat",
        "ops",
        "window",
        "overlap",
        "memory_map",
        "registry",
        "schemas",
        "tracing",
        "offsets",
        "tensor",
        "moves",
        "identities",
        "arguments",
        "higher_order",
        "dispatch",
        "storage",
        "layouts",
        "tree",
        "consolidate",
        "slices",
        "forms",
        "bufferize",
        "mutations",
        "grouping",
        "merge",
        "guards",
        "calling",
        "lowering",
        "backend",
        "explain",
        "recorder",
        "testing",
    ]
    for path in PACKAGE.glob("*.py"):
        name = path.stem
        if name not in order:
            continue
        text = path.read_text()
        for imported in re.findall(r"^from aliasstorage(?:\.(\w+))? import", text, re.M):
            if imported and imported in order:
                assert order.index(imported) < order.index(name), f"{name} imports {imported}"


def test_a_call_of_inductors_graph_does_only_what_it_must(monkeypatch):
    raw = torch.zeros(64, dtype=torch.uint8)
    views = raw[:32].view(torch.float16), raw[32:].view(torch.float32)

    @torch.compile(backend="aliasstorage", fullgraph=True)
    def step(a, b):
        a.add_(1)
        b.mul_(2).add_(a[:8])

    through = []
    call = CompiledFxGraph.__call__

    def record(self, inputs):
        through.append(self)
        return call(self, inputs)

    monkeypatch.setattr(CompiledFxGraph, "__call__", record)
    step(*views)
    through.clear()
    step(*views)
    assert not through
    with profile() as profiled:
        step(*views)
    assert through
    assert any(event.key.startswith("## Call CompiledFxGraph") for event in profiled.key_averages())
    assert torch.equal(views[0], torch.full((16,), 3.0, dtype=torch.float16))
    assert torch.equal(views[1], torch.full((8,), 11.0))


def test_other_functions_are_called_as_they_are():
    function = torch.nn.Linear(1, 1)
    assert _compat.steady_call(function) is function
    assert _compat.steady_call(len) is len
