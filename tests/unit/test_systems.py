"""System presets: each composes, in every application that schedules, runs to its end, and does what makes it that system."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import pytest
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from lengthwise.engine.simulated import SimulatedClock, SimulatedExecutor
from lengthwise.engine.simulated.affine import Affine
from lengthwise.experiments.composer import plain
from lengthwise.experiments.nodes import load_policy, load_scheduler, make, new_kv
from lengthwise.sched import Event, EventKind, LengthDistribution, Phase, Request, Scheduler, serve
from lengthwise.sched.admission import FuturePeak
from lengthwise.sched.batching import PrefillFirst
from lengthwise.sched.kv import Paged
from lengthwise.sched.rehearsal import Log, Script
from lengthwise.sched.victims import LeastComputed

SYSTEMS = sorted(p.name.removesuffix(".yaml") for p in (files("lengthwise.conf") / "system").iterdir() if p.name[0] != "_")
PIECE = 16  # tokens that a name stands for
COST = Affine(8e-3, 1e-4, 1e-7, 2e-5)


@cache
def config(system: str, *overrides: str, app: str = "run") -> dict[str, Any]:
    """What Hydra makes of a preset. A trained predictor wants a checkpoint and texts: an oracle stands in for it."""
    given = [f"system={system}", "predictor=oracle", "refine=none", *overrides]
    with initialize_config_module("lengthwise.conf", version_base="1.3"):
        composed = GlobalHydra.instance().hydra.compose_config(app, given, run_mode=RunMode.RUN)
    return plain(composed, composed.hydra.runtime.choices)


class Asked(NamedTuple):
    arrival: float
    prompt_len: int
    output_len: int
    most: int = 200
    client: str = "a"
    names: tuple[int, ...] = ()


class Seen(NamedTuple):
    log: Log
    scheduler: Scheduler
    requests: list[Request]


def run(cfg: dict[str, Any], asked: list[Asked], pool: int = 1 << 16) -> Seen:
    """The preset's scheduler, all counts checked, over these requests in simulation."""
    kv = new_kv(cfg, pool)
    if kv.indexes:
        kv.use_hashes(PIECE)
    scheduler = load_scheduler({**cfg, "check": True}, load_policy(cfg), kv)
    requests = [
        Request(i, a.arrival, a.prompt_len, a.most, client=a.client, block_hashes=a.names or None,
                prediction=LengthDistribution.point(float(a.output_len)))
        for i, a in enumerate(asked)
    ]  # fmt: skip
    clock, log = SimulatedClock(), Log(max_steps=50_000)
    executor = SimulatedExecutor(clock, COST, [a.output_len for a in asked], swap_seconds=lambda swaps: 0.0)
    serve(Script(Event(r.arrival, EventKind.ARRIVAL, r) for r in requests), scheduler, executor, clock, log)
    assert {r.phase for r in requests} == {Phase.FINISHED}
    assert [log.ended_at[i][0] for i in range(len(asked))] == [min(a.output_len, a.most) for a in asked]
    return Seen(log, scheduler, requests)


def crowd(num: int = 30, gap: float = 0.02) -> list[Asked]:
    """Requests whose answers are a good deal shorter than they may be, two clients, some prompts that begin alike."""
    return [
        Asked(gap * i, 20 + 13 * i % 70, 10 + 29 * i % 90, 150, "ab"[i % 3 == 0], (1, 2) if i % 2 and 13 * i % 70 > 12 else ())
        for i in range(num)
    ]


TIGHT = 700  # tokens: several requests, not all that are there


def order(seen: Seen) -> list[int]:
    """rids as they were first scheduled."""
    return [r.rid for r in sorted(seen.requests, key=lambda r: (r._first_scheduled, r._entry))]


# --- all of them ----------------------------------------------------------------------------------------------------------


def test_the_systems_are_there():
    assert SYSTEMS == [
        "default", "fastserve", "lightllm", "llamacpp", "ltr", "orca", "sarathi", "sglang", "ssjf", "static", "trail",
        "trtllm_max_utilisation", "trtllm_no_evict", "vllm", "vllm_v0", "vtc",
    ]  # fmt: skip


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_preset_names_its_source_and_runs_to_the_end(system):
    cfg = config(system)
    assert cfg["choices"]["system"] == system and cfg["system"]["source"]
    assert (cfg["system"]["leaves_out"] == []) == (system == "default")
    for pool in (1 << 16, TIGHT):
        seen = run(cfg, crowd(), pool)
        assert not seen.scheduler.kv.in_use and len(seen.log.ended_at) == 30


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_server_takes_the_same_parts(system):
    """`lengthwise serve system=...`: every group that a preset chooses is there, with the same node."""
    here, there = config(system), config(system, app="serve")
    for group in ("policy", "batching", "kv", "preemption", "admission", "victim"):
        if system == "default" and group == "kv":  # a server has a prefix cache unless it is told otherwise
            continue
        assert here["choices"][group] == there["choices"][group] and here[group] == there[group], group


