# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Write your own policy
#
# A policy is one method: a number for each request, lower first. Everything else has a default. Here one is written, checked,
# run in simulation beside two others, guarded against starvation, named in a config, and run on a real model, all within a
# minute and without data.

# %%
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

import lengthwise
from lengthwise.engine.native.tiny import tiny
from lengthwise.sched import FOREVER, INF, Policy, Request, View
from lengthwise.sched.contract import check_policy
from lengthwise.sched.policies import SRPT, OvertakingGuard
from lengthwise.sched.request import predicted

# %% [markdown]
# ## The rule
#
# A request that holds $p$ tokens of prompt and generates $n$ more holds $p, p + 1, \ldots, p + n$ tokens of memory in turn: an
# area of about $n (p + n / 2)$ token-steps. Where memory is what requests wait for, the area is what a request costs, not its
# length; and the cheapest first is what shortest-first is to time.
#
# `needs` says what the policy wants to know; whoever runs it refuses what it cannot give, before anything starts. `view` is
# what a policy may see of the engine: time, steps, memory, and what each request has generated. The true length is not in it.


# %%
class AreaFirst(Policy):
    """Key: predicted KV area, in token-steps. Never preempts for a slot."""

    needs = frozenset({"prediction"})

    def key(self, req: Request, view: View) -> float:
        n = max(predicted(req).mean(), 1.0)
        return n * (req.prompt_len + n / 2)

    def stable(self, view: View) -> tuple[int, float]:
        return FOREVER, INF  # time alone changes no decision, so that the simulation may take many steps at once


# %% [markdown]
# ## The check
#
# `check_policy` runs small hostile cases, with hardly any memory, aborts and wrong predictions, in which every count must
# balance at every step, and compares runs that must come out the same: twice the same, many steps at once and singly, with one
# answer made longer that nobody can know of yet. Equal predictions make most policies first-come-first-served; not this one,
# which looks at prompts too.

# %%
check_policy(AreaFirst, constant_is_fcfs=False)


# %% [markdown]
# What it finds: a key must stand still while a request waits (the order is a heap), unless the policy says by `key_epoch` or
# `turned` that it has moved. This one forgets to.


# %%
class Impatient(AreaFirst):
    """The longer it waits the sooner it runs."""

    def key(self, req: Request, view: View) -> float:
        return super().key(req, view) - 100 * (view.now - req.arrival)


try:
    check_policy(Impatient, constant_is_fcfs=False)
except AssertionError as error:
    print(error)
else:
    raise AssertionError("the check has missed it")

# %% [markdown]
# ## In simulation
#
# An object goes wherever the name of a node goes. Predictions are off, memory is short, and more comes than can be served.

# %%
cell = dict(predictor="noisy_oracle", workload="synthetic", load=1.2, num_requests=1500, kv_pool_tokens=20_000, seed=0)
policies = {"first come first served": "fcfs", "shortest remaining first": SRPT(), "least area first": AreaFirst()}
runs = {name: lengthwise.simulate(policy=policy, **cell) for name, policy in policies.items()}


def table(runs):
    names = ["e2e_mean", "e2e_p99", "ttft_p99", "max_wait", "preemptions"]
    return pd.DataFrame({name: {key: run.metrics[key] for key in names} for name, run in runs.items()}).T.round(1)


table(runs)

# %% [markdown]
# ## A guard
#
# What makes the mean small makes somebody wait: whoever is always behind somebody cheaper. A guard wraps any policy and bounds
# that; this one lets at most `most` pass who came later. Its bound is checked too, by the same call.

# %%
check_policy(lambda: OvertakingGuard(AreaFirst(), most=5), constant_is_fcfs=False)
for most in (500, 100):
    runs[f"at most {most} pass"] = lengthwise.simulate(policy=OvertakingGuard(AreaFirst(), most), **cell)
table(runs)

# %%
figure, ax = plt.subplots(figsize=(5, 3.5))
for name, run in runs.items():
    wait = np.sort((run.requests["first_scheduled"] - run.requests["arrival"]).dropna())
    ax.plot(wait, 1 - np.arange(len(wait)) / len(wait), label=name, drawstyle="steps-post")
ax.set(xlabel="wait (s)", ylabel="share that waits longer", yscale="log")
ax.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## A node of the configuration
#
# For the command line and for studies a policy is a file of its own, anywhere on Python's path, and a node that names it:
# `_target_`, and below it what the class is to be made with. Nodes nest, so that a guard around it is another node.

# %%
folder = Path(tempfile.mkdtemp())
(folder / "area.py").write_text("""\
from lengthwise.sched import FOREVER, INF, Policy
from lengthwise.sched.request import predicted


class AreaFirst(Policy):
    needs = frozenset({"prediction"})

    def __init__(self, prompt_weight: float = 1.0) -> None:
        self.prompt_weight = prompt_weight

    def key(self, req, view):
        n = max(predicted(req).mean(), 1.0)
        return n * (self.prompt_weight * req.prompt_len + n / 2)

    def stable(self, view):
        return FOREVER, INF
""")
(folder / "policy").mkdir()
(folder / "policy" / "area.yaml").write_text("""\
_target_: area.AreaFirst
prompt_weight: 1.0
""")
(folder / "policy" / "bounded_area.yaml").write_text("""\
_target_: lengthwise.sched.policies.bounded.OvertakingGuard
policy: {_target_: area.AreaFirst}
most: 100
""")
sweep = ["policy=fcfs,area,bounded_area", "predictor=noisy_oracle", "load=1.2", "limits.kv_pool_tokens=20000"]
sweep += ["num_requests=500", "wandb=off", "name=area", f"out={folder / 'runs'}"]
command = [sys.executable, "-m", "lengthwise.cli", "run", "--config-dir", str(folder), "-m", *sweep]
env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
done = subprocess.run(command, env=env, capture_output=True, text=True)
assert done.returncode == 0, done.stderr
print(done.stdout)

# %% [markdown]
# That is, with the folder on the path:
#
# ```
# PYTHONPATH=FOLDER lengthwise run --config-dir FOLDER -m policy=fcfs,area,bounded_area predictor=noisy_oracle load=1.2
# ```
#
# ## On an engine
#
# The same object on a real model, a tiny one made in place: `executor="native"` is all that changes.

# %%
torch.set_num_threads(1)
real = lengthwise.simulate(
    executor="native", model=tiny(max_positions=8192), workload="synthetic_short", limits="cpu32", num_requests=30, rate=20.0,
    policy=AreaFirst(), predictor="noisy_oracle",
)  # fmt: skip
assert (real.requests["status"] == "finished").all()
real.requests[["arrival", "first_scheduled", "finish", "prompt_len", "output_len"]].head()

# %% [markdown]
# A server takes it by the node, and so does vLLM, whose waiting requests then stand in its order; predictions come with the
# requests there, as `SamplingParams(extra_args={"predicted_len": 120})`:
#
# ```
# PYTHONPATH=FOLDER lengthwise serve --config-dir FOLDER model=smollm2 policy=area predictor=artefact predictor.path=PATH
# PYTHONPATH=FOLDER vllm serve MODEL --scheduler-cls lengthwise.engine.vllm.PolicyScheduler \
#     --additional-config '{"lengthwise": {"policy": {"_target_": "area.AreaFirst"}}}'
# ```
