"""Private torch names: all there, and only in one file."""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch._inductor.output_code import CompiledFxGraph
from torch.profiler import profile

from aliasstorage import _compat, doctor
from aliasstorage._requirements import NEEDED, Need, check_torch, missing_names
from aliasstorage.errors import IncompatibleTorchError

PACKAGE = Path(_compat.__file__).parent


@pytest.mark.parametrize("name", _compat.__all__)
def test_every_private_name_exists(name):
    assert getattr(_compat, name) is not None


def test_what_is_needed_is_there_whether_torch_imported_it_or_not():
    script = (
        "from aliasstorage import _requirements as r; import sys\n"
        "assert 'torch._inductor.compile_fx' not in sys.modules\n"
        "print(r.missing_names(), r.missing_names((r.Need('_inductor.ir', 'Moved'), "
        "r.Need('_inductor.compile_fx', 'compile_fx', ('model_', 'renamed')))))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.strip() == (
        "[] ['torch._inductor.ir has no Moved', "
        "'torch._inductor.compile_fx.compile_fx has no parameter renamed']"
    ), result.stderr
    assert not missing_names()


def test_a_torch_without_a_name_is_told_of_by_one_error_that_lists_all():
    needed = (Need("_guards", "Guard", ("moved",)), Need("_inductor.ir", "Renamed"), *NEEDED)
    with pytest.raises(IncompatibleTorchError) as caught:
        check_torch(needed)
    assert "torch._guards.Guard has no parameter moved" in str(caught.value)
    assert "torch._inductor.ir has no Renamed" in str(caught.value)
    with pytest.raises(IncompatibleTorchError, match="an older release"):
        check_torch(version="2.12.1")


def test_a_newer_torch_is_warned_of_once():
    with pytest.warns(UserWarning, match=r"this is 2\.99\.0.*aliasstorage\.doctor") as warned:
        check_torch(version="2.99.0")
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_torch(version="2.15.0+cpu")


def test_every_private_name_of_compat_is_checked():
    """The imports of `_compat` and its attributes of modules, against what is looked up."""
    text = (PACKAGE / "_compat.py").read_text()
    used = set(re.findall(r"torch\._C\.(_\w+)", text))
    for names in re.findall(r"^from torch\.[\w.]*_[\w.]* import (.+)$", text, re.M):
        used.update(name.split(" as ")[0].strip() for name in names.split(","))
    used.update(_compat._ON_FIRST_USE)
    optional = {"_tensors_data_ptrs_at_indices_equal"}
    known = {part for need in NEEDED for part in need.name.split(".")}
    assert used - known - optional == set()


def test_the_doctor_finds_nothing_wrong(capsys):
    assert doctor.main() == 0
    report = capsys.readouterr().out
    assert f"{torch.__version__}, tested" in report
    assert report.count("the two-dtype example is right") == 2


def test_only_compat_imports_private_names():
    pattern = re.compile(r"(from|import) +torch\.[\w.]*\b_\w|torch\._[a-z]")
    for path in PACKAGE.rglob("*.py"):
        if path.name == "_compat.py":
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not pattern.search(line.split("#")[0]), f"{path.name}:{number}: {line.strip()}"


# What each part may import: itself and what stands before it.
ORDER = (
    ("version", "errors", "stage_logs", "_requirements", "_compat", "ops"),
    ("windows",),
    ("subclass",),
    ("caches", "layouts"),
    ("bufferize",),
    ("compilation",),
    ("explain", "recorder", "testing"),
    ("doctor",),
)


def test_no_import_goes_backwards():
    """See docs/how-it-works.md for the rooms and the arrows between them."""
    rank = {name: number for number, names in enumerate(ORDER) for name in names}
    for path in PACKAGE.rglob("*.py"):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        for imported in re.findall(r"^ *from aliasstorage\.?(\w*)", path.read_text(), re.M):
            if imported:
                assert rank[imported] <= rank[part], f"{path} imports {imported}"


def test_no_two_files_import_each_other():
    imports = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        text = path.read_text()
        imports[name] = set(re.findall(r"^from aliasstorage\.([\w.]+) import", text, re.M))
    for name, imported in imports.items():
        for other in imported:
            assert name not in imports.get(other, ()), f"{name} and {other} import each other"


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
