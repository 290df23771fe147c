"""Every alias case, by carrier, backend and mode, against the oracle."""

from __future__ import annotations

import contextlib

import pytest
import torch

import aliasstorage
from tests.support.alias_cases import CASES
from tests.support.oracle import check

BY_NAME = {case.name: case for case in CASES}
MODES = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "grad": contextlib.nullcontext,
}
# Cases that Inductor compiles by default; the rest has the marker "slow".
# Inductor keeps a 16-bit value in float32 between fused operations unless told otherwise; the
# oracle rounds after each, as eager does.
EXACT = {"emulate_precision_casts": True}
INDUCTOR_SLICE = {
    "request_example",
    "token_write",
    "mutation_seen_through_alias",
    "output_views_the_other_alias",
    "straddling",
    "index_put",
    "gather_update_scatter_duplicates",
    "masked_writes",
    "old_values_used_after_write",
    "views_of_intermediates",
    "clone_then_mutate",
    "same_bytes_disjoint_elements",
    "bool_window",
    "fp8_over_uint8",
    "many_windows",
    "gradient_of_another_input",
}


def names(mode: str):
    return [c.name for c in CASES if (c.grad or mode != "grad")]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_eager(name, mode):
    """Windows without any compiler equal plain views."""
    with MODES[mode]():
        check(BY_NAME[name], lambda function: function, "wrapped", bitwise=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_stock_aot_eager(name, mode):
    """Stock torch.compile on wrapped inputs."""
    with MODES[mode]():
        check(
            BY_NAME[name],
            lambda function: torch.compile(function, backend="aot_eager"),
            "wrapped",
            bitwise=True,
        )


@pytest.mark.parametrize("bufferize", [True, False], ids=["bufferized", "bytes"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("carrier", ["wrapped", "plain", "mixed"])
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_backend_aot_eager(name, carrier, mode, bufferize):
    """backend="aliasstorage" over aot_eager."""
    backend = aliasstorage.backend(inner="aot_eager", bufferize=bufferize)
    with MODES[mode]():
        check(
            BY_NAME[name],
            lambda function: torch.compile(function, backend=backend),
            carrier,
            bitwise=True,
        )


@pytest.mark.parametrize("carrier", ["wrapped", "plain"])
@pytest.mark.parametrize("inner", ["eager", "aot_eager_decomp_partition"])
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_backend_other_inner(name, inner, carrier):
    """Other inner backends."""
    backend = aliasstorage.backend(inner=inner)
    with torch.no_grad():
        check(
            BY_NAME[name],
            lambda function: torch.compile(function, backend=backend),
            carrier,
            bitwise=False,
        )


def inductor_params(*more):
    return [
        pytest.param(name, *more, marks=() if name in INDUCTOR_SLICE else pytest.mark.slow, id=name)
        for name in sorted(BY_NAME)
    ]


@pytest.mark.usefixtures("compiler_threads")
@pytest.mark.parametrize("name", inductor_params())
def test_backend_inductor(name):
    """backend="aliasstorage" over Inductor, bufferized."""
    with torch.no_grad() if name != "gradient_of_another_input" else contextlib.nullcontext():
        check(
            BY_NAME[name],
            lambda function: torch.compile(function, backend="aliasstorage", options=EXACT),
            "wrapped",
            bitwise=False,
        )


@pytest.mark.slow
@pytest.mark.usefixtures("compiler_threads")
@pytest.mark.parametrize("carrier", ["plain", "mixed"])
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_backend_inductor_carriers(name, carrier):
    """The other carriers over Inductor."""
    with torch.inference_mode():
        check(
            BY_NAME[name],
            lambda function: torch.compile(function, backend="aliasstorage", options=EXACT),
            carrier,
            bitwise=False,
        )


@pytest.mark.slow
@pytest.mark.usefixtures("compiler_threads")
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_stock_inductor(name):
    """Stock torch.compile with Inductor on wrapped inputs."""
    if name == "bool_window":
        pytest.skip("CPU Inductor cannot compile bytes viewed as bools; see docs/promises.md")
    with torch.no_grad():
        check(
            BY_NAME[name],
            lambda function: torch.compile(function, options=EXACT),
            "wrapped",
            bitwise=False,
        )
