"""Backends and devices that others wrote, and the kit that checks them."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

import aliasstorage
from aliasstorage import errors, testing
from aliasstorage.compilation.slice_regeneration import regenerate_by_slices
from aliasstorage.windows.window import regenerate
from examples.piecewise_backend import compare_with_eager
from tests.layouts.test_layouts import DTYPES, TABLES

CASES = set(testing.CASES)


def installed(*modules):
    try:
        return all(importlib.util.find_spec(module) for module in modules)
    except ModuleNotFoundError:  # of a parent package
        return False


def kit(*arguments):
    """Run the kit as its users do, each case in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "aliasstorage.testing", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return {outcome["case"]: outcome for outcome in json.loads(done.stdout.splitlines()[-1])}


def right(outcomes):
    return {name for name, outcome in outcomes.items() if outcome["verdict"] == "right"}


@pytest.mark.parametrize("form", ["windows", "bytes", "slices"])
@pytest.mark.parametrize("inner", ["aot_eager", "eager"])
def test_every_form_in_this_process(inner, form):
    conformance = testing.check_backend(inner, form=form)
    wrong = {o.case for o in conformance.outcomes if o.verdict != "right"}
    # Functional kernels make 1 of the odd bools that they keep; see docs/promises.md.
    assert wrong == ({"bools"} if inner == "aot_eager" and form != "windows" else set())


def test_arrays_are_copied_back_or_refused():
    conformance = testing.check_backend("aot_eager", form="arrays")
    outcomes = {outcome.case: outcome for outcome in conformance.outcomes}
    for name in ("two dtypes", "interleaved keys and values", "values with scales", "lengths"):
        assert outcomes[name].verdict == "right", name
    for name in ("a write is read in another dtype", "hybrid step", "overlapping lattices"):
        assert outcomes[name].verdict == "unsupported", name
        assert "BackendUnsupportedError" in outcomes[name].detail
    assert conformance.sound


def test_the_kit_finds_a_backend_that_loses_writes():
    def forgetful(module, inputs):
        return lambda *args: module(*(a.clone() if hasattr(a, "clone") else a for a in args))

    conformance = testing.check_backend(forgetful, cases=["two dtypes"])
    assert not conformance.sound
    assert "in window 0" in str(conformance)


def test_a_callable_on_aten_graphs():
    """What an engine's own compiler gets: typed windows, written in place."""
    graphs = []

    def compiler(module, inputs):
        graphs.append(module)
        return module

    raw = torch.zeros(64, dtype=torch.uint8)

    def step(a, b):
        a[1:3] = 1
        return b.mul_(2)

    compiled = torch.compile(step, backend=aliasstorage.backend(compiler, form="windows"))
    compiled(raw[:32].view(torch.float16), raw[32:].view(torch.float32))
    assert raw[2:6].tolist() == [0, 60, 0, 60]
    (graph,) = graphs
    dtypes = {n.meta["val"].dtype for n in graph.graph.find_nodes(op="placeholder")}
    assert dtypes == {torch.float16, torch.float32}


def test_an_engines_piecewise_backend():
    engine, differ = compare_with_eager(1 << 14)
    assert engine.pieces == [True, False, True]
    assert differ == 0


def test_decompositions_are_the_callers():
    graphs = aliasstorage.Recorder(
        lambda module, inputs: module,
        form="windows",
        decompositions={torch.ops.aten.silu.default: lambda x: x * torch.sigmoid(x)},
    )
    raw = torch.zeros(64, dtype=torch.uint8)

    def step(a, b):
        return b.copy_(torch.nn.functional.silu(a).float())

    torch.compile(step, backend=graphs)(raw[:32].view(torch.float16), raw.view(torch.float32))
    assert "sigmoid" in str(graphs)
    assert "silu" not in str(graphs).replace("functional.silu", "")
    with pytest.raises(Exception, match="Decompositions are only applied"):
        torch.compile(step, backend=aliasstorage.backend("inductor", decompositions={}))(
            raw[:32].view(torch.float16), raw.view(torch.float32)
        )


def test_unknown_forms_and_known_faults_are_refused():
    with pytest.raises(Exception, match="There is no such form") as caught:
        torch.compile(lambda x: x + 1, backend=aliasstorage.backend("eager", form="pages"))(
            torch.ones(2)
        )
    assert isinstance(caught.value.inner_exception, errors.BackendUnsupportedError)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [name for name in TABLES if name.startswith(("small", "int8"))])
def test_slices_make_the_same_views(name):
    for table in TABLES[name]:
        buffer = torch.zeros(table["bytes"], dtype=torch.uint8)
        for row in table["windows"]:
            window = (DTYPES[row["dtype"]], row["size"], row["stride"], row["byte_offset"])
            left, right = regenerate_by_slices(buffer, *window), regenerate(buffer, *window)
            assert left.shape == right.shape
            assert left.data_ptr() == right.data_ptr()
            steps = zip(left.shape, left.stride(), right.stride(), strict=True)
            assert all(a == b for extent, a, b in steps if extent > 1)


def test_slices_refuse_what_does_not_nest():
    with pytest.raises(errors.BackendUnsupportedError, match="overlap"):
        regenerate_by_slices(torch.zeros(64, dtype=torch.uint8), torch.int16, (4, 4), (2, 1), 0)


@pytest.mark.skipif(not installed("iree.turbine"), reason="iree-turbine is not installed")
def test_iree_turbine():
    outcomes = kit("iree_turbine")
    unsupported = {"values with scales", "doubles", "bools", "complex numbers"}
    assert right(outcomes) >= CASES - unsupported
    assert not [o for o in outcomes.values() if o["verdict"] == "differs"]


@pytest.mark.skipif(not installed("openvino"), reason="openvino is not installed")
def test_openvino():
    outcomes = kit("openvino")
    unsupported = {"lengths", "doubles", "bools", "blocks are copied"}
    assert right(outcomes) >= CASES - unsupported
    assert not [o for o in outcomes.values() if o["verdict"] == "differs"]


def has_vulkan():
    if not installed("torchvulkan"):
        return False
    probe = "import torch, torchvulkan; torch.ones(1).to('vulkan').cpu()"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False)
    return done.returncode == 0


@pytest.mark.parametrize("inner", ["aot_eager", "aot_eager_decomp_partition"])
def test_vulkan(inner):
    if not has_vulkan():
        pytest.skip("no Vulkan device: torchvulkan and a driver such as mesa-vulkan-drivers")
    assert right(kit(inner, "--device", "vulkan", "--import", "torchvulkan")) == CASES
