"""The same promises on a CUDA device, its graphs and its Triton kernels; skipped without one."""

import pytest
import torch

import aliasstorage
from aliasstorage import testing
from examples.hybrid_decode import Geometry, caches_of, make_step
from tests.support.alias_cases import CASES
from tests.support.oracle import WINDOWS, as_tuple

try:
    import triton
    from triton import language as tl
except ImportError:
    triton = None

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

BACKENDS = {
    "stock": {"backend": "inductor"},
    "ours": {"backend": "aliasstorage"},
    "reduce-overhead": {"backend": "aliasstorage", "mode": "reduce-overhead"},
}


def random_bytes(nbytes):
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.manual_seed(0))


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_the_kit(inner):
    conformance = testing.check_backend(inner, device="cuda")
    assert {outcome.verdict for outcome in conformance.outcomes} == {"right"}, str(conformance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [c for c in CASES if not c.storages], ids=lambda case: case.name)
def test_alias_cases(case, backend):
    """Buffers after a compiled call on the device equal those after an eager one there."""
    sides = []
    for compiled in (False, True):
        torch._dynamo.reset()
        raw = random_bytes(256).cuda()
        views = [WINDOWS[letter].regenerate(raw) for letter in case.windows]
        torch.manual_seed(0)
        extra = [
            value.cuda() if isinstance(value, torch.Tensor) else value for value in case.extra()
        ]
        function = case.function
        if compiled:
            views = aliasstorage.wrap(views) if backend == "stock" else views
            function = torch.compile(function, **BACKENDS[backend])
        with torch.no_grad():
            results = as_tuple(function(*views, *extra))
        sides.append((raw, [r.clone() for r in results if isinstance(r, torch.Tensor)]))
    (want_raw, want), (raw, got) = sides
    # NaNs that the program computes may have other bits on the device.
    for letter in case.windows:
        left, right = (WINDOWS[letter].regenerate(r).to(torch.complex128) for r in (want_raw, raw))
        torch.testing.assert_close(right, left, equal_nan=True)
    for left, right in zip(want, got, strict=True):
        if case.exact:  # sums of random halves depend on their order
            torch.testing.assert_close(right, left, equal_nan=True)


def hybrid(pages):
    geometry = Geometry()
    raw = torch.zeros(geometry.page_bytes * pages, dtype=torch.uint8, device="cuda")
    views = {name: window.regenerate(raw) for name, window in geometry.windows(pages).items()}
    step = make_step(geometry, pages)
    step.linear = [{name: w.cuda() for name, w in weights.items()} for weights in step.linear]
    step.softmax = {name: w.cuda() for name, w in step.softmax.items()}
    step.slots, step.block_table = [s.cuda() for s in step.slots], step.block_table.cuda()
    positions = torch.tensor([0, 3, 5, 9], device="cuda")
    return raw, caches_of(views), step, torch.randn(4, geometry.hidden, device="cuda"), positions


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_hybrid_step_copies_no_cache(mode):
    """With CUDA graphs the caches keep their addresses, so that nothing copies them in."""
    raw, caches, step, x, positions = hybrid(2048)
    expected, eager_caches, *_ = hybrid(2048)
    for tensor in (view for cache in caches for view in cache):
        torch._dynamo.mark_static_address(tensor)
    compiled = torch.compile(step, backend="aliasstorage", mode=mode)
    with torch.no_grad():
        for token in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            got = compiled(caches, x, positions + token).clone()
            torch.testing.assert_close(got, step(eager_caches, x, positions + token))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        compiled(caches, x, positions + 5)
        torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < raw.numel() / 16
    step(eager_caches, x, positions + 5)
    geometry = Geometry()
    for window in geometry.windows(2048).values():
        torch.testing.assert_close(window.regenerate(raw), window.regenerate(expected))


def test_a_triton_kernel_takes_windows():
    if triton is None:
        pytest.skip("Triton is not installed")

    @triton.jit
    def write_token(keys, state, values, slot, WIDTH: tl.constexpr):
        offsets = tl.arange(0, WIDTH)
        loaded = tl.load(values + offsets)
        tl.store(keys + slot * WIDTH + offsets, loaded.to(tl.float16))
        tl.store(state + slot * WIDTH + offsets, loaded)

    def step(keys, state, values):
        before = state[1] * 2
        write_token[(1,)](keys, state, values, 1, WIDTH=16)
        return before, keys[1].float() + state[1]

    sides = []
    for compiled in (False, True):
        raw = random_bytes(2048).cuda()
        keys = raw[:512].view(torch.float16).view(16, 16)
        state = raw[512:1536].view(torch.float32).view(16, 16)
        function = torch.compile(step, backend="aliasstorage") if compiled else step
        sides.append((raw, *function(keys, state, torch.arange(16.0, device="cuda"))))
    for left, right in zip(*sides, strict=True):
        torch.testing.assert_close(right, left, equal_nan=True)