def test_what_is_chosen_beside_a_preset_wins():
    cfg = config("vtc", "policy=srpt", "admission=none", "kv=contiguous", "limits=seqs64")
    assert {g: cfg["choices"][g] for g in ("policy", "admission", "kv", "limits", "batching")} == {
        "policy": "srpt", "admission": "none", "kv": "contiguous", "limits": "seqs64", "batching": "prefill_first",
    }  # fmt: skip
    assert make(cfg["admission"]) is None


@pytest.mark.parametrize(("system", "predictor", "refine"), [
    ("ltr", "ltr_ranker", None), ("ssjf", "ssjf", None), ("trail", "encoder", "probe"), ("vllm", None, None),
])  # fmt: skip
def test_a_preset_brings_its_predictor(system, predictor, refine):
    with initialize_config_module("lengthwise.conf", version_base="1.3"):
        composed = GlobalHydra.instance().hydra.compose_config("run", [f"system={system}"], run_mode=RunMode.RUN)
    choices = composed.hydra.runtime.choices
    assert choices["predictor"] == (predictor or "none") and choices["refine"] == (refine or "none")


def test_a_served_system_reaches_the_scheduler_and_is_stated():
    """compose_service on a tiny model, as `lengthwise serve` does it."""
    from lengthwise.experiments.serve_app import compose_service, start_line

    small = ("limits.kv_pool_tokens=512", "limits.max_num_seqs=4", "limits.token_budget=64", "limits.max_model_len=256")
    tiny = ("model=tiny", *small, "executor.attention=torch", "server.port=0")
    wanted = ("system=lightllm", "victim=least_computed", "predictor=none", *tiny)
    with initialize_config_module("lengthwise.conf", version_base="1.3"):
        composed = GlobalHydra.instance().hydra.compose_config("serve", list(wanted), run_mode=RunMode.RUN)
    cfg = plain(composed, composed.hydra.runtime.choices)
    settings = make(cfg["server"])
    service, about = compose_service(cfg, settings)
    scheduler = service._scheduler
    assert type(scheduler.admission) is FuturePeak and type(scheduler._yielding.rule) is LeastComputed
    assert type(scheduler.batching) is PrefillFirst and type(scheduler.kv) is Paged
    assert (about["system"], about["admission"], about["victim"]) == ("lightllm", "past_future", "least_computed")
    line = start_line("http://h", "tiny", about, settings)
    assert "policy=fcfs admission=past_future victim=least_computed system=lightllm predictor=none" in line
    plainly = start_line("http://h", "tiny", {**about, "admission": "none", "victim": "last", "system": "default"}, settings)
    assert "policy=fcfs predictor=none" in plainly


# --- each of them ---------------------------------------------------------------------------------------------------------


def test_static_lets_nobody_join_a_batch():
    seen = run(config("static"), crowd())
    assert not any(s[2] and s[5] for s in seen.log.steps)
    begins = sorted({r._first_scheduled for r in seen.requests})
    for begin in begins[1:]:  # a batch begins when all that began before have ended
        before = [r.rid for r in seen.requests if r._first_scheduled < begin]
        assert max(seen.log.ended_at[rid][2] for rid in before) <= begin
    assert len(begins) < 10 and any(s[6] for s in seen.log.steps)  # few batches, and finished rows padded them


def test_orca_reserves_the_longest_answer_and_never_preempts():
    seen = run(config("orca"), crowd(), TIGHT)
    assert seen.scheduler.num_preemptions == 0
    ends = {rid: at for rid, (_, _, at) in seen.log.ended_at.items()}
    for r in seen.requests:  # whoever runs at its start has its longest answer reserved
        beside = [q for q in seen.requests if q._first_scheduled <= r._first_scheduled < ends[q.rid]]
        assert sum(q.prompt_len + q.max_new_tokens - 1 for q in beside) <= TIGHT
    assert any(s[2] and s[5] for s in seen.log.steps)  # prompts beside decodes
    assert all(start == 0 and last for s in seen.log.steps for _, start, _, last in s[2])  # and whole
    assert run(config("orca", "kv=paged"), crowd(), TIGHT).scheduler.num_preemptions > 0  # as blocks on demand would not keep


