"""vLLM with a policy: its scheduler alone, on a clock of its own, beside the stock one; and an engine from end to end.

Everything of vLLM runs in the environment that `python benchmarks/peers/setup.py [FOLDER] --only vllm` makes (LENGTHWISE_PEERS
names FOLDER, where it is not the cache's), by vllm_host.py. All runs of the scheduler alone are one process.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from lengthwise.engine.native.cache import cache_dir

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).parents[2]
POLICIES = "lengthwise.sched.policies"
SJF = {"_target_": f"{POLICIES}.sjf.SJF", "by": "mean"}
FCFS = {"_target_": f"{POLICIES}.fcfs.FCFS"}
TIGHT = {"slots": 4, "blocks": 24}  # 23 blocks of 16 tokens
AMPLE = {"slots": 3}


def drawn(seed, num=40, **extra):
    """Requests that queue up: a few come at once, lengths are spread wide. By their ids they stand in order of arrival."""
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.integers(0, 4, num)).tolist()
    lens = rng.geometric(1 / 25, num).clip(1, 120).tolist()
    prompts = rng.integers(1, 120, num).tolist()
    return [
        {"id": f"r{i:03}", "at": at[i], "prompt_len": prompts[i], "output_len": lens[i], "priority": lens[i],
         "extra": {"predicted_len": lens[i], **extra}}
        for i in range(num)
    ]  # fmt: skip


def one(name, at, output_len, **extra):
    return {"id": name, "at": at, "prompt_len": 8, "output_len": output_len, "extra": extra}


def flood(num=30):
    """Slot 1 is taken, a long request waits, and then come short ones, one every other step: more than a slot can serve."""
    long = [one("first", 0, 10, predicted_len=10), one("long", 1, 40, predicted_len=40)]
    return long + [one(f"s{i:02}", 2 + 2 * i, 4, predicted_len=4) for i in range(num)]


def two_clients():
    greedy = [one(f"a{i}", 0, 10, client="a") for i in range(12)]
    return greedy + [one(f"b{i}", 5, 10, client="b") for i in range(3)]


def guarded(name, **arguments):
    return {"_target_": f"{POLICIES}.{name}", "policy": SJF, **arguments}


CROWD, CLIENTS = drawn(0), two_clients()
PRIORITY = {"_target_": f"{POLICIES}.priority.Priority", "preemptive": False}
ABORTS = {"r005": 30, "r039": 70, "r000": 2}  # step at which
BLOCKED = {"r003": 60, "r004": 90}
SAID = [
    one("number", 0, 5, predicted_len=7.5), one("none", 0, 5), one("text", 0, 5, predicted_len="9"),
    one("minus", 0, 5, predicted_len=-1), one("nan", 0, 5, predicted_len=float("nan")),
    one("quantiles", 0, 5, predicted_len=[10, 20, 30], client=3, slo_ttft="soon"), one("falling", 0, 5, predicted_len=[30, 10]),
]  # fmt: skip
REFUSED = {
    "SRPT": ({"_target_": f"{POLICIES}.srpt.SRPT"}, "SRPT needs ['preempt']"),
    "Priority": ({"_target_": f"{POLICIES}.priority.Priority"}, "Priority needs ['preempt']"),
    "MCSF": ({"_target_": f"{POLICIES}.mc_sf.MCSF"}, "MCSF needs ['future_peak']"),
    "LPM": ({"_target_": f"{POLICIES}.lpm.LPM"}, "LPM needs ['cached_len']"),
    "guard": ({**guarded("bounded.OvertakingGuard", most=3), "policy": {"_target_": f"{POLICIES}.srpt.SRPT"}}, "['preempt']"),
    "no policy": ({"_target_": "builtins.dict"}, "it must hold"),
}
PLAYS = {
    "fcfs": {**AMPLE, "requests": CROWD},
    "constant": {**AMPLE, "policy": {"_target_": "vllm_host.Constant"}, "requests": CROWD},
    "fcfs tight": {**TIGHT, "requests": CROWD},
    "constant tight": {**TIGHT, "policy": {"_target_": "vllm_host.Constant"}, "requests": CROWD},
    "fcfs blocked": {**AMPLE, "blocked": BLOCKED, "requests": CROWD},
    "constant blocked": {**AMPLE, "blocked": BLOCKED, "policy": FCFS, "requests": CROWD},
    "hrrn blocked": {**AMPLE, "blocked": BLOCKED, "policy": {"_target_": f"{POLICIES}.hrrn.HRRN"}, "requests": CROWD},
    "async": {**TIGHT, "scheduler": "stock async", "requests": CROWD},
    "async constant": {**TIGHT, "scheduler": "AsyncPolicyScheduler", "policy": FCFS, "requests": CROWD},
    "priority": {**AMPLE, "stock": "priority", "requests": CROWD},
    "sjf": {**AMPLE, "policy": SJF, "requests": CROWD},
    "priority tight": {**TIGHT, "stock": "priority", "requests": CROWD},
    "sjf tight": {**TIGHT, "stock": "priority", "policy": SJF, "requests": CROWD},
    "by priority": {**TIGHT, "stock": "priority", "policy": PRIORITY, "requests": CROWD},
    "unguarded": {"slots": 1, "policy": SJF, "requests": flood()},
    "overtaking": {"slots": 1, "policy": guarded("bounded.OvertakingGuard", most=10), "requests": flood()},
    "aging": {"slots": 1, "policy": guarded("aging.Aging", alpha=2.0), "requests": flood()},
    "deadline": {"slots": 1, "policy": guarded("deadline.DeadlineGuard", wait=25.0), "requests": flood()},
    "fcfs clients": {"slots": 1, "requests": CLIENTS},
    "vtc": {"slots": 1, "policy": {"_target_": f"{POLICIES}.vtc.VTC"}, "requests": CLIENTS},
    "wait": {"slots": 8, "policy": {"_target_": f"{POLICIES}.wait.Wait", "threshold": 4},
             "requests": [one(f"w{i}", 3 * i, 30) for i in range(8)]},
    "told": {**TIGHT, "policy": {"_target_": "vllm_host.Told"}, "requests": CROWD, "aborts": ABORTS,
             "blocked": BLOCKED},
    "said": {"slots": 1, "policy": {"_target_": "vllm_host.Told"}, "requests": SAID},
    "beside": {**AMPLE, "policy": SJF, "beside": {"alpha": 1}, "requests": []},
    **{f"refused {name}": {**AMPLE, "policy": node, "requests": []} for name, (node, _) in REFUSED.items()},
}  # fmt: skip


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """Do a job in vLLM's environment."""
    folder = Path(os.environ.get("LENGTHWISE_PEERS") or cache_dir("peers"))
    index = folder / "peers.json"
    python = json.loads(index.read_text()).get("vllm", "") if index.exists() else ""
    if not Path(python).is_file():
        pytest.skip(f"no vLLM: {index} names none. `python benchmarks/peers/setup.py FOLDER --only vllm` makes an environment")
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    env.setdefault("VLLM_CACHE_ROOT", str(folder / "vllm-cache"))

    def ask(**job):
        job["folder"] = str(tmp_path_factory.mktemp("llama"))
        command = [python, str(ROOT / "tests" / "vllm_host.py")]
        done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, env=env, timeout=400)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    return ask


