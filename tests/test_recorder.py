"""The graphs that a backend is handed, compared with the ones in tests/golden.

After a change that is meant to change them: UPDATE_GOLDEN=1 python -m pytest tests/test_recorder.py
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import aliasstorage
from aliasstorage import Recorder, Window
from examples.hybrid_decode import Geometry, caches_of, make_step

GOLDEN = Path(__file__).parent / "golden"


def two_dtypes(a, b, x):
    a.copy_(x.to(a.dtype))
    b.mul_(2)
    return a.sum() + b.sum()


def a_value_kept_across_a_write(a, b, x):
    kept = b[1:3].clone()
    a[0:2] = x[:2, None]
    return kept, b[0] + 1


def interleaved(k, v, x):
    k[torch.tensor([1, 3])] = x[:2, None].half()
    v[torch.tensor([1, 3])] = x[2:4, None].half()
    return (k[1] * v[1]).sum()


FLAT = Window(torch.float16, (256,))
HALF, FLOAT = Window(torch.float16, (16, 16)), Window(torch.float32, (8, 16))
CASES = {
    "two_dtypes": (two_dtypes, FLAT, Window(torch.float32, (128,), byte_offset=256), 256),
    "a_value_kept_across_a_write": (a_value_kept_across_a_write, HALF, FLOAT, 16),
    "interleaved": (
        interleaved,
        Window(torch.float16, (8, 16), (32, 1)),
        Window(torch.float16, (8, 16), (32, 1), byte_offset=32),
        16,
    ),
}
FORMS = {
    "windows": {"form": "windows"},
    "byte_graph": {"bufferize": False},
    "bytes": {"form": "bytes"},
    "slices": {"form": "slices"},
}


def record(case, form, carrier="plain"):
    function, *windows, length = CASES[case]
    raw = torch.zeros(1024, dtype=torch.uint8)
    views = [window.regenerate(raw) for window in windows]
    if carrier == "wrapped":
        views = aliasstorage.wrap(views)
    recorder = Recorder("aot_eager", **FORMS[form])
    with torch.no_grad():
        x = torch.zeros(16, 16).flatten()[:length]
        torch.compile(function, backend=recorder)(*views, x)
    return recorder


def without_places(text):
    """Return a graph's text without paths and line numbers."""
    text = re.sub(r"# File: \S*/(\w+\.py):\d+ in", r"# \1,", text)
    return re.sub(r"class .*\(torch", "class Graph(torch", text).rstrip() + "\n"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_golden(case, form):
    text = without_places(str(record(case, form)))
    path = GOLDEN / f"{case}.{form}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("carrier", ["plain", "wrapped"])
@pytest.mark.parametrize("form", ["byte_graph", "bytes", "slices"])
@pytest.mark.parametrize("case", CASES)
def test_each_storage_is_one_input_of_bytes(case, form, carrier):
    (graph,) = record(case, form, carrier).graphs
    inputs = {name: (dtype, shape) for name, dtype, shape in graph.inputs}
    assert list(inputs.values()).count((torch.uint8, (1024,))) == 1
    assert len(inputs) == 2


@pytest.mark.parametrize("carrier", ["plain", "wrapped"])
def test_windows_have_the_names_of_their_sources(carrier):
    (graph,) = record("two_dtypes", "windows", carrier).graphs
    assert {name for name, _, _ in graph.inputs} >= {"window_a", "window_b"}


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_names_that_compilers_use_themselves(inner):
    def step(torch, self, buf0, arg0_1):
        torch.add_(1)
        self.mul_(2)
        buf0.copy_(self + arg0_1)
        return torch + buf0

    raw = torch.zeros(96, dtype=torch.uint8)
    views = raw[:32].view(torch.float16), raw[32:].view(torch.int32)
    results = torch.compile(step, backend=aliasstorage.backend(inner))(
        views[0], views[1], views[1], torch.ones(16, dtype=torch.int32)
    )
    assert results.tolist() == [2.0] * 16
    assert views[1].tolist() == [1] * 16


def test_equal_windows_of_two_storages_have_inputs_of_their_own():
    def step(a, b, c, d, arg1_1):
        a.add_(b[0])
        c.copy_(d[1] + arg1_1)
        return a + c

    raws = [torch.zeros(64, dtype=torch.uint8) for _ in range(2)]
    views = [v for raw in raws for v in (raw.view(torch.float16), raw.view(torch.float32)[:8])]
    recorder = Recorder("aot_eager")
    torch.compile(step, backend=recorder)(views[0], views[1], views[2], views[3], torch.ones(32))
    names = [name for name, _, _ in recorder.graphs[0].inputs]
    assert len(set(names)) == len(names) == 5
    assert raws[1].view(torch.float16).tolist() == [1.0] * 32


class Sizes(Recorder):
    """Also keeps the bytes of each value that a graph makes, other than views."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.sizes = []

    def _listen(self, reports, module):
        for node in module.graph.nodes:
            value, target = node.meta.get("val"), node.target
            is_op = isinstance(target, torch._ops.OpOverload) and isinstance(value, torch.Tensor)
            if is_op and not (target._schema.is_mutable or target.is_view):
                self.sizes.append(value.numel() * value.dtype.itemsize)


def test_what_a_step_makes_does_not_grow_with_the_storage():
    geometry, made = Geometry(), []
    for pages in (32, 512):
        torch._dynamo.reset()
        raw = torch.zeros(geometry.page_bytes * pages, dtype=torch.uint8)
        views = {name: window.regenerate(raw) for name, window in geometry.windows(pages).items()}
        recorder = Sizes("aot_eager")
        with torch.no_grad():
            compiled = torch.compile(make_step(geometry, pages), backend=recorder)
            compiled(caches_of(views), torch.zeros(4, geometry.hidden), torch.tensor([0, 3, 5, 9]))
        made.append(sorted(recorder.sizes))
    assert made[0] == made[1]


def test_every_stage_is_logged(tmp_path):
    """TORCH_LOGS takes the name of the package."""
    script = tmp_path / "step.py"
    script.write_text(
        "import torch\n"
        "raw = torch.zeros(64, dtype=torch.uint8)\n"
        "@torch.compile(backend='aliasstorage', options={'inner': 'aot_eager'})\n"
        "def step(a, b):\n"
        "    a.add_(1)\n"
        "    return b + 1\n"
        "step(raw.view(torch.int16), raw.view(torch.int32))\n"
    )
    environment = {**os.environ, "TORCH_LOGS": "+aliasstorage"}
    result = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=environment, check=True
    )
    stages = ["Dynamo's graph:", "merged graph", "byte graph:", "graph for the inner backend:"]
    places = [result.stderr.find(stage) for stage in stages]
    assert -1 not in places
    assert places == sorted(places)
    assert "window_a" in result.stderr.partition(stages[-1])[2]
