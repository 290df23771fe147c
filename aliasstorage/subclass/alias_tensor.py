"""`AliasTensor`: a typed window over a byte buffer, as a tensor.

Note [Two kinds of AliasTensor]
Over a buffer of real bytes, an AliasTensor is an alias of the plain typed view. It has that view's
storage, data pointer and version counter, and an operation on it runs on the view. While torch
traces, the buffer is a FakeTensor or a FunctionalTensor. There an AliasTensor is a wrapper without
storage. Each operation regenerates the typed view from the buffer, so that every read and every
write appears in the graph as a window of the one buffer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from aliasstorage._compat import (
    FunctionalTensor,
    disabled_torch_function,
    is_compile_tracing,
    is_describing,
    run_eagerly,
)
from aliasstorage.errors import (
    ExportError,
    MetadataMutationError,
    RequiresGradError,
    UnsupportedTensorError,
)
from aliasstorage.subclass import functional_buffers
from aliasstorage.subclass.symbolic_offsets import offset_in_trace
from aliasstorage.version import __version__
from aliasstorage.windows.byte_buffers import byte_buffer
from aliasstorage.windows.window import Window, regenerate


class AliasTensor(torch.Tensor):
    """A cache view as a typed window over one byte buffer.

    Tensor attributes:
        buffer: The byte buffer, 1-D contiguous ``uint8``, the whole storage.

    Non-tensor attributes:
        window: dtype, size and stride in elements, byte offset.

    Invariants:
        * ``window.regenerate(buffer)`` is the plain typed view with the same values, and the
          tensor's own dtype, shape, stride and storage offset are that view's.
        * Windows of one storage hold the same buffer object.
        * It never requires gradients.

    + Views stay windows; in-place operations write the buffer's bytes; stock `torch.compile`
      sees one mutated input for all windows of a storage.
    - Operations that change metadata in place, lazy conjugation and gradients are refused.

    Constructor arguments:
        buffer: The byte buffer of a storage, as `ByteStorage.buffer` gives it.
        window: What to see of it.

    Raises:
        UnsupportedTensorError: ``buffer`` is not a 1-D contiguous ``uint8`` tensor that covers
            its storage.
        WindowOutOfBoundsError: The window reaches past the buffer.

    Examples:
        >>> import torch, aliasstorage
        >>> buffer = torch.zeros(8, dtype=torch.uint8)
        >>> ints = aliasstorage.AliasTensor(buffer, aliasstorage.Window(torch.int32, (2,)))
        >>> ints[1] = -1
        >>> buffer.tolist()
        [0, 0, 0, 0, 255, 255, 255, 255]
    """

    _buffer: torch.Tensor
    _plain: torch.Tensor | None
    _window: Window | None
    _flat: tuple[list[str], tuple[torch.dtype, int]] | None = None
    _tracing_storage: torch.UntypedStorage | None = None

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[AliasTensor], buffer: torch.Tensor, window: Window) -> AliasTensor:
        """Return the window of ``buffer``."""
        if functional_buffers.is_traced(buffer):
            return cls._from_traced(
                buffer, window.dtype, window.size, window.stride, window.byte_offset
            )
        _check_buffer(buffer)
        buffer = byte_buffer(buffer)
        return cls._from_plain(buffer, window.regenerate(buffer), window)

    @classmethod
    def _from_plain(
        cls, buffer: torch.Tensor, plain: torch.Tensor, window: Window | None = None
    ) -> AliasTensor:
        """Return the window that ``plain``, a typed view of ``buffer``'s bytes, already is."""
        self = torch.Tensor._make_subclass(cls, plain)
        self._buffer, self._plain, self._window = buffer, plain, window
        return self

    @classmethod
    def _from_traced(
        cls,
        buffer: torch.Tensor,
        dtype: torch.dtype,
        size: Sequence[int],
        stride: Sequence[int],
        byte_offset: int,
    ) -> AliasTensor:
        """Return a wrapper over a traced buffer; sizes may be symbolic."""
        if torch.compiler.is_exporting():
            raise _export_error(dtype, size)
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            size,
            strides=stride,
            # The plain view's offset, so that as_strided means on a window what it means there.
            storage_offset=byte_offset // dtype.itemsize,
            dtype=dtype,
            device=buffer.device,
            requires_grad=False,
        )
        self._buffer, self._plain, self._window = buffer, None, None
        functional_buffers.register_window(buffer, self)
        return self

    @classmethod
    def _of_buffer(
        cls,
        buffer: torch.Tensor,
        dtype: torch.dtype,
        size: Sequence[int],
        stride: Sequence[int],
        byte_offset: int,
    ) -> AliasTensor:
        """Return the window of a buffer, traced or real, without checks."""
        if functional_buffers.is_traced(buffer):
            return cls._from_traced(buffer, dtype, size, stride, byte_offset)
        return cls._from_plain(buffer, regenerate(buffer, dtype, size, stride, byte_offset))

    # --- what a window is ---

    @property
    def buffer(self) -> torch.Tensor:
        """The byte buffer: 1-D contiguous ``uint8``, the whole storage."""
        return self._buffer

    @property
    def window(self) -> Window:
        """The window: dtype, size and stride in elements, byte offset."""
        if self._window is None:
            self._window = Window(self.dtype, tuple(self.shape), self.stride(), self._byte_offset)
        return self._window

    @property
    def _byte_offset(self) -> Any:  # bytes; symbolic while tracing dynamic shapes
        return self.storage_offset() * self.dtype.itemsize

    @property
    def _is_static(self) -> bool:
        """Whether no extent of the window is symbolic."""
        extents = (*self.shape, *self.stride(), self.storage_offset())
        return all(isinstance(extent, int) for extent in extents)

    def _typed(self) -> torch.Tensor:
        """Return the plain typed view that this window is."""
        if self._plain is not None:
            return self._plain
        if torch.compiler.is_exporting():
            raise _export_error(self.dtype, self.shape)
        dtype, offset = self.dtype, self._byte_offset
        plain = regenerate(self._buffer, dtype, self.shape, self.stride(), offset)
        if isinstance(self._buffer, FunctionalTensor):
            # One functional view follows all later writes to its buffer, so it can be kept. A
            # fake one cannot: kept from outside, it would be a constant inside a proxy trace.
            self._plain = plain
        return plain

    # --- the flatten protocol ---

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, int]]:
        """Return the inner tensor's name and the static context."""
        # Size and stride are not in the context: torch hands them to unflatten, symbolic ones
        # resolved, whereas a SymInt in the context would leak into run time.
        # Kept, since Dynamo's guards ask for it at each call.
        if self._flat is None:
            self._flat = (["_buffer"], (self.dtype, self._byte_offset))
        return self._flat

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor],
        context: tuple[torch.dtype, int],
        outer_size: Sequence[int],
        outer_stride: Sequence[int],
    ) -> AliasTensor:
        """Rebuild a window from its buffer."""
        _prepare_trace()
        dtype, offset = context
        buffer = functional_buffers.canonical_buffer(inner["_buffer"])
        offset = offset_in_trace(dtype, outer_size, offset)
        return AliasTensor._of_buffer(buffer, dtype, outer_size, outer_stride, offset)

    def _stable_hash_for_caching(self) -> str:
        """Return the key of this input in AOTAutograd's cache.

        See Note [Caches on disk ignore aliasing] in `functional_buffers`.
        """
        ordinal = functional_buffers.buffer_ordinal(self._buffer)
        window = (self.dtype, self.shape, self.stride(), self._byte_offset)
        return repr((__version__, *window, ordinal))

    # --- operations ---

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _dispatch(func, args, kwargs or {})

    # --- refusals of what does not pass through __torch_dispatch__ ---

    @property
    def data(self) -> torch.Tensor:
        """The same window, as `detach` gives it."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise MetadataMutationError(
            "A window cannot be pointed at other memory.",
            which="AliasTensor.data = tensor",
            expected="a write of elements",
            got=f"an assignment of a tensor of shape {tuple(value.shape)}",
            do="Write with window.copy_(value), or bind a new window to the name.",
        )

    def requires_grad_(self, requires_grad: bool = True) -> AliasTensor:
        """Refuse to require gradients; ``False`` is accepted."""
        if requires_grad:
            _refuse_grad()
        return self

    @property
    def requires_grad(self) -> bool:
        """Always False: a window holds state, not a differentiable value."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value:
            _refuse_grad()

    # --- what torch asks of a tensor before it fakes it ---

    def _is_view(self) -> bool:
        # Autograd marks a[0] as a view of a. To the tracer each window stands on its own: it is
        # described by its buffer and its offset, and not replayed from another window.
        return False

    # Note [Returned views are regenerated from the input's buffer]
    # AOTAutograd rebuilds an output that aliases an input by as_strided on that input, then a
    # change of dtype, which is wrong between dtypes of different itemsize. When the output has
    # a _base, it asks the output's _view_func instead; there the answer is exact: the same
    # window of the input's buffer. All that is asked of the base itself is its metadata.
    @property
    def _base(self) -> torch.Tensor:  # type: ignore[override]
        return _NO_BASE

    def _view_func(self, new_base: torch.Tensor) -> AliasTensor:
        assert isinstance(new_base, AliasTensor)  # noqa: S101  (torch passes our input back)
        return AliasTensor._of_buffer(
            new_base._buffer, self.dtype, self.shape, self.stride(), self._byte_offset
        )

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the bytes.

        Note [Windows have storages of their own while tracing]
        Dynamo and AOTAutograd compare the storages of the *outer* tensors and give up on
        subclasses that share one. While they trace, each window thus answers with a storage of
        its own; that windows share bytes is said by their common buffer.
        """
        if (is_compile_tracing() or is_describing()) and not functional_buffers.is_traced(
            self._buffer
        ):
            if self._tracing_storage is None:
                nbytes = max(1, self._buffer.numel())
                self._tracing_storage = torch.UntypedStorage(nbytes, device="meta")
            return self._tracing_storage
        return super().untyped_storage()

    # --- leaving torch: these read memory directly, so they take the plain view ---

    def numpy(self, *, force: bool = False) -> Any:
        """Return the plain view's NumPy array, which shares its bytes."""
        return self._typed().numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self._typed().tolist()

    def __array__(self, dtype: Any = None) -> Any:
        """Return the values for NumPy."""
        return self._typed().__array__() if dtype is None else self._typed().__array__(dtype)

    def __dlpack__(self, **options: Any) -> Any:
        """Return a DLPack capsule of the plain view, which shares its bytes."""
        return self._typed().__dlpack__(**options)

    # --- copies, pickles, printing ---

    def __deepcopy__(self, memo: dict[int, Any]) -> AliasTensor:
        """Copy the whole storage once, and keep its windows together."""
        if id(self) in memo:
            return memo[id(self)]
        result = AliasTensor(copy.deepcopy(self._buffer, memo), self.window)
        memo[id(self)] = result
        return result

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle the buffer and the window; windows of one storage stay together."""
        window = self.window
        fields = (window.dtype, window.size, window.stride, window.byte_offset)
        return (rebuild_alias_tensor, (self._buffer, *fields))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the values and the window."""
        if functional_buffers.is_traced(self._buffer):
            shape, stride, offset = tuple(self.shape), self.stride(), self._byte_offset
            return f"AliasTensor({self.dtype}, {shape}, {stride}, byte_offset={offset}, traced)"
        values = repr(self._typed()).removeprefix("tensor(").removesuffix(")")
        return f"AliasTensor({values}, window={self.window})"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        """Format a 0-dim window as its value, any other as its text."""
        return format(self.item(), spec) if self.dim() == 0 else format(repr(self), spec)


