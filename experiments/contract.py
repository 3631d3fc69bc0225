"""The contract of a workload loader, as a check that plug-in authors can call from their own tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from lengthwise.sched import covers_answers

from .arrivals.poisson import Poisson
from .arrivals.replay import Replay
from .dataset import Dataset, Workload
from .draw import draw
from .source import WorkloadSource


def check_workload(load: Callable[[], Dataset], *, num_requests: int = 200) -> Dataset:
    """Assert what every workload must hold; returns the Dataset. `load` is called twice.

    Sorted arrivals from 0, positive whole lengths, same seed same bytes (of loading and of drawing), requests that are the
    same whatever the true lengths. Raises AssertionError saying what does not hold.
    """
    dataset, again = load(), load()
    _columns(dataset)
    _same_bytes(dataset, again)
    n = min(num_requests, len(dataset))
    _drawing(dataset, n)
    _truth_unread(dataset, n)
    return dataset


def _hold(truth: Any, message: str) -> None:
    if not truth:
        raise AssertionError(message)


def _columns(dataset: Dataset) -> None:
    who = f"workload {dataset.name}"
    for name, lens in (("prompt_len", dataset.prompt_len), ("output_len", dataset.output_len)):
        _hold(np.issubdtype(lens.dtype, np.integer), f"{who}: {name} is {lens.dtype}, not whole numbers")
        _hold(lens.min() >= 1, f"{who}: {name} has a length below 1")
    for name in ("unit", "source", "licence"):
        _hold(getattr(dataset, name), f"{who} does not state its {name}")
    _hold(dataset.max_new_tokens >= 1, f"{who}: max_new_tokens {dataset.max_new_tokens} is below 1")
    _hold(all(count >= 0 for count in dataset.dropped.values()), f"{who}: dropped has a negative count")
    if dataset.censored is not None:
        _hold(dataset.censored.dtype == bool, f"{who}: censored is {dataset.censored.dtype}, not bool")
    if dataset.group is not None:
        _hold(np.issubdtype(dataset.group.dtype, np.integer), f"{who}: group is {dataset.group.dtype}, not whole numbers")
    if dataset.arrival is not None:
        _hold(np.all(np.isfinite(dataset.arrival)), f"{who}: an arrival is not finite")
        if not dataset.notes.get("saved"):  # a saved workload has the times of its run's clock
            _hold(dataset.arrival[0] == 0, f"{who}: arrivals start at {dataset.arrival[0]}, not at 0")
        _hold(np.all(np.diff(dataset.arrival) >= 0), f"{who}: arrivals are not sorted")
    _prefixes_and_sessions(dataset)
    asked = dataset.columns.get("max_new_tokens")
    if asked is not None and len(np.unique(dataset.output_len)) > 1:
        _hold(np.any(asked != dataset.output_len), f"{who}: max_new_tokens is the true output length")


def _prefixes_and_sessions(dataset: Dataset) -> None:
    who = f"workload {dataset.name}"
    for row, hashes in enumerate(dataset.block_hashes or ()):
        if not covers_answers(hashes):  # names beyond the prompt would tell how long the answer will be
            most = -(-int(dataset.prompt_len[row]) // dataset.hash_tokens)
            _hold(len(hashes) <= most, f"{who}: row {row} has {len(hashes)} block_hashes, its prompt {most} pieces")
    gap, session, turn = (dataset.columns.get(name) for name in ("gap", "session", "turn"))
    if gap is not None:
        _hold(session is not None, f"{who}: a column gap without sessions")
        _hold(not np.any(np.asarray(gap, dtype=np.float64) < 0), f"{who}: a gap is negative")
    if session is not None and turn is not None:
        places = set(zip(np.asarray(session).tolist(), np.asarray(turn).tolist(), strict=True))
        _hold(len(places) == len(dataset), f"{who}: two rows of one session have the same turn")


def _same_bytes(a: Dataset, b: Dataset) -> None:
    for name in ("prompt_len", "output_len", "censored", "group", "arrival"):
        x, y = getattr(a, name), getattr(b, name)
        same = (x is None) == (y is None) and (x is None or (x.dtype == y.dtype and x.tobytes() == y.tobytes()))
        _hold(same, f"workload {a.name}: {name} differs when loaded twice")
    _hold(list(a.prompts or ()) == list(b.prompts or ()), f"workload {a.name}: prompts differ when loaded twice")
    same = list(a.block_hashes or ()) == list(b.block_hashes or ()) and a.hash_tokens == b.hash_tokens
    _hold(same, f"workload {a.name}: block_hashes differ when loaded twice")
    _hold(dict(a.dropped) == dict(b.dropped), f"workload {a.name}: dropped differs when loaded twice")


def _drawing(dataset: Dataset, n: int) -> None:
    who = f"workload {dataset.name}"
    one, two, other = (draw(dataset, Poisson(), n, 2.0, seed) for seed in (7, 7, 8))
    _hold(one.rows.tobytes() == two.rows.tobytes(), f"{who}: one seed draws different rows")
    _hold(one.arrival.tobytes() == two.arrival.tobytes(), f"{who}: one seed draws different arrivals")
    _hold(one.arrival.tobytes() != other.arrival.tobytes(), f"{who}: two seeds draw the same arrivals")
    _hold(len(np.unique(one.rows)) == n, f"{who}: a row is drawn twice")
    if dataset.arrival is not None:
        replayed = draw(dataset, Replay(), n, None, 7)
        _hold(replayed.rows.tolist() == list(range(n)), f"{who}: a replay is not in file order")


def _truth_unread(dataset: Dataset, n: int) -> None:
    workload = draw(dataset, Poisson(), n, 2.0, 7)
    shuffled = dataset.output_len[np.random.default_rng(0).permutation(len(dataset))]
    other = Workload(replace_truth(dataset, shuffled), workload.rows, workload.arrival, workload.notes)
    same = request_fields(workload) == request_fields(other)
    _hold(same, f"workload {dataset.name}: a request depends on true output lengths")


def replace_truth(dataset: Dataset, output_len: np.ndarray[Any, np.dtype[np.int64]]) -> Dataset:
    """The same dataset with other true lengths."""
    return replace(dataset, output_len=output_len)


def request_fields(workload: Workload) -> list[dict[str, Any]]:
    """Every public field of every request, in order of arrival."""
    source = WorkloadSource(workload, None, None, gate=False)
    requests = [event.request for event in source.pop(float("inf")) if event.kind == 0]
    names = [name for name in type(requests[0]).__slots__ if not name.startswith("_")]
    return [{name: getattr(request, name) for name in names} for request in requests]
