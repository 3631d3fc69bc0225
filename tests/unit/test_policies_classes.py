"""Policies over clients, classes, queues and the prefix cache: each does what its source says, and all keep the contract."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from harness import TICK, Ask, Case, Result, play

from lengthwise.engine.simulated.affine import Affine
from lengthwise.sched import LengthDistribution, Outcome, Phase, Policy, Request, Scheduler, pause, recompute
from lengthwise.sched.batching import Chunked
from lengthwise.sched.contract import check_policy, hostile, rehearse
from lengthwise.sched.kv import Paged
from lengthwise.sched.policies import FCFS, PSJF, SJF, SRPT
from lengthwise.sched.policies.colocation import Colocation
from lengthwise.sched.policies.dfs_weight import DFSWeight
from lengthwise.sched.policies.drr import DRR
from lengthwise.sched.policies.lcf import LCF
from lengthwise.sched.policies.lpm import LPM
from lengthwise.sched.policies.mlfq import MLFQ
from lengthwise.sched.policies.response_ratio import ResponseRatio
from lengthwise.sched.policies.sharing import Sharing
from lengthwise.sched.policies.vtc import VTC
from lengthwise.sched.policies.vtc_predicted import VTCPredicted
from lengthwise.sched.policies.wrr import WRR
from lengthwise.sched.policy import overrides

point = LengthDistribution.point


# --- the contract: beside the nodes, what their options make of them -------------------------------------------------------

OPTIONS = {
    "vtc_weighted": lambda: VTC(weights={"client 1": 3.0, "client 2": 0.7}),
    "vtc_prices": lambda: VTC(0.3, 1.7),
    "drr_prices": lambda: DRR(33.3, 0.3, 1.7, {"client 1": 0.7}),
    "vtc_predicted": lambda: VTCPredicted(window=None),
    "vtc_predicted_history": lambda: VTCPredicted(window=2, weights={"client 0": 2.5}),
    "lcf": LCF,
    "drr_fine": lambda: DRR(quantum=3.0),
    "drr_coarse": lambda: DRR(quantum=80.0, weights={"client 3": 2.0}),
    "wrr_clients": lambda: WRR("client", {"client 1": 1.5}),
    "wrr_classes": lambda: WRR(weights={0.0: 3, 2.0: 0.5}),
    "mlfq_short": lambda: MLFQ(0.006, 1.5, 0.004, 2e-5),
    "mlfq_promoting": lambda: MLFQ(0.01, 2.0, 0.0, 0.0, promote_after=0.05, promote_every=7),
    "lpm_few": lambda: LPM(max_waiting=3, shared=8, piece=4),
    "lpm_many": lambda: LPM(shared=4, piece=4),
    "response_ratio_few": lambda: ResponseRatio(max_waiting=3, shared=8, piece=4),
    "response_ratio_many": lambda: ResponseRatio(shared=0, piece=4),
    "dfs_weight": lambda: DFSWeight(piece=4),
    "dfs_weight_few": lambda: DFSWeight(piece=4, max_waiting=3),
}
INNER = {
    "sjf_fcfs": lambda: Colocation(SJF(), FCFS()),
    "psjf_psjf": lambda: Colocation(PSJF(), PSJF()),
    "srpt_fcfs": lambda: Colocation(SRPT("reestimate"), FCFS()),
    "vtc_lpm": lambda: Colocation(VTC(), LPM(shared=4, piece=4)),
    "mlfq_drr": lambda: Colocation(MLFQ(0.006, promote_after=0.05, promote_every=7), DRR(30.0)),
    "fcfs_mlfq": lambda: Colocation(FCFS(), MLFQ(0.006)),
    "nested": lambda: Colocation(Colocation(VTC(), SRPT(), 1.0), DRR(50.0), 2.0),
    "ratio_dfs": lambda: Colocation(ResponseRatio(max_waiting=5, piece=4), DFSWeight(4), offline_from=2.0),
}


ALL = pytest.mark.parametrize(
    "make", [*OPTIONS.values(), *INNER.values()], ids=[*OPTIONS, *(f"colocation_{name}" for name in INNER)]
)


@ALL
def test_options_keep_the_contract(make):
    check_policy(make, num_cases=4, constant_is_fcfs=False)


@pytest.mark.slow
@ALL
def test_options_keep_the_contract_in_many_cases(make):
    check_policy(make, seed=1, num_cases=60, constant_is_fcfs=False)


def test_wrong_arguments_are_refused_with_the_value():
    for make, words in (
        (lambda: VTC(input_price=-1.0), "input_price=-1"),
        (lambda: VTCPredicted(window=0), "window=0"),
        (lambda: DRR(quantum=0.0), "quantum=0"),
        (lambda: WRR("group"), "by='group'"),  # type: ignore[arg-type]
        (lambda: MLFQ(ratio=1.0), "ratio=1"),
        (lambda: MLFQ(promote_every=0), "promote_every=0"),
        (lambda: LPM(piece=0), "piece=0"),
        (lambda: DFSWeight(0), "piece=0"),
        (lambda: Colocation(FCFS(), FCFS(), float("nan")), "offline_from=nan"),
    ):
        with pytest.raises(ValueError, match=words):
            make()
    with pytest.raises(ValueError, match="client 'a' has the weight 0"):
        VTC(weights={"a": 0.0}).on_arrival(Request(0, 0.0, 4, client="a"))


# --- sharing: the books ------------------------------------------------------------------------------------------------


class Recount:
    """Asserts, after every step, that the books are what a look at every request says."""

    def __init__(self, *policies: Sharing) -> None:
        self.policies, self.seen = policies, dict[Request, None]()

    def __call__(self, scheduler, plan, outcome):
        self.seen |= dict.fromkeys([*scheduler.waiting, *scheduler.prefilling, *scheduler.running])
        self.seen |= dict.fromkeys(f.request for f in outcome.finished)
        for offline, policy in enumerate(self.policies):
            for client in policy.clients.values():
                self.look(scheduler, policy, client, offline)

    def look(self, scheduler, policy, client, offline):
        whose = [r for r in self.seen if len(self.policies) == 1 or (r.priority >= 1.0) == offline]
        mine = [r for r in whose if policy.group(r) == client.name]
        admitted = [r for r in mine if r._first_scheduled >= 0.0]
        live = [r for r in admitted if r.phase < Phase.FINISHED]
        assert client.admissions == len(admitted)
        assert client.inputs == sum(r.prompt_len for r in admitted)
        ahead = sum(max(policy.ahead(r) - scheduler.generated(r), 0) for r in live)
        assert client.outputs == sum(map(scheduler.generated, admitted)) + ahead
        waiting = [r for r in mine if r in [*scheduler.waiting]]
        assert client.num_waiting == len(waiting) and (client in policy.backlogged) == bool(waiting)
        if waiting:
            assert client.first() is min(waiting, key=lambda r: (r.arrival, r._entry))


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("make", [VTC, DRR, WRR, lambda: VTCPredicted(window=None)], ids=["vtc", "drr", "wrr", "predicted"])
def test_the_books_are_those_of_a_recount(make, reuse):
    """Whatever is preempted, swapped, aborted or cached, for a policy alone and for two in one engine."""
    preempted = 0
    for seed in range(12):
        case = hostile(np.random.default_rng([9, seed]), reuse=reuse)
        policy = make()
        rehearse(policy, case, watch=Recount(policy))
        online, offline = make(), make()
        _, scheduler = rehearse(Colocation(online, offline), case, watch=Recount(online, offline))
        preempted += scheduler.num_preemptions
    assert preempted > 10


def engine(policy: Policy, slots: int = 1) -> Scheduler:
    return Scheduler(policy, Chunked(), Paged(4096), recompute(), max_num_seqs=slots, check=True)


def step(scheduler: Scheduler, end: float) -> None:
    plan = scheduler.plan(scheduler.now)
    assert plan is not None
    scheduler.book(plan, Outcome(1, [end], 1 if plan.num_decode else 0))


def test_vtc_charges_prompts_at_admission_and_tokens_as_they_come():
    vtc = VTC(weights={"b": 2.0})
    scheduler = engine(vtc, slots=2)
    for rid, client in enumerate("abb"):
        scheduler.add(Request(rid, 0.0, 10, client=client))
    step(scheduler, 1.0)  # prompts of one of a's and one of b's, a token each
    assert [vtc.counter(vtc.clients[c]) for c in "ab"] == [10 + 2 * 1, (10 + 2 * 1) / 2]
    step(scheduler, 2.0)
    assert [vtc.counter(vtc.clients[c]) for c in "ab"] == [10 + 2 * 2, (10 + 2 * 2) / 2]


@pytest.mark.parametrize("someone_waits", [True, False])
def test_vtc_lifts_who_comes_to_an_empty_queue(someone_waits):
    """To the least counter of those that wait; when nobody waits, to that of who left the queue last."""
    for policy, lifted in ((VTC(), 12.0), (LCF(), 0.0)):
        scheduler = engine(policy)
        for rid in range(2 if someone_waits else 1):
            scheduler.add(Request(rid, 0.0, 10, client="b"))
        step(scheduler, 1.0)  # b: a prompt of 10 and a token
        scheduler.add(Request(7, 1.0, 10, client="a"))
        assert policy.counter(policy.clients["a"]) == lifted
        step(scheduler, 2.0)
        scheduler.add(Request(8, 2.0, 10, client="a"))  # its queue is not empty: no lift
        assert policy.counter(policy.clients["a"]) == lifted
        assert policy.counter(policy.clients["b"]) == 14.0


def test_vtc_never_lowers_a_counter():
    vtc = VTC()
    scheduler = engine(vtc)
    scheduler.add(Request(0, 0.0, 500, client="a"))
    step(scheduler, 1.0)
    scheduler.add(Request(1, 1.0, 10, client="b"))  # lifted to a's 502
    scheduler.add(Request(2, 1.0, 10, client="c"))
    assert [vtc.counter(c) for c in vtc.clients.values()] == [502.0] * 3
    step(scheduler, 2.0)
    scheduler.add(Request(3, 2.0, 10, client="a"))  # b and c wait with less than a has
    assert vtc.counter(vtc.clients["a"]) == 504.0


def test_vtc_predicted_charges_ahead_and_gives_back():
    policy = VTCPredicted(window=None)
    scheduler = engine(policy)
    req = Request(0, 0.0, 10, client="a", prediction=point(3.5))
    scheduler.add(req)
    step(scheduler, 1.0)
    seen = [policy.clients["a"].outputs]
    for end in (2.0, 3.0, 4.0, 5.0):
        step(scheduler, end)
        seen.append(policy.clients["a"].outputs)
    assert seen == [4, 4, 4, 4, 5]  # tokens 1 to 4 were paid ahead
    other = Request(1, 5.0, 10, client="b", prediction=point(9.0))
    scheduler.abort(req)
    scheduler.add(other)
    step(scheduler, 6.0)
    step(scheduler, 7.0)
    assert policy.clients["b"].outputs == 9
    scheduler.abort(other)
    assert policy.clients["b"].outputs == 2 and policy.clients["a"].outputs == 5


def test_vtc_predicted_by_history_is_a_moving_mean():
    policy = VTCPredicted(window=5)
    scheduler = engine(policy)
    for rid, tokens in enumerate((4, 9)):
        req = Request(rid, scheduler.now, 10, client="a")
        scheduler.add(req)
        for _ in range(tokens):
            step(scheduler, scheduler.now + 1.0)
        scheduler.abort(req)
    assert policy.ahead(Request(2, 0.0, 10, client="a")) == (4 * 4 + 9) / 5
    assert policy.ahead(Request(3, 0.0, 10, client="b")) == 0


# --- classes in turns --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shared(Case):
    """A Case whose requests have clients."""

    clients: tuple[str, ...] = ()

    def requests(self):
        out = super().requests()
        for req, client in zip(out[0], self.clients, strict=True):
            req.client = client
        return out


def first_scheduled(result: Result) -> list[int]:
    """Requests by rid in the order of their first admission."""
    return [r.rid for r in sorted(result.requests, key=lambda r: (r._first_scheduled, r._first_token))]


def test_wrr_admits_by_weight_in_each_round():
    asks = tuple(Ask(0.0, 4, 3, priority=float(rid // 12)) for rid in range(36))
    result = play(Case(asks, max_num_seqs=1, cost="tick"), policy=WRR(weights={0: 3, 1: 2, 2: 1}))
    classes = [rid // 12 for rid in first_scheduled(result)]
    assert classes == [0, 0, 0, 1, 1, 2] * 4 + [1, 1, 2] * 2 + [2] * 6


def test_wrr_of_a_weight_and_a_half_is_three_in_two_rounds():
    clients = tuple("a" * 9 + "b" * 6)
    case = Shared(tuple(Ask(0.0, 4, 3) for _ in clients), max_num_seqs=1, cost="tick", clients=clients)
    result = play(case, policy=WRR("client", {"a": 1.5}))
    assert "".join(clients[rid] for rid in first_scheduled(result)) == "aabab" * 3


def test_wrr_of_equal_weights_is_round_robin_and_skips_who_has_nothing():
    clients = tuple("aaabbc")
    result = play(
        Shared(tuple(Ask(0.0, 4, 3) for _ in clients), max_num_seqs=1, cost="tick", clients=clients), policy=WRR("client")
    )
    assert "".join(clients[rid] for rid in first_scheduled(result)) == "abcaba"


def test_drr_serves_a_quantum_at_a_time():
    """Requests of 10 + 2 x 5 = 20 in prices and a quantum of 60: three of one client, then three of the other."""
    clients = tuple("ab" * 9)
    case = Shared(tuple(Ask(0.0, 10, 5) for _ in clients), max_num_seqs=1, cost="tick", clients=clients)
    for quantum, want in ((60.0, "aaabbb" * 3), (20.0, "ab" * 9)):
        result = play(case, policy=DRR(quantum))
        assert "".join(clients[rid] for rid in first_scheduled(result)) == want


def test_drr_takes_the_credit_of_who_has_nobody_waiting_and_leaves_the_debt():
    policy = DRR(60.0)
    scheduler = engine(policy)
    scheduler.add(Request(0, 0.0, 10, client="a"))
    step(scheduler, 1.0)
    assert policy.credit(policy.clients["a"]) == -2.0  # not 60 - 10 - 2
    scheduler.add(Request(1, 1.0, 100, client="a"))
    scheduler.add(Request(2, 1.0, 10, client="b"))
    step(scheduler, 2.0)
    assert policy.credit(policy.clients["a"]) == -4.0
    assert policy.pick().name == "a"  # it came first, and one quantum is enough for each


@pytest.mark.parametrize("make", [VTC, LCF, lambda: VTCPredicted(window=None), lambda: DRR(30.0)])
def test_sharing_says_exactly_for_how_long_a_pick_holds(make):
    """While nobody comes, goes or decodes anew the pick stays for the steps that `stable` promises, and may change then."""
    rng = np.random.default_rng(11)
    clients = tuple(rng.choice(["a", "b", "c"], 60).tolist())
    asks = tuple(Ask(0.0, int(p), int(n), 64, point(n / 2)) for p, n in rng.integers(2, 60, (60, 2)))
    case = Shared(asks, max_num_seqs=4, cost="tick", clients=clients)
    policy = make()
    promise: list = [None, 0, None]  # pick, until step, what went on
    kept, used_up = [], []

    def watch(scheduler, plan, outcome):
        if not policy.backlogged:
            return
        pick = policy.pick()
        goes_on = scheduler.num_waiting, scheduler.counts["finished"], len(scheduler.prefilling), not plan.chunks
        if goes_on == promise[2] and goes_on[-1]:
            if scheduler.step < promise[1]:
                kept.append(pick is promise[0])
            elif scheduler.step == promise[1]:
                used_up.append(pick is not promise[0])
        steps, _ = policy.stable(scheduler)
        if pick is not promise[0] or goes_on != promise[2] or scheduler.step >= promise[1]:
            promise[:] = pick, scheduler.step + steps, goes_on

    play(case, policy=policy, watch=watch, plain=True, fast_forward=False)
    assert len(kept) > 20 and all(kept)
    assert any(used_up)


# --- skip-join MLFQ ----------------------------------------------------------------------------------------------------

STEP = 1 / 1024  # s


def one_at_a_time(arrival, size, level0, quantum: float, ratio: float) -> list[float]:
    """FastServe's queues as lists, one request a step: finish times (s)."""
    queues: dict[int, list[int]] = {}
    finish, done, attained = [0.0] * len(size), [0] * len(size), [0.0] * len(size)
    now, coming = 0.0, 0
    while True:
        while coming < len(size) and arrival[coming] <= now:
            queues.setdefault(level0[coming], []).append(coming)
            coming += 1
        level = min((k for k, q in queues.items() if q), default=None)
        if level is None:
            if coming == len(size):
                return finish
            now = arrival[coming]
            continue
        job = queues[level].pop(0)
        now += STEP
        done[job] += 1
        attained[job] += STEP
        if done[job] == size[job]:
            finish[job] = now
            continue
        if attained[job] > quantum * ratio**level:
            level, attained[job] = level + 1, 0.0
        queues.setdefault(level, []).insert(0, job)


