"""check_predictor: the contract that every length predictor keeps, for our own nodes and for plug-in authors.

    def test_mine(tmp_path):
        check_predictor(lambda: MyPredictor(), tmp_path)

Raises AssertionError saying which clause is broken.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lengthwise.sched import Request

from .predictions import Predictions
from .predictor import LengthPredictor
from .prompts import Prompts

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
UNIT = "synthetic tokens"
_TOPICS = ("yes or no answer", "poem about rain", "python function", "list of ideas", "summary of a text", "letter to a friend")
_IN_ANOTHER_PROCESS = """
import sys, numpy as np
from lengthwise.predictors.artefact import load
from lengthwise.predictors.contract import synthetic_rows
prompts, _, _ = synthetic_rows(65, seed=1)
out = load(sys.argv[1]).predict_columns(prompts)
columns = dict(score=out.score, point=out.point, survival=out.survival)
np.savez(sys.argv[2], **{name: column for name, column in columns.items() if column is not None})
"""


def synthetic_rows(num_rows: int, seed: int = 0) -> tuple[Prompts, NDArray[Any], NDArray[Any]]:
    """(prompts, lengths, censored) of made-up requests whose answers depend on the words of the prompt, and by them on who asks
    and on the answers before."""
    rng = np.random.default_rng(np.random.SeedSequence([0xC0DE, seed]))
    topic = rng.integers(len(_TOPICS), size=num_rows)
    extra = rng.integers(1, 40, size=num_rows)
    texts = [f"Request {i}: please write a {_TOPICS[topic[i]]} {'with detail ' * int(extra[i])}" for i in range(num_rows)]
    lengths = np.maximum(1, np.round(np.exp(3.0 + 0.5 * topic + 0.4 * rng.standard_normal(num_rows)))).astype(np.int64)
    censored = rng.random(num_rows) < 0.05
    client = [f"client {i % 3}" if i % 5 else None for i in topic.tolist()]
    before = [[int(x)] * int(n) for x, n in zip(30 * (topic + 1), rng.integers(0, 4, num_rows), strict=True)]
    return Prompts(np.asarray(6 + 2 * extra, dtype=np.float64), texts, client, before), lengths, censored


def check_predictor(make: Callable[[], LengthPredictor], folder: Path, *, new_process: bool = True) -> None:
    """Fit on 200 synthetic rows and check every clause; writes an artefact into `folder`.

    new_process: also load it in another Python process (the class must be importable there). Raises AssertionError.
    """
    prompts, lengths, censored = synthetic_rows(200)
    group = np.arange(200) // 2

    unfitted = make()
    assert not unfitted.fitted or unfitted.training_median is None, f"{unfitted.name}: a new predictor is already fitted"
    predictor = make()
    predictor.fit(prompts, lengths, censored, group=group)
    predictor.unit = UNIT
    assert predictor.fitted, f"{predictor.name}: not fitted after fit"
    assert predictor.training_median is not None and predictor.training_median >= 1, f"{predictor.name}: no training median"

    asked, _, _ = synthetic_rows(65, seed=1)
    whole = predictor.predict_columns(asked)
    assert isinstance(whole, Predictions) and len(whole) == 65, f"{predictor.name}: 65 rows gave {len(whole)} predictions"
    check_rows(predictor.name, whole)

    assert len(predictor.predict_columns(asked.take([]))) == 0, f"{predictor.name}: an empty batch"
    assert predictor.predict([]) == [], f"{predictor.name}: no requests"
    parts = [predictor.predict_columns(asked.take(range(i, min(i + 64, 65)))) for i in (0, 64)]
    assert [len(p) for p in parts] == [64, 1], f"{predictor.name}: batches of 64 and 1"
    _same(predictor.name, "a batch changes its rows", Predictions.concatenate(parts), whole)

    order = np.random.default_rng(0).permutation(65)
    permuted = predictor.predict_columns(asked.take(order))
    _same(predictor.name, "permuted rows are not permuted predictions", permuted, whole.take(order))

    assert asked.texts is not None and asked.client is not None and asked.answers_before is not None
    requests = [
        Request(i, 0.0, int(n), prompt=text, client=client, answers_before=before)
        for i, (n, text, client, before) in enumerate(
            zip(asked.prompt_len, asked.texts, asked.client, asked.answers_before, strict=True)
        )
    ]
    scores = [d.score for d in predictor.predict(requests)]
    assert scores == whole.score.tolist(), f"{predictor.name}: requests and columns differ"

    again = make()
    again.fit(prompts, lengths, censored, group=group)
    _same(predictor.name, "two fits on the same rows differ", again.predict_columns(asked), whole)

    predictor.save(folder)
    loaded = type(predictor).load(folder)
    for kept in ("unit", "latency", "training_median"):
        assert getattr(loaded, kept) == getattr(predictor, kept), f"{predictor.name}: {kept} is lost in the artefact"
    _same(predictor.name, "save and load change predictions", loaded.predict_columns(asked), whole)
    if new_process:
        out = folder / "in_another_process.npz"
        command = [sys.executable, "-c", _IN_ANOTHER_PROCESS, str(folder), str(out)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{predictor.name}: loading in a new process failed: {done.stderr}"
        with np.load(out) as stored:
            found = Predictions(stored["score"], stored.get("point"), stored.get("survival"))
        _same(predictor.name, "a new process predicts otherwise", found, whole)


def check_rows(name: str, predictions: Predictions) -> None:
    """Finite scores; finite, ordered quantiles; a survival within [0, 1] that never rises. Raises AssertionError."""
    assert np.all(np.isfinite(predictions.score)), f"{name}: a score is not finite"
    if predictions.point is None and predictions.survival is None:
        return
    quantiles = predictions.quantiles(LEVELS)
    assert np.all(np.isfinite(quantiles)) and np.all(quantiles >= 0), f"{name}: a quantile is not a finite length"
    assert np.all(np.diff(quantiles, axis=1) >= 0), f"{name}: quantiles are out of order"
    assert np.all(np.isfinite(predictions.means())), f"{name}: a mean is not finite"
    if predictions.survival is not None:
        s = np.asarray(predictions.survival)
        assert s.min() >= 0 and s.max() <= 1 and np.all(np.diff(s, axis=1) <= 1e-9), f"{name}: a survival function is not one"
    for i in (0, len(predictions) - 1):
        row = predictions.row(i)
        assert row.mean() == predictions.means()[i], f"{name}: row {i} and its column differ"


def _same(name: str, clause: str, a: Predictions, b: Predictions) -> None:
    for column in ("score", "point", "survival"):
        x, y = getattr(a, column), getattr(b, column)
        assert (x is None) == (y is None) and (x is None or np.array_equal(x, y)), f"{name}: {clause} ({column})"
