"""Scheduling regret: how much of an oracle's gain is left when a length predictor stands before SJF and SRPT instead.

Rank correlation says who is confused with whom, not what it costs. Here the prompts that each named split holds out come to the
quickstart's setting (b), predicted by the predictor that has not seen them, whose measured time they wait for. One split is one
seed, on which FCFS, a constant and the oracle are asked the same at the same times.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lengthwise.predictors.constant import Constant
from lengthwise.predictors.latency import LatencyModel
from lengthwise.predictors.oracle import Oracle
from lengthwise.predictors.predictions import Predictions

from .cell import run_cell
from .dataset import Dataset
from .nodes import Config
from .reshape import take
from .saturation import measure_saturation
from .simulate import compose
from .statistics import gap_closed

POLICIES = ("sjf", "srpt")
SETTING = "slots64_gamma3"
LIMITS = "seqs64"
ARRIVALS = {"_target_": "lengthwise.experiments.arrivals.gamma.Gamma", "cv": 3.0, "burstiness": None, "normalised": True}
WINDOW = {"warm_up": 0.1, "cool_down": 0.0, "unit": "share", "go_on": 1.0}  # as in conf/run.yaml
SCORE = "e2e_mean"  # as in comparison.py


class Held(NamedTuple):
    """What a split holds out: its rows (n,) of the dataset, what the predictor says of them, the median of the lengths that it
    has learned from, and how it corrects itself as answers come (settings of a Correction), if it does."""

    rows: NDArray[np.int64]
    predictions: Predictions
    median: float
    correction: Mapping[str, Any] | None = None


class Ready:
    """Prepared inputs that are there already: what is predicted of each row, and how long that takes."""

    def __init__(self, predictions: Predictions | None = None, latency: LatencyModel | None = None, **info: Any) -> None:
        self._predictions = predictions
        self._info = {**info, **({} if latency is None else {"latency": latency.as_dict()})}

    def saturation_rate(self, cfg: Config) -> float:
        raise ValueError("the saturation rate is to be stated")

    def predictions(self, cfg: Config) -> tuple[Predictions, NDArray[np.int64], dict[str, Any]] | None:
        if self._predictions is None:
            return None
        return self._predictions, np.full(len(self._predictions), -1, dtype=np.int64), self._info


class Regret:
    """Simulates `num_requests` a seed at `load`. It keeps what FCFS, the constant and the oracle came to, by data set and
    rows, so that the next predictor on the same rows is compared with the same runs."""

    def __init__(self, num_requests: int = 1000, load: float = 0.95) -> None:
        if num_requests < 100 or not 0.0 < load < 10.0:
            raise ValueError(f"regret: num_requests={num_requests} is to be 100 at least, and load={load} within (0, 10)")
        self.num_requests, self.load = num_requests, load
        self._kept: dict[tuple[str, ...], float] = {}

    def __call__(
        self,
        dataset: Dataset,
        key: str,
        held: Mapping[str, Held],
        latency: LatencyModel | None,
        say: Callable[[str], None] = lambda text: None,
    ) -> dict[str, Any]:
        """The report's section, JSON values: mean E2E (s, over splits) of FCFS and, by policy, of constant, oracle and
        `predictor`, each by split too, and the gap closed with its interval (statistics.py); of a predictor that only ranks,
        why SRPT cannot use it. key: of the dataset's content. held: by named split, whose name is the seed. Rows are drawn
        again where a split has fewer than num_requests.
        """
        found: dict[tuple[str, str], dict[int, float]] = {}
        rank_only = any(one.predictions.is_rank_only for one in held.values())
        for split, one in held.items():
            rows, seed = take(dataset, one.rows), int(split)
            about = (key, split, hashlib.sha256(one.rows.tobytes()).hexdigest())
            rate = self._once((*about, "saturation"), partial(self._saturation, rows))
            constant = Ready(Predictions.from_points(np.full(len(rows), one.median)))
            own = Ready(one.predictions, latency, **({} if one.correction is None else {"correction": dict(one.correction)}))
            arms: list[tuple[str, str, Any, Ready]] = [("fcfs", "none", "none", Ready())]
            for policy in POLICIES:
                arms += [(policy, "constant", Constant(one.median), constant), (policy, "oracle", Oracle(), Ready())]
                if not (rank_only and policy == "srpt"):
                    arms.append((policy, "predictor", Constant(one.median), own))  # any learned one: `own` says what it says
            for policy, name, node, ready in arms:
                run = partial(self._run, rows, rate, seed, policy, node, ready)
                value = run() if name == "predictor" else self._once((*about, policy, name, str(one.median)), run)
                found.setdefault((policy, name), {})[seed] = value
            say(f"before SJF and SRPT: split {split}")
        fcfs = found["fcfs", "none"]
        charged = latency.as_dict() if latency is not None else None
        policies = {policy: _compared(fcfs, {n: by for (p, n), by in found.items() if p == policy}) for policy in POLICIES}
        return {
            "setting": SETTING, "load": self.load, "num_requests": self.num_requests, "seeds": [int(split) for split in held],
            "num_rows": {split: len(one.rows) for split, one in held.items()}, "charged": charged,
            "charged_ms": None if latency is None else 1e3 * float(latency.ready_times([0.0])[0]),
            "fcfs": _told(fcfs), "policies": policies,
        }  # fmt: skip

    def cell(self, rows: Dataset, rate: float | None, seed: int, policy: str, predictor: Any) -> dict[str, Any]:
        """The config of one run: a cell of `study=quickstart`, of these rows. rate: of saturation, requests/s."""
        return compose(
            policy=policy, predictor=predictor, workload=rows, arrivals=ARRIVALS, limits=LIMITS, load=self.load,
            saturation=rate, num_requests=self.num_requests, seed=seed, window=WINDOW, resample=True,
        )  # fmt: skip

    def _saturation(self, rows: Dataset) -> float:
        return float(measure_saturation(self.cell(rows, None, 0, "fcfs", "none"))["rate"])

    def _run(self, rows: Dataset, rate: float, seed: int, policy: str, predictor: Any, ready: Ready) -> float:
        value = run_cell(self.cell(rows, rate, seed, policy, predictor), ready).metrics.get(SCORE)
        return float("nan") if value is None else float(value)

    def _once(self, key: tuple[str, ...], make: Callable[[], float]) -> float:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


def _compared(fcfs: Mapping[int, float], arms: Mapping[str, Mapping[int, float]]) -> dict[str, Any]:
    """One policy: what each predictor came to, and the shares of the gap between FCFS and the oracle that are closed."""
    out: dict[str, Any] = {name: _told(by) for name, by in arms.items()}
    for name in ("constant", "predictor"):
        if name in arms:
            gap = gap_closed(fcfs, arms[name], arms["oracle"])
            out[name] |= {"gap_closed": gap.share, "gap_closed_low": gap.low, "gap_closed_high": gap.high, "note": gap.reason}
    return {**out, "predictor": out.get("predictor") or {"skipped": "it has an order and no lengths, which SRPT counts down"}}


def _told(by_seed: Mapping[int, float]) -> dict[str, Any]:
    values = {str(seed): None if value != value else value for seed, value in by_seed.items()}
    known = [value for value in values.values() if value is not None]
    return {"e2e_mean": float(np.mean(known)) if len(known) == len(values) else None, "e2e_mean_by_split": values}


def lines(found: Mapping[str, Any], name: str, number: Callable[[Any], str]) -> Sequence[str]:
    """The section as text."""
    charged = "no time" if found["charged_ms"] is None else f"{found['charged_ms']:.2f} ms for one prediction"
    out = [
        f"held-out prompts in the simulator, {found['setting']} at load {found['load']:g}, {len(found['seeds'])} x "
        f"{found['num_requests']:,} requests; {charged} charged",
        f"{'mean E2E (s)':<15}" + "".join(f"{head[:11]:>12}" for head in ("FCFS", "constant", name, "oracle")) + "  gap closed",
    ]
    for policy, arms in found["policies"].items():
        own = arms["predictor"]
        cells = [found["fcfs"], arms["constant"], own, arms["oracle"]]
        text = f"{policy:<15}" + "".join(f"{number(cell.get('e2e_mean')):>12}" for cell in cells)
        out.append(f"{text}  {own['skipped'] if 'skipped' in own else _share(own)}")
    return out


def _share(own: Mapping[str, Any]) -> str:
    if own["gap_closed"] is None:
        return "n/a: over these seeds no gap is shown"
    return f"{own['gap_closed']:.0%} [{own['gap_closed_low']:.0%}, {own['gap_closed_high']:.0%}]"