@pytest.mark.parametrize("load", [0.7, 1.2])
def test_mlfq_is_the_reference_with_queues_as_lists(load):
    rng = np.random.default_rng(int(10 * load))
    num = 400
    size = np.maximum(1, np.rint(rng.exponential(40.0, num))).astype(int)
    arrival = np.cumsum(rng.exponential(40.0 * STEP / load, num))
    prompt = rng.integers(1, 60, num)
    policy = MLFQ(2.3 * STEP, 2.0, 0.0, STEP / 4, promote_after=None)  # no time on the batch is equal to a quantum
    asks = tuple(Ask(a, p, s + 1) for a, p, s in zip(arrival.tolist(), prompt.tolist(), size.tolist(), strict=True))
    levels = [policy.level(Request(0, 0.0, a.prompt_len)) for a in asks]
    assert max(levels) == 3 and min(levels) == 0
    case = Case(asks, max_num_seqs=1, keeps_kv=True, pool=1 << 20, cost=Affine(0, 0, 0, 0, decode_base=STEP))
    want = one_at_a_time(arrival.tolist(), size.tolist(), levels, 2.3 * STEP, 2.0)
    got = play(case, policy=policy).finish
    np.testing.assert_allclose(got, want, rtol=1e-9)


def test_mlfq_joins_the_first_queue_that_holds_its_first_iteration():
    policy = MLFQ(0.01, 2.0, 0.005, 1e-4)
    assert [policy.level(Request(0, 0.0, n)) for n in (1, 50, 51, 150, 151, 350, 351)] == [0, 0, 1, 1, 2, 2, 3]


