"""Draw a result file: ``python -m benchmarks.plot RESULTS.json FOLDER`` (needs matplotlib).

Four pictures: cost against the size of the buffer, cost of a call against the number of windows,
where the time of a call goes, and the ratio to separate caches by layout, overlap and dtype.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "aliasstorage"  # the same file for the same results

COLORS = {
    "eager": "#777777",
    "stock, separate caches": "#d1603d",
    "stock, plain views": "#e0a458",
    "stock, windows by hand from bytes": "#a23b72",
    "stock, hidden in a custom op": "#8a7a3a",
    "aliasstorage, plain views": "#2b6cb0",
    "aliasstorage, wrapped": "#63a4e0",
    "aliasstorage, taken inside": "#2f855a",
}


def number(size: str) -> float:
    return float(size.split()[0])


def series(cases: Iterable[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Return microseconds against size, by variant."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for case in sorted(cases, key=lambda case: number(case["size"])):
        for result in case["results"]:
            if result["microseconds"] is not None:
                point = (number(case["size"]), result["microseconds"])
                lines.setdefault(result["variant"], []).append(point)
    return lines


def draw_lines(axes: Any, cases: list[dict[str, Any]], title: str, xlabel: str) -> None:
    for variant, points in series(cases).items():
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, marker="o", label=variant, color=COLORS.get(variant))
    axes.set(xscale="log", yscale="log", title=title, xlabel=xlabel, ylabel="µs a call")
    axes.grid(alpha=0.3)


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """Write the pictures that the results allow, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    cases: dict[str, list[dict[str, Any]]] = {}
    for case in results["cases"]:
        cases.setdefault(case["case"], []).append(case)
    written = []

    def save(figure: Any, name: str) -> None:
        where = ", ".join(f"{key} {value}" for key, value in results["machine"].items())
        figure.text(0.01, -0.06, where, fontsize=6, color="#777777")
        figure.savefig(folder / name, bbox_inches="tight", metadata={"Date": None})
        plt.close(figure)
        written.append(folder / name)

    by_size = [name for name in ("token write", "hybrid decode step") if name in cases]
    if by_size:
        figure, axes = plt.subplots(1, len(by_size), figsize=(5.2 * len(by_size), 4), squeeze=False)
        for axis, name in zip(axes[0], by_size, strict=True):
            draw_lines(axis, cases[name], name, "buffer, MiB")
        labels: dict[str, Any] = {}
        for axis in axes[0]:
            handles, names = axis.get_legend_handles_labels()
            labels.update(zip(names, handles, strict=True))
        figure.legend(labels.values(), labels.keys(), loc="upper center", ncols=3, frameon=False,
                      bbox_to_anchor=(0.5, 1.12), fontsize=8)  # fmt: skip
        save(figure, "cost-by-size.svg")
    if "call" in cases:
        figure, axis = plt.subplots(figsize=(5.2, 4))
        draw_lines(axis, cases["call"], "a call, a row written to each window", "windows")
        axis.legend(fontsize=8, frameon=False)
        save(figure, "cost-by-windows.svg")
    ratios = draw_ratios(cases)
    if ratios is not None:
        save(ratios, "cost-by-layout.svg")
    if "where a call's time goes" in cases:
        figure, axis = plt.subplots(figsize=(6.5, 2.6))
        parts = max(cases["where a call's time goes"], key=lambda case: number(case["size"]))
        times = {r["variant"]: r["microseconds"] for r in parts["results"]}
        whole, bound = times["the whole call"], times["without Dynamo's guards"]
        bars = {
            "Dynamo: guards and frame": whole - bound,
            "pattern check, AOTAutograd,\ntyped inputs": bound,
            "not paid: flattening all": times["flattening all windows"],
            "not paid: regenerating all": times["regenerating all windows"],
        }
        colors = ["#2b6cb0", "#63a4e0", "#cccccc", "#cccccc"]
        axis.barh(list(bars)[::-1], list(bars.values())[::-1], color=colors[::-1])
        axis.set(xlabel="µs", title=f"where a call's time goes, {parts['size']}, wrapped")
        save(figure, "where-the-time-goes.svg")
    return written


LAYOUTS = (
    "token write",
    "same dtype",
    "custom op",
    "fp8 over uint8",
    "int8 with scales",
    "interleaved heads",
)


def draw_ratios(cases: dict[str, list[dict[str, Any]]]) -> Any | None:
    """Return bars of what each layout, overlap and dtype costs, as ratios to separate caches."""
    rows: list[tuple[str, dict[str, float]]] = []

    def add(label: str, case: dict[str, Any]) -> None:
        times = {r["variant"]: r["microseconds"] for r in case["results"]}
        separate = times.get("stock, separate caches")
        if separate:
            rows.append((label, {name: time / separate for name, time in times.items() if time}))

    for name in LAYOUTS:
        of_one_size = [case for case in cases.get(name, []) if number(case["size"]) == 64]
        for case in of_one_size:
            add(f"{name}, {case['size']}", case)
    for name in ("overlap", "dtype"):
        for case in cases.get(name, []):
            add(f"{name}: {case['size']}", case)
    if not rows:
        return None
    figure, axis = plt.subplots(figsize=(6.5, 0.32 * len(rows) + 1))
    shown = ("aliasstorage, plain views", "aliasstorage, wrapped")
    for offset, variant in zip((0.2, -0.2), shown, strict=True):
        ratios = [times.get(variant, 0.0) for _, times in rows]
        places = [len(rows) - row + offset for row in range(len(rows))]
        axis.barh(places, ratios, height=0.38, label=variant, color=COLORS[variant])
    axis.set_yticks([len(rows) - row for row in range(len(rows))], [label for label, _ in rows])
    axis.axvline(1, color="#777777", linewidth=1)
    axis.set(xlabel="time, as a ratio to stock torch.compile on separate caches")
    axis.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=2)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    for path in draw(json.loads(arguments.results.read_text()), arguments.folder):
        print(path)


if __name__ == "__main__":
    main()
