"""Ledger: where every request stands, what KV it holds, and the moves between; it is also what a policy may see (View).

Each move keeps the queues, the KV accounting and the private slots of the request in step with each other.
"""

from __future__ import annotations

from typing import Any

from .kv import KVCache
from .policy import Policy
from .request import Phase, Request
from .running import Running
from .waiting import Waiting

PENDING, WAITING, PREFILLING, DECODING, PAUSED = (
    Phase.PENDING, Phase.WAITING, Phase.PREFILLING, Phase.DECODING, Phase.PAUSED,
)  # fmt: skip


class Ledger:
    """Requests by phase: pending, waiting (with the paused among them), prefilling, running (the decode set)."""

    def __init__(self, policy: Policy, kv: KVCache) -> None:
        self.policy = policy
        self.kv = kv
        self.now = 0.0
        self.step_time = 0.0
        self.running = Running(policy, self)
        self.waiting = Waiting()  # waiting and paused requests, in one order
        self.prefilling: dict[Request, None] = {}  # in order of admission
        self.paused: dict[Request, None] = {}
        self.pending: dict[Request, None] = {}
        self.counts = dict.fromkeys(("injected", "finished", "rejected", "aborted", "failed"), 0)
        self.num_preemptions = 0
        self.recomputed_tokens = 0
        self.joins: dict[Request, None] = {}  # changes of the decode set that no plan has told yet
        self.leaves: list[Request] = []

    # --- what a policy may know (View) --------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        return self.running.step

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running.members) + len(self.prefilling)

    @property
    def free_tokens(self) -> int:
        return self.kv.free_tokens

    def generated(self, req: Request) -> int:
        since = req._decode_from
        return req._generated if since < 0 else req._generated + self.running.step - since

    def computed(self, req: Request) -> int:
        since = req._decode_from
        return req._computed if since < 0 else req._computed + self.running.step - since

    def cached_len(self, req: Request) -> int:
        return self.kv.lookup(req)

    def client_running(self, client: str | None) -> int:
        return sum(r.client == client for group in (self.running.members, self.prefilling) for r in group)

    def future_peak(self) -> float:
        """Sort by remaining, longest first: the peak is the greatest (k x remaining_k + KV of the k longest)."""
        rows = []
        for group in (self.running.members, self.prefilling):
            for r in group:
                if r.prediction is None:
                    raise ValueError(f"request {r.rid} has no prediction; future_peak needs one")
                g = self.generated(r)
                rows.append((r.prediction.expected_remaining(g), r.prompt_len + g))
        peak = held = 0.0
        for k, (left, tokens) in enumerate(sorted(rows, reverse=True), 1):
            held += tokens
            peak = max(peak, held + k * left)
        return peak

    # --- what a request holds -----------------------------------------------------------------------------------------

    def capacity(self, req: Request) -> int:
        """Tokens that the blocks of `req` have room for."""
        return self.computed(req) if req._prefilled else req.prompt_len + req._generated

    def blocks(self, req: Request) -> int:
        return self.kv.held(req, self.capacity(req))

    def next_block(self, req: Request) -> int:
        """Blocks that `req` needs for its next token, if it decodes (or resumes to)."""
        if not req._prefilled:
            return 0
        held = self.computed(req)
        return self.kv.held(req, held + 1) - self.kv.held(req, held)

    def rank(self, req: Request) -> tuple[Any, float, int]:
        """Its place in the one order: key, arrival, order of entry."""
        return self.policy.key(req, self), req.arrival, req._entry

    # --- moves --------------------------------------------------------------------------------------------------------

    def enqueue(self, req: Request) -> None:
        req._phase = WAITING
        self.policy.on_arrival(req)
        key = self.policy.key(req, self)
        if key != key:  # NaN would sort anywhere and take others with it
            raise ValueError(f"{type(self.policy).__name__} gives request {req.rid} the key {key}: {req!r}")
        self.waiting.push(req, key)

    def schedule(self, req: Request) -> None:
        """Take `req` out of the waiting: it prefills, goes on prefilling, or (paused while decoding) decodes again."""
        self.waiting.remove(req)
        if req._first_scheduled < 0.0:
            req._first_scheduled = self.now
        elif req._resumes:
            req._resumes.append(self.now)
        if req._phase == PAUSED:
            del self.paused[req]
        else:
            self.kv.allocate(req, req.prompt_len + req._generated)
        if req._prefilled:
            self.start_decoding(req)
        else:
            req._phase = PREFILLING
            self.prefilling[req] = None

    def start_decoding(self, req: Request) -> None:
        req._phase = DECODING
        self.kv.join(req._computed)
        self.running.join(req)
        self.joins[req] = None

    def end_prefill(self, req: Request, now: float) -> None:
        """Its last chunk is done and has emitted a token at `now` (s)."""
        del self.prefilling[req]
        if req._first_token < 0.0:
            req._first_token = now
        req._generated += 1
        req._prefilled = True
        self.start_decoding(req)

    def pause(self, req: Request) -> None:
        """Take `req` off the batch, its KV kept."""
        self._off_batch(req)
        self._note_preemption(req)
        req._phase = PAUSED
        self.paused[req] = None
        self.waiting.push(req, self.policy.key(req, self))

    def evict(self, req: Request) -> None:
        """Free the KV of a running or paused request; it waits to be computed again, its generated tokens kept."""
        if req._phase == PAUSED:
            self.waiting.remove(req)
            del self.paused[req]
        else:
            self._off_batch(req)
            self._note_preemption(req)
        self.kv.release(req, self.capacity(req))
        self.recomputed_tokens += req._computed
        req._recomputed += req._computed
        req._computed = 0
        req._prefilled = False
        req._phase = WAITING
        self.waiting.push(req, self.policy.key(req, self))

    def finish(self, req: Request) -> None:
        """A decoding request (or one whose last chunk has just emitted its only token) is done."""
        self.running.leave(req)
        self.joins.pop(req, None)
        self.kv.leave(req._computed)
        self.kv.release(req, req._computed)
        req._phase = Phase.FINISHED
        self.counts["finished"] += 1
        self.policy.on_finish(req)

    def abort(self, req: Request, failed: bool = False) -> bool:
        """Drop a request in whatever phase, freeing what it holds. False if it had ended already, or has not arrived."""
        phase = req._phase
        if phase == PENDING:
            if req not in self.pending:  # it has not arrived
                return False
            del self.pending[req]
        elif phase == WAITING:
            self.waiting.remove(req)
        elif phase == PAUSED:
            self.waiting.remove(req)
            del self.paused[req]
            self.kv.release(req, self.capacity(req))
        elif phase in (PREFILLING, DECODING):
            self._off_batch(req)
            self.kv.release(req, self.capacity(req))
        else:
            return False
        if phase != PENDING:
            self.policy.on_finish(req)
        req._phase = Phase.FAILED if failed else Phase.ABORTED
        self.counts["failed" if failed else "aborted"] += 1
        return True

    def _note_preemption(self, req: Request) -> None:
        self.num_preemptions += 1
        req._num_preemptions += 1
        if req._resumes is None:
            req._resumes = []
        req._resumes.append(self.now)

    def _off_batch(self, req: Request) -> None:
        if req._phase == DECODING:
            self.running.leave(req)
            self.kv.leave(req._computed)
            if req in self.joins:
                del self.joins[req]
            else:
                self.leaves.append(req)
        else:
            del self.prefilling[req]
