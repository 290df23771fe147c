"""Do two windows share a byte? Exact for strided and interleaved windows.

A window is the set of bytes ``offset + sum(i_d * step_d) + b`` with ``0 <= i_d < n_d`` and
``0 <= b < run``. Two windows share a byte when the difference of two such sums hits zero,
which is one bounded linear equation over the integers. It is solved by a depth-first search
from the largest step down; bounds and greatest common divisors leave one or two candidates at
each level for every cache layout that engines use. The search costs nothing in bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple, Protocol

# Search nodes before the answer becomes "may overlap". The layouts of real engines need fewer
# than 20; two incommensurate lattices of thousands of pages need some thousands.
MAX_SEARCH_NODES = 20_000


class Strided(Protocol):
    """What is asked of a window here: where its elements lie, in bytes."""

    @property
    def dtype(self) -> Any:
        """The dtype, for its itemsize."""

    @property
    def size(self) -> tuple[int, ...]:
        """The number of elements in each dimension."""

    @property
    def byte_stride(self) -> tuple[int, ...]:
        """The step of each dimension, in bytes."""

    @property
    def byte_offset(self) -> int:
        """The first byte."""

    @property
    def numel(self) -> int:
        """The number of elements."""

    def __hash__(self) -> int:
        """Windows are values."""


class Relation(enum.Enum):
    """How two windows lie to each other."""

    DISJOINT = "disjoint"
    OVERLAP = "overlap"
    MAY_OVERLAP = "may overlap"


class Lattice(NamedTuple):
    """A window reduced to its set of bytes: runs of bytes repeated along steps."""

    offset: int
    run: int
    terms: tuple[tuple[int, int], ...]  # (step in bytes, largest index), largest step first

    @property
    def last(self) -> int:
        """The last byte."""
        return self.offset + self.run - 1 + sum(step * bound for step, bound in self.terms)


@lru_cache(maxsize=4096)
def lattice(window: Strided) -> Lattice:
    """Return the set of bytes of a non-empty window, with contiguous dimensions folded.

    Examples:
        >>> import torch
        >>> from aliasstorage import Window
        >>> lattice(Window(torch.float32, (8, 4, 2), (64, 2, 1), byte_offset=16))
        Lattice(offset=16, run=32, terms=((256, 7),))
    """
    run = window.dtype.itemsize
    terms: list[tuple[int, int]] = []
    dims = [
        (step, extent - 1)
        for step, extent in zip(window.byte_stride, window.size, strict=True)
        if extent > 1 and step > 0
    ]
    for step, bound in sorted(dims):
        if not terms and step <= run:
            run += step * bound
        elif terms and step == terms[-1][0] * (terms[-1][1] + 1):
            # The next dimension continues this one at the same step: one longer dimension.
            inner, count = terms[-1]
            terms[-1] = (inner, (count + 1) * (bound + 1) - 1)
        else:
            terms.append((step, bound))
    return Lattice(window.byte_offset, run, tuple(reversed(terms)))


def relation(a: Strided, b: Strided) -> Relation:
    """Return whether two windows over one buffer share a byte.

    ``MAY_OVERLAP`` is the answer only when the exact one would cost more than
    `MAX_SEARCH_NODES` steps; ``DISJOINT`` is always proven.

    Examples:
        >>> import torch
        >>> from aliasstorage import Window
        >>> page = 64  # bytes; conv and ssm states share pages, and never a byte
        >>> conv = Window(torch.bfloat16, (8, 6), (page // 2, 1), byte_offset=0)
        >>> ssm = Window(torch.float32, (8, 12), (page // 4, 1), byte_offset=12)
        >>> relation(conv, ssm), relation(conv, Window(torch.uint8, (1,), byte_offset=75))
        (<Relation.DISJOINT: 'disjoint'>, <Relation.OVERLAP: 'overlap'>)
    """
    if a.numel == 0 or b.numel == 0:
        return Relation.DISJOINT
    return _relation(lattice(a), lattice(b))


def overlaps(a: Strided, b: Strided) -> bool:
    """Return whether two windows share a byte, counting "may overlap" as yes."""
    return relation(a, b) is not Relation.DISJOINT


@lru_cache(maxsize=65536)
def _relation(a: Lattice, b: Lattice) -> Relation:
    if a.last < b.offset or b.last < a.offset:
        return Relation.DISJOINT
    # sum(step * i) - sum(step * j) must fall in [low, high]; flipping j to bound - j makes all
    # steps positive, after which equal steps of the two windows join into one term.
    bounds: dict[int, int] = {}
    shift = b.offset - a.offset
    for step, bound in a.terms:
        bounds[step] = bounds.get(step, 0) + bound
    for step, bound in b.terms:
        bounds[step] = bounds.get(step, 0) + bound
        shift += step * bound
    terms = sorted(bounds.items(), reverse=True)
    return _search(terms, shift - (a.run - 1), shift + (b.run - 1))


def _search(terms: list[tuple[int, int]], low: int, high: int) -> Relation:
    """Decide whether ``sum(step * x)``, ``0 <= x <= bound``, can fall in [low, high]."""
    depth = len(terms)
    reach = [0] * (depth + 1)  # the largest sum that terms[k:] can make
    divisor = [0] * (depth + 1)  # every sum of terms[k:] is a multiple of this
    for k in range(depth - 1, -1, -1):
        step, bound = terms[k]
        reach[k] = reach[k + 1] + step * bound
        divisor[k] = gcd(divisor[k + 1], step)
    nodes = 0
    stack = [(0, low, high)]
    while stack:
        k, low, high = stack.pop()
        if low <= 0 <= high:
            return Relation.OVERLAP  # all remaining indices 0
        if low <= reach[k] <= high:
            return Relation.OVERLAP  # all remaining indices at their bound
        if high < 0 or low > reach[k] or k == depth:
            continue
        if high // divisor[k] * divisor[k] < low:
            continue  # no multiple of the divisor lies in [low, high]
        nodes += 1
        if nodes > MAX_SEARCH_NODES:
            return Relation.MAY_OVERLAP
        step, bound = terms[k]
        first = max(0, -(-(low - reach[k + 1]) // step))
        last = min(bound, high // step)
        if last - first > MAX_SEARCH_NODES:
            return Relation.MAY_OVERLAP
        for index in range(first, last + 1):
            stack.append((k + 1, low - index * step, high - index * step))
    return Relation.DISJOINT


def alias_classes(windows: Sequence[Strided]) -> list[list[int]]:
    """Group windows of one buffer that are connected by shared bytes.

    Returns:
        The alias classes as lists of indices into ``windows``, each in order, ordered by
        their first member. Empty windows stand alone.

    Examples:
        >>> import torch
        >>> from aliasstorage import Window
        >>> alias_classes([Window(torch.float16, (8,)), Window(torch.int8, (4,), byte_offset=16),
        ...                Window(torch.float32, (2,), byte_offset=8)])
        [[0, 2], [1]]
    """
    parent = list(range(len(windows)))

    def find(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    # A sweep in order of the first byte: only windows whose spans still reach here can meet.
    # Windows over the same set of bytes are compared once.
    first_of: dict[Lattice, int] = {}
    for index, window in enumerate(windows):
        if window.numel:
            parent[index] = first_of.setdefault(lattice(window), index)
    active: list[tuple[int, int, Lattice]] = []
    for shape, index in sorted(first_of.items()):
        active = [entry for entry in active if entry[0] >= shape.offset]
        for _, other, other_shape in active:
            root, other_root = find(index), find(other)
            if root != other_root and _relation(shape, other_shape) is not Relation.DISJOINT:
                parent[max(root, other_root)] = min(root, other_root)
        active.append((shape.last, index, shape))
    classes: dict[int, list[int]] = {}
    for index in range(len(windows)):
        classes.setdefault(find(index), []).append(index)
    return sorted(classes.values())
