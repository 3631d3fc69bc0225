"""What holds for every run of the bench client, and rows to run it with."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest

from lengthwise.experiments.dataset import Dataset
from lengthwise.experiments.metrics import measure
from lengthwise.experiments.run import Run
from lengthwise.experiments.windows import Window

N = 12


def rows(n=N, output_len=5, **fields) -> Dataset:
    lens = np.broadcast_to(np.asarray(output_len), (n,)).astype(np.int64)
    return Dataset("few", np.full(n, 7), lens, "tokens", "made here", "none", max_new_tokens=50, **fields)


def laws(run: Run) -> None:
    """What holds for every run: times are in order, tokens add up, and the summary is what the stored rows say."""
    requests = run.requests
    order = [requests[name] for name in ("arrival", "sent", "first_token", "ended")]
    for before, after in pairwise(order):
        both = before.notna() & after.notna()
        assert (before[both] <= after[both] + 1e-9).all()
    came = run.tokens.groupby("rid")
    assert came["num"].sum().reindex(requests["rid"], fill_value=0).tolist() == requests["output_len"].tolist()
    some = requests[requests["first_token"].notna()].set_index("rid")
    pd.testing.assert_series_equal(came["time"].min(), some["first_token"], check_names=False, check_index_type=False)
    ended = requests[requests["status"] == "finished"].set_index("rid")["finish"]
    assert np.allclose(came["time"].max()[ended.index], ended)
    found = run.summary["window"]
    window = Window(
        -np.inf if found["begin"] is None else found["begin"], np.inf if found["end"] is None else found["end"],
        found["whole"], found["horizon"],
    )  # fmt: skip
    again = measure(
        requests, window=window, run_end=found["run_end"], slo=run.summary["slo"], itl=run.itl,
        totals={"output_tokens": float(run.tokens["num"][run.tokens["time"].between(window.begin, window.end)].sum())},
    )  # fmt: skip
    for name, value in again.metrics.items():
        if not name.startswith("fallback"):
            assert run.metrics[name] == (pytest.approx(value) if value is not None else None), name