@pytest.mark.parametrize("system", ["vllm", "sarathi"])
def test_chunked_systems_keep_decodes_running_within_the_budget(system):
    cfg = config(system, *(["limits.token_budget=64", "limits.max_num_seqs=16"] if system == "vllm" else []))
    budget = cfg["limits"]["token_budget"]
    assert budget == {"vllm": 64, "sarathi": 512}[system]
    asked = [*crowd(20, 0.01), Asked(0.1, 3 * budget, 5)]
    seen = run(cfg, asked)
    decoding: set[int] = set()
    ends = {rid: at for rid, (_, _, at) in seen.log.ended_at.items()}
    for start, _, chunks, joins, leaves, num_decode, _, _ in seen.log.steps:
        decoding = {rid for rid in (decoding | set(joins)) - set(leaves) if ends[rid] > start}
        assert num_decode == len(decoding)  # nobody who decodes ever stands still
        assert num_decode + sum(length for _, _, length, _ in chunks) <= budget
    assert sum(rid == 20 for s in seen.log.steps for rid, *_ in s[2]) >= 3  # the long prompt came in pieces


def test_vllm_preempts_who_came_last_and_takes_it_back_first():
    seen = run(config("vllm", "kv.watermark=0"), crowd(), TIGHT)
    hit = [r for r in seen.requests if r._num_preemptions]
    assert hit and seen.scheduler.recomputed_tokens > 0
    for r in hit:
        left, back = r._resumes[0], r._resumes[1]
        beside = [q for q in seen.requests if q._first_scheduled < left < seen.log.ended_at[q.rid][2]]
        assert all(q.rid <= r.rid or q._num_preemptions for q in beside)
        assert not [q for q in seen.requests if q.rid > r.rid and left <= q._first_scheduled < back]


@pytest.mark.parametrize("system", ["vllm_v0", "sglang", "vtc", "lightllm"])
def test_prompts_go_before_decodes(system):
    seen = run(config(system), crowd())
    assert not any(s[2] and s[5] for s in seen.log.steps)
    cut = any(not last for s in run(config(system, "limits.token_budget=256"), crowd(8, 0.0)).log.steps for *_, last in s[2])
    assert cut == (system == "sglang")


def test_sglang_takes_the_longest_cached_prefix_and_retracts_who_has_generated_least():
    first = Asked(0.0, 64, 40, names=(1, 2, 3, 4))
    late = [Asked(0.1, 64, 5, names=(9, 8, 7, 6)), Asked(0.2, 80, 5, names=(1, 2, 3, 4, 5))]
    seen = run(config("sglang", "limits.max_num_seqs=1"), [first, *late])
    assert order(seen) == [0, 2, 1] and seen.requests[2]._cached == 64
    asked = [Asked(0.0, 200, 60, 80), *(Asked(0.0, 20, 60, 80) for _ in range(4))]  # they decode in step

    def first_hit(*more: Asked, victim: str = "least_generated") -> int:
        seen = run(config("sglang", "kv.watermark=0", f"victim={victim}"), [*asked, *more], 35 * PIECE)
        return min((r for r in seen.requests if r._num_preemptions), key=lambda r: r._resumes[0]).rid

    assert first_hit() == 0 and first_hit(victim="last") == 4  # of equals the longest prompt
    assert first_hit(Asked(0.1, 20, 60, 80)) == 5  # the youngest answer


def test_fastserve_demotes_who_has_had_its_quantum_and_swaps():
    asked = [*(Asked(0.0, 30, 150) for _ in range(4)), *(Asked(0.5 + 0.1 * i, 10, 4) for i in range(6))]
    seen = run(config("fastserve", "limits.max_num_seqs=4"), asked)
    assert seen.scheduler.num_swaps > 0 and seen.scheduler.recomputed_tokens == 0
    assert max(seen.log.ended_at[i][2] for i in range(4, 10)) < min(seen.log.ended_at[i][2] for i in range(4))


def test_ltr_orders_all_and_swaps_who_yields():
    asked = [*(Asked(0.0, 30, 150) for _ in range(4)), *(Asked(0.3 + 0.1 * i, 30, 20) for i in range(6))]
    seen = run(config("ltr", "limits.max_num_seqs=4"), asked)
    assert seen.scheduler.num_swaps > 0 and seen.scheduler.recomputed_tokens == 0
    assert all(r._first_scheduled < r.arrival + 0.02 for r in seen.requests[4:])  # a shorter one goes first at once
    assert seen.scheduler.policy.guard is None