@pytest.fixture(scope="module")
def played(ask):
    return dict(zip(PLAYS, ask(play=list(PLAYS.values())), strict=True))


def same(one, two):
    assert [one[key] for key in ("admitted", "preempted", "finished")] == [
        two[key] for key in ("admitted", "preempted", "finished")
    ]


def test_a_constant_key_is_stock_fcfs(played):
    same(played["constant"], played["fcfs"])
    same(played["constant tight"], played["fcfs tight"])
    assert played["fcfs tight"]["preempted"], "memory never ran out"
    assert [rid for _, rid in played["fcfs"]["admitted"]] == [r["id"] for r in CROWD]


def test_shortest_first_by_an_oracle_is_stock_priority_by_length(played):
    same(played["sjf"], played["priority"])
    same(played["sjf tight"], played["priority tight"])
    same(played["by priority"], played["priority tight"])
    assert played["priority tight"]["preempted"], "memory never ran out"
    assert played["sjf"]["admitted"] != played["fcfs"]["admitted"]


def test_asynchronous_scheduling(played):
    same(played["async constant"], played["async"])
    assert played["async"]["preempted"]


def test_whom_vllm_sets_aside_takes_nobody_elses_place(played):
    """A request that vLLM skips until it is ready, as one whose grammar is being compiled."""
    same(played["constant blocked"], played["fcfs blocked"])
    for name in ("constant blocked", "hrrn blocked"):
        when = {rid: step for step, rid in played[name]["admitted"]}
        assert len(when) == len(CROWD) and all(when[rid] >= step for rid, step in BLOCKED.items())
    others = [[row for row in played[name]["admitted"] if row[1] not in BLOCKED] for name in ("constant blocked", "fcfs")]
    assert others[0] != others[1]