_NO_BASE = torch.empty(0)


Dispatch = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_dispatch: Dispatch
_prepare_trace: Callable[[], None]


def set_dispatch(function: Dispatch, prepare_trace: Callable[[], None]) -> None:
    """Give the functions of `dispatch` and `higher_order_operators` that do operations on windows.

    These modules build on this one, so they are handed over when they are imported.
    """
    global _dispatch, _prepare_trace
    _dispatch, _prepare_trace = function, prepare_trace


def rebuild_alias_tensor(
    buffer: torch.Tensor,
    dtype: torch.dtype,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    byte_offset: int,
) -> AliasTensor:
    """Rebuild a pickled window."""
    return AliasTensor(buffer, Window(dtype, size, stride, byte_offset))


torch.serialization.add_safe_globals([rebuild_alias_tensor])


def _check_buffer(buffer: torch.Tensor) -> None:
    covers = (
        type(buffer) is torch.Tensor
        and buffer.dtype == torch.uint8
        and buffer.dim() == 1
        and buffer.storage_offset() == 0
        and buffer.numel() == buffer.untyped_storage().nbytes()
        and buffer.is_contiguous()
    )
    if not covers:
        raise UnsupportedTensorError(
            "A window needs a byte buffer that covers its storage.",
            which="buffer",
            expected="a 1-D contiguous torch.uint8 tensor over the whole storage",
            got=f"{type(buffer).__name__} of {buffer.dtype}, shape {tuple(buffer.shape)}, "
            f"storage offset {buffer.storage_offset()}",
            do="Use aliasstorage.ByteStorage.adopt(tensor), or aliasstorage.wrap(view).",
        )


def _export_error(dtype: torch.dtype, size: Sequence[int]) -> ExportError:
    # A program that is saved and loaded has a storage for each of its tensors, so that what one
    # window writes would no longer be seen through another.
    return ExportError(
        "A window cannot be an input or a buffer of an exported program.",
        which=f"{dtype} window of size {tuple(size)}",
        expected="the storage's bytes as one buffer of the module",
        got="a window, which torch.export would save as a tensor of its own",
        do="Register storage.buffer as a buffer, and take windows in forward: "
        "ByteStorage.adopt(self.cache).window(...).",
    )


def _refuse_grad() -> NoReturn:
    raise RequiresGradError(
        "A window cannot require gradients.",
        which="AliasTensor.requires_grad",
        expected="False",
        got="True",
        do="Keep trainable parameters outside the byte buffer; windows hold caches and states.",
    )


run_eagerly(globals())
