"""Seconds to read 1,000 cells back: `load_runs` (a row per cell) and `load_requests` (a row per request).

Without --study a study of as many cells as asked is made first: results of one simulated cell, copied under other names, in a
temporary folder. Each measurement is a process of its own; files are in the system's cache, as after a sweep.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import report


def make(folder: Path, num_cells: int, num_requests: int) -> None:
    """A study of `num_cells` complete cells in `folder`."""
    from lengthwise.experiments.manifest import append
    from lengthwise.experiments.run import FILES
    from lengthwise.experiments.simulate import simulate

    first = folder / "cell-0"
    simulate("srpt", "oracle", rate=20.0, num_requests=num_requests, max_num_seqs=64).save(first)
    summary = json.loads((first / "summary.json").read_text())
    for seed in range(num_cells):
        cell = folder / f"cell-{seed}"
        if seed:
            cell.mkdir()
            for name in FILES[:-1]:
                shutil.copyfile(first / name, cell / name)
        summary["cell"]["seed"], summary["provenance"]["config_hash"] = seed, f"{seed:016x}"
        (cell / "summary.json").write_text(json.dumps(summary, sort_keys=True, indent=2))
        append(folder, {"cell": cell.name, "hash": f"{seed:016x}", "status": "ok", "folder": cell.name, "fields": {}})


def one(what: str, folder: str) -> dict[str, float]:
    """Read once in this process: seconds after the imports, rows, peak memory in MiB."""
    from lengthwise.experiments.load_runs import load_requests, load_runs

    columns = ["arrival", "ttft", "e2e", "counted"] if what == "columns" else None
    start = time.perf_counter()
    frame = load_runs(folder) if what == "runs" else load_requests(folder, columns)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "rows": len(frame), "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--study", type=Path, help="an existing study; default: made here")
    parser.add_argument("--cells", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=1000, help="of each cell that is made")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write machine, commit, n, figures and spread here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        if args.study is None:
            make(Path(made), args.cells, args.requests)
        samples: dict[str, list[float]] = {}
        for what in ("runs", "requests", "columns"):
            for _ in range(args.repeats):
                command = [sys.executable, __file__, "one", what, str(args.study or made)]
                found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
                for key, value in found.items():
                    samples.setdefault(f"{what}_{key}", []).append(value)
    report(samples, args.json)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "one":
        print(json.dumps(one(sys.argv[2], sys.argv[3])))
    else:
        main()
