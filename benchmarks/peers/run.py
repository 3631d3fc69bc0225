"""Run the children of the throughput benchmark in order, say how long it will take, and keep what they measured."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .job import Point
from .limit import Shape, least_seconds
from .results import MACHINE, Log, behind, limit_of

HERE = Path(__file__).resolve().parent
SCRIPTS = {"transformers": "hf.py", "vllm": "vllm_cpu.py", "llamacpp": "llamacpp.py", "ours": "ours.py", MACHINE: "machine.py"}
BOOT = {
    "vllm_compiled": 150.0,
    "vllm_eager": 80.0,
    "ours_compiled": 40.0,
    "ours_int8_compiled": 40.0,
}  # s, a guess until measured
NOMINAL = (27e9, 420e9)  # bytes/s and FLOP/s, likewise
SHARE = 0.35  # of the limit, likewise
QUIET = 0.05  # cores that others may use without a word
Job = tuple[str, str, int]  # system, model, repetition


@dataclasses.dataclass
class Run:
    """args: threads, peers, models_folder, give_up, timeout. pythons: by peer. folders, points, shapes: by model."""

    args: argparse.Namespace
    pythons: dict[str, str]
    folders: dict[str, Path]
    points: dict[str, list[Point]]
    shapes: dict[str, Shape]
    log: Log

    def wanted(self, job: Job) -> list[Point]:
        """The points of a job that are still to be measured."""
        system, model, repetition = job
        return [
            point
            for point in self.points[model]
            if (system, model, point.name, repetition) not in self.log.lines
            and not (repetition and behind(self.log, system, model, point.name, self.args.give_up))
        ]

    def seconds(self, job: Job) -> float:
        """About how long a job will take: as in an earlier repetition, else a guess."""
        system, model, _ = job
        if system == MACHINE:
            return 0.0 if self.measured(job) else 10.0
        total = load = 0.0
        for point in self.wanted(job):
            known = [self.log.values(system, model, point.name, name).values() for name in ("wall_s", "warm_s", "load_s")]
            if all(known):
                total += max(known[0]) + max(known[1])
                load = max(load, *known[2])
            else:
                shape = self.shapes[model]
                total += least_seconds(point, shape, 2 * shape.num_weights, *NOMINAL) / SHARE
                load = max(load, BOOT.get(system, 10.0))
        return total + load

    def left(self, jobs: Sequence[Job]) -> float:
        return sum(self.seconds(job) for job in jobs)

    def measured(self, job: Job) -> bool:
        return (MACHINE, "", "", job[2]) in self.log.lines

    def all(self, jobs: Sequence[Job]) -> list[str]:
        """Every job, and a line for each that failed."""
        failed: list[str] = []
        start = time.perf_counter()
        for i, job in enumerate(jobs):
            if job[0] == MACHINE:
                if not self.measured(job):
                    failed += self.measure_machine(job[2])
                continue
            points = self.wanted(job)
            if not points:
                continue
            passed, left = time.perf_counter() - start, self.left(jobs[i:])
            print(f"[{passed / 60:.0f} min, about {left / 60:.0f} left] {job[0]} {job[1]}, repetition {job[2] + 1}", flush=True)
            failed += self.one(job, points)
        return failed

    def measure_machine(self, repetition: int) -> list[str]:
        lines, error = self.child(MACHINE, {"threads": self.args.threads}, sys.executable)
        if error or not lines:
            return [f"machine: {error or 'said nothing'}"]
        self.log.add({"system": MACHINE, "model": "", "point": "", "repetition": repetition, **lines[0]})
        print(f"machine: {lines[0]['bandwidth'] / 1e9:.1f} GB/s read, {lines[0]['flops'] / 1e9:.0f} GFLOP/s", flush=True)
        return []

    def one(self, job: Job, points: list[Point]) -> list[str]:
        """One child; its lines go to the log as they come. Gives a line for each failure."""
        system, model, repetition = job
        peer = system.split("_")[0]
        asked: dict[str, Any] = {
            "system": system,
            "model": str(self.folders[model]),
            "dtype": "bf16",
            "threads": self.args.threads,
            "points": [dataclasses.asdict(point) for point in points],
        }
        if peer == "llamacpp":
            try:
                asked["gguf"] = str(self.gguf(model, system.removeprefix("llamacpp_")))
            except subprocess.CalledProcessError as error:
                return [f"{system} {model}: {error}"]
        failed = []

        def keep(line: dict[str, Any]) -> None:
            if "error" in line:
                failed.append(f"{system} {model} {line['point']}: {line['error']}")
                return
            self.log.add({"system": system, "model": model, "repetition": repetition, **line})
            shape = self.shapes[model]
            limit = limit_of(self.log, system, model, next(p for p in points if p.name == line["point"]), shape)
            share = f", {line['tokens_per_s'] / limit:.0%} of the limit" if limit else ""
            busy = f"; others used {line['others_cores']:.1f} cores" if line["others_cores"] > QUIET else ""
            print(f"    {line['point']:8}{line['tokens_per_s']:8.1f} tokens/s{share}{busy}", flush=True)

        _, error = self.child(system, asked, self.pythons[peer], keep)
        if error and not failed:
            failed.append(f"{system} {model}: {error}")
        return failed

    def child(self, system: str, asked: dict[str, Any], python: str, keep: Any = None) -> tuple[list[dict[str, Any]], str]:
        """Run a script on a job: its lines, and what went wrong, or ''. Ends the process group after `timeout`."""
        said = self.args.log.parent / f"{self.args.log.stem}.{system}.err"
        env = {**os.environ, "OMP_NUM_THREADS": str(self.args.threads), "TOKENIZERS_PARALLELISM": "false"}
        env.setdefault("VLLM_CACHE_ROOT", str(self.args.peers / "vllm-cache"))
        command = [python, str(HERE / SCRIPTS[system.split("_")[0]])]
        lines = []
        with said.open("w") as err:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": err}
            with subprocess.Popen(command, text=True, env=env, start_new_session=True, **pipes) as process:  # type: ignore
                assert process.stdin is not None and process.stdout is not None
                clock = threading.Timer(self.args.timeout, end_group, [process.pid])
                clock.start()
                try:
                    process.stdin.write(json.dumps(asked))
                    process.stdin.close()
                    for text in process.stdout:
                        lines.append(json.loads(text))
                        if keep is not None:
                            keep(lines[-1])
                    code = process.wait()
                finally:
                    clock.cancel()
                    end_group(process.pid)
        return lines, "" if code == 0 else f"exit code {code}, see {said}"

    def gguf(self, model: str, kind: str) -> Path:
        """The model as a GGUF file, written on first use."""
        path = self.args.models_folder / f"{self.folders[model].name}-{kind}.gguf"
        if not path.exists():
            part = path.with_suffix(".part")
            command = [self.pythons["llamacpp"], str(HERE / "quantise.py"), str(self.folders[model]), kind, str(part)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            part.rename(path)
        return path


def end_group(pid: int) -> None:
    """End a child and what it started, if anything of it is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
