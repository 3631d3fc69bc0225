"""Sending: what a client's numbers rest on: when requests were sent, against when they were due, and latencies from then on.

lateness        sent - arrival: held back by `concurrency`, or by a client that is too slow
sent_rps        1 / mean gap between sends, sent_cv their coefficient of variation; arrival_rps, arrival_cv are what was due
ttft_sent, e2e_sent    from the first sending, where ttft and e2e count from the arrival
first_content   first visible text - arrival; ttft counts a token of any channel
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from ..arrivals.summary import describe_arrivals
from ..latencies import Sample, samples
from ..metrics import Measured, put_sample
from ..windows import Window

CLOSE_RATE, CLOSE_CV = 0.01, 0.3  # differences between due and sent that are not worth a word: timers tick in ms


def sending(requests: pd.DataFrame, window: Window, run_end: float) -> Measured:
    """The numbers above over the requests that `window` counts; requests: columns of requests.parquet of a client's run."""
    out = Measured({}, {})
    counted = requests[window.counts(requests["arrival"].to_numpy(np.float64))]
    went = counted[counted["sent"].notna()]
    came_to = describe_arrivals(np.sort(went["sent"].to_numpy(np.float64)))
    few = None if came_to["rate"] else "fewer than 2 were sent"
    out.put("sent_rps", came_to["rate"], few)
    out.put("sent_cv", came_to["gap_cv"], few)
    late = (went["sent"] - went["arrival"]).to_numpy(np.float64)
    put_sample(out, "lateness", Sample(late, np.zeros(len(late), np.bool_), np.arange(len(late))))
    out.put("max_lateness", float(late.max()) if len(late) else None, None if len(late) else "n=0")
    since = samples(went.assign(arrival=went["sent"]), run_end)
    for name in ("ttft", "e2e"):
        put_sample(out, f"{name}_sent", since[name])
    content = samples(counted.assign(first_token=counted["first_content"]), run_end)
    put_sample(out, "first_content", content["ttft"])
    out.put("num_retries", int(counted["num_retries"].sum()))
    out.put("num_miscounted", int((counted["miscount"] != 0).sum()))
    return out


def differs(due: tuple[float | None, float | None], sent: tuple[float | None, float | None]) -> str | None:
    """How the sends differ from the arrivals asked for, each as (requests/s, CV of the gaps); None where they do not."""
    (rate, cv), (sent_rate, sent_cv) = due, sent
    if rate is None or sent_rate is None or cv is None or sent_cv is None:
        return None
    if math.isclose(rate, sent_rate, rel_tol=CLOSE_RATE) and abs(cv - sent_cv) <= CLOSE_CV * max(cv, 1.0):
        return None
    return (
        f"requests were not sent as they were due: {rate:.4g}/s with CV {cv:.3g} asked for, {sent_rate:.4g}/s with CV "
        f"{sent_cv:.3g} sent (lateness_* and the column `sent` say by how much)"
    )
