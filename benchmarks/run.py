"""Run the benchmarks: ``python -m benchmarks.run [--full] [--only NAME] [--output FILE]``."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="also 1 GiB, and more sizes")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ...")
    parser.add_argument("--threads", type=int, default=0, help="threads of torch")
    arguments = parser.parse_args()
    os.environ["BENCHMARK_DEVICE"] = arguments.device  # read where the cases are made

    import torch

    from benchmarks.cases import FULL, QUICK
    from benchmarks.measure import machine, measure
    from benchmarks.parts import PARTS, PARTS_FULL

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    records = []
    for case in [*FULL, *PARTS_FULL] if arguments.full else [*QUICK, *PARTS]:
        if arguments.only not in case.name:
            continue
        measured = measure(case)
        print(measured, flush=True)
        records.append(measured.as_record())
        if arguments.output:  # after each case, so that a run that is stopped has results
            everything = {"machine": machine(), "cases": records}
            arguments.output.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
