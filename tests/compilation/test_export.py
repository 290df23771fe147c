"""`torch.export`, AOTInductor and standalone_compile of what lies in one storage."""

import io

import pytest
import torch

import aliasstorage
from aliasstorage import ByteStorage, Window, errors

NBYTES = 256
KEYS = Window(torch.float16, (8, 16))
STATE = Window(torch.float32, (4, 4), byte_offset=64)  # bytes of KEYS
FIELDS = [(w.dtype, w.size, w.stride, w.byte_offset) for w in (KEYS, STATE)]


def step(keys, state, x, slot):
    keys[slot] = x
    state.add_(1)
    return state.nan_to_num(0, 0, 0).sum() + keys[slot].float().sum()


class Owner(torch.nn.Module):
    """Owns a storage, whose bytes are a buffer of the module."""

    def __init__(self, raw):
        super().__init__()
        self.storage = ByteStorage.adopt(raw)
        self.register_buffer("cache", self.storage.buffer)

    def forward(self, x, slot):
        return step(*(self.storage.window(*field) for field in FIELDS), x, slot)


class Adopter(torch.nn.Module):
    """Has a buffer of bytes, and takes windows of it in forward."""

    def __init__(self, raw):
        super().__init__()
        self.register_buffer("cache", raw)

    def forward(self, x, slot):
        storage = ByteStorage.adopt(self.cache)
        return step(*(storage.window(*field) for field in FIELDS), x, slot)


class Regenerator(Adopter):
    """Has a buffer of bytes, and windows as plain data."""

    def forward(self, x, slot):
        return step(KEYS.regenerate(self.cache), STATE.regenerate(self.cache), x, slot)


def random_bytes():
    return torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, generator=torch.manual_seed(0))


def inputs():
    return torch.ones(16, dtype=torch.float16), torch.tensor([2])


def check(program, cache=None):
    """Call a program three times, and compare with eager mode on plain views."""
    raw = random_bytes()
    views = [KEYS.regenerate(raw), STATE.regenerate(raw)]
    for _ in range(3):
        want, got = step(*views, *inputs()), program(*inputs())
        got = got[0] if isinstance(got, (tuple, list)) else got
        torch.testing.assert_close(got, want, equal_nan=True)
        if cache is not None:
            assert torch.equal(cache, raw)


MODULES = pytest.mark.parametrize("module", [Owner, Adopter, Regenerator])
STRICT = pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])


def export(module, strict):
    with torch.no_grad():
        return torch.export.export(module(random_bytes()), inputs(), strict=strict)


@STRICT
@MODULES
def test_export(module, strict):
    program = export(module, strict).module()
    check(program, program.cache)


@STRICT
@MODULES
def test_decompositions_show_one_mutated_buffer(module, strict):
    exported = export(module, strict).run_decompositions()
    assert list(exported.graph_signature.buffers_to_mutate.values()) == ["cache"]
    program = exported.module()
    check(program, program.cache)


@STRICT
@MODULES
def test_right_after_a_reload(module, strict):
    file = io.BytesIO()
    torch.export.save(export(module, strict).run_decompositions(), file)
    file.seek(0)
    program = torch.export.load(file).module()
    check(program, program.cache)


@pytest.mark.matrix
@pytest.mark.parametrize("module", [Owner])
def test_aotinductor_package(module, tmp_path):
    path = torch._inductor.aoti_compile_and_package(
        export(module, False), package_path=str(tmp_path / "step.pt2")
    )
    check(torch._inductor.aoti_load_package(path))


@STRICT
def test_windows_as_inputs_or_buffers_are_refused(strict):
    """A saved program would have a storage for each window."""

    class Windows(torch.nn.Module):
        def __init__(self):
            super().__init__()
            storage = ByteStorage.adopt(random_bytes())
            self.register_buffer("keys", storage.window(*FIELDS[0]))
            self.register_buffer("state", storage.window(*FIELDS[1]))

        def forward(self, x, slot):
            return step(self.keys, self.state, x, slot)

    class Inputs(torch.nn.Module):
        def forward(self, keys, state, x, slot):
            return step(keys, state, x, slot)

    storage = ByteStorage.adopt(random_bytes())
    windows = tuple(storage.window(*field) for field in FIELDS)
    for module, args in ((Windows(), inputs()), (Inputs(), (*windows, *inputs()))):
        with pytest.raises(Exception, match="A window cannot be an input or a buffer") as caught:
            torch.export.export(module, args, strict=strict)
        assert "ByteStorage.adopt(self.cache)" in str(caught.value)


def test_a_storage_that_is_not_the_modules_is_refused():
    class Forgetful(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.storage = ByteStorage.adopt(random_bytes())

        def forward(self, x, slot):
            return step(*(self.storage.window(*field) for field in FIELDS), x, slot)

    with pytest.raises(errors.ExportError, match="register_buffer"):
        torch.export.export(Forgetful(), inputs(), strict=False)


def test_adopting_inside_a_compiled_function_is_written_in_place():
    raw = random_bytes()
    module = Adopter(raw)
    check(torch.compile(module, backend="aot_eager"), raw)
    torch._dynamo.reset()
    raw = random_bytes()
    check(torch.compile(Adopter(raw), backend=aliasstorage.backend("aot_eager")), raw)
    (report,) = aliasstorage.explain(Adopter(random_bytes()))(*inputs()).buffers
    assert report.reason is None
    assert {write.how for write in report.writes} <= {"in place", "computed into place"}


def test_standalone_compile_of_a_graph_on_bytes():
    """How vLLM compiles a piece: with form="bytes", a piece has one mutated input per storage."""

    def compile_piece(module, example_inputs):
        return torch._inductor.standalone_compile(
            module, example_inputs, dynamic_shapes="from_tracing_context"
        )

    raw = random_bytes()
    views = [KEYS.regenerate(raw), STATE.regenerate(raw)]
    backend = aliasstorage.backend(compile_piece, form="bytes")
    compiled = torch.compile(step, backend=backend)
    check(lambda x, slot: compiled(*views, x, slot), raw)


def test_fakes_of_windows_share_a_buffer():
    storage = ByteStorage.adopt(random_bytes())
    keys, state = (storage.window(*field) for field in FIELDS)
    mode = torch._subclasses.FakeTensorMode()
    fake_keys, fake_state = mode.from_tensor(keys), mode.from_tensor(state)
    assert fake_keys.buffer is fake_state.buffer  # type: ignore[attr-defined]
    assert (fake_state.shape, fake_state.dtype) == (state.shape, state.dtype)
    assert keys.untyped_storage().data_ptr() == state.untyped_storage().data_ptr()
