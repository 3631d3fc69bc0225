"""Drawing what waits for answers: sessions are drawn whole, a closed loop in order, and one seed is one workload."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lengthwise
from lengthwise.experiments.arrivals.closed_loop import ClosedLoop
from lengthwise.experiments.arrivals.pause import Pause
from lengthwise.experiments.arrivals.poisson import Poisson
from lengthwise.experiments.arrivals.sessions import Sessions
from lengthwise.experiments.dataset import Dataset
from lengthwise.experiments.draw import draw, stream


def data(**more: Any) -> Dataset:
    rng = np.random.default_rng(0)
    session = rng.permutation(np.repeat(np.arange(50), 6))
    turn = np.empty(300, np.int64)
    for one in range(50):
        turn[session == one] = rng.permutation(6)
    columns = {"session": session, "turn": turn, **more}
    return Dataset("d", rng.integers(1, 99, 300), rng.integers(1, 99, 300), "t", "s", "l", columns=columns)


def test_sessions_are_drawn_whole_and_their_turns_wait_in_order() -> None:
    load = draw(data(), Sessions(think=Pause(3.0)), 280, 4.0, 1)
    session, turn = load.column("session"), load.column("turn")
    assert load.after is not None and session is not None and turn is not None and load.gap is not None
    roots = load.after < 0
    assert roots.sum() == 47 and sorted(np.bincount(session)[np.bincount(session) > 0].tolist()) == [4] + [6] * 46
    waits = np.flatnonzero(~roots)
    assert (session[waits] == session[load.after[waits]]).all()
    assert (turn[waits] == turn[load.after[waits]] + 1).all() and (turn[roots] == 0).all()
    assert (load.arrival[waits] >= load.arrival[load.after[waits]] + load.gap[waits] - 1e-9).all()
    # requests come at about the rate asked for: sessions start at rate / turns per session
    assert abs(roots.sum() / load.arrival[roots].max() / (4.0 * 47 / 280) - 1) < 0.5
    again = draw(data(), Sessions(think=Pause(3.0)), 280, 4.0, 1)
    assert again.rows.tobytes() == load.rows.tobytes() and again.arrival.tobytes() == load.arrival.tobytes()


def test_the_datas_own_gaps_go_before_drawn_ones() -> None:
    own = np.where(np.arange(300) % 2 == 0, 7.0, np.nan)
    load = draw(data(gap=own), Sessions(think=Pause(1.0, cv=0.0)), 300, 4.0, 1)
    assert load.gap is not None and load.after is not None
    waits = load.after >= 0
    assert set(load.gap[waits].tolist()) == {1.0, 7.0} and not load.gap[~waits].any()
    assert (load.gap[waits] == np.where(load.rows[waits] % 2 == 0, 7.0, 1.0)).all()


def test_a_higher_rate_brings_sessions_closer_and_leaves_pauses() -> None:
    slow, fast = (draw(data(), Sessions(), 300, rate, 1) for rate in (1.0, 10.0))
    assert slow.after is not None and fast.after is not None and slow.gap is not None and fast.gap is not None
    start = [w.arrival[w.after < 0] for w in (slow, fast)]  # type: ignore[operator]
    assert np.allclose(start[0], 10 * start[1])
    assert np.array_equal(np.sort(slow.gap), np.sort(fast.gap))


def test_a_closed_loop_has_its_own_rate() -> None:
    load = draw(data(), ClosedLoop(8, Pause(2.0)), 100, None, 1)
    assert load.users == 8 and load.notes["arrivals"]["rate"] is None and not load.is_open
    assert "n" not in load.notes["arrivals"]  # what is not known is not said
    few = draw(data(), ClosedLoop(8), 5, None, 1)
    assert len(few) == 5 and not few.arrival.any()
    with pytest.raises(ValueError, match="load=null rate=null"):
        draw(data(), ClosedLoop(8), 100, 2.0, 1)
    with pytest.raises(ValueError, match="load=null rate=null"):
        lengthwise.simulate(arrivals="closed_loop", load=0.8, num_requests=10)


def test_what_cannot_be_is_refused() -> None:
    plain = Dataset("p", np.array([1, 2]), np.array([1, 2]), "t", "s", "l")
    with pytest.raises(ValueError, match="no column `session`"):
        draw(plain, Sessions(), 2, 1.0, 0)
    with pytest.raises(ValueError, match="300 rows, 301 requests are asked for: a sessions cannot repeat"):
        draw(data(), Sessions(), 301, 1.0, 0, resample=True)
    with pytest.raises(ValueError, match="users 0"):
        ClosedLoop(0)
    with pytest.raises(ValueError, match="pause mean -1"):
        Pause(-1)


def test_pauses() -> None:
    gaps = Pause(4.0, cv=0.5).times(20_000, stream(0, "x"))
    assert abs(gaps.mean() - 4.0) < 0.06 and abs(gaps.std() / gaps.mean() - 0.5) < 0.02
    assert set(Pause(3.0, cv=0.0).times(3, stream(0, "x")).tolist()) == {3.0}


def test_little_closed_loop_against_the_interactive_law() -> None:
    """Throughput x (response + think) = users, to the share of the ends (Denning & Buzen, 1978, the response time law)."""
    run = lengthwise.simulate(
        arrivals={"_target_": "lengthwise.experiments.arrivals.closed_loop.ClosedLoop", "users": 20,
                  "think": {"_target_": "lengthwise.experiments.arrivals.pause.Pause", "mean": 3.0}},
        num_requests=4000,
    )  # fmt: skip
    requests = run.requests
    middle = (requests["arrival"] > 50) & (requests["arrival"] < requests["arrival"].max() - 50)
    throughput = middle.sum() / (requests["arrival"].max() - 100)
    response = (requests["finish"] - requests["arrival"])[middle].mean()
    assert abs(throughput * (response + 3.0) / 20 - 1) < 0.03


def test_sessions_in_steady_state_count_from_the_warm_up_to_the_last_start() -> None:
    run = lengthwise.simulate(
        workload="conversations", arrivals="sessions", load=0.5, num_requests=1500,
        window={"warm_up": 0.1, "cool_down": 0.0, "unit": "share"},
    )  # fmt: skip
    window = run.summary["window"]
    inside = run.requests["arrival"].between(window["begin"], window["end"], inclusive="left").sum()
    assert 0 < window["begin"] < window["end"] and run.metrics["num_counted"] == inside < 1500
    assert run.metrics["num_finished"] == inside


def test_the_poisson_process_starts_sessions() -> None:
    load = draw(data(), Sessions(starts=Poisson(normalised=True)), 300, 3.0, 0)
    assert load.notes["sessions"]["num_sessions"] == 50 and load.arrival[load.after < 0].max() <= 100.0  # type: ignore[operator]


def test_a_window_that_sees_less_than_the_rate_asked_for_says_so() -> None:
    short, long = (
        lengthwise.simulate(workload="agents", arrivals=Sessions(think=Pause(mean)), rate=2.0, num_requests=300,
                            window={"warm_up": 0.1, "unit": "share"})
        for mean in (60.0, 0.01)
    )  # fmt: skip
    marks = [[mark for mark in run.summary["provenance"]["marks"] if "sessions last long" in mark] for run in (short, long)]
    assert len(marks[0]) == 1 and "not at the 2/s asked for" in marks[0][0] and not marks[1]
