"""Private torch names: all there, and only in one file."""

import re
from pathlib import Path

import pytest

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
