"""A picture of which windows lie where in a storage: as text, and with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from aliasstorage.windows.overlap import overlaps
from aliasstorage.windows.window import Window

# Bytes looked at in each cell, to tell a cell that a window fills from one that it shares.
SAMPLES = 16

_SIGNS = {0.0: "·", 1.0: "█"}


@dataclass(frozen=True)
class MemoryMap:
    """Which part of each cell of a storage its windows cover.

    Attributes:
        start: First byte shown.
        stop: One past the last byte shown.
        windows: The windows, by name.
        cover: For each window, the share of each cell that it covers: 0 and 1 are exact for
            cells of up to `SAMPLES` bytes, otherwise 0 is exact and the rest is sampled.
    """

    start: int
    stop: int
    windows: Mapping[str, Window]
    cover: Mapping[str, tuple[float, ...]]

    @property
    def cells(self) -> int:
        """Number of cells."""
        return len(next(iter(self.cover.values()), ()))

    @property
    def shared(self) -> tuple[int, ...]:
        """For each cell, how many windows touch it."""
        return tuple(
            sum(cover[cell] > 0 for cover in self.cover.values()) for cell in range(self.cells)
        )

    def __str__(self) -> str:
        """Return the map as text: one line for each window, and one that counts them."""
        width = max(map(len, (*self.cover, "windows")), default=0)
        size = (self.stop - self.start) / max(1, self.cells)
        lines = [f"bytes [{self.start}, {self.stop}), {size:g} to a cell"]
        for name, cover in self.cover.items():
            signs = "".join(_SIGNS.get(share, "▒") for share in cover)
            window = self.windows[name]
            lines.append(f"{name:<{width}} |{signs}| {window.dtype} {list(window.size)}")
        counts = "".join(" " if n == 0 else str(n) if n < 10 else "+" for n in self.shared)
        lines.append(f"{'windows':<{width}} |{counts}| blank: padding")
        return "\n".join(lines)

    def plot(self, axes: Any = None) -> Any:
        """Draw the map with matplotlib, and return the axes.

        Raises:
            ModuleNotFoundError: matplotlib is not installed (``pip install aliasstorage[plot]``).
        """
        import matplotlib.pyplot as plt

        if axes is None:
            height = 0.32 * (len(self.cover) + 1) + 0.9
            axes = plt.subplots(figsize=(9, height), layout="constrained")[1]
        step = (self.stop - self.start) / max(1, self.cells)
        colors: dict[torch.dtype, Any] = {}
        for row, (name, cover) in enumerate(self.cover.items()):
            dtype = self.windows[name].dtype
            color = colors.setdefault(dtype, f"C{len(colors)}")
            for cell, share in enumerate(cover):
                if share:
                    bar = (self.start + cell * step, step)
                    axes.broken_barh(
                        [bar], (row - 0.4, 0.8), color=color, alpha=0.35 + 0.65 * share, lw=0
                    )
        for cell, count in enumerate(self.shared):
            if not count:
                bar = (self.start + cell * step, step)
                axes.broken_barh(
                    [bar], (len(self.cover) - 0.4, 0.8), facecolor="none", edgecolor="0.5",
                    hatch="////", lw=0,
                )  # fmt: skip
        axes.set_yticks(range(len(self.cover) + 1), [*self.cover, "padding"])
        axes.set_ylim(len(self.cover) + 0.6, -0.6)
        axes.set_xlim(self.start, self.stop)
        axes.set_xlabel("byte")
        handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
        labels = [str(dtype).removeprefix("torch.") for dtype in colors]
        axes.figure.legend(handles, labels, loc="outside upper right", ncols=len(labels))
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        return axes


def memory_map(windows: Mapping[str, Window], start: int, stop: int, cells: int = 64) -> MemoryMap:
    """Return the map of the bytes from ``start`` up to ``stop``.

    Examples:
        >>> import torch
        >>> keys, state = Window(torch.float16, (8,)), Window(torch.float32, (2,), byte_offset=8)
        >>> print(memory_map({"keys": keys, "state": state}, 0, 24, cells=12))
        bytes [0, 24), 2 to a cell
        keys    |████████····| torch.float16 [8]
        state   |····████····| torch.float32 [2]
        windows |11112222    | blank: padding
    """
    cells = max(1, min(cells, stop - start))
    edges = [start + (stop - start) * cell // cells for cell in range(cells + 1)]
    cover = {
        name: tuple(_share(window, low, high) for low, high in pairwise(edges))
        for name, window in windows.items()
    }
    return MemoryMap(start, stop, dict(windows), cover)


def _share(window: Window, low: int, high: int) -> float:
    if not overlaps(window, Window(torch.uint8, (high - low,), byte_offset=low)):
        return 0.0
    count = min(SAMPLES, high - low)
    places = [low + (high - low) * i // count for i in range(count)]
    hits = sum(overlaps(window, Window(torch.uint8, (1,), byte_offset=p)) for p in places)
    return max(hits, 1) / count if hits < count else 1.0
