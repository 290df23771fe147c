"""Hugging Face hybrid models, unchanged, with their whole cache in one storage."""

import pytest
import torch

import aliasstorage
from aliasstorage import AliasTensor, errors
from examples.huggingface_hybrid import MODELS, decode, decode_step, prefill
from tests.support.oracle import buffer_reports

pytest.importorskip("transformers")

PROMPT = torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(0))


def check(model_name, inner, wrapped, dtype=torch.float32, tolerance=0.0):
    model = MODELS[model_name](dtype)
    want, want_logits = decode(decode_step(model), *prefill(model, PROMPT, 32), 5)
    cache, token = prefill(model, PROMPT, 32)
    storage = aliasstorage.consolidate_(cache, wrapped=wrapped)
    with buffer_reports() as reports:
        compiled = torch.compile(decode_step(model), backend=aliasstorage.backend(inner))
        got, logits = decode(compiled, cache, token, 5)
    if dtype == torch.float32:
        assert torch.equal(want, got)
    torch.testing.assert_close(want_logits, logits, rtol=tolerance, atol=tolerance)
    (report,) = {id(r): r for r in reports}.values()
    assert report.nbytes == storage.nbytes
    assert report.reason is None
    assert not report.copies
    return cache


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("model_name", MODELS)
def test_token_for_token(model_name, wrapped):
    """Bit for bit the eager model, all states written in place."""
    cache = check(model_name, "aot_eager", wrapped)
    states = [t for layer in cache.layers for t in getattr(layer, "conv_states", {}).values()]
    assert all(isinstance(state, AliasTensor) is wrapped for state in states)
    assert states


def test_bfloat16():
    check("qwen3_next", "aot_eager", True, torch.bfloat16, 0.0)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_name", MODELS)
def test_inductor(model_name, dtype):
    tolerance = 1e-4 if dtype == torch.float32 else 4e-2
    check(model_name, "inductor", True, dtype, tolerance)


class Cache:
    def __init__(self, base):
        self.keys, self.values = base[0], base[1]
        self.states = {"conv": torch.arange(6.0).bfloat16(), "length": torch.tensor(3)}
        self.more = [torch.ones(3, dtype=torch.bool), None, "text"]
        self.itself = self


def test_consolidate_keeps_values_and_sharing():
    base = torch.randn(2, 4, 8)
    cache = Cache(base)
    torch._dynamo.mark_static_address(cache.states["conv"])
    storage = aliasstorage.consolidate_(cache)
    assert torch.equal(cache.keys, base[0])
    assert torch.equal(cache.values, base[1])
    assert cache.values.window.byte_offset - cache.keys.window.byte_offset == 128
    assert cache.states["length"].item() == 3
    assert torch.equal(cache.more[0], torch.ones(3, dtype=torch.bool))
    assert cache.states["conv"]._dynamo_static_input_type == "unguarded"  # type: ignore[attr-defined]
    cache.values.fill_(7)
    assert (storage.buffer.view(-1)[:256].view(torch.float32)[32:] == 7).all()
    again = aliasstorage.consolidate_(cache, wrapped=False)
    assert again.nbytes == storage.nbytes
    assert type(cache.values) is torch.Tensor
    assert (cache.values == 7).all()


def test_large_tensors_start_half_a_page_into_a_page():
    """Where no large result starts: see Note [Where large tensors start]."""
    sizes = [3, 65535, 65536, 5, 100_000, 65536, 65536 + 2048, 1]
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    held = list(tensors)
    storage = aliasstorage.consolidate_(held)
    starts = [tensor.storage_offset() for tensor in held]
    assert all(
        start % 4096 == 2048 if size >= 65536 else start % 64 == 0
        for start, size in zip(starts, sizes, strict=True)
    )
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    padding = [start - end for start, end in zip(starts, [0, *ends], strict=False)]
    assert all(0 <= space < 4096 for space in padding)
    assert storage.nbytes == ends[-1]
    assert all(torch.equal(old, new) for old, new in zip(tensors, held, strict=True))


def test_consolidate_refuses():
    with pytest.raises(errors.UnsupportedTensorError, match="no tensors"):
        aliasstorage.consolidate_({"a": 1})
    with pytest.raises(errors.UnsupportedTensorError, match="meta"):
        aliasstorage.consolidate_([torch.ones(2), torch.ones(2, device="meta")])
    held = [torch.ones(2), torch.ones(2, requires_grad=True)]
    with pytest.raises(errors.RequiresGradError, match=r"list\[1\]"):
        aliasstorage.consolidate_(held)
    assert type(held[0]) is torch.Tensor
