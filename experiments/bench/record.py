"""Record: what a client saw, as the columns that a cell is made of, and line by line while it runs.

A Recorder without an engine to look at: when requests were scheduled, preempted or found cached is the server's to know.
"""

from __future__ import annotations

import json
import math
from array import array
from typing import Any, TextIO

import numpy as np
import pandas as pd

from lengthwise.sched import Request

from ..recorder import Columns, Recorder
from .answer import Answer

FLOATS = ("sent", "first_content")
COUNTS = ("num_retries", "num_first", "num_events", "miscount", "prompt_count")


class Seen(Recorder):
    """Records the answers of one run of `n` requests at most. raw: each is written there as a line of JSON when it ends.

    Gaps between tokens: of k tokens that came at once, each has a k-th of the gap before; the first ones have none.
    """

    inside = False

    __slots__ = ("_columns", "_raw", "_rids", "_sizes", "_times", "num_answered", "num_counted_by_usage", "num_miscounted")

    def __init__(self, n: int, *, window: tuple[float, float], raw: TextIO | None = None) -> None:
        super().__init__(window=window, steps=False)
        self._columns: Columns = {name: np.full(n, math.nan) for name in FLOATS}
        self._columns |= {name: np.full(n, -1 if name == "prompt_count" else 0, np.int32) for name in COUNTS}
        self._raw = raw
        self._rids, self._times, self._sizes = array("i"), array("d"), array("i")
        self.num_answered = self.num_counted_by_usage = self.num_miscounted = 0
        self.window_totals = {"output_tokens": 0.0}

    def answered(self, request: Request, answer: Answer, reason: str, now: float) -> tuple[int, float]:
        """Take in an answer that has ended, before `ended` is told. Returns (output tokens, when it ended, s): a finished one
        with its last token. Mutates the request's progress, which no scheduler has written."""
        times, sizes = answer.tokens()
        if not math.isnan(first := answer.first_token):
            request._first_token = first
        if answer.cached is not None:
            self.indexes, request._cached = True, answer.cached
        values: dict[str, Any] = {
            "sent": answer.sent, "first_content": answer.first_content, "num_retries": answer.num_retries,
            "num_first": sizes[0] if len(sizes) else 0, "num_events": answer.num_events, "miscount": answer.miscount,
            "prompt_count": -1 if answer.prompt_count is None else answer.prompt_count,
        }  # fmt: skip
        for name, value in values.items():
            self._columns[name][request.rid] = value
        self.num_answered += 1
        self.num_counted_by_usage += answer.num_tokens > 0 and answer.count is not None
        self.num_miscounted += answer.miscount != 0
        self._count(times, sizes)
        self._rids.extend([request.rid] * len(times))
        self._times.extend(times.tolist())
        self._sizes.extend(sizes.tolist())
        ended = float(times[-1]) if reason in ("stop", "length") and len(times) else now
        if self._raw is not None:
            self._write(request, answer, reason, ended, times, sizes)
        return int(sizes.sum()), ended

    def _count(self, times: np.ndarray, sizes: np.ndarray) -> None:
        begin, close = self.window
        inside = (times >= begin) & (times < close)
        self.window_totals["output_tokens"] += float(sizes[inside].sum())
        if len(times) > 1:
            self.itl.add((np.diff(times) / sizes[1:])[inside[1:]], sizes[1:][inside[1:]])

    def _write(self, request: Request, answer: Answer, reason: str, ended: float, times: np.ndarray, sizes: np.ndarray) -> None:
        assert self._raw is not None
        line = {
            "rid": request.rid, "arrival": request.arrival, "sent": answer.sent, "ended": ended, "reason": reason,
            "num_retries": answer.num_retries, "count": answer.count, "times": times.tolist(), "sizes": sizes.tolist(),
        }  # fmt: skip
        line = {name: None if value != value else value for name, value in line.items()}
        self._raw.write(json.dumps(line) + "\n")

    def further(self, n: int) -> Columns:
        """See Recorder. sent, first_content (s); num_retries; num_first: tokens that came first, at once; num_events; miscount:
        the server's count of output tokens less those seen; prompt_count: the server's count of the prompt, -1 unknown."""
        return {name: column[:n] for name, column in self._columns.items()}

    def tokens(self) -> pd.DataFrame:
        """rid, time (s), num: one row for each time that tokens came, in the order in which requests ended."""
        return pd.DataFrame(
            {"rid": np.array(self._rids, np.int32), "time": np.array(self._times), "num": np.array(self._sizes, np.int32)}
        )
