"""What became of a buffer's accesses, as data; `aliasstorage.explain` shows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from aliasstorage.bufferize.symbolic_windows import AnyWindow


@dataclass
class WriteReport:
    """How one write is done: ``in place``, or ``computed into place``, by which operation."""

    window: AnyWindow
    how: str
    operation: str


@dataclass
class BufferReport:
    """What became of one buffer's accesses; `explain` prints it.

    Attributes:
        nbytes: Length of the buffer, in bytes, None if it is symbolic.
        roots: Typed views that the graph is given.
        names: The inputs of the graph that they are.
        classes: Alias classes, as lists of indices into ``roots``.
        reads: Windows that are read.
        writes: What is written, and how.
        copies: For each value that is copied, its window and the reason.
        fences: How many fences.
        reason: Why the buffer was not bufferized, None if it was.
    """

    nbytes: int | None
    roots: list[AnyWindow] = field(default_factory=list)
    classes: list[list[int]] = field(default_factory=list)
    reads: list[AnyWindow] = field(default_factory=list)
    writes: list[WriteReport] = field(default_factory=list)
    copies: list[tuple[AnyWindow, str]] = field(default_factory=list)
    fences: int = 0
    names: list[str] = field(default_factory=list)
    reason: str | None = None
