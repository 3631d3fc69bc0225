"""Recorder: the Observer that turns a run into columns.

It is called once per plan and once per request, so each call packs one row of plain numbers into a byte buffer and nothing
else; every 16,384 rows numpy makes columns of them, adds up what a window needs and counts the gaps between tokens.

How gaps between tokens (ITL) are counted, the first token of a request excepted: a plan of k steps gives each decoding row k
gaps of its mean step duration (exact for k = 1). A row whose last token is older than the plan's start has one longer gap in
its first step: behind others' prefills (prefill_first), or back from a preemption, whose whole time away is one gap; after a
recompute that gap ends with the chunk that emits the next token. Gaps so add up to last token - first token.
"""

from __future__ import annotations

import math
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lengthwise.sched import Outcome, Phase, Plan, Request, Scheduler

from .histogram import Histogram

BATCH = 16_384  # rows per numpy conversion
KEPT_REASONS = 10_000  # distinct reasons kept word for word; rejections name numbers, so that there may be many

STATUSES = ("finished", "rejected", "aborted", "timeout", "failed", "unfinished")

STEP = np.dtype(
    [("start", "f8"), ("end", "f8"), ("prefill_pairs", "f8")]
    + [
        (name, "i4")
        for name in (
            "num_steps", "num_decode", "num_padding", "context_tokens", "prefill_tokens", "num_chunks", "num_waiting",
            "num_running", "kv_free_blocks", "emitted", "apart", "kv_held",  # kv_free_blocks: also the evictable ones
        )
    ]
)  # fmt: skip
STEP_COLUMNS = STEP.names[:-3]  # type: ignore[index]  # emitted, apart and kv_held are used up here
ENDED = np.dtype(
    [(name, "f8") for name in ("arrival", "first_scheduled", "first_token", "ended", "score", "priority")]
    + [
        (name, "i4")
        for name in (
            "rid", "prompt_len", "output_len", "max_new_tokens", "num_preemptions", "recomputed", "cached", "reason", "client",
        )
    ]
)  # fmt: skip
STEP_SIZE, ENDED_SIZE = STEP.itemsize, ENDED.itemsize
STEP_BYTES, ENDED_BYTES = STEP_SIZE * BATCH, ENDED_SIZE * BATCH

Columns = dict[str, NDArray[Any]]


