"""Every Python block of the README and the docs runs."""

import re
import runpy
from pathlib import Path

import pytest
import torch

from aliasstorage._requirements import OLDEST, version_of
from tests.support.stages import graphs_of_a_token_write

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


@pytest.mark.skipif(version_of(torch.__version__) != OLDEST, reason="graphs of another torch")
def test_the_graphs_of_a_token_write_are_those_of_how_it_works():
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    graphs = graphs_of_a_token_write()
    assert len(graphs) == 4
    for stage, graph in graphs.items():
        assert f"```text\n{graph}```" in page, f"{stage}:\n{graph}"


def test_pages_name_files_that_exist():
    for page in PAGES:
        for name in re.findall(
            r"`((?:aliasstorage|tests|benchmarks|examples)/[\w/]+\.py)`", page.read_text()
        ):
            assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_pages_link_to_files_that_exist():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