def test_mlfq_lets_a_new_one_take_the_slot_of_who_was_demoted():  # S7
    asks = (Ask(0.0, 4, 60), Ask(4 * TICK, 4, 3))
    result = play(Case(asks, max_num_seqs=1, keeps_kv=True, cost="tick"), policy=MLFQ(2.5 * TICK, 2.0, 0.0, 0.0))
    assert result.finish[1] == 6 * TICK and result.requests[0]._num_preemptions == 1
    calm = play(Case(asks, max_num_seqs=1, keeps_kv=True, cost="tick"), policy=MLFQ(5.5 * TICK, 2.0, 0.0, 0.0))
    assert calm.finish[1] == 8 * TICK  # to the end of the step that exceeds the quantum, then


def test_mlfq_promotes_who_has_been_idle():  # S6
    """A stream that fills the engine starves who has been demoted, but for the promotion."""
    asks = (Ask(0.0, 4, 40), *(Ask(4 * TICK + 2 * TICK * i, 4, 3) for i in range(200)))
    case = Case(asks, max_num_seqs=1, keeps_kv=True, cost="tick")
    finish = {
        after: play(case, policy=MLFQ(2.5 * TICK, 2.0, 0.0, 0.0, promote_after=after, promote_every=10)).finish[0]
        for after in (None, 20 * TICK)
    }
    assert finish[None] > 400 * TICK
    assert finish[20 * TICK] < finish[None] - 40 * TICK


