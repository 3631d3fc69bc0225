"""Population: shares come out, sessions keep one client, and the draw knows nothing of lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import lengthwise
from lengthwise.experiments.arrivals.poisson import Poisson
from lengthwise.experiments.arrivals.sessions import Sessions
from lengthwise.experiments.contract import request_fields
from lengthwise.experiments.dataset import Dataset
from lengthwise.experiments.draw import draw
from lengthwise.experiments.population import Population

MIXED = Population(
    clients={"a": 0.7, "b": 0.3},
    classes={"chat": {"share": 0.8, "ttft": 2.0, "tpot": 0.1}, "batch": {"share": 0.2, "e2e": 60.0, "timeout": 90.0}},
    priorities={0: 0.25, 1: 0.75},
)


def data(n: int = 4000, **more: Any) -> Dataset:
    rng = np.random.default_rng(0)
    return Dataset("d", rng.integers(1, 99, n), rng.integers(1, 99, n), "t", "s", "l", **more)


def test_shares_come_out_and_a_class_brings_its_objectives() -> None:
    requests = request_fields(draw(data(), Poisson(), 4000, 10.0, 1, population=MIXED))
    assert abs(sum(r["client"] == "a" for r in requests) / 4000 - 0.7) < 4 * np.sqrt(0.21 / 4000)
    assert abs(sum(r["priority"] == 0.0 for r in requests) / 4000 - 0.25) < 4 * np.sqrt(0.1875 / 4000)
    batch = [r for r in requests if r["slo"].e2e is not None]
    assert abs(len(batch) / 4000 - 0.2) < 4 * np.sqrt(0.16 / 4000)
    assert all(r["slo"].ttft is None and r["timeout"] == 90.0 for r in batch)
    assert all(r["slo"].ttft == 2.0 and r["slo"].tpot == 0.1 and r["timeout"] is None for r in requests if r["slo"].e2e is None)


def test_one_seed_one_population_whatever_the_lengths_and_the_load() -> None:
    a = draw(data(), Poisson(), 500, 10.0, 1, population=MIXED)
    b = draw(replace(data(), output_len=data().output_len[::-1].copy()), Poisson(), 500, 99.0, 1, population=MIXED)
    other = draw(data(), Poisson(), 500, 10.0, 2, population=MIXED)
    for name in a.columns:
        assert np.array_equal(a.columns[name].astype(str), b.columns[name].astype(str))
    assert not np.array_equal(a.columns["client"], other.columns["client"])
    drawn = a.notes["population"]["drawn"]["client"]
    assert drawn == {"a": int((a.columns["client"] == "a").sum()), "b": int((a.columns["client"] == "b").sum())}


def test_further_requests_and_further_parts_change_nothing_of_the_first() -> None:
    """Cells below load 1 draw more requests than those above; a pair of them has the same population all the same."""
    some = replace(MIXED, classes={"chat": {"share": 1.0}}, timeouts=[{"share": 0.5, "seconds": 3.0}])
    for who in (MIXED, some):
        short, long = (draw(data(), Poisson(), 300, 10.0, 1, extra=extra, population=who) for extra in (0, 300))
        for name, column in short.columns.items():
            assert column.astype(str).tolist() == long.columns[name][:300].astype(str).tolist(), name
    without = draw(data(), Poisson(), 300, 10.0, 1, population=Population(priorities=MIXED.priorities))
    assert without.columns["priority"].tolist() == short.columns["priority"].tolist()


def test_a_turn_has_one_timeout_at_every_rate() -> None:
    turns = {"session": np.repeat(np.arange(100), 5), "turn": np.tile(np.arange(5), 100)}
    who = Population(timeouts=[{"share": 0.5, "seconds": 3.0}])
    slow, fast = (draw(data(500, columns=turns), Sessions(), 500, rate, 0, population=who) for rate in (1.0, 50.0))
    assert slow.rows.tolist() != fast.rows.tolist()  # they come in another order
    timeouts = [dict(zip(w.rows.tolist(), w.columns["timeout"].tolist(), strict=True)) for w in (slow, fast)]
    assert timeouts[0] == timeouts[1] and 0.4 < np.isfinite(slow.columns["timeout"]).mean() < 0.6


def test_all_turns_of_a_session_are_one_clients() -> None:
    session = np.repeat(np.arange(200), 5)
    turns = {"session": session, "turn": np.tile(np.arange(5), 200)}
    load = draw(data(1000, columns=turns), Sessions(), 1000, 5.0, 0, population=MIXED)
    names, client = load.column("session"), load.columns["client"]
    assert names is not None
    for one in np.unique(names):
        assert len(set(client[names == one])) == 1
    assert 0.55 < (client == "a").mean() < 0.85


def test_columns_of_the_population_go_before_those_of_the_data() -> None:
    dataset = data(50, columns={"client": np.array(["x"] * 50, dtype=object)})
    kept = request_fields(draw(dataset, Poisson(), 50, 1.0, 0, population=Population(priorities={3: 1.0})))
    assert {r["client"] for r in kept} == {"x"} and {r["priority"] for r in kept} == {3.0}
    drawn = request_fields(draw(dataset, Poisson(), 50, 1.0, 0, population=Population(clients={"y": 1.0})))
    assert {r["client"] for r in drawn} == {"y"}


def test_timeouts_and_classes_reach_the_result() -> None:
    run = lengthwise.simulate(workload="synthetic", load=1.5, num_requests=1000, limits="seqs64", population="impatient")
    assert run.metrics["num_timeout"] > 0
    assert run.metrics["num_timeout"] + run.metrics["num_finished"] == 1000
    run = lengthwise.simulate(workload="synthetic", load=0.5, num_requests=200, population="mixed")
    assert set(run.requests["class"]) == {"chat", "code"} and set(run.requests["client"]) == {"a", "b", "c", "d"}
    assert set(run.requests["priority"]) == {0.0, 1.0, 2.0}


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"clients": {"a": 0.5, "b": 0.4}}, r"clients: shares \[0.5, 0.4\] add up to 0.9, not 1"),
        ({"priorities": {0: 1.5, 1: -0.5}}, "must be from 0 to 1"),
        ({"timeouts": [{"share": 0.7, "seconds": 1.0}, {"share": 0.7, "seconds": 2.0}]}, "more than 1"),
        ({"timeouts": [{"share": 0.7, "seconds": 0.0}]}, "timeout 0.0 s"),
        ({"classes": {"chat": {"share": 1.0, "tft": 1.0}}}, r"class chat has \['tft'\]"),
        ({"classes": {"chat": {"share": 1.0, "ttft": -1.0}}}, r"class chat: ttft -1.0 s must be a finite number above 0"),
        ({"classes": {"chat": {"share": 1.0, "timeout": 0.0}}}, r"class chat: timeout 0.0 s"),
        ({"timeouts": [{"share": 0.7, "second": 1.0}]}, r"a timeout has \['second', 'share'\], it needs share and seconds"),
        (
            {"classes": {"a": {"share": 1.0, "timeout": 1.0}}, "timeouts": [{"share": 0.1, "seconds": 1.0}]},
            "give one of them",
        ),
    ],
)
def test_bad_shares_are_refused(bad: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Population(**bad)
