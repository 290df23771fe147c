"""Compare two result files: ``python -m benchmarks.compare BEFORE.json AFTER.json``.

Ratios against the baseline of the same run are compared, not times, since machines differ from
hour to hour. A difference counts when it is larger than the spread of both runs together.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def ratios(path: Path) -> dict[tuple[str, str, str], tuple[float, float]]:
    """Return ratio and spread of each variant of each case in a file."""
    found = {}
    for case in json.loads(path.read_text())["cases"]:
        for result in case["results"]:
            if result["ratio"] is not None and result["variant"] != case["baseline"]:
                key = (case["case"], case["size"], result["variant"])
                found[key] = (result["ratio"], result["ratio_spread"])
    return found


def compare(before: Path, after: Path) -> list[dict[str, Any]]:
    """Return a row for each variant that both files have."""
    old, new = ratios(before), ratios(after)
    rows = []
    for key in old.keys() & new.keys():
        (left, left_spread), (right, right_spread) = old[key], new[key]
        noise = left_spread + right_spread
        verdict = "same"
        if abs(right - left) > max(noise, 0.02 * left):
            verdict = "slower" if right > left else "faster"
        rows.append(
            {"key": key, "before": left, "after": right, "noise": noise, "verdict": verdict}
        )
    return sorted(rows, key=lambda row: row["key"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    arguments = parser.parse_args()
    rows = compare(arguments.before, arguments.after)
    for row in rows:
        case, size, variant = row["key"]
        print(
            f"{row['verdict']:<7} {row['before']:8.2f} -> {row['after']:8.2f} "
            f"(noise {row['noise']:.2f})  {case}, {size}: {variant}"
        )
    slower = [row for row in rows if row["verdict"] == "slower"]
    print(f"{len(rows)} compared, {len(slower)} slower beyond the noise")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
