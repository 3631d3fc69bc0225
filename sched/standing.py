"""Standing: where every request stands and what KV it holds; this is what a policy may see (View)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .kv import KVCache
from .outlook import Outlook, Total
from .policy import Policy
from .request import Phase, Request
from .running import Running
from .swapping import Swapping
from .waiting import Waiting

PENDING, WAITING, PREFILLING, DECODING, PAUSED, SWAPPED = (
    Phase.PENDING, Phase.WAITING, Phase.PREFILLING, Phase.DECODING, Phase.PAUSED, Phase.SWAPPED,
)  # fmt: skip

THRASH = 3  # preemptions of one request; more are called thrashing


class Standing:
    """Requests by phase: pending, waiting (with the paused and the swapped among them), prefilling, running (the decode set).

    tiers: tokens of KV that swap tiers hold, by name; empty: nobody is swapped. `cached_tokens`: of prompts, found cached when
    they were first admitted. `given_back`: blocks held in the last step that came free at its end: of whoever finished,
    if nobody else held them, and of those who computed what somebody else has in the index.
    """

    __slots__ = (  # slots: a dict of thirty attributes is slower to read
        "cached_tokens", "counts", "given_back", "joins", "kv", "leaves", "max_num_seqs", "now", "num_futile",
        "num_preemptions", "num_thrashed", "paused", "pending", "policy", "prefilling", "recomputed_tokens", "running",
        "step_time", "swapping", "waiting",
    )  # fmt: skip

    def __init__(self, policy: Policy, kv: KVCache, tiers: Mapping[str, int], max_num_seqs: int) -> None:
        self.policy = policy
        self.max_num_seqs = max_num_seqs
        self.kv = kv
        self.now = 0.0
        self.step_time = 0.0
        self.running = Running(policy, self)
        self.swapping = Swapping({name: kv.slice_tokens(tokens) for name, tokens in tiers.items()}, kv.block_size)
        self.waiting = Waiting()  # waiting, paused and swapped requests, in one order
        self.prefilling: dict[Request, None] = {}  # in order of admission
        self.paused: dict[Request, None] = {}
        self.pending: dict[Request, None] = {}
        self.counts = dict.fromkeys(("injected", "finished", "rejected", "aborted", "failed"), 0)
        self.num_preemptions = 0
        self.num_thrashed = 0  # requests preempted more than THRASH times
        self.num_futile = 0  # preemptions of a request that had not got a token since the one before: it came back for nothing
        self.recomputed_tokens = 0  # thrown away and not found again when the request came back
        self.cached_tokens = 0
        self.given_back = 0
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
    def num_swaps(self) -> int:
        """Requests swapped out so far; `swapping` counts blocks and tokens, out and in."""
        return self.swapping.num_outs

    @property
    def num_swap_full(self) -> int:
        """Victims that no swap tier had room for."""
        return self.swapping.num_full

    @property
    def free_tokens(self) -> int:
        return self.kv.free_tokens

    @property
    def pool_tokens(self) -> int:
        kv = self.kv
        return (kv.num_blocks - kv.watermark_blocks) * kv.block_size

    def generated(self, req: Request) -> int:
        since = req._decode_from
        return req._generated if since < 0 else req._generated + self.running.step - since

    def computed(self, req: Request) -> int:
        since = req._decode_from
        return req._computed if since < 0 else req._computed + self.running.step - since

    @property
    def cache_epoch(self) -> int:
        return self.kv.epoch

    def cached_len(self, req: Request) -> int:
        return self.kv.lookup(req) if req._phase <= WAITING else min(req._found, req.prompt_len - 1)

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

    def outlook(self, total: Total, renews: bool = False) -> Outlook:
        return Outlook(self, total, renews)

    # --- what a request holds -----------------------------------------------------------------------------------------

    def capacity(self, req: Request) -> int:
        """Tokens that the blocks of `req` have room for."""
        return self.computed(req) if req._prefilled else req.prompt_len + req._generated

    def next_block(self, req: Request) -> int:
        """Blocks that `req` needs for its next token, if it decodes (or resumes to)."""
        if not req._prefilled:
            return 0
        return self.kv.opens(req, self.computed(req))

    def rank(self, req: Request) -> tuple[Any, float, int]:
        """Its place in the one order: key, arrival, order of entry."""
        return self.policy.key(req, self), req.arrival, req._entry
