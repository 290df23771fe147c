"""Windows: arithmetic, validation, composition, regeneration."""

import pickle

import pytest
import torch

from aliasstorage import Window, errors

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
SHAPES = [
    ((), ()),
    ((0,), (1,)),
    ((3,), (1,)),
    ((1, 4), (7, 1)),
    ((4, 3), (1, 4)),
    ((2, 3), (0, 1)),
    ((2, 0, 3), (9, 3, 1)),
    ((2, 2, 2), (8, 3, 1)),
]


@pytest.mark.parametrize("size, stride", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip_through_a_tensor(dtype, size, stride):
    """Window.of(window.regenerate(buffer)) is the window, and the bytes are where it says."""
    window = Window(dtype, size, stride, 2 * dtype.itemsize)
    buffer = torch.arange(1024, dtype=torch.int64).to(torch.uint8)
    view = window.regenerate(buffer)
    assert Window.of(view) == window
    assert view.numel() == window.numel
    assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    if window.numel:
        assert view.data_ptr() == buffer.data_ptr() + window.byte_offset


def test_a_window_that_was_never_used_is_regenerated_in_a_graph():
    """Its cached properties are kept under a lock, which Dynamo does not trace."""
    window = Window(torch.float16, (4, 8))

    @torch.compile(backend="eager", fullgraph=True)
    def regenerate(buffer):
        return window.regenerate(buffer) + 1

    assert regenerate(torch.zeros(64, dtype=torch.uint8)).shape == (4, 8)


def test_default_stride_is_row_major():
    assert Window(torch.float32, (2, 3, 4)).stride == (12, 4, 1)
    assert Window(torch.float32, (2, 0, 4)).stride == torch.empty(2, 0, 4).stride()


def test_value_semantics():
    a, b = Window(torch.float16, [2, 2], [2, 1], 4), Window(torch.float16, (2, 2), byte_offset=4)
    assert a == b
    assert hash(a) == hash(b)
    assert pickle.loads(pickle.dumps(a)) == a
    with pytest.raises(AttributeError):
        a.byte_offset = 8


def test_span_counts_bytes():
    assert Window(torch.float32, (4, 2), (4, 1), 8).span == (8, 8 + 4 * (3 * 4 + 1) + 4)
    assert Window(torch.float32, (0, 2), byte_offset=8).span == (8, 8)
    assert Window(torch.int64, ()).span == (0, 8)


def test_of_counts_from_the_storage():
    raw = torch.zeros(64, dtype=torch.int8)
    assert Window.of(raw[16:].view(torch.bfloat16)[2:4]).byte_offset == 20


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[1],
        lambda t: t[:, 1:3],
        lambda t: t.transpose(0, 1),
        lambda t: t.view(-1)[3:9:2],
        lambda t: t.view(torch.int8)[2],
        lambda t: t.view(torch.float32),
        lambda t: t[None].expand(3, 4, 6),
        lambda t: t.unfold(1, 2, 2),
        lambda t: t.diagonal(),
        lambda t: t[2, 3],
    ],
)
def test_compose_is_what_torch_does(view):
    window = Window(torch.float16, (4, 6), byte_offset=12)
    buffer = torch.zeros(128, dtype=torch.uint8)
    assert window.compose(view) == Window.of(view(window.regenerate(buffer)))


@pytest.mark.parametrize(
    "make, error, line",
    [
        (lambda: Window("float16", (2,)), errors.InvalidWindowError, "needs a torch.dtype"),
        (lambda: Window(torch.float16, (2,), (1, 1)), errors.InvalidWindowError, "differ"),
        (lambda: Window(torch.float16, (-2,)), errors.InvalidWindowError, "size is negative"),
        (lambda: Window(torch.float16, (2,), (-1,)), errors.InvalidWindowError, "stride is neg"),
        (lambda: Window(torch.float16, (2,), None, -2), errors.InvalidWindowError, "offset is neg"),
        (lambda: Window(torch.float32, (2,), None, 18), errors.MisalignedWindowError, "multiple"),
    ],
)
def test_invalid_windows(make, error, line):
    with pytest.raises(error, match=line) as caught:
        make()
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, errors.AliasStorageError)


def test_out_of_bounds_names_the_bytes():
    window = Window(torch.float32, (4,), byte_offset=4)
    window.check_bounds(20)
    with pytest.raises(errors.WindowOutOfBoundsError) as caught:
        window.regenerate(torch.zeros(19, dtype=torch.uint8))
    assert str(caught.value) == (
        "A window reaches past the end of its byte buffer.\n"
        "  which:    Window(torch.float32, (4,), byte_offset=4)\n"
        "  expected: bytes within [0, 19)\n"
        "  got:      bytes [4, 20)\n"
        "  do:       Allocate a larger storage, or correct the size, stride or offset."
    )
    Window(torch.float32, (0,), byte_offset=400).check_bounds(20)


@pytest.mark.parametrize(
    "tensor",
    [
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.eye(2).to_sparse_csr(),
        lambda: torch.zeros(2, dtype=torch.complex64).conj(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
)
def test_of_refuses_what_is_not_bytes(tensor):
    with pytest.raises(errors.UnsupportedTensorError):
        Window.of(tensor())


def test_errors_survive_pickling():
    error = errors.MisalignedWindowError("What.", which="a", expected="b", got="c", do="d")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
