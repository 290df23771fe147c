"""Overlap is exact: never "disjoint" when a byte is shared, and "may overlap" only by name."""

import json
import random
import time
from pathlib import Path

import pytest
import torch

from aliasstorage import Window
from aliasstorage.windows.overlap import Relation, alias_classes, overlaps, relation

DTYPES = [torch.uint8, torch.float16, torch.float32, torch.float64, torch.complex128]
LAYOUTS = json.loads((Path(__file__).parents[1] / "data" / "layouts.json").read_text())
NAMES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "u8": torch.uint8,
    "i8": torch.int8,
}


def byte_set(window):
    """Every byte of a window, by brute force."""
    if not window.numel:
        return set()
    starts = {window.byte_offset}
    for extent, step in zip(window.size, window.byte_stride, strict=True):
        starts = {start + i * step for start in starts for i in range(extent)}
    return {start + b for start in starts for b in range(window.dtype.itemsize)}


def random_window(rng):
    dtype = rng.choice(DTYPES)
    dims = rng.randint(0, 4)
    size = [rng.choice([0, 1, 1, 2, 3, 4, 7]) for _ in range(dims)]
    stride = [rng.choice([0, 1, 2, 3, 5, 8, 16, 33]) for _ in range(dims)]
    return Window(dtype, size, stride, rng.randint(0, 60) * dtype.itemsize)


@pytest.mark.parametrize("seed", range(4))
def test_against_brute_force(seed):
    rng = random.Random(seed)
    for _ in range(4000):
        a, b = random_window(rng), random_window(rng)
        expected = bool(byte_set(a) & byte_set(b))
        assert relation(a, b) is (Relation.OVERLAP if expected else Relation.DISJOINT), (a, b)


def test_one_byte_is_an_overlap():
    a = Window(torch.float32, (4,))
    assert overlaps(a, Window(torch.uint8, (1,), byte_offset=15))
    assert not overlaps(a, Window(torch.uint8, (1,), byte_offset=16))


def test_the_pairs_that_element_offsets_get_wrong():
    """torch compares element offsets, and forgets the dtype."""
    assert overlaps(Window(torch.float32, (100,)), Window(torch.bfloat16, (50,), byte_offset=300))
    assert not overlaps(Window(torch.float16, (32,)), Window(torch.float32, (16,), byte_offset=64))
    assert overlaps(
        Window(torch.float16, (16,), byte_offset=64), Window(torch.float32, (8,), byte_offset=64)
    )


def test_too_costly_is_may_overlap_and_counts_as_overlap():
    rng = random.Random(0)
    steps = [rng.randrange(10**6, 10**7) | 1 for _ in range(8)]
    a = Window(torch.uint8, (40,) * 4, steps[:4])
    b = Window(torch.uint8, (40,) * 4, steps[4:], byte_offset=1)
    if relation(a, b) is Relation.MAY_OVERLAP:
        assert overlaps(a, b)


def engine_windows(buffer):
    return [
        Window(NAMES[w["dtype"]], w["size"], w["stride"], w["byte_offset"])
        for w in buffer["windows"]
    ]


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_engine_layouts_are_exact(name):
    """No pair of windows of a real layout is left undecided, and the conv and recurrent states
    of one layer, which interleave page by page, are disjoint."""
    for buffer in LAYOUTS[name]:
        windows = engine_windows(buffer)
        for a in windows:
            a.check_bounds(buffer["bytes"])
            for b in windows:
                assert relation(a, b) is not Relation.MAY_OVERLAP
        names = [w["name"] for w in buffer["windows"]]
        for layer in {n.split(".")[0] for n in names}:
            if f"{layer}.conv" in names and f"{layer}.ssm" in names:
                conv, ssm = names.index(f"{layer}.conv"), names.index(f"{layer}.ssm")
                assert not overlaps(windows[conv], windows[ssm])


def test_alias_classes_of_200_real_windows_take_milliseconds():
    buffer = LAYOUTS["qwen3next-80B-TP1-fp32ssm/vllm_new_BLHNC"][0]
    windows = engine_windows(buffer)
    shifted = [Window(w.dtype, w.size, w.stride, w.byte_offset + buffer["bytes"]) for w in windows]
    start = time.perf_counter()
    classes = alias_classes([*windows, *shifted][:200])
    assert time.perf_counter() - start < 1.0  # some 20 ms here; not in proportion to the bytes
    assert sum(map(len, classes)) == 200


def test_alias_classes_are_connected_components():
    rng = random.Random(1)
    for _ in range(200):
        windows = [random_window(rng) for _ in range(8)]
        expected = [{i} for i in range(8)]
        for i in range(8):
            for j in range(i):
                if byte_set(windows[i]) & byte_set(windows[j]):
                    left = next(c for c in expected if i in c)
                    right = next(c for c in expected if j in c)
                    if left is not right:
                        expected.remove(right)
                        left |= right
        assert alias_classes(windows) == sorted(sorted(c) for c in expected)
