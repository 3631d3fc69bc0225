"""Self-estimate: the served model was asked how long its answer would be; the recorded estimate is what predicts.

Asking the model first is Response Length Perception's (Zheng et al., NeurIPS 2023) and, as PO, a baseline of LTR (Fu et al.,
NeurIPS 2024). Departures: the estimates are read from a file, as `lengthwise collect ask=estimate` writes it, so that every
study replays the same ones, and the time that asking took is charged where the file says it. Models count badly and in words:
one factor from their unit to tokens is learned, and the errors that are left make the distribution. The model is not tuned to
estimate, as the former does it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .buckets import marginal_survival
from .calibration import Residuals, kaplan_meier, soft_log, soft_offset
from .latency import LatencyModel
from .predictions import Predictions
from .predictor import MIN_ROWS, Floats, LengthPredictor, State, TrainingRows
from .prompts import Prompts

_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
MOST = 1e6  # a greater estimate is no length


def question(prompt: str) -> str:
    """What to send to the served model in place of `prompt`, so that it says a number of words before it answers anything."""
    return (
        f"{prompt}\n\nDo not answer the request above yet. Say only how many words your answer to it would have: "
        "one whole number and nothing else."
    )


def parse_estimate(answer: str) -> float | None:
    """The first number in a model's answer, above 0; None where there is none that can be a length."""
    found = _NUMBER.search(answer)
    if found is None:
        return None
    number = float(found[0].replace(",", ""))
    return number if 0.0 < number <= MOST else None


def prompt_key(prompt: str) -> str:
    """A prompt's name in the file of estimates: the first 16 hexadecimal digits of its SHA-256, as in collected lengths."""
    return hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def read_estimates(path: Path | str) -> dict[str, float]:
    """Prompt hash -> estimate, from a JSONL file with a `prompt_sha` and an `estimate` (a number) or an `answer` (the model's
    words) a line. Answers without a number are left out; a later line replaces an earlier one. Raises ValueError naming
    the line.
    """
    out: dict[str, float] = {}
    for num, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            key, estimate = f"{int(str(row['prompt_sha'])[:16], 16):016x}", row.get("estimate")
            estimate = parse_estimate(str(row["answer"])) if estimate is None else float(estimate)
        except (json.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} line {num}: prompt_sha and estimate or answer are needed ({error!r})") from error
        if estimate is not None and not (math.isfinite(estimate) and 0.0 < estimate <= MOST):
            raise ValueError(f"{path} line {num}: estimate {estimate} is not within (0, {MOST:g}]")
        out.pop(key, None)
        if estimate is not None:
            out[key] = estimate
    return out


def asking_latency(path: Path | str) -> LatencyModel | None:
    """What asking cost, of the lines of a file of estimates that say the seconds that theirs took, and how many were asked
    `at_once`: the line through one alone (their median) and as many at once as were (their mean). None where no line says it.
    """
    took: dict[int, list[float]] = {}
    for line in Path(path).read_text(encoding="utf-8").split("\n"):
        row = json.loads(line) if line.strip() else {}
        if row.get("seconds") is not None and row.get("at_once"):
            took.setdefault(int(row["at_once"]), []).append(float(row["seconds"]))
    if not took:
        return None
    size = max(took)
    together = float(np.mean(took[size]))
    if size == 1:
        return LatencyModel(float(np.median(took[1])), 0.0, max_batch=1)
    alone = float(np.median(took[1])) if 1 in took else together / size
    per_request = max((together - alone) / (size - 1), 0.0)
    return LatencyModel(max(alone - per_request, 0.0), per_request, max_batch=size)


class SelfEstimate(LengthPredictor):
    """path: the JSONL file of recorded estimates (`read_estimates`); what it holds travels in the artefact. latency: None, as
    the file says that asking took (`asking_latency`); else, where it says nothing, the look-up alone is profiled.

    Tokens = factor x estimate; the factor is the median of length over estimate. Prompts without an estimate get the
    distribution of all training lengths. Censored rows are lower bounds in both.
    """

    name = "self_estimate"
    needs_text = True

    def __init__(self, path: str | None = None, latency: LatencyModel | None = None) -> None:
        self.path = path
        self.latency = latency
        self._known: dict[str, float] = {}
        self._factor = 1.0
        self._residuals: Residuals | None = None
        self._marginal: Floats = np.zeros(0)

    @property
    def fitted(self) -> bool:
        return self._residuals is not None

    @property
    def factor(self) -> float:
        """Tokens for each unit of the model's estimate."""
        self._need_fitted()
        return self._factor

    def learn(self, rows: TrainingRows) -> None:
        if self.path is None:
            raise ValueError("predictor self_estimate needs a file of recorded estimates: predictor.path=FILE.jsonl")
        self._known = read_estimates(self.path)
        self.latency = asking_latency(self.path) if self.latency is None else self.latency
        said = self._said(rows.prompts.texts or ())
        there = np.flatnonzero(np.isfinite(said))
        if len(there) < MIN_ROWS:
            raise ValueError(f"{self.path} estimates {len(there)} of {len(said)} training prompts, {MIN_ROWS} are needed")
        lengths, cut, said = rows.lengths[there], rows.censored[there], said[there]
        ratio, survival = kaplan_meier(np.log(lengths / said), cut)
        if not ratio.size:
            raise ValueError(f"{self.path}: every training prompt with an estimate is censored")
        half = np.flatnonzero(survival <= 0.5)
        self._factor = float(np.exp(ratio[half[0] if half.size else -1]))
        offset = soft_offset(rows.lengths)
        self._residuals = Residuals.fit(soft_log(self._factor * said, offset), soft_log(lengths, offset), cut, offset)
        self._marginal = marginal_survival(rows.lengths, rows.censored)

    def _said(self, texts: Sequence[str]) -> Floats:
        """The recorded estimate of each prompt (N,), NaN where there is none."""
        return np.array([self._known.get(prompt_key(text), math.nan) for text in texts], dtype=np.float64)

    def predict_columns(self, prompts: Prompts) -> Predictions:
        self._need_fitted(prompts)
        assert self._residuals is not None
        said = self._said(prompts.texts or ())
        there = np.isfinite(said)
        survival = np.tile(self._marginal, (len(said), 1))
        location = soft_log(self._factor * said[there], self._residuals.offset)
        survival[there] = self._residuals.survival(location)
        return Predictions.from_survivals(survival)

    def state(self) -> State:
        self._need_fitted()
        assert self._residuals is not None
        keys = np.array([int(key, 16) for key in self._known], dtype=np.uint64)
        arrays: dict[str, Any] = {"keys": keys, "estimates": np.array(list(self._known.values())), "marginal": self._marginal}
        return State({"factor": self._factor}, {**arrays, **self._residuals.arrays()})

    def restore(self, state: State) -> None:
        keys = (f"{key:016x}" for key in state.arrays["keys"].tolist())
        self._known = dict(zip(keys, state.arrays["estimates"].tolist(), strict=True))
        self._factor, self._marginal = float(state.values["factor"]), state.arrays["marginal"]
        self._residuals = Residuals.from_arrays(state.arrays)
