"""Decide where a byte graph may write in place: pure data, no fx.

The input is what `recognize` read from a graph: reads and writes of windows of one buffer, each
at a position in program order. The output says, for the same program with in-place writes,
which values must be copied before they are overwritten, which typed views (roots) the program
is given, and where a fence keeps conflicting accesses apart.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from aliasstorage.bufferize.symbolic_windows import AnyWindow, SymbolicWindow, footprint
from aliasstorage.windows.overlap import alias_classes
from aliasstorage.windows.overlap import overlaps as windows_overlap
from aliasstorage.windows.window import Window


@dataclass(frozen=True)
class Read:
    """A view of one version of the buffer.

    Attributes:
        version: How many writes the buffer had seen.
        window: What is viewed.
        position: Where the view is made.
        uses: Where its values are used, in order; views of the view are followed.
        target_of: Positions at which the view is only the destination of an in-place write, so
            that its old values are either kept or replaced there, never needed afterwards.
        escapes: Whether the values leave the program, as an output or saved for backward. An
            output must not alias the buffer: the next call overwrites it.
        elementwise: Whether its values are used at the index where they stand, or at indices
            that data tells. See Note [Reads that must not be fused with a write].
    """

    version: int
    window: AnyWindow
    position: int
    uses: tuple[int, ...]
    target_of: frozenset[int] = frozenset()
    escapes: bool = False
    elementwise: bool = True


@dataclass(frozen=True)
class Write:
    """A write that makes version ``version`` of the buffer out of the one before.

    Attributes:
        version: The version that it makes.
        window: What is written.
        position: Where.
        in_order: Whether the elements are written in order, not at indices that data tells.
        opaque: Whether a kernel writes that no compiler generates. See Note [Opaque writes].
    """

    version: int
    window: AnyWindow
    position: int
    in_order: bool = False
    opaque: bool = False


@dataclass(frozen=True)
class Copy:
    """A value that must be copied before it is overwritten.

    Attributes:
        read: Index of the read.
        position: Where to copy: before the node at this position.
        overwritten_by: Index of the write that would destroy the value, None for a value that
            only has to be kept because it leaves the program.
    """

    read: int
    position: int
    overwritten_by: int | None


@dataclass(frozen=True)
class Fence:
    """An ordering point before the node at ``position``, over the given roots."""

    position: int
    roots: tuple[int, ...]


@dataclass
class Plan:
    """How to run the program in place.

    Attributes:
        roots: The typed views that the program is given as inputs.
        root_of: For each window, the index of the root that it is expressed in.
        copies: Values to copy.
        fences: Ordering points, by position.
        classes: Alias classes, as lists of root indices.
    """

    roots: list[AnyWindow] = field(default_factory=list)
    root_of: dict[AnyWindow, int] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)
    fences: list[Fence] = field(default_factory=list)
    classes: list[list[int]] = field(default_factory=list)


def plan(
    reads: Sequence[Read], writes: Sequence[Write], preferred_roots: Sequence[Window] = ()
) -> Plan:
    """Plan the in-place program of one buffer.

    Args:
        reads: All reads.
        writes: All writes, in order of version.
        preferred_roots: Windows that make good roots, such as the ones the user passed.

    Examples:
        >>> import torch
        >>> a, b = Window(torch.float16, (4,)), Window(torch.float32, (2,))
        >>> result = plan([Read(0, a, 1, (5,))], [Write(1, b, 3)])
        >>> result.copies, result.fences  # a is copied, since b overwrites it before its use
        ([Copy(read=0, position=1, overwritten_by=0)], [Fence(position=3, roots=(0, 1))])
    """
    result = Plan()
    windows = list(dict.fromkeys(item.window for item in (*reads, *writes) if item.window.numel))
    written = {write.window for write in writes}
    result.roots, result.root_of = choose_roots(windows, preferred_roots, written)
    result.classes = alias_classes([footprint(root) for root in result.roots])
    for index, read in enumerate(reads):
        copy = hazard(index, read, writes)
        if copy is not None:
            result.copies.append(copy)
    result.fences = _fences(reads, writes, result)
    return result


def overlaps(a: AnyWindow, b: AnyWindow) -> bool:
    """Return whether two windows may share a byte."""
    return windows_overlap(footprint(a), footprint(b))


def hazard(index: int, read: Read, writes: Sequence[Write]) -> Copy | None:
    """Return the copy that a read needs, if a later version overwrites it before a use."""
    if not read.uses:
        return None
    for number, write in enumerate(writes):
        if write.version <= read.version:
            continue
        used_after = read.escapes or any(
            use > write.position or (use == write.position and use not in read.target_of)
            for use in read.uses
        )
        if used_after and overlaps(read.window, write.window):
            # Copy where the view is made, or before the first overwrite if that comes earlier.
            # One position before it, so that a fence at the overwrite comes after the copy.
            return Copy(index, min(read.position, write.position - 1), number)
    return Copy(index, read.position, None) if read.escapes else None


def choose_roots(
    windows: Sequence[AnyWindow],
    preferred: Sequence[Window] = (),
    written: Collection[AnyWindow] = (),
) -> tuple[list[AnyWindow], dict[AnyWindow, int]]:
    """Choose the typed views to give a program, and the root of each window.

    A window is expressed in a root of its dtype of which it is a slice, permuted or expanded:
    the smallest of ``preferred``, else the largest other one. Of ``written`` windows, those that
    show an element twice are not. Windows that merely lie inside another one's span
    become roots of their own, since sharing a root would order accesses that have nothing to
    do with each other. Two dtypes never share a root, not even two of one itemsize: CPU
    Inductor stores through a reinterpreted view with the dtype of the root. Symbolic windows
    are roots of their own, after the others, those of the same symbols side by side.
    """
    static = [window for window in windows if isinstance(window, Window)]
    distinct = [window for window in dict.fromkeys((*preferred, *static)) if window.numel]
    distinct.sort(key=lambda window: (shown_elements(window), -window.numel))
    favored = [root for root in distinct if root in preferred]
    hosts = favored + [root for root in reversed(distinct) if root not in favored]
    root_for: dict[AnyWindow, AnyWindow] = {}
    for window in static:
        root_for[window] = window
        repeats = window.numel > shown_elements(window)
        if window in favored or (repeats and window in written):
            continue
        # Of windows that are permutations of each other, the first one is the root.
        before = takewhile(lambda host, window=window: host != window, hosts)
        root_for[window] = next((host for host in before if slice_of(window, host)), window)
    symbolic = [window for window in windows if isinstance(window, SymbolicWindow)]
    symbolic.sort(key=lambda window: window.symbols)
    roots = list(dict.fromkeys((*root_for.values(), *symbolic)))
    root_for.update({window: window for window in symbolic})
    order = {root: number for number, root in enumerate(roots)}
    return roots, {window: order[root] for window, root in root_for.items()}


def shown_elements(window: Window) -> int:
    """Return the number of elements, where those that an expanded dimension repeats count once."""
    extents = zip(window.size, window.stride, strict=True)
    return math.prod(extent for extent, step in extents if step or not extent)


@dataclass(frozen=True)
class Slice:
    """How a window is a slice of a root, permuted and expanded.

    Attributes:
        ranges: For each dimension of the root, start, length and step.
        dims: For each dimension of the window, the dimension of the root that it is, or None
            for a dimension of extent 1 or an expanded one. Dimensions of the root that do not
            appear have length 1 and are dropped.
    """

    ranges: tuple[tuple[int, int, int], ...]
    dims: tuple[int | None, ...]


def slice_of(window: Window, root: Window) -> Slice | None:
    """Return how a window shows some or all of a root's elements, or None.

    Examples:
        >>> import torch
        >>> root = Window(torch.float16, (8, 4, 6))
        >>> slice_of(Window(torch.float16, (4, 3), (48, 2), byte_offset=2 * 12), root)
        Slice(ranges=((0, 4, 2), (2, 1, 1), (0, 3, 2)), dims=(0, 2))
        >>> slice_of(Window(torch.float16, (9,), byte_offset=0), root) is None
        True
    """
    itemsize = root.dtype.itemsize
    if window.dtype != root.dtype or not window.numel:
        return None
    offset = window.byte_offset - root.byte_offset
    if offset < 0 or offset % itemsize:
        return None
    offset //= itemsize
    free = [dim for dim, extent in enumerate(root.size) if extent > 1]
    if len({root.stride[dim] for dim in free} - {0}) != len(free):
        return None  # a root that shows an element twice has more than one answer
    free.sort(key=lambda dim: -root.stride[dim])
    ranges = [(0, 1, 1)] * len(root.size)
    for dim in free:
        start = min(offset // root.stride[dim], root.size[dim] - 1)
        offset -= start * root.stride[dim]
        ranges[dim] = (start, 1, 1)
    if offset:
        return None
    dims: list[int | None] = []
    for extent, step in zip(window.size, window.stride, strict=True):
        if extent == 1 or not step:
            dims.append(None)
            continue
        fits = [d for d in free if step % root.stride[d] == 0]
        if not fits:
            return None
        dim = fits[0]
        start, stride = ranges[dim][0], step // root.stride[dim]
        if start + (extent - 1) * stride >= root.size[dim]:
            return None
        ranges[dim] = (start, extent, stride)
        free.remove(dim)
        dims.append(dim)
    return Slice(tuple(ranges), tuple(dims))


@dataclass(frozen=True)
class _Access:
    """A use of a window at a position: ``exact`` if no loop with another access could be wrong."""

    position: int
    is_write: bool
    root: int
    window: AnyWindow
    exact: bool
    opaque: bool = False

    def conflicts(self, later: _Access) -> bool:
        """Return whether a fence must keep a later access from this one."""
        if not (self.is_write or later.is_write) or not overlaps(self.window, later.window):
            return False
        if self.root != later.root or (later.opaque and not self.is_write):
            return True
        # Accesses of one root are ordered by the compiler, which then may fuse them.
        if not later.is_write or later.exact:
            return False
        return self.window != later.window or not (self.exact or self.is_write)


def _fences(reads: Sequence[Read], writes: Sequence[Write], result: Plan) -> list[Fence]:
    """Place fences between conflicting accesses."""
    copied = {copy.read: copy for copy in result.copies}
    accesses = [
        _Access(w.position, True, result.root_of[w.window], w.window, not w.in_order, w.opaque)
        for w in writes
        if w.window.numel
    ]
    for index, read in enumerate(reads):
        if not read.window.numel:
            continue
        uses, exact = read.uses, read.elementwise
        if index in copied:
            # The copy reads; what remains is the use as the destination of an in-place write,
            # which is that write's own access.
            uses, exact = (copied[index].position,), True
        root = result.root_of[read.window]
        accesses += [_Access(use, False, root, read.window, exact) for use in uses]
    accesses.sort(key=lambda access: (access.position, access.is_write))
    class_of = {root: number for number, roots in enumerate(result.classes) for root in roots}
    pending: dict[int, dict[_Access, None]] = {}
    fences: list[Fence] = []
    for access in accesses:
        alias_class = class_of[access.root]
        earlier = pending.setdefault(alias_class, {})
        if any(other.position < access.position and other.conflicts(access) for other in earlier):
            fences.append(Fence(access.position, tuple(result.classes[alias_class])))
            earlier.clear()
        earlier[access] = None
    return fences
