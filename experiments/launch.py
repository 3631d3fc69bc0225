"""Launch: hand jobs to the launcher Hydra was told to use, some at a time, so that a sweep of any length fits in memory.

What a job comes to is in the manifest and in its folder, so nothing that a launcher returns is kept.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.core.utils import JobStatus
from hydra.plugins.launcher import Launcher

from .job import is_complete
from .manifest import Row, append, read_manifest
from .paths import MANIFEST

AT_ONCE = 256  # a launcher keeps the config of each job it was given


def plan(study: Path, rows: Sequence[Row], *, anew: bool = True) -> list[int]:
    """Begin the manifest, or go on with it, those with a result as ended. Returns which rows are to be computed."""
    if anew:
        (study / MANIFEST).write_text("")
    todo = [i for i, row in enumerate(rows) if not is_complete(study / row["folder"], row["hash"])]
    missing = set(todo)
    for i, row in enumerate(rows):
        append(study, row if i in missing else {**row, "status": "ok", "cached": True, "seconds": 0.0})
    return todo


def launch(launcher: Launcher, jobs: Sequence[list[str]], study: Path, at_once: int | None = None) -> None:
    """Run the jobs, `at_once` at a time. A launcher that breaks (a worker killed for memory) ends the sweep, not the study."""
    size = at_once or _at_once(launcher)
    try:
        for start in range(0, len(jobs), size):
            part = jobs[start : start + size]
            for job, result in zip(part, launcher.launch(part, initial_job_idx=start), strict=True):
                if result.status is JobStatus.FAILED:  # outside of what a job catches itself
                    say(f"{' '.join(job)}: {result._return_value!r}")
    except Exception as error:  # launchers are plug-ins: whatever they raise, the cells that ended are kept and shown
        say(f"the launcher stopped: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")
    except BaseException:
        rows = read_manifest(study)
        left = sum(row["status"] != "ok" for row in rows)
        say(f"stopped: {left} of {len(rows)} cells have no result in {study}; the same command again goes on from here")
        raise


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _at_once(launcher: Launcher) -> int:
    """submitit_local starts a process for each job it is given, all at the same time."""
    return os.cpu_count() or 1 if type(launcher).__name__ == "LocalLauncher" else AT_ONCE