# --- the prefix cache ---------------------------------------------------------------------------------------------------


def conversation(group: int, own: int, shared: int = 4, pieces: int = 6) -> list[int]:
    """Names of a prompt of `pieces` pieces, the first `shared` of which are its group's."""
    return [1000 * group + k for k in range(shared)] + [10**6 * (own + 1) + k for k in range(pieces - shared)]


def prefixed(groups: str, **how) -> Case:
    """A request a letter, all at once, of 6 pieces of 16 tokens; those of one letter share 4."""
    asks = tuple(
        Ask(0.0, 96, 3, 8, block_hashes=conversation(ord(g), rid) if g != "-" else None) for rid, g in enumerate(groups)
    )
    case = Case(asks, prefix=True, hash_tokens=16, max_num_seqs=1, cost="tick")
    return replace(case, **how)


def served(groups: str, policy: Policy, **how) -> str:
    result = play(prefixed(groups, **how), policy=policy)
    return "".join(groups[rid] for rid in first_scheduled(result))


def test_lpm_serves_a_group_of_equal_prefixes_together():
    groups = "abcabcabc"
    assert served(groups, FCFS()) == groups
    assert served(groups, LPM()) == "aaabbbccc"
    assert served(groups, LPM(), prefix=False, hash_tokens=0) == groups  # nothing is cached: first come


