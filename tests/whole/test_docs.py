"""Every Python block of the README and the docs runs."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks_of(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.S)


@pytest.mark.usefixtures("compiler_threads")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)], ids=lambda p: p.stem)
def test_blocks_run(page, tmp_path):
    """One after the other, as a reader would."""
    path = tmp_path / "page.py"
    path.write_text("\n".join(blocks_of(page)))
    runpy.run_path(str(path))


def test_pages_link_to_files_that_exist():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