def test_trail_preempts_the_young_only():
    cfg = config("trail", "limits.max_num_seqs=1")
    early = run(cfg, [Asked(0.0, 20, 100), Asked(0.2, 20, 10)])
    late = run(cfg, [Asked(0.0, 20, 100), Asked(0.95, 20, 5)])  # past 0.8 of what was predicted, less to come than 5 + 1
    assert early.scheduler.num_preemptions == 1 and late.scheduler.num_preemptions == 0
    assert early.scheduler.recomputed_tokens == 0  # its KV stayed


def test_ssjf_takes_the_shortest_and_preempts_nobody():
    asked = [Asked(0.0, 20, 100), Asked(0.1, 20, 90), Asked(0.2, 20, 10), Asked(0.3, 20, 40)]
    seen = run(config("ssjf", "limits.max_num_seqs=1"), asked)
    assert order(seen) == [0, 2, 3, 1] and seen.scheduler.num_preemptions == 0
    flood = [Asked(0.0, 20, 60), Asked(0.0, 20, 150), *(Asked(0.16 * i, 20, 20) for i in range(250))]
    seen = run(config("ssjf", "limits.max_num_seqs=1"), flood)
    due = 1.0 + 0.2 * 150
    assert due <= seen.requests[1]._first_scheduled < due + 1.0  # ten times its predicted time, and not at the end


def test_vtc_serves_clients_by_counter_and_preempts_nobody():
    greedy = [Asked(0.0, 40, 40, 60, "greedy") for _ in range(20)]
    modest = [Asked(0.5, 40, 40, 60, "modest") for _ in range(5)]
    seen = run(config("vtc", "limits.max_num_seqs=2"), [*greedy, *modest])
    first = order(seen)
    late = [rid for rid in first if seen.requests[rid]._first_scheduled >= 0.5][:10]
    assert sum(rid >= 20 for rid in late) == 5  # turn and turn about, though twenty of the other's came before
    tight = run(config("vtc"), crowd(), TIGHT)
    assert tight.scheduler.num_preemptions == 0
    assert run(config("vtc", "admission=none", "kv.watermark=0"), crowd(), TIGHT).scheduler.num_preemptions > 0


def test_lightllm_learns_how_much_it_may_admit():
    """By max_new_tokens at first, then by the answers there were: more at a time, none of it by preemption alone."""
    asked = [Asked(0.01 * i, 20, 10 + i % 5, 150) for i in range(60)]
    past = run(config("lightllm"), asked, TIGHT)
    asked_for = run(config("lightllm", "admission=future_peak_asked"), asked, TIGHT)
    most = {id(s): max(step[5] for step in s.log.steps) for s in (past, asked_for)}
    assert most[id(past)] > 2 * most[id(asked_for)]
    free = run(config("lightllm", "admission=none", "kv.watermark=0"), crowd(), TIGHT)
    held = run(config("lightllm", "kv.watermark=0"), crowd(), TIGHT)
    assert held.scheduler.num_preemptions < free.scheduler.num_preemptions


def test_llamacpp_has_so_many_slots():
    seen = run(config("llamacpp"), crowd())
    ends = sorted(at for _, _, at in seen.log.ended_at.values())
    assert max(s[5] + len(s[2]) for s in seen.log.steps) == 4 and seen.scheduler.num_preemptions == 0
    assert order(seen) == list(range(30))
    waited = [r for r in seen.requests if r._first_scheduled > r.arrival + 0.02]
    assert waited and all(r._first_scheduled in ends for r in waited)  # a slot is taken when somebody leaves it


def test_tensorrt_llm_evicts_nobody_or_uses_all():
    safe, full = (run(config(f"trtllm_{kind}"), crowd(), TIGHT) for kind in ("no_evict", "max_utilisation"))
    assert safe.scheduler.num_preemptions == 0 < full.scheduler.num_preemptions
    assert max(s[5] for s in safe.log.steps) < max(s[5] for s in full.log.steps)
    assert any(s[2] and s[5] for s in safe.log.steps) and any(s[2] and s[5] for s in full.log.steps)
    victims = [r for r in full.requests if r._num_preemptions]
    assert all(r._resumes[0] >= r._first_scheduled for r in victims) and order(safe) == list(range(30))
