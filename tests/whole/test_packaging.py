"""The wheel, as users meet it: installed beside a torch that is there already."""

import os
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXAMPLE = """
import sys
import torch

raw = torch.zeros(1024, dtype=torch.uint8)
a, b = raw[:512].view(torch.float16), raw[256:].view(torch.float32)


@torch.compile(backend="aliasstorage", options={"inner": "aot_eager"})
def step(a, b, x):
    a.copy_(x.to(a.dtype))
    b.mul_(2)
    return a.sum()


step(a, b, torch.ones(256))
want = torch.zeros(1024, dtype=torch.uint8)
want[:512].view(torch.float16).fill_(1)
want[256:].view(torch.float32).mul_(2)
assert torch.equal(raw, want)
print(torch.__version__, sys.modules["aliasstorage"].__file__)
"""


def run(*command, **options):
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_a_wheel_and_an_sdist_are_built_and_work_beside_an_installed_torch(tmp_path):
    source = tmp_path / "source"
    tracked = run("git", "ls-files", cwd=ROOT).splitlines()
    if not tracked:
        pytest.skip("this is no git checkout")
    for name in tracked:
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", source)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert len(list((tmp_path / "dist").glob("*.tar.gz"))) == 1
    names = zipfile.ZipFile(wheel).namelist()
    assert "aliasstorage/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]

    # All that is installed here but this library stands beside it there, as it does for a user.
    beside = tmp_path / "beside"
    beside.mkdir()
    for entry in Path(torch.__file__).parent.parent.iterdir():
        if "aliasstorage" not in entry.name:
            (beside / entry.name).symlink_to(entry)
    clean = tmp_path / "clean"
    venv.create(clean, with_pip=False, symlinks=True)
    (site,) = (clean / "lib").glob("python*/site-packages")
    (site / "installed.pth").write_text(f"{beside}\n")
    python = clean / "bin" / "python"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index"]
    printed = run(*pip, wheel, env=environment, cwd=tmp_path)
    assert "Successfully installed aliasstorage" in printed
    assert "torch-" not in printed.split("Successfully installed")[1]

    torch_version, file = run(python, "-c", EXAMPLE, env=environment, cwd=tmp_path).split()
    assert torch_version == torch.__version__
    assert Path(file).is_relative_to(site)
    assert version("aliasstorage") in wheel.name
