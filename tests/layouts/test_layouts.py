"""Layouts: the algebra, every engine's table, and every window of each under the backend."""

import json
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import aliasstorage
from aliasstorage import errors
from aliasstorage.layouts import (
    HybridGeometry,
    ascend,
    consolidated,
    field,
    overlay,
    packed,
    repeated,
    sglang,
    vllm,
)
from tests.support.matrix import in_matrix
from tests.support.oracle import buffer_reports

TABLES = json.loads((Path(__file__).parents[1] / "data" / "layouts.json").read_text())
DTYPES = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "u8": torch.uint8,
    "i8": torch.int8,
}


def gated_delta_net(layers, key_heads, value_heads, state_dim, kv_heads, head_dim, **dtypes):
    return HybridGeometry.gated_delta_net(
        layers=layers,
        interval=4,
        key_heads=key_heads,
        value_heads=value_heads,
        state_dim=state_dim,
        kv_heads=kv_heads,
        head_dim=head_dim,
        **dtypes,
    )


GEOMETRIES = {
    "qwen3next-80B-TP1-fp32ssm": gated_delta_net(48, 16, 32, 128, 2, 256),
    "qwen3next-80B-TP1-bf16ssm": gated_delta_net(
        48, 16, 32, 128, 2, 256, state_dtype=torch.bfloat16
    ),
    "qwen3next-TP8rank": gated_delta_net(8, 2, 4, 128, 1, 256),
    "small": gated_delta_net(8, 2, 4, 32, 2, 32),
    "small-fp8kv": gated_delta_net(8, 2, 4, 32, 2, 32, kv_dtype=torch.uint8),
    "tiny": gated_delta_net(4, 1, 2, 16, 1, 16),
}
BLOCKS = {
    "qwen3next-80B-TP1-fp32ssm": 2,
    "qwen3next-80B-TP1-bf16ssm": 4,
    "qwen3next-TP8rank": 100,
}


def layouts_of(name, blocks=None):
    """Return the layouts that a row of the table describes."""
    if name == "int8_per_token_head":
        return [vllm.int8_per_token_head(blocks or 8, 16, 2, 32)]
    geometry_name, engine = name.split("/")
    geometry = GEOMETRIES[geometry_name]
    blocks = blocks or BLOCKS.get(geometry_name, 64)
    if engine == "vllm_v1":
        return vllm.shared_by(geometry, blocks)
    if engine == "ascend":
        return ascend.contiguous_regions(geometry, blocks)
    if engine.startswith("vllm_new_"):
        return [vllm.one_allocation(geometry, blocks, engine.removeprefix("vllm_new_"))]
    page = int(engine.removeprefix("sglang_unified_ps"))
    return [sglang.unified_memory(geometry, 4096 if blocks == 64 else 64 * blocks, 16, page)]


@pytest.mark.parametrize("name", TABLES)
def test_every_row_of_the_engines_tables(name):
    layouts = layouts_of(name)
    assert len(layouts) == len(TABLES[name])
    for layout, table in zip(layouts, TABLES[name], strict=True):
        assert layout.nbytes == table["bytes"]
        want = {
            row["name"]: aliasstorage.Window(
                DTYPES[row["dtype"]], row["size"], row["stride"], row["byte_offset"]
            )
            for row in table["windows"]
        }
        assert dict(layout.windows) == want


def test_heads_outside_tokens():
    """LBHNC is LBNHC with the two middle dimensions in another order in memory."""
    geometry = GEOMETRIES["small"]
    layout = vllm.one_allocation(geometry, 4, "LBHNC")
    assert layout["L3.kv"].size == (4, 2, 80, 64)
    assert layout["L3.kv"].stride == (10240, 5120, 64, 1)
    assert layout["L3.k"].size == (4, 80, 2, 32)
    assert layout["L3.k"].stride == (10240, 64, 5120, 1)
    same = vllm.one_allocation(geometry, 4, "BLNHC")
    assert same.nbytes == layout.nbytes
    assert same["L7.kv"].byte_offset == geometry.page_bytes


def test_consolidated_offsets_are_multiples_of_8():
    layout = consolidated(
        {
            "a": (torch.bfloat16, (3,)),
            "b": (torch.float32, (2, 2)),
            "c": (torch.int64, (1,)),
            "d": (torch.bool, (5,)),
            "e": (torch.uint8, (84, 84, 3)),
        }
    )
    assert [window.byte_offset for window in layout.windows.values()] == [0, 8, 24, 32, 40]


