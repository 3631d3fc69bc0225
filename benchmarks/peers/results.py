"""What is kept of each measurement, and the figures that follow from them.

One JSON line for each (system, model, point, repetition), so that a run that was cut off goes on where it was.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .job import Point
from .limit import Shape, least_rate

TRANSFORMERS = ("transformers_static", "transformers_batch")
VLLM = ("vllm_compiled", "vllm_eager")
OURS = ("ours_eager", "ours_compiled")
INT8 = ("ours_int8", "ours_int8_compiled")
SYSTEMS = (*TRANSFORMERS, *VLLM, "llamacpp_q8_0", "llamacpp_q4_k_m", *OURS, *INT8)
PEERS = (TRANSFORMERS, VLLM)
MACHINE = "machine"
Samples = dict[str, list[float]]
Key = tuple[str, str, str, int]  # system, model, point, repetition


class Log:
    """The lines of `path`, read at the start, and appended to. digests: (model, point) -> what a line must have been measured
    with to count."""

    def __init__(self, path: Path, digests: dict[tuple[str, str], str]) -> None:
        self.path, self.digests = path, digests
        self.lines: dict[Key, dict[str, Any]] = {}
        written = path.read_text() if path.exists() else ""
        if written and not written.endswith("\n"):  # cut off while it was written: the next line is not to join it
            path.write_text(written + "\n")
        for text in written.splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if line["digest"] == digests.get((line["model"], line["point"])):
                self.lines[key_of(line)] = line

    def add(self, line: dict[str, Any]) -> None:
        line = {**line, "digest": self.digests[line["model"], line["point"]]}
        self.lines[key_of(line)] = line
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def values(self, system: str, model: str, point: str, name: str = "tokens_per_s") -> dict[int, float]:
        """By repetition."""
        found = {}
        for (s, m, p, repetition), line in sorted(self.lines.items()):
            if (s, m, p) == (system, model, point) and line.get(name) is not None:
                found[repetition] = float(line[name])
        return found

    def median(self, *key: str) -> float | None:
        values = self.values(*key)
        return statistics.median(values.values()) if values else None

    def machine(self) -> tuple[float, float] | None:
        """Medians of bytes/s read and FLOP/s; None when not measured."""
        found = [self.values(MACHINE, "", "", name).values() for name in ("bandwidth", "flops")]
        return (statistics.median(found[0]), statistics.median(found[1])) if all(found) else None


def key_of(line: dict[str, Any]) -> Key:
    return line["system"], line["model"], line["point"], line["repetition"]


def digests(points: dict[str, list[Point]], threads: int) -> dict[tuple[str, str], str]:
    """By (model, point): a digest of the requests and of the number of threads."""
    made = {(model, p.name): [dataclasses.asdict(p), threads] for model, listed in points.items() for p in listed}
    made["", ""] = [threads]
    return {key: hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:12] for key, asked in made.items()}


def behind(log: Log, system: str, model: str, point: str, share: float) -> bool:
    """Whether another variant of the same library did so much better in the first repetition that this one is not repeated: it
    cannot be the faster one any more."""
    for group in (*PEERS, INT8):
        if system in group:
            first = {s: log.values(s, model, point).get(0) for s in group}
            own, others = first.pop(system), [x for x in first.values() if x is not None]
            return own is not None and bool(others) and own < share * max(others)
    return False


def fastest(log: Log, systems: Sequence[str], model: str, point: str) -> dict[int, float]:
    """Tokens/s by repetition of the variant that is the fastest by median; empty when none ran."""
    medians = {s: m for s in systems if (m := log.median(s, model, point)) is not None}
    return log.values(max(medians, key=lambda s: medians[s]), model, point) if medians else {}


def ratios(ours: dict[int, float], theirs: dict[int, float]) -> list[float]:
    """Within each repetition that both ran in."""
    return [ours[r] / theirs[r] for r in sorted(ours.keys() & theirs.keys())]


def most(values: Iterable[dict[int, float]]) -> Iterable[float]:
    """The greatest of each repetition."""
    greatest: dict[int, float] = {}
    for by_repetition in values:
        for repetition, value in by_repetition.items():
            greatest[repetition] = max(greatest.get(repetition, value), value)
    return greatest.values()


def limit_of(log: Log, system: str, model: str, point: Point, shape: Shape) -> float | None:
    """Output tokens/s at the limit for the weights that `system` reads; None when the machine was not measured."""
    measured = log.machine()
    if measured is None:
        return None
    weights = 2.0 * shape.num_weights
    if system in INT8:
        weights /= 2
    elif system.startswith("llamacpp"):
        weights = float(max(line["weight_bytes"] for key, line in log.lines.items() if key[:2] == (system, model)))
    return least_rate(point, shape, weights, *measured)


def figures(log: Log, points: dict[str, Iterable[Point]], shapes: dict[str, Shape]) -> Samples:
    """Name -> values, one a repetition. points, shapes: by model. A ratio is there only when all sides ran: for `ratio_` that
    is ours, transformers and vLLM, each by its variant that is the fastest at that point."""
    made: Samples = {}

    def put(name: str, values: Iterable[float]) -> None:
        if values := list(values):
            made[name] = values

    for name in ("bandwidth", "flops"):
        put(f"machine_{name}_g_per_s", (x / 1e9 for x in log.values(MACHINE, "", "", name).values()))
    for model, shape in shapes.items():
        for point in points[model]:
            at = f"{model}_{point.name}"
            for system in SYSTEMS:
                put(f"{system}_{at}_tokens_per_s", log.values(system, model, point.name).values())
            ours = fastest(log, OURS, model, point.name)
            peers = [fastest(log, group, model, point.name) for group in PEERS]
            if all(peers):
                best = max(peers, key=lambda values: statistics.median(values.values()))
                put(f"ratio_{at}", ratios(ours, best))
            int8 = fastest(log, INT8, model, point.name)
            put(f"llamacpp_ratio_{at}", ratios(int8, log.values("llamacpp_q8_0", model, point.name)))
            limit = limit_of(log, "ours_eager", model, point, shape)
            if limit is not None:
                put(f"limit_{at}_tokens_per_s", [limit])
                put(f"limit_share_{at}", (x / limit for x in ours.values()))
        for system in SYSTEMS:
            for name in ("load_s", "rss_mib"):  # the most over all points
                put(f"{system}_{model}_{name}", most(log.values(system, model, p.name, name) for p in points[model]))
    return made
