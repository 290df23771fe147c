"""The benchmarks measure what they say: not how fast, but that wrong variants get no time."""

import json

import pytest
import torch

from benchmarks.cases import Case, Variant, token_write
from benchmarks.compare import compare
from benchmarks.measure import measure
from benchmarks.parts import (
    copies_case,
    eager_case,
    fences_case,
    flatness_case,
    windows_case,
)


def a_case():
    def variants():
        yield Variant("first", lambda: torch.ones(2), list)
        yield Variant("second", lambda: torch.ones(2) * 1, list)
        yield Variant("wrong", lambda: torch.zeros(2), list)

        def refused():
            raise RuntimeError("no")

        yield Variant("refused", refused, list)

    return Case("a case", "2 elements", variants)


def test_only_what_is_right_has_a_time():
    measured = measure(a_case(), rounds=3, seconds=0.01)
    results = {result.variant: result for result in measured.results}
    assert results["first"].ratio == 1
    assert results["second"].microseconds > 0
    assert (results["wrong"].right, results["wrong"].microseconds) == (False, None)
    assert (results["refused"].right, results["refused"].note) == (None, "no")
    assert "WRONG" in str(measured)


@pytest.mark.parametrize(
    "case",
    [
        flatness_case(token_write, (1 << 18, 1 << 19)),
        windows_case(2),
        fences_case(1),
        copies_case(1 << 12),
        eager_case("t[1]"),
    ],
    ids=lambda case: case.name,
)
def test_parts_are_right(case):
    measured = measure(case, rounds=1, seconds=0.001)
    assert [result.right for result in measured.results] == [True] * len(measured.results)


def test_the_graph_that_is_timed_is_the_one_that_was_checked():
    compiled = []

    def backend(module, inputs):
        compiled.append(module)
        return module

    def variants():
        double = torch.compile(lambda x: x * 2, backend=backend, fullgraph=True)
        yield Variant("compiled", lambda: double(torch.ones(2)), list)

    measure(Case("a case", "2 elements", variants), rounds=3, seconds=0.01)
    assert len(compiled) == 1


def test_compare_knows_noise(tmp_path):
    def write(name, ratio, spread):
        result = {"variant": "ours", "ratio": ratio, "ratio_spread": spread}
        base = {"variant": "eager", "ratio": 1.0, "ratio_spread": 0.0}
        case = {"case": "c", "size": "1 MiB", "baseline": "eager", "results": [base, result]}
        path = tmp_path / name
        path.write_text(json.dumps({"cases": [case]}))
        return path

    before = write("before", 1.0, 0.05)
    assert [row["verdict"] for row in compare(before, write("a", 1.08, 0.05))] == ["same"]
    assert [row["verdict"] for row in compare(before, write("b", 1.3, 0.05))] == ["slower"]
    assert [row["verdict"] for row in compare(before, write("c", 0.7, 0.05))] == ["faster"]
