"""Service: one engine and its live requests, driven by a step loop in a thread of its own.

The event loop hands requests to the inbox and reads streams; the step loop never waits for it. A step crosses over once with
all its tokens, and once for each request that it ends. Whatever goes wrong for one request ends that request; what goes wrong
with the step loop ends all and is said.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

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
from lengthwise.sched.admission import Admission
from lengthwise.sched.check import check
from lengthwise.sched.door import refusal
from lengthwise.sched.victims import VictimRule

from ..native.clock import WallClock
from ..native.engine import NativeEngine
from ..native.generate import warm_up
from ..native.generation import GREEDY
from ..native.inbox import Inbox, StandIn
from ..native.sampling import SamplingParams
from ..native.workers import give_back
from .health import Down, Full, Health
from .live import Live
from .metrics import Metrics
from .outbox import Outbox
from .predicting import Predicting
from .refining import Refines, Refining
from .streams import Stream
from .tally import Tally
from .timed import Timed
from .traces import Traces

log = logging.getLogger(__name__)

PATIENCE = 30.0  # s, for a step to end
GRACE = 1.0  # s, for a predictor to come back


class Service:
    """Takes memory for KV and warms the engine up when it is made, which takes seconds. `start` it, then `submit`; everything
    is for the event loop's thread.

    admission, victim: as Scheduler takes them. max_waiting: requests that may wait (for a prediction, a slot, KV), those that
    were preempted included; one more is refused.
    predictor: predicts lengths, in its own thread; a policy that needs predictions waits prediction_deadline s for one, then
    `fallback_len` tokens stand in, as for a prediction that is no length. None: whoever submits says predicted_len. refine:
    predicts anew those who decode, in the step thread. replay: answers may be forced to a length. starved_after: see Tally.
    check: assert all counts at every step. traces: takes a span of each request; closed with the service. Raises ValueError
    for limits that do not fit each other or the model.
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
        admission: Admission | None = None,
        victim: VictimRule | None = None,
        predictor: Predictor | None = None,
        prediction_deadline: float = 0.05,
        fallback_len: float | None = None,
        refine: Refines | None = None,
        max_waiting: int = 256,
        starved_after: float = 30.0,
        seed: int = 0,
        replay: bool = False,
        check: bool = False,
        traces: Traces | None = None,
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
        self.max_model_len = max_model_len
        self.max_waiting = max_waiting
        self._deadline = prediction_deadline
        self._replay = replay
        if kv.indexes and not getattr(kv, "hash_tokens", 0):
            kv.use_hashes(kv.block_size)
        wake = threading.Event()
        self._clock = clock = WallClock(wake)
        self._tally = tally = Tally(starved_after)
        self._scheduler = scheduler = Timed(
            policy, batching, kv, preemption, max_num_seqs=max_num_seqs, token_budget=token_budget,
            max_model_len=max_model_len, admission=admission, victim=victim,
            refine_every=0 if refine is None else refine.every, check=check, seconds=tally.scheduling,
        )  # fmt: skip
        self._needs_prediction = not scheduler.needs.isdisjoint(("prediction", "distribution"))
        self._inbox = inbox = Inbox(
            clock, model.vocab_size, hash_tokens=getattr(kv, "hash_tokens", 0), wake=wake,
            has_text=model.tokenizer is not None, door=self._refusal, freed=self._freed,
        )  # fmt: skip
        self._predicting = predicting = None
        if predictor is not None and fallback_len is not None:
            self._predicting = predicting = Predicting(predictor, fallback_len, inbox.predicted)
        self._traces = traces
        self._live = live = Live(None if traces is None else lambda stream, ending: traces.ended(stream, ending, self.now))
        warm_up(engine, kv.block_size)
        self._executor = engine.executor(
            kv, clock, sampling=inbox.sampling, answer_lens=inbox.answer_lens, seed=seed, max_num_seqs=max_num_seqs,
            texts=model.tokenizer is not None, probe=engine.look_at(None if refine is None else refine.layer),
        )  # fmt: skip
        self._refining = None if refine is None else Refining(refine.refiner((), (), seed))
        self._outbox = Outbox(
            self._executor, tally, send=partial(self._call, live.put), end=partial(self._call, live.end),
            learning=predicting if predicting is not None and predicting.learns else None,
        )  # fmt: skip
        self.metrics = Metrics(
            model.name, tally, scheduler, inbox, predicting, self._refining, num_waiting=lambda: self.num_waiting,
            step_age=self._step_age,
        )  # fmt: skip
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="lengthwise-steps", daemon=True)
        self._stopped = asyncio.Event()
        self._error: str | None = None
        self._draining = False

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin. loop: where streams are read. Raises ValueError the second time."""
        if self._loop is not None:
            raise ValueError("a service starts once")
        self._loop = loop
        give_back()
        gc.freeze()  # to look for garbage among all that a model has loaded would hold every stream for 0.2 s
        self._clock.restart()
        if self._predicting is not None:
            self._predicting.thread.start()
        self._thread.start()

    async def drain(self, timeout: float) -> int:
        """Take in nothing more and wait for what lives, at most `timeout` s; the rest is aborted. Returns how many."""
        self._draining = True
        if await _comes(self._live.idle, timeout):
            return 0
        rest = list(self._live.streams)
        for request in rest:
            self._inbox.abort(request)
        await _comes(self._live.idle, PATIENCE)
        return len(rest)

    async def close(self) -> None:
        """End whatever lives, and the threads; one that hangs ends with the process."""
        await self.drain(0.0)
        self._inbox.close()
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)
        if self._loop is None:
            return
        gc.unfreeze()
        if self._predicting is not None:
            self._predicting.close()
        if not await _comes(self._stopped, PATIENCE):
            log.error("the step loop has been at one step for more than %.0f s", PATIENCE)
            return
        self._thread.join()
        if self._predicting is not None:
            self._predicting.thread.join(GRACE)

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
        answers_before: Sequence[int] | None = None,
        trace: Mapping[str, str] | None = None,
    ) -> Stream:
        """Hand in a request. prompt: its text, and answers_before: tokens of the earlier answers, for the predictor. timeout: s
        from now. predicted_len: tokens, instead of what the predictor says. answer_len: the answer has so many, whatever they
        are; the scheduler is not told. trace: the span it belongs to, as `traceparent` and `tracestate`.

        Raises Down, Full, and ValueError, each before anything has changed, the last for what `Inbox.submit` refuses, a request
        that can never be served (with the numbers), a predicted_len that is no length, one that is missing where the policy
        needs it and nobody predicts, and an answer_len without replay."""
        self.check_room()
        asks = self._predicting if predicted_len is None else None
        try:
            if answer_len is not None and not self._replay:
                raise ValueError(f"request {key!r} has an answer_len, which only replay takes")
            if predicted_len is None and self._predicting is None and self._needs_prediction:
                raise ValueError(f"request {key!r} has no predicted_len; the policy needs one, and there is no predictor")
            request = self._inbox.submit(
                key, prompt_ids, max_new_tokens, params, answer_len=answer_len, prompt=prompt, client=client,
                priority=priority, slo=slo, timeout=timeout, session=session, answers_before=answers_before,
                prediction=None if predicted_len is None else LengthDistribution.point(predicted_len),
                stand_in=None if asks is None else StandIn(self._deadline, asks.stand_in),
            )  # fmt: skip
        except ValueError:
            self._tally.num_invalid += 1
            raise
        stream = Stream(key, request, trace)
        self._live.add(stream)
        if asks is not None:
            asks.ask(request)
        return stream

    def check_room(self) -> None:
        """Raises Down or Full, as `submit` would now."""
        if (why := self._why_down()) is not None:
            raise Down(why)
        if (num_waiting := self.num_waiting) >= self.max_waiting:
            self._tally.num_full += 1
            raise Full(num_waiting, self.max_waiting, self._live.retry_after(num_waiting, self.now))

    def abort(self, stream: Stream) -> None:
        """End a request within a step, whatever it is at; nothing for one that has ended."""
        self._inbox.abort(stream.request)

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
        """Requests that live and do not run. One that is on its way may count as waiting for a moment too long."""
        return max(self._inbox.num_live - self._scheduler.num_running - self._outbox.num_leaving, 0)

    def health(self) -> Health:
        error = self._error
        if error is None and self._loop is not None and not self._thread.is_alive() and not self._draining:
            error = "the step loop has ended"
        return Health(error is None, error, self._draining, self._step_age(), self.num_waiting, self.num_running)

    def idle_check(self) -> None:
        """Raises AssertionError unless nothing is kept of anybody and all blocks are back. Call it when nothing lives."""
        kept = {
            "streams": len(self._live.streams), "requests in the inbox": self._inbox.num_live,
            "generations": len(self._executor.generations), "blocks in use": self._scheduler.kv.in_use,
        }  # fmt: skip
        if any(kept.values()):
            raise AssertionError(f"kept: {kept}")
        check(self._scheduler, self._scheduler.max_num_seqs)

    def _step_age(self) -> float:
        return self.now - max(self._outbox.last_step, self._live.busy_since) if self._live.streams else 0.0

    def _why_down(self) -> str | None:
        if self._loop is None:
            return "the engine has not started"
        return self.health().error or ("the engine takes in nothing more" if self._draining else None)

    # --- in the step loop's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            serve(self._inbox, self._scheduler, self._executor, self._clock, self._outbox, self._refining)
        except Exception as error:
            log.exception("the step loop has failed")
            self._call(self._fail, f"{type(error).__name__}: {error}")
        self._call(self._stopped.set)

    def _refusal(self, request: Request) -> str | None:
        scheduler = self._scheduler
        return refusal(
            request, scheduler.kv, whole_prompts=scheduler.batching.whole_prompts, token_budget=scheduler.token_budget,
            max_model_len=scheduler.max_model_len, clip=False,
        )  # fmt: skip

    def _freed(self, request: Request) -> None:
        self._outbox.freed(request)

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        """Have `function` called in the event loop's thread."""
        assert self._loop is not None
        with suppress(RuntimeError):  # the event loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(function, *args)

    def _fail(self, error: str) -> None:
        """In the event loop's thread: the step loop is gone."""
        self._error = error
        reason, now = f"failed: the engine has failed ({error})", self.now
        for request in self._live.streams:
            self._tally.ended(request, self._scheduler.generated(request), reason, now)
        self._live.end_all(reason, now, self._scheduler.generated)


async def _comes(event: asyncio.Event, timeout: float) -> bool:
    """Whether it is set within `timeout` s."""
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout)
    return event.is_set()