def passes(run):
    """Arrivals (s) of those who came after `long` and were admitted before it."""
    at = {r["id"]: r["at"] for r in flood()}
    order = [rid for _, rid in run["admitted"]]
    return [at[rid] for rid in order[: order.index("long")] if at[rid] > at["long"]]


def test_guards_bound_overtaking(played):
    """Each by what it declares: a number of passes, the key at arrival over alpha, a deadline."""
    assert len(passes(played["unguarded"])) == 30, "nothing to guard against"
    assert 0 < len(passes(played["overtaking"])) <= 10
    assert max(passes(played["aging"])) < 1 + (40 - 1) / 2.0
    assert max(passes(played["deadline"])) < 1 + 25
    assert all(len(passes(played[name])) > 3 for name in ("aging", "deadline"))  # neither is first come first served


def test_a_policy_with_an_order_of_its_own(played):
    """VTC lets a client who has had little in before the queue of one who has had much."""
    order = {name: [rid for _, rid in played[name]["admitted"]] for name in ("vtc", "fcfs clients")}
    assert order["fcfs clients"][-3:] == ["b0", "b1", "b2"]
    assert order["vtc"][:5] == ["a0", "b0", "a1", "b1", "a2"]


def test_a_policy_may_hold_requests_back(played):
    """Four must have come together; at first the engine is empty, and the gate opens for one."""
    assert played["wait"]["admitted"] == [
        [0, "w0"],
        *([12, f"w{i}"] for i in range(1, 5)),
        *([42, f"w{i}"] for i in range(5, 8)),
    ]


def test_what_a_policy_is_told(played):
    """Each request arrives, is on and off the batch in turn, and ends once, aborted or not; the view counts with it."""
    calls, after = played["told"]["calls"], {"arrival": {"schedule", "finish"}, "preempt": {"schedule", "finish"}}
    after["schedule"] = {"preempt", "finish"}
    last, running = {}, 0
    for what, *rest in calls:
        if what == "steps":
            assert rest[3] == running and rest[2] == 1.0
            continue
        rid = rest[0]
        assert what in after[last[rid]] if rid in last else what == "arrival"
        if what == "schedule":
            assert rest[2] == running
        running += (what == "schedule") - (what == "preempt") - (what == "finish" and last[rid] == "schedule")
        last[rid] = what
    assert len(last) == len(CROWD) and set(last.values()) == {"finish"} and running == 0
    assert sum(what == "preempt" for what, *_ in calls) == len(played["told"]["preempted"]) > 0
    assert {rest[4] for what, *rest in calls if what == "steps"} <= set(range(0, 23 * 16 + 1, 16))  # whole blocks


def test_nothing_is_left_of_requests_that_ended(played):
    left = [run["left"] for run in played.values() if "left" in run]
    assert len(left) > 12 and all(run == [0, 0, 0, 0] for run in left)


def test_what_clients_say(played):
    """No prediction, and one that cannot be read, is max_tokens: a client must not be able to end the engine."""
    rows = {one["id"]: row for one, row in zip(SAID, [c for c in played["said"]["calls"] if c[0] == "arrival"], strict=True)}
    means = {name: row[5] for name, row in rows.items()}
    assert means.pop("quantiles") == pytest.approx(20, rel=0.2)
    assert means == {"number": 7.5, "none": 5, "text": 5, "minus": 5, "nan": 5, "falling": 5}
    assert rows["quantiles"][6] == "3" and rows["none"][6] is None


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_policy_and_need(played, name):
    assert REFUSED[name][1] in played[f"refused {name}"]["refused"]


def test_an_unknown_key_is_refused(played):
    assert "alpha" in played["beside"]["refused"]


def test_an_engine_serves_in_the_order_of_a_policy(ask):
    """All come at once to one slot. The first holds it until the others have come."""
    lens = {"first": 200, "c": 9, "a": 3, "d": 30, "b": 5}
    requests = [one(rid, 0, num, predicted_len=0 if rid == "first" else num) for rid, num in lens.items()]
    answer = ask(serve={"slots": 1, "policy": SJF, "requests": requests})
    assert answer == {"admitted": ["first", "a", "b", "c", "d"], "tokens": lens}