class Recorder:
    """Records one run. window: [begin, end) s, what `window_totals` and `itl` cover. steps: keep the rows of steps.

    After the run: `requests()`, `steps()`, `preemptions()` give columns; `window_totals`, `run_totals`, `itl`, `end`.
    """

    inside = True  # whether the engine itself is watched: when it schedules, preempts, finds prompts cached

    __slots__ = (
        "_aways", "_client_codes", "_decode_end", "_ended_buffer", "_ended_offset", "_gaps", "_last_token", "_pack_ended",
        "_pack_step", "_reason_codes", "_requests", "_step_buffer", "_step_offset", "_steps", "clients", "end", "indexes",
        "itl", "keeps_steps", "num_blocks", "reasons", "run_totals", "slos", "window", "window_totals",
    )  # fmt: skip

    def __init__(self, *, window: tuple[float, float] = (-math.inf, math.inf), steps: bool = True) -> None:
        self.window = window
        self.keeps_steps = steps
        self.end = 0.0  # s, the last thing seen
        self.itl = Histogram()
        self.window_totals: dict[str, float] = {}
        self.run_totals: dict[str, float] = {}
        self.num_blocks = 0
        self.indexes = False  # whether the KV cache keeps prefixes, so that `cached` says something
        self.slos: dict[int, tuple[float, float, float]] = {}  # rid -> ttft, tpot, e2e; only requests that carry their own
        self.reasons: list[str] = []
        self.clients: list[str | None] = [None]
        self._reason_codes: dict[str, int] = {}
        self._client_codes: dict[str | None, int] = {None: 0}
        self._steps: dict[str, list[NDArray[Any]]] = {name: [] for name in STEP_COLUMNS}
        self._requests: dict[str, list[NDArray[Any]]] = {name: [] for name in ENDED.names or ()}
        self._aways: list[tuple[int, float, float]] = []  # (rid, left, back) of each preemption, back NaN if never
        self._gaps: list[tuple[float, float, int]] = []  # (time, gap, rows) of tokens set apart from their plan's mean
        self._last_token: dict[int, float] = {}  # rid -> s, of preempted requests
        self._decode_end = -math.inf  # end of the last plan with decodes
        self._step_buffer = bytearray(STEP_BYTES)
        self._step_offset = 0
        self._pack_step = Struct("=3d12i").pack_into
        self._ended_buffer = bytearray(ENDED_BYTES)
        self._ended_offset = 0
        self._pack_ended = Struct("=6d9i").pack_into

    # --- the Observer -------------------------------------------------------------------------------------------------

    def step(self, start: float, plan: Plan, outcome: Outcome, scheduler: Scheduler) -> None:
        """Record one plan and its outcome, already booked."""
        end = outcome.ends[-1]
        chunks = plan.chunks
        num_decode = plan.num_decode
        prefill = emitted = apart = 0
        pairs = 0.0
        if plan.leaves:
            for req in plan.leaves:
                if req._phase < Phase.FINISHED:
                    self._last_token[req.rid] = self._decode_end
        if num_decode:
            joins = plan.joins
            if joins:
                for req in joins:
                    last_token = req._first_token
                    if req._resumes:
                        last_token = self._last_token.get(req.rid, last_token)
                    if start > last_token:
                        apart += 1
                        self._gaps.append((end, start - last_token + (end - start) / outcome.num_steps, 1))
            if start > self._decode_end and num_decode > len(joins):
                stayed = num_decode - len(joins)
                apart += stayed
                self._gaps.append((end, start - self._decode_end + (end - start) / outcome.num_steps, stayed))
            self._decode_end = end
        if chunks:
            for req, at, length, last in chunks:
                prefill += length
                pairs += length * (at + length / 2)
                if last:
                    emitted += 1
                    if req._resumes and at + length > req.prompt_len:  # prefilled again: not its first token
                        self._gaps.append((end, end - self._last_token.get(req.rid, req._first_token), 1))
                        self._last_token[req.rid] = end
        kv = scheduler.kv
        used = kv.in_use
        offset = self._step_offset
        self._pack_step(
            self._step_buffer, offset, start, end, pairs, outcome.num_steps, num_decode, plan.num_padding, plan.context_tokens,
            prefill, len(chunks), len(scheduler.waiting), len(scheduler.running.members) + len(scheduler.prefilling),
            kv.num_blocks - used, emitted, apart, used + scheduler.given_back,
        )  # fmt: skip
        self._step_offset = offset = offset + STEP_SIZE
        if offset == STEP_BYTES:
            self._flush_steps()
        elif offset == STEP_SIZE:
            self.num_blocks, self.indexes = kv.num_blocks, kv.indexes

    def ended(self, request: Request, num_tokens: int, reason: str, now: float) -> None:
        """Record the end of `request`, for whatever reason."""
        code = self._reason_codes.get(reason)
        if code is None:
            code = self._new_reason(reason)
        client = request.client
        if client is not None:
            client_code = self._client_codes.get(client)
            if client_code is None:
                client_code = self._client_codes[client] = len(self.clients)
                self.clients.append(client)
        else:
            client_code = 0
        prediction = request.prediction
        if request._resumes:
            self._note_aways(request)
        if request.slo is not None:
            slo = request.slo
            self.slos[request.rid] = tuple(math.nan if x is None else x for x in (slo.ttft, slo.tpot, slo.e2e))  # type: ignore[assignment]
        offset = self._ended_offset
        self._pack_ended(
            self._ended_buffer, offset, request.arrival, request._first_scheduled, request._first_token, now,
            math.nan if prediction is None else prediction.score, request.priority, request.rid, request.prompt_len,
            num_tokens, request.max_new_tokens, request._num_preemptions, request._recomputed, request._cached, code,
            client_code,
        )  # fmt: skip
        self._ended_offset = offset = offset + ENDED_SIZE
        if offset == ENDED_BYTES:
            self._flush_ended()

    def cut_off(self, scheduler: Scheduler, now: float) -> None:
        """The run stops at `now` (s): record every request that is still in `scheduler` as unfinished."""
        groups = (scheduler.pending, scheduler.waiting, scheduler.prefilling, scheduler.running.members)
        left = sorted((req for group in groups for req in group), key=lambda r: r.rid)
        for req in left:
            self.ended(req, scheduler.generated(req), "unfinished", now)
        if left:
            self.end = max(self.end, now)

    # --- columns ------------------------------------------------------------------------------------------------------

    def requests(self) -> Columns:
        """Columns of ENDED, sorted by rid, `status` (code of STATUSES) beside; -1.0 in times stands as NaN. Frees them here."""
        self._flush_ended()
        out = self._join(self._requests, ENDED)
        order = np.argsort(out["rid"], kind="stable")
        for name in out:
            out[name] = out[name][order]
        repeated = np.flatnonzero(np.diff(out["rid"]) == 0)
        if repeated.size:
            raise ValueError(f"request {out['rid'][repeated[0]]} ended twice")
        for name in ("first_scheduled", "first_token"):
            column = out[name]
            column[column < 0] = math.nan
        codes = np.array([STATUSES.index(_status(reason)) for reason in self.reasons], dtype=np.int8)
        out["status"] = codes[out["reason"]] if len(codes) else np.empty(0, np.int8)
        return out

    def steps(self) -> Columns:
        """Columns of STEP_COLUMNS, one row per plan; empty if they were not kept. Frees them here."""
        self._flush_steps()
        return self._join(self._steps, STEP)

    def further(self, n: int) -> Columns:
        """More columns (n,) of requests.parquet, of a workload of n requests."""
        return {}

    def preemptions(self) -> Columns:
        """rid, left, back (s; back NaN if it never came back), one row per preemption, sorted by rid and time."""
        rows = np.array(sorted(self._aways), dtype=np.float64).reshape(-1, 3)
        return {"rid": rows[:, 0].astype(np.int32), "left": rows[:, 1].copy(), "back": rows[:, 2].copy()}

    @staticmethod
    def _join(parts: dict[str, list[NDArray[Any]]], dtype: np.dtype) -> Columns:
        out: Columns = {}
        for name, arrays in parts.items():  # column by column, so that memory never holds two copies of all
            out[name] = np.concatenate(arrays) if arrays else np.empty(0, dtype[name])
            arrays[:] = []
        return out

    # --- inside -------------------------------------------------------------------------------------------------------

    def _new_reason(self, reason: str) -> int:
        if len(self.reasons) >= KEPT_REASONS:
            kind = reason.split(":", 1)[0]
            reason = f"{kind}: one of more than {KEPT_REASONS} different reasons"
            if reason in self._reason_codes:
                return self._reason_codes[reason]
        code = self._reason_codes[reason] = len(self.reasons)
        self.reasons.append(reason)
        return code

    def _note_aways(self, request: Request) -> None:
        times = request._resumes or []
        self._last_token.pop(request.rid, None)
        for i in range(0, len(times), 2):
            self._aways.append((request.rid, times[i], times[i + 1] if i + 1 < len(times) else math.nan))

    def _flush_ended(self) -> None:
        rows = np.frombuffer(self._ended_buffer, ENDED, self._ended_offset // ENDED_SIZE)
        if len(rows):
            for name, parts in self._requests.items():
                parts.append(rows[name].copy())
            self.end = max(self.end, float(rows["ended"].max()))
        self._ended_offset = 0

    def _flush_steps(self) -> None:
        rows = np.frombuffer(self._step_buffer, STEP, self._step_offset // STEP_SIZE)
        self._step_offset = 0
        if not len(rows):
            return
        self.end = max(self.end, float(rows["end"][-1]))
        if self.keeps_steps:
            for name, parts in self._steps.items():
                parts.append(rows[name].copy())
        begin, close = self.window
        start, end = rows["start"], rows["end"]
        duration = end - start
        inside = (end >= begin) & (end < close)
        overlap = np.clip(np.minimum(end, close) - np.maximum(start, begin), 0.0, None)
        share = np.divide(overlap, duration, out=inside.astype(np.float64), where=duration > 0)
        decoded = rows["num_decode"].astype(np.int64) * rows["num_steps"]
        mean = duration / rows["num_steps"]
        self.itl.add(mean[inside], (decoded - rows["apart"])[inside])
        if self._gaps:
            gaps = np.array(self._gaps)
            gaps = gaps[(gaps[:, 0] >= begin) & (gaps[:, 0] < close)]
            self.itl.add(gaps[:, 1], gaps[:, 2])
            self._gaps.clear()
        # sums, not dots: a dot starts BLAS threads, which cost more than all the rest and may change the last bit
        for totals, part, emits in ((self.window_totals, share, inside), (self.run_totals, np.ones(len(rows)), True)):
            seconds = duration * part
            for name, amount in (
                ("busy", seconds.sum()),
                ("steps", (rows["num_steps"] * part).sum()),
                ("output_tokens", (decoded * part).sum() + rows["emitted"][emits].sum()),
                ("computed_tokens", ((decoded + rows["prefill_tokens"]) * part).sum()),
                ("kv_held_block_seconds", (rows["kv_held"] * seconds).sum()),
            ):
                totals[name] = totals.get(name, 0.0) + float(amount)


def _status(reason: str) -> str:
    """The status that a reason stands for; stop and length are finished."""
    kind = reason.split(":", 1)[0]
    if kind in ("stop", "length"):
        return "finished"
    if kind in STATUSES:
        return kind
    raise ValueError(f"reason {reason!r} names no status of {', '.join(STATUSES)}, stop or length")
