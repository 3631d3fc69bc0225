"""The plug-in's queue in a stand-in for vLLM, without vLLM: a policy decides there as it does in Lengthwise's own scheduler.

The stand-in has vLLM's names and its loop over the waiting, and no memory that could run out; what it is not, tests of marker
`vllm` show. Each node of conf/policy either runs in it or is refused for a need that it names.
"""

from __future__ import annotations

import enum
import importlib
import json
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from omegaconf import OmegaConf

from lengthwise.sched import SLO, Event, EventKind, LengthDistribution, Request, Scheduler, recompute, serve
from lengthwise.sched.batching import Mixed
from lengthwise.sched.kv import Paged
from lengthwise.sched.rehearsal import JumpingClock, Log, PlainExecutor, Script

CONF = Path(__file__).parents[2] / "conf" / "policy"
SLOTS, NUM, START = 3, 60, 1000.0
GUARDED = {"_target_": "lengthwise.sched.policies.sjf.SJF", "by": "mean"}
LIKE_SRPT = {
    "aging_srpt": {"alpha": 2.0}, "bounded_srpt": {"most": 4}, "deadline_srpt": {"wait": 20.0, "per_token": 0.5},
    "idle_srpt": {"idle": 15.0, "quantum": 4}, "work_srpt": {"factor": 1.0, "slack": 20.0},
}  # fmt: skip


def nodes():
    for path in sorted(CONF.glob("*.yaml")):
        tree = OmegaConf.create({"slo": {"ttft": 8.0, "tpot": 1.5, "e2e": None}, "policy": OmegaConf.load(path)})
        plain = OmegaConf.to_container(tree, resolve=True)["policy"]
        yield pytest.param(plain, id=path.stem)
        if path.stem in LIKE_SRPT:  # the same guard around a policy that never preempts
            yield pytest.param({**plain, "policy": GUARDED, **LIKE_SRPT[path.stem]}, id=path.stem.replace("srpt", "sjf"))


class Status(enum.IntEnum):
    WAITING = 1
    RUNNING = 2
    FINISHED = 3


class Theirs:
    """A request as vLLM has it."""

    def __init__(self, i, row):
        self.request_id = f"r{i}"
        self.arrival_time = START + row["at"]
        self.num_prompt_tokens, self.max_tokens, self.priority = row["prompt_len"], row["output_len"], row["priority"]
        self.prompt_token_ids = [5] * row["prompt_len"]
        extra = {"predicted_len": row["predicted"], "client": row["client"], "slo_ttft": row["ttft"]}
        self.sampling_params = SimpleNamespace(extra_args=extra)
        self.status, self.num_output_tokens, self.num_computed_tokens = Status.WAITING, 0, 0

    def is_finished(self):
        return self.status == Status.FINISHED


class Loop:
    """vLLM's scheduler, as far as the plug-in touches it: slots, and a token a step for each request in one."""

    def __init__(self, vllm_config):
        self.cache_config, self.block_size = SimpleNamespace(num_gpu_blocks=101), 16
        self.waiting, self.running, self.finished_req_ids, self.admitted = None, [], set(), []

    def get_kv_cache_usage(self):
        return 0.25

    def schedule(self):
        while self.waiting and len(self.running) < SLOTS:
            request = self.waiting.peek_request()
            assert self.waiting.pop_request() is request
            request.status = Status.RUNNING
            self.running.append(request)
            self.admitted.append(request.request_id)
        self.finished_req_ids = set()
        for request in self.running:
            request.num_computed_tokens = request.num_prompt_tokens + request.num_output_tokens
        return SimpleNamespace(total_num_scheduled_tokens=len(self.running))

    def update_from_output(self, output, answers):
        for request in list(self.running):
            request.num_output_tokens += 1
            if request.num_output_tokens == request.max_tokens:
                request.status = Status.FINISHED
                self.running.remove(request)
                self.finished_req_ids.add(request.request_id)


@pytest.fixture
def plugin(monkeypatch):
    queue, request = ModuleType("request_queue"), ModuleType("request")
    queue.RequestQueue, request.Request, request.RequestStatus = object, Theirs, Status
    logger, plain, asynchronous = ModuleType("logger"), ModuleType("scheduler"), ModuleType("async_scheduler")
    logger.init_logger = logging.getLogger
    plain.Scheduler, asynchronous.AsyncScheduler = Loop, type("AsyncLoop", (Loop,), {})
    names = {"logger": logger, "v1.request": request, "v1.core.sched.request_queue": queue, "v1.core.sched.scheduler": plain}
    names["v1.core.sched.async_scheduler"] = asynchronous
    for name in ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, module in names.items():
        monkeypatch.setitem(sys.modules, f"vllm.{name}", module)
    yield importlib.import_module("lengthwise.engine.vllm")
    for name in [name for name in sys.modules if name.startswith("lengthwise.engine.vllm")]:
        del sys.modules[name]
    del importlib.import_module("lengthwise.engine").vllm


def config(policy, **beside):
    return SimpleNamespace(
        additional_config={"lengthwise": {"policy": policy, **beside}}, kv_transfer_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=SLOTS),
    )  # fmt: skip


