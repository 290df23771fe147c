"""AliasTensor without a compiler: views, writes, refusals, and life outside a graph."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch

import aliasstorage
from aliasstorage import AliasTensor, ByteStorage, Window, errors
from aliasstorage.windows.byte_buffers import live_buffers


def pair(dtype=torch.float32, size=(4, 6), offset=16):
    """Return a plain view and a window, over two copies of the same bytes."""
    generator = torch.Generator().manual_seed(0)
    left = torch.randint(0, 256, (512,), dtype=torch.uint8, generator=generator)
    right = left.clone()
    window = Window(dtype, size, byte_offset=offset)
    return window.regenerate(left), AliasTensor(right, window), left, right


VIEWS = {
    "view": lambda t: t.view(6, 4),
    "reshape": lambda t: t.reshape(2, 12),
    "flatten": lambda t: t.flatten(),
    "unflatten": lambda t: t.unflatten(1, (2, 3)),
    "squeeze": lambda t: t[:1].squeeze(0),
    "unsqueeze": lambda t: t.unsqueeze(1),
    "select": lambda t: t.select(1, 2),
    "slice": lambda t: t[1:4:2, ::3],
    "narrow": lambda t: t.narrow(1, 2, 3),
    "diagonal": lambda t: t.diagonal(1),
    "unfold": lambda t: t.unfold(0, 2, 1),
    "movedim": lambda t: t.movedim(0, 1),
    "T": lambda t: t.T,
    "mT": lambda t: t.mT,
    "permute": lambda t: t.permute(1, 0),
    "swapaxes": lambda t: t.swapaxes(0, 1),
    "expand": lambda t: t[:, None].expand(4, 2, 6),
    "as_strided": lambda t: t.as_strided((3, 2), (2, 1), 5),
    "view_same_size": lambda t: t.view(torch.int32),
    "view_narrower": lambda t: t.view(torch.int16),
    "view_bytes": lambda t: t.view(torch.uint8),
    "view_wider": lambda t: t.view(torch.int64),
    "view_as_complex": lambda t: torch.view_as_complex(t.view(4, 3, 2)),
    "detach": lambda t: t.detach(),
    "alias": lambda t: torch.ops.aten.alias(t),
    "data": lambda t: t.data,
    "view_as": lambda t: t.view_as(torch.zeros(6, 4)),
    "chunk": lambda t: t.chunk(2)[1],
    "split": lambda t: t.split([1, 3])[1],
    "unbind": lambda t: t.unbind(1)[2],
    "tensor_split": lambda t: t.tensor_split(3)[0],
    "hsplit": lambda t: t.hsplit(2)[1],
    "atleast_3d": lambda t: torch.atleast_3d(t),
    "real_of_real": lambda t: t.real,
    "contiguous": lambda t: t.contiguous(),
    "to_same": lambda t: t.to(torch.float32),
    "getitem_none": lambda t: t[None, ..., 1],
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", VIEWS)
def test_views_stay_windows(name, mode):
    with mode():
        plain, window, left, right = pair()
        expected, got = VIEWS[name](plain), VIEWS[name](window)
        assert isinstance(got, AliasTensor)
        assert got.window == Window.of(expected)
        assert got.buffer is window.buffer
        assert got.storage_offset() == expected.storage_offset()
        if 0 not in expected.stride():
            expected.fill_(1)
            got.fill_(1)
        assert torch.equal(left, right)


WRITES = {
    "add_": lambda t, x: t.add_(x),
    "iadd": lambda t, x: t.__iadd__(x),
    "setitem_slice": lambda t, x: t.__setitem__(slice(1, 3), x[1:3]),
    "setitem_index": lambda t, x: t.__setitem__(torch.tensor([3, 0]), x[:2]),
    "setitem_mask": lambda t, x: t.__setitem__(x > 0, 7.0),
    "setitem_bool_row": lambda t, x: t.__setitem__(torch.tensor([True, False, True, False]), 2.0),
    "setitem_incremented": lambda t, x: t.__setitem__(1, t[1] + 1),
    "masked_fill_": lambda t, x: t.masked_fill_(x > 0, 3.0),
    "masked_scatter_": lambda t, x: t.masked_scatter_(x > 0, x),
    "clamp_": lambda t, x: t.clamp_(-1, 1),
    "copy_": lambda t, x: t.copy_(x),
    "copy_cast": lambda t, x: t.copy_(x.double()),
    "copy_broadcast": lambda t, x: t.copy_(x[:1]),
    "fill_": lambda t, x: t.fill_(2),
    "zero_": lambda t, x: t.zero_(),
    "index_put_accumulate": lambda t, x: t.index_put_(
        (torch.tensor([1, 1]),), x[:2], accumulate=True
    ),
    "index_copy_": lambda t, x: t.index_copy_(0, torch.tensor([2, 0]), x[:2]),
    "index_add_": lambda t, x: t.index_add_(0, torch.tensor([2, 2]), x[:2]),
    "index_fill_": lambda t, x: t.index_fill_(1, torch.tensor([2, 0]), 5),
    "scatter_": lambda t, x: t.scatter_(1, torch.zeros(4, 2, dtype=torch.long), x),
    "scatter_reduce_": lambda t, x: t.scatter_reduce_(
        0, torch.zeros(2, 6, dtype=torch.long), x, "amax"
    ),
    "put_": lambda t, x: t.put_(torch.tensor([3, 5]), x[0, :2]),
    "out": lambda t, x: torch.mul(x, 2, out=t),
    "out_matmul": lambda t, x: torch.mm(x, x.T @ x, out=t),
    "out_sort": lambda t, x: torch.sort(x, out=(t, torch.empty(4, 6, dtype=torch.long)))[0],
    "foreach_add_": lambda t, x: torch._foreach_add_([t, x], 1.0),
    "foreach_copy_": lambda t, x: torch._foreach_copy_([t], [x]),
    "random_": lambda t, x: t.random_(0, 9),
    "uniform_": lambda t, x: t.uniform_(),
    "bernoulli_": lambda t, x: t.bernoulli_(0.5),
    "relu_": lambda t, x: torch.relu_(t),
    "addmm_": lambda t, x: t.addmm_(x, x.T @ x),
    "t_write": lambda t, x: t.t().copy_(x.t()),
    "view_write": lambda t, x: t.view(torch.int16)[0].fill_(3),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", WRITES)
def test_writes_equal_plain_views(name, mode):
    with mode():
        plain, window, left, right = pair()
        x = torch.randn(4, 6)
        torch.manual_seed(1)
        expected = WRITES[name](plain, x.clone())
        torch.manual_seed(1)
        got = WRITES[name](window, x.clone())
        assert torch.equal(left, right)
        assert (got is window) == (expected is plain)


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t + 1,
        lambda t: t.clone(),
        lambda t: t.to(torch.float64),
        lambda t: t.T.contiguous(),
        lambda t: t.reshape(-1, 3).T.reshape(-1),
        lambda t: torch.zeros_like(t),
        lambda t: t.new_ones(3),
        lambda t: torch.cat([t, t]),
        lambda t: t[torch.tensor([1, 2])],
        lambda t: t @ t.T,
        lambda t: torch.nn.functional.embedding(torch.tensor([1, 3]), t),
        lambda t: torch.nn.functional.scaled_dot_product_attention(t[None], t[None], t[None]),
        lambda t: t.sum(),
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_new_values_are_plain_tensors(read, mode):
    with mode():
        plain, window, _, right = pair()
        right[16:112].view(torch.float32).copy_(torch.randn(24))
        plain.copy_(aliasstorage.unwrap(window))
        got = read(window)
        assert type(got) is torch.Tensor
        torch.testing.assert_close(got, read(plain), rtol=0, atol=0)
        assert got.untyped_storage().data_ptr() != right.untyped_storage().data_ptr()


@torch.library.custom_op("tests_tensor::scale_into", mutates_args=("out", "more"))
def scale_into(out: torch.Tensor, more: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    out.copy_(x * 2)
    for tensor in more:
        tensor.add_(1)
    return x + 1


def test_custom_operation_mutates_windows():
    plain, window, left, right = pair()
    other = Window(torch.int16, (8,), byte_offset=200)
    a = scale_into(plain, [other.regenerate(left)], torch.ones(4, 6))
    b = scale_into(window, [AliasTensor(right, other)], torch.ones(4, 6))
    assert torch.equal(left, right)
    assert torch.equal(a, b)


# --- refusals ---

METADATA = {
    "resize_": lambda t: t.resize_(2, 2),
    "resize_as_": lambda t: t.resize_as_(torch.zeros(2)),
    "set_": lambda t: t.set_(torch.zeros(2)),
    "set_empty": lambda t: t.set_(),
    "t_": lambda t: t.t_(),
    "transpose_": lambda t: t.transpose_(0, 1),
    "squeeze_": lambda t: t.squeeze_(),
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    "as_strided_": lambda t: t.as_strided_((2,), (1,)),
    "swapaxes_": lambda t: t.swapaxes_(0, 1),
    "data": lambda t: setattr(t, "data", torch.zeros(2)),
    "out_of_another_shape": lambda t: torch.add(torch.ones(3), 1, out=t),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", METADATA)
def test_metadata_mutation_is_refused(name, mode):
    with mode():
        _, window, _, right = pair()
        before, spec = right.clone(), window.window
        with pytest.raises(errors.MetadataMutationError):
            METADATA[name](window)
        assert torch.equal(right, before)
        assert window.shape == spec.size
        assert window.stride() == spec.stride


def test_gradients_are_refused():
    _, window, _, right = pair()
    before = right.clone()
    with pytest.raises(errors.RequiresGradError):
        window.requires_grad_(True)
    with pytest.raises(errors.RequiresGradError):
        window.requires_grad = True
    assert window.requires_grad_(False) is window
    parameter = torch.ones(4, 6, requires_grad=True)
    for write in (
        lambda: window.copy_(parameter),
        lambda: window.add_(parameter),
        lambda: window.__setitem__(0, parameter[0]),
        lambda: window.index_put_((torch.tensor([1]),), parameter[:1]),
        lambda: torch._foreach_copy_([window], [parameter]),
    ):
        with pytest.raises(errors.GradientWriteError):
            write()
    assert torch.equal(right, before)
    with torch.no_grad():
        window.copy_(parameter)
    with pytest.raises(errors.RequiresGradError, match=r"\['k'\]"):
        aliasstorage.wrap({"k": parameter})


def test_lazy_bits_are_refused():
    storage = ByteStorage.zeros(64)
    window = storage.window(torch.complex64, (4,))
    with pytest.raises(errors.UnsupportedOpError, match="conj_physical"):
        window.conj()
    assert torch.equal(torch.conj_physical(window), torch.zeros(4, dtype=torch.complex64))
    with pytest.raises(errors.UnsupportedTensorError):
        aliasstorage.wrap(torch.zeros(2, dtype=torch.complex64).conj())
    for tensor in (
        torch.eye(3).to_sparse(),
        torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.quint8),
        torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    ):
        with pytest.raises(errors.UnsupportedTensorError):
            aliasstorage.wrap(tensor)


def test_buffer_must_cover_its_storage():
    raw = torch.zeros(64, dtype=torch.uint8)
    for bad in (raw[:32], raw[16:], raw.view(8, 8), raw.view(torch.int8), raw[::2]):
        with pytest.raises(errors.UnsupportedTensorError):
            AliasTensor(bad, Window(torch.uint8, (4,)))


# --- autograd around windows ---


def test_gradient_of_another_input():
    _, window, _, right = pair()
    right.zero_()
    window.fill_(3.0)
    weight = torch.ones(4, 6, requires_grad=True)
    (weight * window).sum().backward()
    assert torch.equal(weight.grad, torch.full((4, 6), 3.0))


def test_a_write_after_saving_for_backward_is_found():
    """Windows of a storage share their version counter, as views of a tensor do."""
    _, window, _, right = pair()
    other = AliasTensor(right, Window(torch.int8, (4,), byte_offset=16))
    weight = torch.ones(4, 6, requires_grad=True)
    loss = (weight * window).sum()
    other.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- life outside torch's dispatcher ---


def test_pointers_and_exports_share_the_bytes():
    plain, window, _, right = pair()
    assert window.data_ptr() == right.data_ptr() + 16
    assert window.untyped_storage().data_ptr() == right.data_ptr()
    assert window.numpy().ctypes.data == window.data_ptr()
    assert torch.from_dlpack(window).data_ptr() == window.data_ptr()
    assert window.tolist()[0][:1] == plain.tolist()[0][:1] or plain[0, 0].isnan()
    assert window[0, 0].item() == plain[0, 0].item() or plain[0, 0].isnan()
    assert memoryview(window.numpy()).nbytes == 96
    assert window.__array__().shape == (4, 6)


def test_share_memory_and_pin_do_not_crash():
    storage = ByteStorage.zeros(64)
    window = storage.window(torch.float32, (4,))
    window.share_memory_()
    window.fill_(1)
    assert window.is_shared()
    assert storage.buffer[:4].tolist() == [0, 0, 128, 63]
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError):
            window.pin_memory()


def test_copies_keep_windows_together():
    storage = ByteStorage.zeros(64)
    a, b = storage.window(torch.float32, (4,)), storage.window(torch.int16, (8,))
    module = torch.nn.Module()
    module.a, module.b = a, b
    for x, y in (
        copy.deepcopy((a, b)),
        (lambda m: (m.a, m.b))(copy.deepcopy(module)),
        pickle.loads(pickle.dumps((a, b))),
    ):
        assert x.buffer is y.buffer
        assert x.buffer is not a.buffer
        x.fill_(1.0)
        assert y[1].item() == 0x3F80
        assert x.window == a.window
        assert aliasstorage.wrap(aliasstorage.unwrap(y)).buffer is x.buffer
    assert copy.copy(a).buffer is a.buffer


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("mmap", [True, False])
def test_save_and_load(tmp_path, weights_only, mmap):
    storage = ByteStorage.zeros(64)
    a = storage.window(torch.bfloat16, (2, 3), (8, 1), 16)
    b = storage.window(torch.float32, (4,))
    a.fill_(2.0)
    path = tmp_path / "windows.pt"
    torch.save({"a": a, "b": b}, path)
    assert path.stat().st_size < 4096
    loaded = torch.load(path, weights_only=weights_only, mmap=mmap, map_location="cpu")
    assert loaded["a"].window == a.window
    assert loaded["a"].buffer is loaded["b"].buffer
    assert torch.equal(loaded["b"].buffer, storage.buffer)


def test_state_dict_round_trip():
    module = torch.nn.Module()
    raw = torch.zeros(32, dtype=torch.uint8)
    module.register_buffer("a", raw[:16].view(torch.float32))
    module.register_buffer("b", raw[8:].view(torch.int16))
    aliasstorage.wrap_module_(module)
    module.a.fill_(1.0)
    state = copy.deepcopy(module.state_dict())
    module.a.zero_()
    module.load_state_dict(state)
    assert module.a.buffer is module.b.buffer
    assert torch.equal(aliasstorage.unwrap(module.a), torch.ones(4))
    module.load_state_dict(state, assign=True)
    assert module.a.buffer is module.b.buffer


def test_printing_shows_values_and_window():
    storage = ByteStorage.zeros(8)
    window = storage.window(torch.int16, (2,), byte_offset=4)
    text = "AliasTensor([0, 0], dtype=torch.int16, window=Window(torch.int16, (2,), byte_offset=4))"
    assert repr(window) == str(window) == f"{window}" == text
    assert f"{window[0]:>3}" == "  0"
    assert repr(storage) == "ByteStorage(8 bytes on cpu)"


def test_python_protocols():
    _, window, _, _ = pair()
    assert len(window) == 4
    assert window in {window}
    assert (window == window) is not NotImplemented
    assert weakref.ref(window)() is window
    assert [row.shape for row in window] == [(6,)] * 4
    assert bool(window[0, 0] == window[0, 0]) in (True, False)


# --- storages ---


@pytest.mark.parametrize(
    "raw",
    [
        lambda: torch.zeros(63, dtype=torch.int8)[16:],
        lambda: torch.zeros(33, dtype=torch.bfloat16)[1:],
        lambda: torch.zeros(5, 4, dtype=torch.float64).t()[1],
        lambda: torch.zeros(4, dtype=torch.int16).view(torch.uint8)[2:7],
    ],
)
def test_adopt_any_raw_buffer(raw):
    tensor = raw()
    storage = ByteStorage.adopt(tensor)
    assert storage.nbytes == tensor.untyped_storage().nbytes()
    assert storage.buffer.data_ptr() == tensor.untyped_storage().data_ptr()
    assert ByteStorage.adopt(tensor).buffer is storage.buffer
    wrapped = aliasstorage.wrap(tensor)
    assert wrapped.buffer is storage.buffer
    assert wrapped.data_ptr() == tensor.data_ptr()
    storage.window(torch.uint8, (2,)).fill_(1)
    assert tensor.untyped_storage()[0] == 1


def test_storage_errors_name_the_field():
    storage = ByteStorage.zeros(30)
    with pytest.raises(errors.WindowOutOfBoundsError):
        storage.window(torch.float32, (8,))
    with pytest.raises(errors.MisalignedWindowError):
        storage.window(torch.float32, (2,), byte_offset=18)  # nine bfloat16 before it
    with pytest.raises(errors.InvalidWindowError):
        storage.window(torch.float32, (2,), (1, 1))


def test_nothing_keeps_a_dead_storage_alive():
    raw = torch.zeros(64, dtype=torch.uint8)
    windows = aliasstorage.wrap([raw[:8].view(torch.float16), raw[8:].view(torch.float32)])
    windows[0][1:].add_(1)
    probe, key = weakref.ref(raw.untyped_storage()), raw.untyped_storage()._cdata
    buffer = weakref.ref(windows[0].buffer)  # type: ignore[attr-defined]
    assert key in live_buffers
    del raw, windows
    gc.collect()
    assert buffer() is None
    assert probe() is None
    assert key not in live_buffers


def test_a_storage_that_grew_gets_a_new_buffer():
    raw = torch.zeros(8, dtype=torch.uint8)
    old = aliasstorage.wrap(raw).buffer  # type: ignore[attr-defined]
    raw.untyped_storage().resize_(32)
    new = ByteStorage.adopt(raw)
    assert new.nbytes == 32
    assert new.buffer is not old


def test_wrapping_twice_gives_one_buffer():
    raw = torch.zeros(64, dtype=torch.uint8)
    a = aliasstorage.wrap(raw[:8])
    b = aliasstorage.wrap(raw.view(torch.int32))
    assert a.buffer is b.buffer  # type: ignore[attr-defined]
    assert aliasstorage.wrap(a) is a


def test_trees_and_modules():
    raw = torch.zeros(64, dtype=torch.uint8)
    tree = {"layers": [(raw[:8], raw[8:16].view(torch.float32)), None], "n": 3, "s": "x"}
    wrapped = aliasstorage.wrap(tree)
    assert wrapped["n"] == 3
    assert isinstance(wrapped["layers"][0][1], AliasTensor)
    plain = aliasstorage.unwrap(wrapped)
    assert type(plain["layers"][0][1]) is torch.Tensor
    assert plain["layers"][0][1].data_ptr() == tree["layers"][0][1].data_ptr()

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)
            self.register_buffer("state", raw[:16].view(torch.float32))
            self.kv_cache = (raw[16:32].view(torch.float16), raw[32:48].view(torch.float16))
            self.scale = 2.0

    model = torch.nn.Sequential(Layer(), Layer())
    aliasstorage.wrap_module_(model, names=["0.kv_cache"])
    assert isinstance(model[0].kv_cache[1], AliasTensor)
    assert not isinstance(model[1].kv_cache[1], AliasTensor)
    aliasstorage.wrap_module_(model)
    assert isinstance(model[1].state, AliasTensor)
    assert isinstance(model[1].linear.weight, torch.nn.Parameter)
    assert "0.state" in dict(model.named_buffers())
    aliasstorage.unwrap_module_(model)
    assert type(model[0].kv_cache[1]) is torch.Tensor
    with pytest.raises(aliasstorage.AliasStorageError, match="0.nothing"):
        aliasstorage.wrap_module_(model, names=["0.nothing"])


def test_pickle_through_a_file_object():
    window = ByteStorage.zeros(16).window(torch.float16, (4,))
    stream = io.BytesIO()
    torch.save(window, stream)
    stream.seek(0)
    assert torch.load(stream, weights_only=True).window == window.window
