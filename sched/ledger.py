"""Ledger: the moves of a request from phase to phase.

Each move keeps the queues, the KV accounting and the private slots of the request in step with each other.
"""

from __future__ import annotations

from .request import Phase, Request
from .standing import DECODING, PAUSED, PENDING, PREFILLING, SWAPPED, THRASH, WAITING, Standing


class Ledger(Standing):
    """Moves requests; who calls has made sure that there is room."""

    __slots__ = ()

    def enqueue(self, req: Request) -> None:
        req._phase = WAITING
        self.policy.on_arrival(req)
        key = self.policy.key(req, self)
        if key != key:  # NaN would sort anywhere and take others with it
            raise ValueError(f"{type(self.policy).__name__} gives request {req.rid} the key {key}: {req!r}")
        self.waiting.push(req, key)

    def schedule(self, req: Request) -> None:
        """Take `req` out of the waiting: it prefills, goes on prefilling, or (off the batch while decoding) decodes again."""
        self.waiting.remove(req)
        phase = req._phase
        if phase == PAUSED:
            del self.paused[req]
        elif phase == SWAPPED:
            self._swap_in(req)
        elif found := self.kv.allocate(req, req.prompt_len + req._generated):
            self._skip_cached(req, found)
        if req._first_scheduled < 0.0:
            req._first_scheduled = self.now
        elif req._resumes:
            req._resumes.append(self.now)
        self.policy.on_schedule(req, self)
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
        self.policy.on_preempt(req, self)
        self.waiting.push(req, self.policy.key(req, self))

    def give_up(self, req: Request) -> None:
        """Take the KV of a running or paused request: it is swapped out where a tier has room, else thrown away, to be computed
        again, the generated tokens kept. The request waits."""
        was_running = req._phase != PAUSED
        if was_running:
            self._off_batch(req)
            self._note_preemption(req)
        else:
            self.waiting.remove(req)
            del self.paused[req]
        # a copy that is yet to be made cannot be swapped out: it is found again where it was to come from
        swaps, computed = bool(self.swapping.tiers.sizes) and req not in self.kv.copies, req._computed
        table = self.kv.lies_in(req, computed) if swaps else ()
        self._release(req)
        if computed and swaps and self.swapping.take(req, self.kv.blocks(computed), computed, table):
            req._phase = SWAPPED
        else:
            self.recomputed_tokens += computed
            req._recomputed += computed
            req._lost = max(req._lost, computed)
            req._computed = req._found = 0
            req._prefilled = False
            req._phase = WAITING
        if was_running:
            self.policy.on_preempt(req, self)
        self.waiting.push(req, self.policy.key(req, self))

    def finish(self, req: Request) -> None:
        """A decoding request (or one whose last chunk has just emitted its only token) is done."""
        self.running.leave(req)
        self.joins.pop(req, None)
        self.kv.leave(req._computed)
        if self.kv.indexes:
            self.given_back += self.kv.enter(req, req._computed)
        self.given_back += self.kv.release(req, req._computed)
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
            self._release(req, keep=not failed)
        elif phase == SWAPPED:
            self.waiting.remove(req)
            self.swapping.drop(req)
        elif phase in (PREFILLING, DECODING):
            self._off_batch(req)
            self._release(req, keep=not failed)
        else:
            return False
        if phase != PENDING:
            self.policy.on_finish(req)
        req._phase = Phase.FAILED if failed else Phase.ABORTED
        self.counts["failed" if failed else "aborted"] += 1
        return True

    def _skip_cached(self, req: Request, found: int) -> None:
        """Its prefill starts behind the `found` tokens that are cached; what it had lost of them is not computed again."""
        if req._first_scheduled < 0.0:
            req._cached = found
            self.cached_tokens += found
        self._find_again(req, min(found, req._lost))
        req._computed = req._found = found

    def _find_again(self, req: Request, tokens: int) -> None:
        req._recomputed -= tokens
        self.recomputed_tokens -= tokens

    def _swap_in(self, req: Request) -> None:
        """Copy back what the device has not kept. Who was in mid-prefill may find more there than it had."""
        kv, computed = self.kv, req._computed
        found = kv.allocate(req, self.capacity(req))
        self.swapping.bring(req, kv.blocks(found), max(computed - found, 0), kv.lies_in(req, computed))
        if not req._prefilled and found > computed:
            self._find_again(req, max(min(found, req._lost) - computed, 0))
            req._computed = found

    def _release(self, req: Request, keep: bool = True) -> None:
        """Give back the blocks of a request that is off the batch. keep: what it has computed stays for others, where there is
        an index."""
        if keep and self.kv.indexes and req not in self.kv.copies:  # what is yet to be copied is not there for others
            self.kv.enter(req, req._computed)
        self.kv.release(req, self.capacity(req))

    def _note_preemption(self, req: Request) -> None:
        self.num_preemptions += 1
        req._num_preemptions += 1
        self.num_thrashed += req._num_preemptions == THRASH + 1
        self.num_futile += req._left_with == req._generated
        req._left_with = req._generated
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
