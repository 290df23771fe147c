"""A typed view of a byte buffer by slices and views, without ``as_strided``.

For backends that have no ``as_strided``, or that ignore storage offsets. It expresses windows whose
dimensions nest: regions, pages, fields of pages, interleaved heads; not overlapping dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aliasstorage.errors import BackendUnsupportedError


def regenerate_by_slices(
    buffer: torch.Tensor,
    dtype: torch.dtype,
    size: Sequence[int],
    stride: Sequence[int],
    byte_offset: int,
) -> torch.Tensor:
    """Return the typed view that `window.regenerate` returns.

    Args:
        buffer: 1-D contiguous ``uint8`` tensor.
        dtype: Element type of the view.
        size: Extents, in elements; not symbolic.
        stride: Steps, in elements; not symbolic.
        byte_offset: Offset of the first element, in bytes.

    Raises:
        BackendUnsupportedError: The window's dimensions do not nest, or one is symbolic.

    Examples:
        >>> import torch
        >>> buffer = torch.arange(24, dtype=torch.uint8)
        >>> regenerate_by_slices(buffer, torch.uint8, (2, 3), (12, 2), 4)
        tensor([[ 4,  6,  8],
                [16, 18, 20]], dtype=torch.uint8)
    """
    values = (*size, *stride, byte_offset)
    if not all(isinstance(value, int) for value in values):
        raise _unsupported(dtype, size, stride, byte_offset, "a symbolic size, stride or offset")
    itemsize = dtype.itemsize
    if 0 in size:
        return buffer[:0].view(dtype).view(size)
    dims = [dim for dim, extent in enumerate(size) if extent > 1]
    dims.sort(key=lambda dim: -stride[dim])
    spans = [itemsize]  # of the dimensions inside, innermost first
    for dim in reversed(dims):
        spans.append(spans[-1] + (size[dim] - 1) * stride[dim] * itemsize)
    view, start = buffer, byte_offset
    for position, dim in enumerate(dims):
        step, extent = stride[dim] * itemsize, size[dim]
        inside = spans[len(dims) - position - 1]
        length = view.shape[-1]
        if step < inside:
            raise _unsupported(dtype, size, stride, byte_offset, "dimensions that overlap")
        # The last repetition may be cut off by the end of the buffer; then start earlier.
        first = min(start, length - extent * step)
        if first < 0 or start - first + inside > step:
            raise _unsupported(
                dtype, size, stride, byte_offset, "a last repetition that reaches past the end"
            )
        view = view[..., first : first + extent * step].unflatten(-1, (extent, step))
        start -= first
    view = view[..., start : start + itemsize].view(dtype).squeeze(-1)
    order = [dims.index(dim) for dim in sorted(dims)]
    view = view.permute(order)
    for dim, extent in enumerate(size):
        if extent == 1:
            view = view.unsqueeze(dim)
    return view


def _unsupported(
    dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], byte_offset: int, what: str
) -> BackendUnsupportedError:
    return BackendUnsupportedError(
        "A window cannot be made by slices and views.",
        which=f"{dtype} of size {tuple(size)}, stride {tuple(stride)}, at byte {byte_offset}",
        expected="dimensions that nest, such as pages and fields of pages",
        got=what,
        do='Choose form="bytes" if the backend has as_strided, or form="windows".',
    )
