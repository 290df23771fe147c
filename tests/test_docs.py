"""Every Python block of the README and the docs runs."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
]


@pytest.mark.usefixtures("compiler_threads")
@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block, tmp_path):
    path = tmp_path / "block.py"
    path.write_text(block)
    runpy.run_path(str(path))


def test_pages_link_to_files_that_exist():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
