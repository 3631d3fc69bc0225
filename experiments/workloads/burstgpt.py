"""BurstGPT: four months of calls to GPT-3.5 and GPT-4 at one campus, failed calls among them (KDD 2025).

A row without response tokens is a call that failed, never an answer of length 0. `Elapsed time` is how long the whole answer
took, not the time to its first token: it serves here only to tell how long a user waited before going on.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pandas as pd

from ..dataset import Dataset, Floats, Ints
from .columns import Flags, in_time_order, lengths, refuse, times
from .origin import File, Origin, open_origin, origin_of, stated
from .reading import read_columns

log = logging.getLogger(__name__)

TIME, PROMPT, OUTPUT = "Timestamp", "Request tokens", "Response tokens"
MODEL, KIND, SESSION, ELAPSED = "Model", "Log Type", "Session ID", "Elapsed time"
PROJECT = "HPMLL/BurstGPT"
RELEASE = f"https://github.com/{PROJECT}/releases/download/v1.2/"
KINDS = {"conversation": "Conversation log", "api": "API log"}
FAILURES = ("drop", "mark", "error")


def _origin(number: int, what: str) -> Origin:
    files = tuple(File(name, url=RELEASE + name) for name in (f"BurstGPT_{number}.csv", f"BurstGPT_without_fails_{number}.csv"))
    page = f"https://github.com/{PROJECT}/releases/tag/v1.2"
    return Origin(f"BurstGPT, {what}", PROJECT, page, "CC-BY-4.0 (cite BurstGPT, KDD 2025)", files)


ORIGINS = {
    "burstgpt_1": _origin(1, "first two months"),
    "burstgpt_2": _origin(2, "second two months"),
    "burstgpt_3": _origin(3, "110 more days"),
}


def load(
    trace: str,
    path: str | None = None,
    *,
    failures: str = "drop",
    model: str | None = None,
    kind: str | None = None,
    max_prompt_len: int | None = None,
    limit: int | None = None,
    max_new_tokens: int = 2048,
) -> Dataset:
    """A trace of ORIGINS as a Dataset with arrivals (`notes["arrival_offset"]`: s after midnight of its first day).

    failures, calls with 0 response tokens: "drop" leaves them out, "mark" keeps them with an output of 1 token, censored (no
    label) and True in the column `failed`, "error" refuses them; rows of 0 request tokens are left out, or refused. How many
    there are is logged, and stands in `dropped` or the notes. model: ChatGPT or GPT-4 only; kind: conversation or api only.

    Where the file has a Session ID, columns session (a call without one is a session of its own) and turn (from 0); with
    Elapsed time, too, gap: s from the end of the session's previous answer, NaN where that is not known. path: another file
    of these columns. limit: only its first rows. Raises FileNotFoundError, or ValueError naming the row and the value.
    """
    if failures not in FAILURES:
        raise ValueError(f"failures {failures!r} is not one of {', '.join(FAILURES)}")
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind {kind!r} is not one of {', '.join(KINDS)}")
    origin = origin_of(ORIGINS, trace)
    file = open_origin(origin, path)
    table = read_columns(file, [TIME, PROMPT, OUTPUT, MODEL, KIND], limit, optional=(SESSION, ELAPSED))
    prompt, output = lengths(table[PROMPT]), lengths(table[OUTPUT])
    keep = np.full(len(table), True)
    dropped: dict[str, int] = {}

    def leave_out(reason: str, rows: Any) -> None:
        dropped[reason] = int((keep & rows).sum())
        np.logical_and(keep, ~np.asarray(rows), out=keep)

    if model is not None:
        leave_out("rows_other_models", table[MODEL].to_numpy() != model)
    if kind is not None:
        leave_out("rows_other_kinds", table[KIND].to_numpy() != KINDS[kind])
    failed = output == 0
    num_failed = int((keep & failed).sum())
    log.info("%s: %d rows with zero output (failed calls): failures=%s", trace, num_failed, failures)
    if failures == "error":
        refuse(table[OUTPUT], keep & failed, f"{num_failed} rows with zero output are failed calls: failures=drop or mark")
        refuse(table[PROMPT], keep & (prompt == 0), "a prompt of no tokens: failures=drop")
    if failures == "drop":
        leave_out("rows_zero_output", failed)
    leave_out("rows_zero_prompt", prompt == 0)
    if max_prompt_len is not None:
        leave_out(f"rows_prompt_over_{max_prompt_len}", prompt > max_prompt_len)
    rows, arrival, notes = np.flatnonzero(keep), None, dict[str, Any]()
    columns: dict[str, Any] = {}
    if rows.size:
        rows, arrival, notes = in_time_order(*times(table[TIME], "s"), rows, "s")
        columns = _sessions(table.iloc[rows], arrival)
    if failures == "mark":
        columns["failed"] = failed[rows]
        notes["num_failed"] = num_failed
    return Dataset(
        name=trace,
        prompt_len=prompt[rows],
        output_len=np.maximum(output[rows], 1),
        unit="tokens as OpenAI counted them",
        censored=failed[rows] if failures == "mark" else None,
        group=pd.factorize(columns["session"])[0].astype(np.int64) if "session" in columns else None,
        arrival=arrival,
        max_new_tokens=max_new_tokens,
        dropped=dropped,
        columns=columns,
        notes={"file": file.name, **notes, "failures": failures},
        **stated(origin, file),
    )


def _sessions(table: pd.DataFrame, arrival: Floats) -> dict[str, Any]:
    """Columns session, turn and gap of rows in order of time, as far as the file tells."""
    if SESSION not in table:
        return {}
    named = table[SESSION].notna().to_numpy()
    session = np.where(named, table[SESSION].astype(str), [f"row {row}" for row in table.index])
    turn = table.groupby(session, sort=False).cumcount().to_numpy(dtype=np.int64)
    out: dict[str, Any] = {"session": session.astype(str), "turn": turn}
    if ELAPSED in table:
        elapsed = pd.to_numeric(table[ELAPSED], errors="coerce").to_numpy(dtype=np.float64)
        ended = arrival + np.where(elapsed >= 0, elapsed, np.nan)
        out["gap"] = gaps(arrival, ended, pd.factorize(session)[0], turn > 0)
    return out


def gaps(start: Floats, ended: Floats, session: Ints, later: Flags) -> Floats:
    """Seconds from the end of a session's turn to the start of its next (N,), at least 0; 0 for the first of each.

    NaN where the end is not known.
    """
    before = pd.Series(ended).groupby(session).shift().to_numpy()
    gap: Floats = np.where(later, np.maximum(start - before, 0.0), 0.0)
    return gap