def test_lpm_falls_back_to_fcfs_when_many_wait():
    """More than 4: the first five by arrival, then by what is cached."""
    groups = "abcdefagb"
    assert served(groups, LPM(max_waiting=4)) == "abcde" + "abfg"
    assert served(groups, LPM(max_waiting=0)) == groups
    assert served(groups, LPM(max_waiting=9)) == "aabbcdefg"


def test_lpm_lets_one_warm_the_cache_for_others():
    """Two slots: of three that begin alike one goes first, beside another that shares nothing."""
    result = play(prefixed("aaab", max_num_seqs=2), policy=LPM())
    assert [r._cached for r in result.requests] == [0, 64, 64, 0]
    result = play(prefixed("aaab", max_num_seqs=2), policy=LPM(shared=0))
    assert [r._cached for r in result.requests] == [0, 0, 64, 0]


def test_dfs_weight_goes_down_the_branch_that_most_wait_for():
    """b is wanted by three and a by two; within b, a branch of two goes before one of one; who has no match comes last."""
    below = [[10, 11], [20, 21, 22], [10, 11], [20, 21, 23], [20, 21, 22], [99, 98, 97]]
    waiting = []
    for rid, names in enumerate(below):
        req = Request(rid, float(rid), 64, block_hashes=names)
        req._entry = rid
        waiting.append(req)

    class Look:
        def cached_len(self, req):
            return 0 if req.rid == 5 else 16 * len(req.block_hashes)

    order = [r.rid for r in DFSWeight().depth_first(reversed(waiting), Look())]
    assert order == [1, 4, 3, 0, 2, 5]


