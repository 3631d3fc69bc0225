"""Service: one engine and its live requests, driven by a step loop in a thread of its own.

The event loop hands requests to the inbox and reads streams; the step loop never waits for it. Each step crosses over once, with
all it made. Whatever goes wrong for one request ends that request; what goes wrong with the step loop ends all and is said.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from lengthwise.sched import (
    SLO,
    Batching,
    KVCache,
    LengthDistribution,
    Policy,
    Predictor,
    Preemption,
    Request,
    serve,
)
from lengthwise.sched.check import check
from lengthwise.sched.door import refusal

from ..native.clock import WallClock
from ..native.engine import NativeEngine
from ..native.executor import NativeExecutor
from ..native.generate import warm_up
from ..native.generation import GREEDY
from ..native.inbox import Inbox, StandIn
from ..native.sampling import SamplingParams
from .metrics import Metrics
from .predicting import Predicting
from .streams import Ending, Outbox, Piece, Stream
from .tally import Tally
from .timed import Timed

log = logging.getLogger(__name__)

RECENT = 64  # ends that the rate is taken from
LONGEST_RETRY = 60.0  # s
PATIENCE = 30.0  # s for threads to end


class Full(Exception):
    """As many requests wait as may; in about `retry_after` s there will be room."""

    def __init__(self, num_waiting: int, retry_after: float) -> None:
        super().__init__(f"{num_waiting} requests wait already, the most is that many; try again in {retry_after:.0f} s")
        self.retry_after = retry_after


class Down(Exception):
    """Nothing is taken in: the engine has failed, or is stopping."""


class Health(NamedTuple):
    """error: why the step loop has failed. last_step_age: s since a step ended, or since there was something to do; 0 while there
    is not."""

    ok: bool
    error: str | None
    draining: bool
    last_step_age: float
    num_waiting: int
    num_running: int


class Service:
    """`start` it, then `submit`. All methods are for the event loop's thread.

    max_waiting: requests that may wait (for a prediction, a slot, KV), those that were preempted included; one more is refused.
    predictor: predicts lengths, in its own thread; a policy that needs predictions waits prediction_deadline s for one, then
    `fallback_len` tokens stand in, as for a prediction that is no length. None: whoever submits says predicted_len. replay:
    answers may be forced to a length. starved_after: see Tally. check: assert all counts at every step. Raises ValueError for
    limits that do not fit each other or the model.
    """

    def __init__(
        self,
        engine: NativeEngine,
        kv: KVCache,
        policy: Policy,
        batching: Batching,
        preemption: Preemption,
        *,
        max_num_seqs: int,
        token_budget: int,
        max_model_len: int,
        predictor: Predictor | None = None,
        prediction_deadline: float = 0.05,
        fallback_len: float | None = None,
        max_waiting: int = 256,
        starved_after: float = 30.0,
        seed: int = 0,
        replay: bool = False,
        check: bool = False,
    ) -> None:
        model = engine.model
        if not 2 <= max_model_len <= model.max_positions:
            raise ValueError(f"max_model_len {max_model_len}: from 2 to the {model.max_positions} positions of {model.name}")
        if max_waiting < 1:
            raise ValueError(f"max_waiting {max_waiting}, the least is 1")
        if not 0.0 < prediction_deadline < math.inf:
            raise ValueError(f"prediction_deadline {prediction_deadline}: seconds above 0")
        if predictor is not None and fallback_len is None:
            raise ValueError("a predictor needs fallback_len, the tokens that stand in for a prediction that is none")
        self.model = model
        self.engine = engine
        self.max_waiting = max_waiting
        self.max_model_len = max_model_len
        self._kv = kv
        self._seed, self._replay = seed, replay
        self._max_num_seqs = max_num_seqs
        self._deadline = prediction_deadline
        self._needs_prediction = not policy.needs.isdisjoint(("prediction", "distribution"))
        if kv.indexes and not getattr(kv, "hash_tokens", 0):
            kv.use_hashes(kv.block_size)
        wake = threading.Event()
        self._clock = WallClock(wake)
        self._tally = Tally(starved_after)
        self._scheduler = Timed(
            policy, batching, kv, preemption, max_num_seqs=max_num_seqs, token_budget=token_budget,
            max_model_len=max_model_len, check=check, seconds=self._tally.scheduling,
        )  # fmt: skip
        self._inbox = Inbox(
            self._clock, model.vocab_size, hash_tokens=getattr(kv, "hash_tokens", 0), wake=wake,
            has_text=model.tokenizer is not None, door=self._refusal, freed=self._freed,
        )  # fmt: skip
        self._predicting: Predicting | None = None
        if predictor is not None and fallback_len is not None:
            self._predicting = Predicting(predictor, fallback_len, self._inbox.predicted)
        self.metrics = Metrics(
            model.name, self._tally, gauges=self._gauges, counters=self._counters, fallbacks=self._fallbacks,
            cache={"block_size": kv.block_size, "num_gpu_blocks": kv.num_blocks},
            prediction=None if self._predicting is None else self._predicting.seconds,
        )  # fmt: skip
        self._executor: NativeExecutor
        self._outbox: Outbox
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="lengthwise-steps", daemon=True)
        self._streams: dict[Request, Stream] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopped = asyncio.Event()
        self._busy_since = 0.0
        self._ends: deque[float] = deque(maxlen=RECENT)
        self._error: str | None = None
        self._draining = False

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take memory for KV, warm the engine up, and begin: takes seconds. `loop` is where streams are read."""
        if self._loop is not None:
            raise ValueError("a service starts once")
        self._loop = loop
        warm_up(self.engine, self._kv.block_size)
        self._executor = self.engine.executor(
            self._kv, self._clock, sampling=self._inbox.sampling, seed=self._seed, max_num_seqs=self._max_num_seqs,
            answer_lens=self._inbox.answer_lens if self._replay else None, texts=self.model.tokenizer is not None,
        )  # fmt: skip
        self._outbox = Outbox(self._executor, self._tally, self._send, self._end)
        self._clock.restart()
        if self._predicting is not None:
            self._predicting.thread.start()
        self._thread.start()

    async def drain(self, timeout: float) -> int:
        """Take in nothing more and wait for what lives, at most `timeout` s; the rest is aborted. Returns how many that were."""
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
            return 0
        except TimeoutError:
            rest = list(self._streams.values())
        for stream in rest:
            self._inbox.abort(stream.key)
        await asyncio.wait_for(self._idle.wait(), PATIENCE)
        return len(rest)

    async def close(self) -> None:
        """End whatever lives, and the threads."""
        self._draining = True
        for stream in self._streams.values():
            self._inbox.abort(stream.key)
        self._inbox.close()
        if self._predicting is not None and self._predicting.thread.is_alive():
            self._predicting.close()
        if self._loop is None:
            return
        await asyncio.wait_for(self._stopped.wait(), PATIENCE)
        self._thread.join(PATIENCE)
        if self._predicting is not None:
            self._predicting.thread.join(self._deadline)  # it ends with the process, if a predictor does not come back

    # --- requests -----------------------------------------------------------------------------------------------------

    async def submit(
        self,
        key: str,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        params: SamplingParams = GREEDY,
        *,
        prompt: str | None = None,
        client: str | None = None,
        priority: float = 0.0,
        slo: SLO | None = None,
        timeout: float | None = None,
        predicted_len: float | None = None,
        answer_len: int | None = None,
        session: str | None = None,
    ) -> Stream:
        """Hand in a request. prompt: its text, for the predictor. timeout: s from now. predicted_len: tokens, instead of what
        the predictor says. answer_len: the answer has so many, whatever they are; the scheduler is not told.

        Raises Down, Full, and ValueError, each before anything has changed, the last for what `Inbox.submit` refuses, a request
        that can never be served (with the numbers), a predicted_len that is no length, one that is missing where the policy
        needs it and nobody predicts, and an answer_len without replay."""
        if (why := self._why_down()) is not None:
            raise Down(why)
        if (num_waiting := self.num_waiting) >= self.max_waiting:
            self._tally.num_full += 1
            raise Full(num_waiting, self._retry_after(num_waiting))
        asks = self._predicting if predicted_len is None else None
        try:
            if answer_len is not None and not self._replay:
                raise ValueError(f"request {key!r} has an answer_len, which only replay takes")
            if predicted_len is None and self._predicting is None and self._needs_prediction:
                raise ValueError(f"request {key!r} has no predicted_len; the policy needs one, and there is no predictor")
            request = self._inbox.submit(
                key, prompt_ids, max_new_tokens, params, answer_len=answer_len, prompt=prompt, client=client,
                priority=priority, slo=slo, timeout=timeout, session=session,
                prediction=None if predicted_len is None else LengthDistribution.point(predicted_len),
                stand_in=None if asks is None else StandIn(self._deadline, asks.stand_in()),
            )  # fmt: skip
        except ValueError:
            self._tally.num_invalid += 1
            raise
        stream = Stream(key, request)
        if not self._streams:
            self._idle.clear()
            self._busy_since = request.arrival
        self._streams[request] = stream
        if asks is not None:
            asks.ask(request)
        return stream

    def abort(self, key: str) -> None:
        """End a request within a step, whatever it is at; nothing for keys of nobody."""
        self._inbox.abort(key)

    # --- what can be seen ---------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """s of the service's clock."""
        return self._clock.now

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that live and do not run. While the step loop moves one it may count as waiting a moment too long."""
        leaving = 0 if self._loop is None else self._outbox.num_leaving
        return max(self._inbox.num_live - self._scheduler.num_running - leaving, 0)

    def health(self) -> Health:
        why = self._error
        if why is None and self._loop is not None and not self._thread.is_alive() and not self._draining:
            why = "the step loop has ended"
        return Health(why is None, why, self._draining, self._last_step_age(), self.num_waiting, self.num_running)

    def idle_check(self) -> None:
        """Raises AssertionError unless nothing lives, nothing is kept and all blocks are back. Call it when nothing lives."""
        kept = len(self._streams), self._inbox.num_live, len(self._executor.generations), self._kv.in_use
        if any(kept):
            raise AssertionError(f"{kept[0]} streams, {kept[1]} in the inbox, {kept[2]} generations, {kept[3]} blocks in use")
        check(self._scheduler, self._max_num_seqs)

    def _last_step_age(self) -> float:
        return self._clock.now - max(self._outbox.last_step, self._busy_since) if self._streams else 0.0

    def _why_down(self) -> str | None:
        if self._loop is None:
            return "the engine has not started"
        return self.health().error or ("the engine takes in nothing more" if self._draining else None)

    def _retry_after(self, num_waiting: int) -> float:
        """s in which as many end as wait, at the rate of late."""
        if len(self._ends) < 2:
            return 1.0
        rate = (len(self._ends) - 1) / max(self._clock.now - self._ends[0], 1e-9)
        return min(max(num_waiting / rate, 1.0), LONGEST_RETRY)

    def _gauges(self) -> dict[str, float]:
        return {
            "vllm:num_requests_running": self.num_running,
            "vllm:num_requests_waiting": self.num_waiting,
            "vllm:kv_cache_usage_perc": self._kv.in_use / self._kv.num_blocks,
            "lengthwise_last_step_age_seconds": self._last_step_age(),
        }

    def _counters(self) -> dict[str, float]:
        scheduler = self._scheduler
        return {"vllm:num_preemptions": scheduler.num_preemptions, "vllm:prefix_cache_hits": scheduler.cached_tokens}

    def _fallbacks(self) -> dict[str, float]:
        counts = {} if self._predicting is None else self._predicting.counts
        return {**counts, "late": self._inbox.num_late}

    # --- in the step loop's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            serve(self._inbox, self._scheduler, self._executor, self._clock, self._outbox)
        except Exception as error:
            log.exception("the step loop has failed")
            self._call(self._fail, f"{type(error).__name__}: {error}")
        self._call(self._stopped.set)

    def _refusal(self, request: Request) -> str | None:
        scheduler = self._scheduler
        return refusal(
            request, self._kv, whole_prompts=scheduler.batching.whole_prompts, token_budget=scheduler.token_budget,
            max_model_len=scheduler.max_model_len, clip=False,
        )  # fmt: skip

    def _freed(self, request: Request) -> None:
        self._outbox.freed(request)

    def _send(self, pieces: list[Piece], time: float) -> None:
        self._call(self._put, pieces, time)

    def _end(self, ending: Ending) -> None:
        self._call(self._put_end, ending)

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        """Have `function` called in the event loop's thread."""
        assert self._loop is not None
        with suppress(RuntimeError):  # the event loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(function, *args)

    # --- in the event loop's thread, what the other tells ---------------------------------------------------------------

    def _put(self, pieces: list[Piece], time: float) -> None:
        for piece in pieces:
            if (stream := self._streams.get(piece.request)) is not None:
                stream.put(piece, time)

    def _put_end(self, ending: Ending) -> None:
        request = ending.piece.request
        stream = self._streams.pop(request, None)
        if stream is None:  # it was ended by a failure
            return
        stream.put(ending.piece, ending.time, ending.reason)
        self._ends.append(ending.time)
        self._note(stream, ending.num_tokens, ending.reason, ending.time)
        if not self._streams:
            self._idle.set()

    def _fail(self, error: str) -> None:
        """The step loop is gone: so is everybody."""
        self._error = error
        self._draining = True
        now = self._clock.now
        streams, self._streams = self._streams, {}
        for request, stream in streams.items():
            reason = f"failed: the engine has failed ({error})"
            stream.put(Piece(request, None, "", None), now, reason)
            self._note(stream, self._scheduler.generated(request), reason, now)
        self._idle.set()

    def _note(self, stream: Stream, num_tokens: int, reason: str, now: float) -> None:
        """One line for a request that has ended; never what it said."""
        request = stream.request
        times = [x - request.arrival for x in (request._first_scheduled, request._first_token) if x >= 0.0]
        said = "".join(f", {name} after {x:.3f} s" for name, x in zip(("scheduled", "first token"), times, strict=False))
        log.info(
            "request %r ended by %s: %d + %d tokens, %.3f s%s",
            stream.key, reason, request.prompt_len, num_tokens, now - request.arrival, said,
        )  # fmt: skip
