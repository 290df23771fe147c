"""Custom operations with the schemas that engines have, on windows of one storage."""

import pytest
import torch

import aliasstorage
from aliasstorage import Window
from aliasstorage.layouts import HybridGeometry, vllm
from tests.support.oracle import buffer_reports

GEOMETRY = HybridGeometry.gated_delta_net(
    layers=4, interval=4, key_heads=1, value_heads=2, state_dim=16, kv_heads=1, head_dim=16
)
(LAYOUT,) = vllm.shared_by(GEOMETRY, blocks=6)

library = torch.library.Library("tests_engines", "DEF")
library.define(
    "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot_mapping, str kv_cache_dtype) -> ()"
)
library.define(
    "concat_and_cache_mla(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping) -> ()"
)
library.define(
    "causal_conv1d_update(Tensor x, Tensor(a!) conv_state, Tensor indices, Tensor weight) -> Tensor"
)
library.define("copy_blocks(Tensor(a!)[] caches, Tensor pairs) -> ()")
library.define("move_pages(Tensor(a!) pages, Tensor source, Tensor target) -> ()")


def slots_of(cache, slots):
    return slots // cache.shape[1], slots % cache.shape[1]


def reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype):
    # Padding tokens have slot -1 and are written to the null block, one after the other.
    for token, slot in enumerate(slot_mapping.clamp(min=0).tolist()):
        block, place = slot // key_cache.shape[1], slot % key_cache.shape[1]
        key_cache[block, place] = key[token]
        value_cache[block, place] = value[token]


def concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping):
    block, place = slots_of(kv_cache, slot_mapping)
    kv_cache[block, place] = torch.cat([kv_c, k_pe], -1).to(kv_cache.dtype)


def causal_conv1d_update(x, conv_state, indices, weight):
    window = torch.cat([conv_state[indices], x.unsqueeze(1).to(conv_state.dtype)], 1)
    conv_state[indices] = window[:, 1:]
    return (window.float() * weight).sum(1)


def copy_blocks(caches, pairs):
    for cache in caches:
        cache[pairs[:, 1]] = cache[pairs[:, 0]]


def move_pages(pages, source, target):
    pages[target] = pages[source]


for function in (
    reshape_and_cache,
    concat_and_cache_mla,
    causal_conv1d_update,
    copy_blocks,
    move_pages,
):
    library.impl(function.__name__, function, "CompositeExplicitAutograd")
    name = f"tests_engines::{function.__name__}"
    if function is causal_conv1d_update:
        torch.library.register_fake(
            name, lambda x, conv_state, indices, weight: x.float().clone(), lib=library
        )
    else:
        torch.library.register_fake(name, lambda *args: None, lib=library)

ops = torch.ops.tests_engines


def write_tokens(w, x):
    slots = torch.tensor([48, 50, -1, 97, -1])
    ops.reshape_and_cache(
        x.view(5, 1, 16), x.view(5, 1, 16) * 2, w["L3.k"], w["L3.v"], slots, "auto"
    )
    return w["L3.k"][1, :3] + w["L3.v"][2, :3]


def write_latents(w, x):
    ops.concat_and_cache_mla(x[:, :10], x[:, 10:], w["mla"], torch.tensor([3, 0, 7, 11, 4]))
    return w["mla"][:2].float().sum()


def update_states(w, x):
    weight = torch.linspace(-1, 1, 64)
    y = ops.causal_conv1d_update(x[:2].repeat(1, 4), w["L0.conv"], torch.tensor([2, 4]), weight)
    z = ops.causal_conv1d_update(x[2:4].repeat(1, 4), w["L1.conv"], torch.tensor([1, 3]), weight)
    return y + z, w["L0.ssm"][1]


def copy_two_caches(w, x):
    ops.copy_blocks([w["L3.k"], w["L3.v"]], torch.tensor([[1, 4], [2, 5]]))
    w["L3.k"][torch.tensor([0, 1])] = w["L3.k"][torch.tensor([2, 2])]
    return w["L3.v"][4, 0] + 1


def move_raw_pages(w, x):
    w["L0.ssm"][1].mul_(2)
    ops.move_pages(w["pages"], torch.tensor([1, 2]), torch.tensor([4, 5]))
    w["pages"][0] = w["pages"][5]
    return w["L0.ssm"][4], w["L0.conv"][5], w["L3.v"][0, :2]


def a_layer_of_each(w, x):
    first = update_states(w, x)
    second = write_tokens(w, x)
    third = copy_two_caches(w, x)
    return *first, second, third


PROGRAMS = (
    write_tokens,
    write_latents,
    update_states,
    copy_two_caches,
    move_raw_pages,
    a_layer_of_each,
)


def windows_of(raw):
    page = GEOMETRY.page_bytes
    layout = {
        **LAYOUT.windows,
        "mla": Window(torch.bfloat16, (6, 4, 16), (page // 2, 16, 1), byte_offset=512),
        "pages": Window(torch.uint8, (6, page)),
    }
    return {name: window.regenerate(raw) for name, window in layout.items()}


@pytest.mark.usefixtures("compiler_threads")
@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("carrier", ["plain", "wrapped"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_engine_operations(program, carrier, inner):
    compiled = torch.compile(program, backend=aliasstorage.backend(inner), fullgraph=True)
    with buffer_reports() as reports:
        for seed in (0, 1):
            sides = []
            for run in (program, compiled):
                generator = torch.Generator().manual_seed(seed)
                raw = torch.randint(
                    0, 0x3F, (LAYOUT.nbytes,), dtype=torch.uint8, generator=generator
                )
                x = torch.randn(5, 16, generator=generator).bfloat16()
                windows = windows_of(raw)
                if run is compiled and carrier == "wrapped":
                    windows = aliasstorage.wrap(windows)
                with torch.no_grad():
                    results = run(windows, x)
                sides.append((raw, results if isinstance(results, tuple) else (results,)))
            (want_raw, want), (raw, got) = sides
            assert torch.equal(want_raw, raw)
            for left, right in zip(want, got, strict=True):
                torch.testing.assert_close(left, aliasstorage.unwrap(right), rtol=1e-5, atol=1e-6)
    (report,) = {id(report): report for report in reports}.values()
    assert report.reason is None
    page = GEOMETRY.page_bytes
    assert all(window.nbytes <= 2 * page for window, _ in report.copies)