def test_dfs_weight_keeps_a_branch_together():
    """a, b and c are cached once one of each has run; then the most wanted goes first, whole."""
    groups = "abcbcbcb"
    assert served(groups, DFSWeight()) == "abbbbccc"
    assert served(groups, DFSWeight(max_waiting=0)) == groups  # more wait: first come, first served


def test_response_ratio_ages_by_tokens_prefilled():
    """A prompt of 400 tokens has waited for 2,000 prefilled ones, one of 40 for 100: 5 is more than 2.5."""
    policy, view = ResponseRatio(), engine(FCFS())
    long, short = Request(0, 0.0, 400), Request(1, 1.0, 40)
    policy.on_arrival(long)
    policy._processed = 1900
    policy.on_arrival(short)
    policy._processed = 2000
    assert policy.rank(long, view) == -5.0 and policy.rank(short, view) == -2.5
    policy._processed = 2200
    assert policy.rank(long, view) == -5.5 and policy.rank(short, view) == -7.5


def test_response_ratio_counts_the_tokens_of_chunks():
    for seed in range(12):
        policy = ResponseRatio(piece=4)
        log, _ = rehearse(policy, hostile(np.random.default_rng([4, seed]), reuse=seed % 2 > 0))
        assert policy._processed == sum(c[2] for s in log.steps for c in s[2])


@pytest.mark.parametrize("make", [LPM, DFSWeight, ResponseRatio, lambda: Colocation(LPM(), DFSWeight())])
def test_answers_do_not_depend_on_the_cache(make):
    """The same requests end with as many tokens, and each is prefilled once, whatever was found."""
    groups = "abc-abca-bcc-ab"
    ends = []
    for how in ({}, {"prefix": False, "hash_tokens": 0}, {"copy_on_write": True}, {"pool": 256}):
        result = play(prefixed(groups, max_num_seqs=3, **how), policy=make())
        ends.append({rid: end[:2] for rid, end in result.log.ended_at.items()})
    assert all(end == ends[0] for end in ends) and len(ends[0]) == len(groups)


