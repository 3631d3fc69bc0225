"""Cells per second of a sweep, how its memory grows, and what a second worker brings.

Two sweeps, each a process of its own, watched from outside through /proc. `--cells` tiny ones (60 requests of synthetic
lengths) show what a cell costs beside its simulation: cells/s, and the resident memory of the sweep with its workers, the mean
of the last quarter of the time less that of the second one (the first holds start-up). `--long` cells of about a second each
(synthetic, `--requests` requests) run with one joblib worker, which is the command's own process, and with more: the ratio of
the times from when the study is opened to the end of its last cell, start of the workers included, and of the whole commands.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from report import arguments, report

COMMAND = [sys.executable, "-c", "import sys; from lengthwise.cli import main; sys.exit(main())", "run", "-m", "wandb=off"]
TINY = ["rate=20", "num_requests=60", "workload.num_rows=200"]
LONG = ["policy=srpt", "predictor=noisy_oracle", "limits=seqs64", "rate=24"]
MIB = 2**20


def sweep(folder: Path, *overrides: str) -> dict[str, float]:
    """Run a sweep; seconds of the command and of its cells, and memory growth (MiB) where it ran long enough to tell."""
    start, memory, done = time.perf_counter(), [], threading.Event()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as told:
        process = subprocess.Popen([*COMMAND, *overrides, f"out={folder}"], env=env, stdout=told, stderr=told)

        def watch() -> None:
            while not done.wait(0.5):
                memory.append(resident(process.pid) / MIB)

        watcher = threading.Thread(target=watch)
        watcher.start()
        code = process.wait()
        seconds = time.perf_counter() - start
        done.set()
        watcher.join()
        told.seek(0)
        text = told.read().decode()
    if code:
        raise SystemExit(text[-2000:])
    cells = (folder / "adhoc/cells.jsonl").stat().st_mtime - (folder / "adhoc/.lock").stat().st_mtime
    rows = [json.loads(line) for line in (folder / "adhoc/cells.jsonl").read_text().splitlines()]
    each = [row["seconds"] for row in rows if row["status"] == "ok"]
    n = len(memory)
    growth = statistics.mean(memory[3 * n // 4 : n - 2]) - statistics.mean(memory[n // 4 : n // 2]) if n >= 20 else float("nan")
    return {"seconds": seconds, "cells": cells, "each": statistics.median(each), "growth": growth, "peak": max(memory)}


def resident(pid: int) -> int:
    """Bytes of the process and of all that came of it."""
    total = 0
    try:
        total = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(resident(int(child)) for child in re.findall(r"\d+", (task / "children").read_text()))
    except (FileNotFoundError, ProcessLookupError):
        pass  # it ended meanwhile
    return total


def main() -> None:
    args = arguments(__doc__ or "", cells=1000, workers=2, long=60, requests=16_000, repeats=3)
    samples: dict[str, list[float]] = {}

    def add(name: str, value: float) -> None:
        samples.setdefault(name, []).append(value)

    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as folder:
            joblib = ["hydra/launcher=joblib", f"hydra.launcher.n_jobs={args.workers}"]
            if args.cells:
                tiny = sweep(Path(folder) / "tiny", f"seed=range(0,{args.cells})", *joblib, *TINY)
                add("tiny_cells_per_s", args.cells / tiny["cells"])
                add("tiny_memory_growth_mib", tiny["growth"])
                add("tiny_memory_peak_mib", tiny["peak"])
            if args.long:
                long = [
                    *LONG,
                    f"num_requests={args.requests}",
                    f"workload.num_rows={args.requests}",
                    f"seed=range(0,{args.long})",
                    "hydra/launcher=joblib",
                ]
                one, more = (
                    sweep(Path(folder) / str(n), *long, f"hydra.launcher.n_jobs={n}") for n in (1, args.workers)
                )  # fmt: skip
                add("long_seconds_a_cell", one["each"])
                add(f"speed_up_{args.workers}_workers", one["cells"] / more["cells"])
                add(f"speed_up_{args.workers}_workers_whole_command", one["seconds"] / more["seconds"])
    report(samples, args.json)


if __name__ == "__main__":
    main()