@pytest.fixture(scope="module")
def rows():
    """A queue that grows and empties, told of by predictions that are distributions."""
    rng = np.random.default_rng(3)
    at = np.cumsum(rng.integers(0, 5, NUM))
    at[NUM // 2 :] += 200
    lens = rng.geometric(1 / 8, NUM).clip(1, 40)
    guess = np.sort(np.round(lens[:, None] * rng.lognormal(0, 0.5, (NUM, 3)) + 1), axis=1)
    prompts = rng.integers(1, 60, NUM)
    return [
        {"at": int(at[i]), "prompt_len": int(prompts[i]), "output_len": int(lens[i]), "predicted": guess[i].tolist(),
         "client": f"c{i % 3 % 2}", "priority": i % 3, "ttft": 10.0 if i % 2 else None}
        for i in range(NUM)
    ]  # fmt: skip


def played(plugin, policy, rows):
    """(time, number) of each admission in the stand-in."""
    scheduler, now, coming, out = plugin.PolicyScheduler(config(policy)), 0, list(enumerate(rows)), []
    scheduler.waiting.clock, scheduler.waiting._start = lambda: START + now, START
    while coming or scheduler.running or len(scheduler.waiting) or scheduler.finished_req_ids:
        assert now < 5000, "no end"
        while coming and coming[0][1]["at"] <= now:
            scheduler.waiting.add_request(Theirs(*coming.pop(0)))
        output = scheduler.schedule()
        out += [(now, int(rid[1:])) for rid in scheduler.admitted]
        scheduler.admitted.clear()
        now += 1
        scheduler.update_from_output(output, None)
    assert not scheduler.waiting._ours and not scheduler.waiting._theirs and not scheduler.waiting.num_running
    return out


def simulated(policy, rows):
    """The same by Lengthwise's own scheduler, step by step."""
    events = []
    for i, row in enumerate(rows):
        prediction = LengthDistribution.from_quantiles([0.25, 0.5, 0.75], row["predicted"])
        slo = SLO(ttft=row["ttft"]) if row["ttft"] else None
        req = Request(
            i + 1, float(row["at"]), row["prompt_len"], row["output_len"], prediction=prediction, client=row["client"],
            priority=float(row["priority"]), slo=slo,
        )  # fmt: skip
        events.append(Event(req.arrival, EventKind.ARRIVAL, req))
    clock, log = JumpingClock(), Log(max_steps=5000)
    truth = [0, *(row["output_len"] for row in rows)]
    scheduler = Scheduler(policy, Mixed(), Paged(100_000, 16, 0.0), recompute(), max_num_seqs=SLOTS, token_budget=50_000)
    serve(Script(events), scheduler, PlainExecutor(clock, lambda *_: 1.0, truth, fast_forward=False), clock, log)
    return [(int(start), rid - 1) for start, _, chunks, *_ in log.steps for rid, *_ in chunks]


@pytest.mark.parametrize("policy", [*nodes()])
def test_a_policy_decides_as_in_our_own_scheduler_or_is_refused(plugin, policy, rows):
    build = sys.modules["lengthwise.engine.vllm.scheduler"].build
    made = build(policy)
    if lacks := sorted(made.needs - plugin.GIVES):
        with pytest.raises(ValueError, match=f"{type(made).__name__} needs .*{lacks[0]}"):
            plugin.PolicyScheduler(config(policy))
        return
    assert played(plugin, policy, rows) == simulated(made, rows)


def test_most_that_do_not_preempt_are_taken(plugin):
    """Else the test above is about refusals."""
    build = sys.modules["lengthwise.engine.vllm.scheduler"].build
    taken = {param.id for param in nodes() if not build(param.values[0]).needs - plugin.GIVES}
    assert {"fcfs", "sjf", "hrrn", "tie", "vtc", "wait", "aging_sjf", "bounded_sjf", "deadline_sjf", "work_sjf"} <= taken


def test_a_node_survives_json(plugin):
    policy = sys.modules["lengthwise.engine.vllm.scheduler"].build(json.loads(json.dumps({**GUARDED, "level": 0.5})))
    assert type(policy).__name__ == "SJF"


@pytest.mark.parametrize(
    ("policy", "beside", "says"),
    [(None, {}, "NODE"), ({"_target_": "builtins.dict"}, {}, "NODE"), (GUARDED, {"seed": 1}, "seed")],
)
def test_a_config_that_is_none_is_refused(plugin, policy, beside, says):
    with pytest.raises(ValueError, match=says):
        plugin.PolicyScheduler(config(policy, **beside))


def test_a_connector_is_refused(plugin):
    with pytest.raises(ValueError, match="kv_transfer_config"):
        plugin.PolicyScheduler(SimpleNamespace(**{**vars(config(GUARDED)), "kv_transfer_config": object()}))


def test_memory_is_told_in_tokens(plugin):
    waiting = plugin.AsyncPolicyScheduler(config(GUARDED)).waiting
    assert (waiting.pool_tokens, waiting.free_tokens) == (1600, 1200)


def test_an_id_may_come_again(plugin, rows):
    """One is aborted, and another of the same name comes before vLLM tells."""
    scheduler = plugin.PolicyScheduler(config(GUARDED))
    first, again = Theirs(0, rows[0]), Theirs(0, rows[1])
    scheduler.waiting.add_request(first)
    scheduler.waiting.remove_requests([first])
    first.status = Status.FINISHED
    scheduler.finished_req_ids.add("r0")
    scheduler.waiting.add_request(again)
    scheduler.schedule()
    assert scheduler.running == [again] and len(scheduler.waiting) == 0 and list(scheduler.waiting._ours) == ["r0"]
