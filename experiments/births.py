"""Births: the requests of a workload, made one by one when they arrive and never all at once; no true length is ever read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lengthwise.predictors.predictions import Predictions
from lengthwise.sched import SLO, LengthDistribution, Request

from .dataset import Workload

CHUNK = 4096  # requests whose columns are made into Python numbers at a time: fast, and nothing for the others yet

# Columns that are request fields, and what they are made of. Other columns never reach a request.
FIELDS = {
    "client": str, "session": str, "program": str, "turn": int, "priority": float, "weight": float, "timeout": float,
}  # fmt: skip
SLO_FIELDS = ("ttft", "tpot", "e2e")  # columns slo_ttft, slo_tpot, slo_e2e in s; NaN is no objective


def births(
    workload: Workload, predictions: Predictions | None, late: NDArray[np.bool_] | None
) -> Iterator[tuple[Request, LengthDistribution | None]]:
    """Request after request, each with the prediction that is not there yet (None when it travels with the request).

    late (N,): whose prediction comes after it; None when nobody's does.
    """
    for start in range(0, len(workload), CHUNK):
        yield from _piece(workload, predictions, late, start, min(start + CHUNK, len(workload)))


class Nursery:
    """The same requests in any order, each once: `born(i, arrival)` makes request i, arriving at `arrival` s."""

    def __init__(self, workload: Workload, predictions: Predictions | None) -> None:
        self._workload, self._predictions = workload, predictions
        self._made: dict[int, Request] = {}
        self._pieces: set[int] = set()

    def born(self, i: int, arrival: float) -> Request:
        if i not in self._made:  # its neighbours are made with it, for the columns are read by the piece
            start = i - i % CHUNK
            if start in self._pieces:
                raise ValueError(f"request {i} has arrived before")
            self._pieces.add(start)
            end = min(start + CHUNK, len(self._workload))
            for request, _ in _piece(self._workload, self._predictions, None, start, end):
                self._made[request.rid] = request
        request = self._made.pop(i)
        request.arrival = arrival
        return request


def _piece(
    workload: Workload, predictions: Predictions | None, late: NDArray[np.bool_] | None, start: int, end: int
) -> Iterator[tuple[Request, LengthDistribution | None]]:
    dataset = workload.dataset
    rows = workload.rows[start:end]
    arrival = workload.arrival[start:end].tolist()
    prompt_len = dataset.prompt_len[rows].tolist()
    asked = _values(workload, "max_new_tokens", start, end)
    limits: Iterable[int] = repeat(dataset.max_new_tokens, len(rows)) if asked is None else map(int, asked)
    made = _distributions(predictions, start, len(rows))
    given = zip(range(start, end), arrival, prompt_len, limits, made, strict=True)
    more = _more(workload, start, end)
    if more is None and late is None:
        for rid, time, length, limit, prediction in given:
            yield Request(rid, time, length, limit, prediction=prediction), None
        return
    waits = repeat(False, len(rows)) if late is None else late[start:end].tolist()
    others: Iterable[dict[str, Any]] = repeat({}, len(rows)) if more is None else more
    for (rid, time, length, limit, prediction), wait, other in zip(given, waits, others, strict=True):
        at_once = None if wait else prediction
        yield Request(rid, time, length, limit, prediction=at_once, **other), prediction if wait else None


def _distributions(predictions: Predictions | None, start: int, n: int) -> Iterable[LengthDistribution] | Iterable[None]:
    if predictions is None:
        return repeat(None, n)
    score = predictions.score[start : start + n].tolist()
    if predictions.point is not None:
        return map(LengthDistribution, score, predictions.point[start : start + n].tolist())
    return map(predictions.row, range(start, start + n))


def _values(workload: Workload, name: str, start: int, end: int) -> list[Any] | None:
    """A request field of the requests [start, end), as Python values; None when there is no such column."""
    if name in workload.columns:
        return list(np.asarray(workload.columns[name])[start:end].tolist())
    by_row = workload.dataset.columns.get(name)
    return None if by_row is None else list(np.asarray(by_row)[workload.rows[start:end]].tolist())


def _more(workload: Workload, start: int, end: int) -> Iterator[dict[str, Any]] | None:
    """Keyword arguments of the requests [start, end): client and the like, objectives, prompt text and ids, prefix hashes.
    Missing values are left out. None when there is nothing of the kind."""
    dataset, rows = workload.dataset, workload.rows[start:end].tolist()
    columns: dict[str, list[Any]] = {}
    for name, make in FIELDS.items():
        values = _values(workload, name, start, end)
        if values is not None:
            if not all(type(value) is make for value in values):
                values = [None if _missing(value) else make(value) for value in values]
            columns[name] = values
    objectives = [values for name in SLO_FIELDS if (values := _values(workload, f"slo_{name}", start, end)) is not None]
    if objectives:
        names = [name for name in SLO_FIELDS if workload.column(f"slo_{name}") is not None]
        kept: dict[tuple[float, ...], SLO | None] = {}
        columns["slo"] = [_slo(names, bounds, kept) for bounds in zip(*objectives, strict=True)]
    if dataset.prompts is not None:
        columns["prompt"] = [dataset.prompts[row] for row in rows]
    if dataset.prompt_ids is not None:
        columns["prompt_ids"] = [dataset.prompt_ids[row] for row in rows]
    if dataset.answers_before is not None:
        columns["answers_before"] = [dataset.answers_before[row] for row in rows]
    if dataset.block_hashes is not None:
        columns["block_hashes"] = [dataset.block_hashes[row] for row in rows]
    if not columns:
        return None
    keys = tuple(columns)
    return (
        {key: value for key, value in zip(keys, values, strict=True) if not _missing(value)}
        for values in zip(*columns.values(), strict=True)
    )


def _slo(names: list[str], bounds: tuple[float, ...], kept: dict[tuple[float, ...], SLO | None]) -> SLO | None:
    """One SLO object for all requests with the same bounds."""
    if bounds not in kept:
        some = {name: float(bound) for name, bound in zip(names, bounds, strict=True) if not _missing(bound)}
        kept[bounds] = SLO(**some) if some else None
    return kept[bounds]


def _missing(value: Any) -> bool:
    return value is None or value != value
