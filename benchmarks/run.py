"""Run the benchmarks: ``python -m benchmarks.run [--full] [--only NAME] [--output FILE]``."""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import torch

import aliasstorage
from benchmarks.cases import FULL, QUICK
from benchmarks.measure import as_record, measure, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="also 1 GiB, and more sizes")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    parser.add_argument("--threads", type=int, default=0, help="threads of torch")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    records = []
    for case in FULL if arguments.full else QUICK:
        if arguments.only not in case.name:
            continue
        results = measure(case)
        print(table(case, results), flush=True)
        records.append(as_record(case, results))
    if arguments.output:
        machine = {
            "torch": torch.__version__,
            "aliasstorage": aliasstorage.__version__,
            "python": platform.python_version(),
            "processor": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
        }
        arguments.output.write_text(json.dumps({"machine": machine, "cases": records}, indent=1))


if __name__ == "__main__":
    main()