# --- online and offline ------------------------------------------------------------------------------------------------


def mixed(seed: int, gap: int = 8, **how) -> Case:
    """40 online and 40 offline requests; the offline ones are there from the start."""
    rng = np.random.default_rng(seed)
    arrival = TICK * np.cumsum(rng.integers(0, gap + 1, 40))
    short, long = rng.integers(2, 20, 40), rng.integers(20, 60, 40)
    online = [Ask(float(a), 4, int(n), 64, point(float(n))) for a, n in zip(arrival, short, strict=True)]
    offline = [Ask(0.0, 4, int(n), 64, point(float(n)), priority=1.0) for n in long]
    return Case((*online, *offline), max_num_seqs=3, cost="tick", **how)


def even(rows, context, chunks) -> float:
    return TICK


@pytest.mark.parametrize("keeps_kv", [False, True])
@pytest.mark.parametrize("inner", [FCFS, SJF, SRPT, VTC, lambda: MLFQ(2.5 * TICK, 2.0, 0.0, 0.0)])
def test_offline_requests_cost_online_ones_nothing(inner, keeps_kv):
    """With room in KV and steps as long with more rows as with few: the same finish times, to the bit."""
    case = mixed(1, keeps_kv=keeps_kv)
    alone = play(replace(case, asks=case.asks[:40]), policy=inner(), plain=True, seconds=even).finish
    result = play(case, policy=Colocation(inner(), FCFS()), plain=True, seconds=even)
    assert result.finish[:40] == alone
    assert sum(r._num_preemptions for r in result.requests[40:]) > 5
    rows = [s[5] + sum(c[3] for c in s[2]) for s in result.log.steps]
    assert np.mean(np.array(rows) >= 3) > 0.9  # and what is left is filled


def test_online_requests_yield_kv_only_when_no_offline_one_holds_any():
    num = 0
    for seed in range(5):

        class Watching(Scheduler):
            def give_up(self, req):
                nonlocal num
                if not req.priority:
                    num += 1
                    assert not [r for r in (*self.running, *self.prefilling, *self.paused) if r.priority]
                super().give_up(req)

        case = replace(mixed(seed, 1, pool=96, block_size=4), max_num_seqs=8)
        result = play(case, policy=Colocation(FCFS(), SJF()), scheduler=Watching)
        assert all(f == f for f in result.finish)
    assert num > 0


def test_colocation_takes_the_short_way_where_keys_allow():
    for inner, own in (((FCFS(), PSJF()), ()), ((SRPT(), FCFS()), ("victim",)), ((FCFS(), VTC()), ("order", "victim"))):
        both = Colocation(*inner)
        assert tuple(name for name in ("order", "victim") if overrides(both, name)) == own
        assert ("victim" in both.needs) == bool(own)


def test_offline_yields_at_once():  # S7
    """Two slots with offline requests; an online arrival runs in the next step, and one of the two waits."""
    scheduler = Scheduler(Colocation(FCFS(), FCFS()), Chunked(), Paged(4096), pause(), max_num_seqs=2, check=True)
    for rid in range(2):
        scheduler.add(Request(rid, 0.0, 4, priority=1.0))
    step(scheduler, 1.0)
    step(scheduler, 2.0)
    urgent = Request(2, 2.0, 4)
    scheduler.add(urgent)
    step(scheduler, 3.0)
    assert urgent.phase == Phase.DECODING and scheduler.num_preemptions == 1
    assert [r.rid for r in scheduler.paused] == [1]


@pytest.mark.parametrize("make", [LPM, ResponseRatio], ids=["lpm", "response_ratio"])
def test_a_conversation_may_be_named_without_end(make):
    """Names by place, answers included, for as far as it will ever go: longer than len() can say."""
    asks = tuple(Ask(0.01 * i, 20, 6, 20, block_hashes=range(1 << 70) if i % 3 else [7]) for i in range(6))
    case = Case(asks, prefix=True, hash_tokens=4, block_size=4, pool=200, max_num_seqs=1, cost="even")
    result = play(case, policy=make(shared=8, piece=4))
    assert len(result.log.ended_at) == 6 and result.scheduler.cached_tokens > 0
    assert play(case, policy=make(shared=0, piece=4)).scheduler.counts["finished"] == 6
