"""Correction while serving: censoring-aware, causal, bounded, the same again; in a wrapper and in a simulated run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from lengthwise.experiments.corrected import LOOK, Corrected, corrected
from lengthwise.experiments.dataset import Dataset
from lengthwise.experiments.simulate import simulate
from lengthwise.predictors.artefact import load
from lengthwise.predictors.conformal import Conformal
from lengthwise.predictors.constant import Constant
from lengthwise.predictors.contract import check_predictor, synthetic_rows
from lengthwise.predictors.correction import MIN_ENDED, Correction
from lengthwise.predictors.latency import LatencyModel
from lengthwise.predictors.online import Online
from lengthwise.predictors.predictions import Predictions
from lengthwise.predictors.predictor import LengthPredictor, State, TrainingRows
from lengthwise.predictors.prompt_length import PromptLength
from lengthwise.predictors.prompts import Prompts
from lengthwise.predictors.ridge import Ridge
from lengthwise.sched import EDGES, INF, Event, EventKind, LengthDistribution, Request

MEAN = 100.0


def survivals(mean: Any) -> np.ndarray:
    return np.exp(-EDGES[None, :] / np.atleast_1d(np.asarray(mean, dtype=float))[:, None])


def mean_of(survival: np.ndarray) -> float:
    return float(Predictions.from_survivals(survival).means().mean())


def drifted(num: int, factor: float, now: float, *, seed: int, aware: bool, **options: Any) -> float:
    """The mean that is predicted at `now` by one that has always said MEAN, when answers are `factor` times as long, a token a
    second, and requests have come at random times since 0. aware: it is also told how far those have come that run."""
    rng = np.random.default_rng(seed)
    start = np.sort(rng.uniform(0.0, now, num))
    lengths = np.ceil(factor * MEAN * rng.standard_exponential(num)).astype(int)
    correction = Correction(MEAN, **{"window": num, "every": 1, "prior": 0.0, **options})
    for i in range(num):
        correction.ask(i, survivals(MEAN)[0])
    for i in np.argsort(start + lengths, kind="stable"):  # as they end
        if start[i] + lengths[i] <= now:
            correction.observe(int(i), int(lengths[i]), False)
        elif aware:
            correction.observe(int(i), int(now - start[i]), True)
    return mean_of(correction.corrected(survivals(MEAN)))


@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0])
def test_answers_that_still_run_take_the_bias_away(factor: float) -> None:
    """Asked for 1.5 true means: short answers have ended. Over 20 runs of 400 requests what is told of those that run makes the
    mean right; without it, it is short."""
    now = 1.5 * factor * MEAN
    aware, naive = (np.mean([drifted(400, factor, now, seed=s, aware=a) for s in range(20)]) for a in (True, False))
    assert aware == pytest.approx(factor * MEAN, rel=0.08)
    assert naive < 0.6 * factor * MEAN
    assert drifted(400, factor, 40 * factor * MEAN, seed=0, aware=False) == pytest.approx(factor * MEAN, rel=0.15)  # all ended


def test_shorter_answers_are_learned_too() -> None:
    found = np.mean([drifted(400, 0.3, 600.0, seed=s, aware=True) for s in range(10)])
    assert found == pytest.approx(0.3 * MEAN, rel=0.1)


def test_a_prediction_that_is_right_stays_and_keeps_its_shape() -> None:
    rng = np.random.default_rng(2)
    means = np.exp(rng.normal(5.0, 0.8, 500))
    correction = Correction(150.0)
    for i, mean in enumerate(means):
        correction.ask(i, survivals(mean)[0])
        correction.observe(i, max(1, int(mean * rng.standard_exponential())), False)
    asked = survivals(np.array([20.0, 150.0, 900.0]))
    now = Predictions.from_survivals(correction.corrected(asked))
    assert_allclose(now.means(), [20.0, 150.0, 900.0], rtol=0.15)
    assert_allclose(now.quantiles((0.25, 0.5, 0.9)), Predictions.from_survivals(asked).quantiles((0.25, 0.5, 0.9)), rtol=0.15)


def test_nothing_is_corrected_before_some_have_ended() -> None:
    correction = Correction(MEAN, every=1)
    for i in range(MIN_ENDED):
        assert correction.corrected(survivals(MEAN)).tolist() == survivals(MEAN).tolist()
        correction.ask(i, survivals(MEAN)[0])
        correction.observe(i, 1000, False)
    assert mean_of(correction.corrected(survivals(MEAN))) > 1.5 * MEAN


def test_what_is_not_among_the_last_or_has_ended_teaches_nothing() -> None:
    def run(*more: tuple[int, int, bool]) -> list[float]:
        correction = Correction(MEAN, window=40, every=1)
        for i in range(60):
            correction.ask(i, survivals(MEAN)[0])
            correction.observe(i, 10 + i, i % 3 == 0)
        for one in more:
            correction.observe(*one)
        return correction.corrected(survivals(MEAN))[0].tolist()  # type: ignore[no-any-return]

    assert run() == run((3, 9000, False), (777, 5, False), (58, 9000, False), (58, 9000, True))
    assert run() != run((57, 9000, False))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(MIN_ENDED, 60))
def test_memory_is_bounded_and_the_same_calls_give_the_same_bits(seed: int, window: int) -> None:
    def run() -> tuple[list[float], Correction]:
        rng = np.random.default_rng(seed)
        correction = Correction(MEAN, window=window, every=3)
        said = []
        for i in range(150):
            correction.ask(i, survivals(rng.uniform(10, 500))[0])
            for rid in rng.integers(0, i + 1, 2):
                correction.observe(int(rid), int(rng.integers(0, 3000)), bool(rng.random() < 0.5))
            row = correction.corrected(survivals([MEAN, 7.0]))
            assert np.all(np.diff(row, axis=1) <= 0) and row.min() >= 0 and row.max() <= 1
            said.append(float(row.sum()))
        return said, correction

    (a, correction), (b, _) = run(), run()
    assert a == b and len(correction._asked) == window


# --- the wrapper ------------------------------------------------------------------------------------------------------


class Says(LengthPredictor):
    """Always the same distribution."""

    name = "says"

    def __init__(self) -> None:
        self._fitted = False

    @property
    def fitted(self) -> bool:
        return self._fitted

    def learn(self, rows: TrainingRows) -> None:
        self._fitted = True

    def predict_columns(self, prompts: Prompts) -> Predictions:
        return Predictions.from_survivals(np.tile(survivals(MEAN), (len(prompts), 1)))

    def state(self) -> State:
        return State({"fitted": self._fitted})

    def restore(self, state: State) -> None:
        self._fitted = bool(state.values["fitted"])


@pytest.mark.parametrize("inner", [PromptLength, Ridge, lambda: Conformal(Constant())])
def test_the_contract_holds_around_any_that_says_distributions(inner: Any, tmp_path: Path) -> None:
    check_predictor(lambda: Online(inner()), tmp_path, new_process=False)


def test_points_want_conformal_around_them() -> None:
    prompts, lengths, censored = synthetic_rows(60)
    predictor = Online(Constant())
    predictor.fit(prompts, lengths, censored)
    with pytest.raises(ValueError, match="constant says none: put conformal around it"):
        predictor.predict_columns(prompts)
    for bad in ({"window": 3}, {"every": 0}, {"prior": -1.0}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))}={next(iter(bad.values()))}"):
            Online(Says(), **bad)


def test_what_was_predicted_is_corrected_by_what_came_of_it() -> None:
    predictor = Online(Says(), every=1)
    predictor.fit(Prompts(np.ones(50)), np.full(50, 90), np.zeros(50, dtype=bool))
    asked = [Request(i, 0.0, 10) for i in range(80)]
    assert predictor.predict(asked)[0].mean() == pytest.approx(MEAN, rel=0.02)
    for request in asked:
        predictor.observe(request, 400, False)
    after = predictor.predict([Request(99, 1.0, 10)])[0]
    assert after.quantile(0.5) == pytest.approx(400, rel=0.2)
    assert predictor.predict_columns(Prompts(np.ones(1))).means()[0] == after.mean()
    again = Online(Says(), every=1)
    again.restore(predictor.state())
    assert again.predict_columns(Prompts(np.ones(1))).means()[0] == pytest.approx(MEAN, rel=0.02)  # an artefact begins anew


def test_an_artefact_is_taken_as_it_is(tmp_path: Path) -> None:
    fitted = PromptLength(latency=LatencyModel(0.001, 0.0))
    fitted.fit(*synthetic_rows(100))
    fitted.unit = "made-up tokens"
    fitted.mark_seen(["hello there"])
    fitted.save(tmp_path / "inner")
    inner = f"predictor.inner.path={tmp_path}/inner"
    with initialize_config_module("lengthwise.conf", version_base="1.3"):
        cfg = compose("train", ["predictor=online", "+predictor@predictor.inner=artefact", inner])
    made = instantiate(cfg.predictor)
    assert made.fitted and made.unit == "made-up tokens" and made.latency == fitted.latency
    assert made.training_median == fitted.training_median and made.has_seen(["Hello THERE"]).all()
    prompts, _, _ = synthetic_rows(9, 1)
    assert made.predict_columns(prompts).score.tolist() == fitted.predict_columns(prompts).score.tolist()
    made.save(tmp_path / "outer")
    again = load(tmp_path / "outer")
    assert (
        isinstance(again, Online)
        and again.predict_columns(prompts).score.tolist() == made.predict_columns(prompts).score.tolist()
    )


def test_most_predictors_learn_nothing_of_what_comes() -> None:
    predictor = PromptLength()
    predictor.fit(*synthetic_rows(60))
    asked = Request(0, 0.0, 10)
    before = predictor.predict([asked])[0].mean()
    predictor.observe(asked, 9999, False)
    assert predictor.predict([asked])[0].mean() == before


# --- in a run ---------------------------------------------------------------------------------------------------------


def rows(lengths: np.ndarray) -> Dataset:
    n = len(lengths)
    return Dataset(
        name="drift",
        prompt_len=np.full(n, 20),
        output_len=lengths.astype(np.int64),
        unit="tokens",
        source="made up",
        licence="none",
    )


def test_a_run_learns_from_its_own_answers_and_from_nothing_that_is_to_come() -> None:
    rng = np.random.default_rng(4)
    lengths = np.ceil(60 * rng.standard_exponential(600))
    made = simulate("srpt", Online(PromptLength(latency=LatencyModel(0.0, 0.0))), rows(lengths), rate=20.0, num_requests=600)
    again = simulate("srpt", Online(PromptLength(latency=LatencyModel(0.0, 0.0))), rows(lengths), rate=20.0, num_requests=600)
    order = made.requests.sort_values("arrival")
    said = np.asarray(order["predicted"])
    assert again.requests["predicted"].tolist() == made.requests["predicted"].tolist()
    assert made.summary["provenance"]["predictor"]["correction"]["window"] == 512
    assert len(set(said[:10].round(6))) <= 5 and len(set(said.round(6))) > 20  # a fold each, then corrected
    changed = lengths.copy()
    late = np.asarray(order["row"])[450:]
    changed[late[lengths[late] > np.median(lengths)]] *= 30  # of those that arrive later the long ones are longer yet
    moved = simulate("srpt", Online(Says2()), rows(changed), rate=20.0, num_requests=600).requests.sort_values("arrival")
    plain = simulate("srpt", Online(Says2()), rows(lengths), rate=20.0, num_requests=600).requests.sort_values("arrival")
    assert moved["predicted"].tolist()[:451] == plain["predicted"].tolist()[:451]
    assert moved["predicted"].tolist()[520:] != plain["predicted"].tolist()[520:]


class Says2(Says):
    """As fitted beforehand: no row of a run is learned from."""

    per_row = False
    latency = LatencyModel(0.0, 0.0)


def test_fast_forward_changes_nothing() -> None:
    rng = np.random.default_rng(5)
    lengths = np.ceil(200 * rng.standard_exponential(300))
    found = [
        simulate(
            "srpt", Online(Says2()), rows(lengths), rate=20.0, num_requests=300,
            executor={"_target_": "lengthwise.experiments.simulated_stage.SimulatedStage", "fast_forward": fast},
        ).requests["predicted"].tolist()
        for fast in (True, False)
    ]  # fmt: skip
    assert found[0] == found[1] and np.mean(found[0][-50:]) == pytest.approx(200, rel=0.3)


def test_a_run_follows_a_drift_that_a_fixed_predictor_does_not() -> None:
    rng = np.random.default_rng(6)
    lengths = np.ceil(3 * MEAN * rng.standard_exponential(800))
    online = simulate("fcfs", Online(Says2()), rows(lengths), rate=20.0, num_requests=800).requests.sort_values("arrival")
    fixed = simulate("fcfs", Says2(), rows(lengths), rate=20.0, num_requests=800).requests
    assert np.mean(fixed["predicted"]) == pytest.approx(MEAN, rel=0.02)
    assert np.mean(online["predicted"].tolist()[-300:]) == pytest.approx(3 * MEAN, rel=0.15)


def test_a_run_looks_at_those_that_run_and_leaves_points_alone() -> None:
    told: list[tuple[int, int, bool]] = []

    class Spy(Correction):
        def observe(self, rid: int, length: int, censored: bool) -> None:
            told.append((rid, length, censored))
            super().observe(rid, length, censored)

    class Listed:
        def __init__(self, events: list[Event]) -> None:
            self.events, self.ended = events, 0

        def peek(self) -> float:
            return self.events[0].time if self.events else INF

        def pop(self, now: float) -> list[Event]:
            events, self.events = self.events, []
            return events

        def on_finish(self, request: Request, now: float) -> None:
            self.ended += 1

    class Scheduler:
        def generated(self, request: Request) -> int:
            return 100 + request.rid

    said = Predictions.from_survivals(survivals(MEAN)).row(0)
    requests = [
        Request(i, float(i), 10, prediction=LengthDistribution.point(5.0) if i == 3 else said) for i in range(2 * LOOK + 2)
    ]
    source = Listed([Event(r.arrival, EventKind.ARRIVAL, r) for r in requests])
    run = Corrected(source, Scheduler(), Spy(MEAN))  # type: ignore[arg-type]
    assert run.peek() == 0.0
    for event in run.pop(1e9):
        if event.request.rid == 5:  # ends as soon as it has come
            run.heard(event.request, 7, "stop")
            run.on_finish(event.request, 0.0)
        if event.request.rid == 6:
            run.heard(event.request, 9, "aborted")
            run.on_finish(event.request, 0.0)
    assert told[:2] == [(5, 7, False), (6, 9, True)] and source.ended == 2 and run.peek() == INF
    first = [(i, 100 + i, True) for i in range(LOOK + 1) if i not in (3, 5, 6)]
    assert told[2 : 2 + len(first)] == first  # at the arrival of the next after LOOK that have a distribution
    assert requests[3].prediction is not None and requests[3].prediction.is_point
    assert corrected(source, Scheduler(), {}) is None  # type: ignore[arg-type]


# --- in the server ----------------------------------------------------------------------------------------------------


def test_the_server_tells_its_predictor_what_came() -> None:
    """In the predictor's own thread: how far those have come that run, and every end; only `stop` is a length."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    import threading
    import time

    from serving import read, run, until

    from lengthwise.engine.server.predicting import LOOK as STEPS
    from lengthwise.engine.server.predicting import Predicting
    from lengthwise.sched.policies import SJF

    class Hears:
        learns = True

        def __init__(self) -> None:
            self.heard: list[tuple[int, int, bool]] = []
            self.threads: set[str] = set()

        def predict(self, requests: Any) -> Any:
            return [LengthDistribution.point(5.0) for _ in requests]

        def observe(self, request: Request, length: int, censored: bool) -> None:
            self.threads.add(threading.current_thread().name)
            self.heard.append((request.rid, length, censored))
            raise KeyError("whatever it is, predictions go on")

    hears = Hears()

    async def main(service: Any) -> Any:
        first = await read(await service.submit("a", [1], 2 * STEPS + 5))
        second = await read(await service.submit("b", [1, 2], 3))
        await until(lambda: any(rid == 1 for rid, _, _ in hears.heard))
        return first.reason, second.reason

    assert run(main, policy=SJF(), predictor=hears, fallback_len=1.0, prediction_deadline=50.0) == ("length", "length")
    own = [length for rid, length, censored in hears.heard if rid == 0 and censored]
    assert hears.threads == {"lengthwise-predict"} and own == sorted(own) and own[-1] == 2 * STEPS + 5 and len(own) >= 3
    assert hears.heard[-1] == (1, 3, True)

    predicting = Predicting(hears, 1.0, lambda request, prediction: True)
    predicting.thread.start()
    predicting.ended(Request(7, 0.0, 1), 9, "stop")
    predicting.ended(Request(8, 0.0, 1), 4, "aborted")
    for _ in range(1000):
        if hears.heard[-1][0] == 8:
            break
        time.sleep(0.01)
    predicting.close()
    predicting.thread.join(10)
    assert hears.heard[-2:] == [(7, 9, False), (8, 4, True)]
    assert not Predicting(object(), 1.0, lambda request, prediction: True).learns  # type: ignore[arg-type]