ODD = field("conv", torch.bfloat16, (9,))
ERRORS = {
    "an odd conv before fp32": (
        lambda: packed(ODD, field("ssm", torch.float32, (2,))),
        errors.MisalignedWindowError,
        "ssm",
    ),
    "a page of odd length": (
        lambda: repeated(field("x", torch.float32, (2,)), 3, stride=10),
        errors.MisalignedWindowError,
        "x",
    ),
    "a page too small": (lambda: packed(ODD, nbytes=16), errors.LayoutError, "conv"),
    "an overlay too small": (lambda: overlay(ODD, nbytes=16), errors.LayoutError, "conv"),
    "pages that overlap": (lambda: repeated(ODD, 2, stride=16), errors.LayoutError, "conv"),
    "one name twice": (lambda: packed(ODD, ODD), errors.LayoutError, "conv"),
    "a storage too short": (
        lambda: repeated(ODD, 2).on(aliasstorage.ByteStorage.zeros(20)),
        errors.LayoutError,
        "conv",
    ),
    "keys unlike states": (
        lambda: ascend.contiguous_regions(GEOMETRIES["tiny"], 8),
        errors.LayoutError,
        "states of size",
    ),
    "no linear layers": (
        lambda: HybridGeometry((0,), (), 1, 16, (3, 4), (2, 2)),
        errors.LayoutError,
        "linear",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_field(name):
    make, kind, field_name = ERRORS[name]
    with pytest.raises(kind) as caught:
        make()
    assert field_name in caught.value.which
    assert all((caught.value.expected, caught.value.got, caught.value.do))


SMALL = [name for name in TABLES if name.startswith(("small", "tiny", "int8"))]


def step(windows, rows, number):
    """Read and write a few rows of every window, and one element in order."""
    total = 0
    for window in windows.values():
        old = window[rows]
        window[rows] = old.flip(0) if window.dtype == torch.uint8 else old + number
        window[0].fill_(number)
        total = total + window[rows].float().nan_to_num(0, 0, 0).clamp(-9, 9).sum()
    return total


@pytest.mark.parametrize("carrier", ["plain", "wrapped"])
@pytest.mark.parametrize("name", in_matrix(SMALL, but=list(SMALL)[::3]))
def test_every_window_under_the_backend(name, carrier):
    """Random bytes, a step through all windows, the whole buffer compared, nothing copied."""
    rows = torch.tensor([1, 2])
    with buffer_reports() as reports:
        for layout in layouts_of(name, blocks=6):
            torch._dynamo.reset()
            generator = torch.Generator().manual_seed(0)
            raw = torch.randint(0, 0x3F, (layout.nbytes,), dtype=torch.uint8, generator=generator)
            want = raw.clone()
            compiled = torch.compile(step, backend=aliasstorage.backend("aot_eager"))
            for number in (1, 2):
                sides = []
                for buffer, run in ((want, step), (raw, compiled)):
                    storage = aliasstorage.ByteStorage.adopt(buffer)
                    windows = layout.on(storage)
                    if run is step or carrier == "plain":
                        windows = aliasstorage.unwrap(windows)
                    sides.append(run(windows, rows, number))
                assert torch.equal(want, raw)
                torch.testing.assert_close(*sides)
    assert reports
    for report in reports:
        assert report.reason is None
        assert all(window.nbytes <= report.nbytes // 2 for window, _ in report.copies)


GROWING = [name for name in SMALL if not name.startswith("small-")]


@pytest.mark.parametrize("carrier", ["plain", "wrapped"])
@pytest.mark.parametrize("name", in_matrix(GROWING, but=GROWING[::4]))
def test_another_number_of_blocks(name, carrier):
    """A cache of another length is compiled for once, wherever that moves its windows."""
    rows = torch.tensor([1, 2])
    for position in range(len(layouts_of(name))):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(aliasstorage.backend("aot_eager"))
        compiled = torch.compile(step, backend=counter)
        with buffer_reports() as reports:
            for blocks in (6, 8, 5, 11):
                layout = layouts_of(name, blocks)[position]
                raw = torch.randint(0, 0x3F, (layout.nbytes,), dtype=torch.uint8)
                want = raw.clone()
                sides = []
                for buffer, run in ((want, step), (raw, compiled)):
                    windows = layout.on(aliasstorage.ByteStorage.adopt(buffer))
                    if run is step or carrier == "plain":
                        windows = aliasstorage.unwrap(windows)
                    sides.append(run(windows, rows, 3))
                assert torch.equal(want, raw), blocks
                torch.testing.assert_close(*sides)
        assert counter.frame_count <= 2
        assert not any(report.reason for report in reports)


def test_memory_map_shows_pages_fields_overlays_and_padding():
    geometry = GEOMETRIES["tiny"]
    (layout,) = vllm.shared_by(geometry, blocks=4)
    storage, windows = layout.allocate()
    page = storage.memory_map(layout.windows, stop=geometry.page_bytes, cells=48)
    lines = str(page).splitlines()
    assert lines[0] == f"bytes [0, {geometry.page_bytes}), 64 to a cell"
    assert lines[1].startswith("L3.k")
    assert "█" * 24 + "·" * 24 in lines[1]
    assert page.shared[0] == 4  # keys, and three layers' conv states
    assert page.shared[-1] == 1  # only values reach the end of a page
    states = {name: window for name, window in windows.items() if name[1] != "3"}
    assert storage.memory_map(states, stop=geometry.page_bytes, cells=48).shared[-1] == 0
    whole = storage.memory_map(windows, cells=4)
    assert whole.cover["L0.conv"] == (0.125,) * 4


def test_memory_map_plots():
    pytest.importorskip("matplotlib").use("Agg")
    layout = vllm.int8_per_token_head(2, 2, 2, 8)
    storage, windows = layout.allocate()
    axes = storage.memory_map(windows).plot()
    assert [label.get_text() for label in axes.get_yticklabels()] == [*windows, "padding"]
