"""What every child of the throughput benchmark does: read a job, load a system, serve its points, print a line for each.

A job is one JSON object on the standard input: `model` (a folder), `system`, `threads`, `points`, and what the system needs
besides. Only result lines go to the standard output; whatever libraries print goes to the standard error. Standard library
only, because each peer runs in an environment of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

WARM_OUTPUT = 4  # tokens that each request of a warm-up generates


@dataclass(frozen=True, slots=True)
class Point:
    """Requests that are all there at the start, served at most `concurrency` at a time, in order."""

    name: str
    concurrency: int
    prompts: list[list[int]]
    output_lens: list[int]

    def warm(self) -> Point:
        """Two rounds of its requests, cut short."""
        n = 2 * self.concurrency
        return replace(self, prompts=self.prompts[:n], output_lens=[min(x, WARM_OUTPUT) for x in self.output_lens[:n]])

    @property
    def longest(self) -> int:
        return max(len(p) + n for p, n in zip(self.prompts, self.output_lens, strict=True))


class System(Protocol):
    """A loaded engine. `prepare` may rebuild it for another concurrency and is not timed; `generate` is, and gives the number
    of tokens that each request got."""

    weight_bytes: int | None

    def prepare(self, point: Point) -> None: ...
    def generate(self, point: Point) -> list[int]: ...
    def close(self) -> None: ...


def peak_rss_mib() -> float:
    """Sum of the peak resident memory of this process and its living descendants."""
    total = 0
    for folder in own_processes():
        with contextlib.suppress(OSError):  # it has just ended
            fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
            total += int(fields.get("VmHWM", "0 kB").split()[0])
    return total / 1024


def others_seconds() -> float:
    """CPU seconds since the machine started that went to anybody but this process and its living descendants."""
    fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    ticks = sum(fields) - fields[3] - fields[4]  # all but idle and waiting for I/O
    for folder in own_processes():
        with contextlib.suppress(OSError):
            ticks -= sum(int(x) for x in stat_of(folder)[11:13])
    return ticks / os.sysconf("SC_CLK_TCK")


def stat_of(folder: Path) -> list[str]:
    """The fields of /proc/PID/stat from the third on: state, parent, ..."""
    return (folder / "stat").read_text().rpartition(")")[2].split()


def own_processes() -> list[Path]:
    """/proc/PID of this process and its living descendants."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int(stat_of(folder)[1])
    found = []
    for pid in parents:
        above = pid
        while above and above != os.getpid():
            above = parents.get(above, 0)
        if above:
            found.append(Path("/proc") / str(pid))
    return found


def run(load: Any) -> None:
    """Serve the job on the standard input with the System that `load(job)` gives; exit code 1 where a point failed."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = json.load(sys.stdin)
    start = time.perf_counter()
    system: System = load(job)
    loaded = time.perf_counter() - start
    failed = False
    for point in (Point(**fields) for fields in job["points"]):
        line: dict[str, Any] = {"point": point.name}
        try:
            start = time.perf_counter()
            system.prepare(point)
            line["load_s"] = loaded + time.perf_counter() - start
            start = time.perf_counter()
            system.generate(point.warm())
            line["warm_s"] = time.perf_counter() - start
            others, start = others_seconds(), time.perf_counter()
            lens = system.generate(point)
            wall = time.perf_counter() - start
            others = others_seconds() - others
            if lens != point.output_lens:
                raise RuntimeError(f"asked for {sum(point.output_lens)} tokens, got {sum(lens)}: {lens[:8]}...")
            line |= {"wall_s": wall, "tokens": sum(lens), "tokens_per_s": sum(lens) / wall, "rss_mib": peak_rss_mib()}
            line["others_cores"] = max(others, 0.0) / wall
            line["weight_bytes"] = system.weight_bytes
        except Exception as error:
            traceback.print_exc()
            line["error"] = f"{type(error).__name__}: {error}"[:500]
            failed = True
        print(json.dumps(line), file=out, flush=True)
    system.close()
    out.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(failed))  # engines with threads of their own do not always let an interpreter end


def threads(job: dict[str, Any]) -> int:
    return int(job["threads"])
