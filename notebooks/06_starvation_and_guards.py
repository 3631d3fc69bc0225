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
# # Starvation and guards
#
# Shortest first is the fastest order there is, and it may let a long request wait for as long as short ones keep coming. A
# guard goes around a policy and bounds that; it says what it bounds, and it has a price. Here is a case small enough to check
# by hand, then the price in traffic that is nearer to life. No data is needed, and everything takes seconds.

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import lengthwise
from lengthwise.experiments.dataset import Dataset
from lengthwise.sched.policies import FCFS, SRPT, Aging, DeadlineGuard, IdleGuard, OvertakingGuard, WorkGuard

# %% [markdown]
# ## A stream of short requests
#
# Two slots; a step takes a second, whoever is in it, and prompts cost nothing. Every 4 s comes a request of 10 tokens (9 s of
# decoding, the first token is the prompt's), a little more than two slots can do. Two long ones come among the first of them.

# %%
SLOTS, SHORT, LONG = 2, 10, 61
shorts, longs = [4.0 * k for k in range(100)], [10.0, 50.0]
arrival = np.array(shorts + longs)
output_len = np.array([SHORT] * len(shorts) + [LONG] * len(longs))
order = np.argsort(arrival, kind="stable")
stream = Dataset(
    "stream", np.ones(len(order), dtype=np.int64), output_len[order], "tokens", "made here", "none", arrival=arrival[order]
)


def served(policy):
    """The requests of the stream, served in the order of `policy`, which is told the true lengths."""
    run = lengthwise.simulate(
        policy,
        predictor="oracle",
        workload=stream,
        arrivals="replay",
        hardware="unit",
        max_num_seqs=SLOTS,
        num_requests=len(stream),
    )
    rows = run.requests
    return rows.assign(wait=rows["first_scheduled"] - rows["arrival"], e2e=rows["finish"] - rows["arrival"])


fcfs, srpt = served(FCFS()), served(SRPT())
last = shorts[-1]
{
    "the stream ends at": last,
    "a long one waits, FCFS": fcfs.loc[fcfs["output_len"] == LONG, "wait"].max(),
    "a long one waits, SRPT": srpt.loc[srpt["output_len"] == LONG, "wait"].max(),
}

# %% [markdown]
# Under SRPT the long ones see no slot until the stream is over: had it gone on for a week, they would have waited for a week.

# %%
starved = srpt[srpt["output_len"] == LONG]
assert (starved["first_scheduled"] > last).all()
assert (fcfs.loc[fcfs["output_len"] == LONG, "wait"] < 60).all()

# %% [markdown]
# ## Five guards and what each of them bounds
#
# | guard | promoted, or helped | declared bound |
# | --- | --- | --- |
# | `Aging` | each second of age counts as `alpha` tokens less | passed only by who comes within (key - 1) / alpha s after it |
# | `DeadlineGuard` | after `wait` s (and `per_token` s for each predicted token) | passed by nobody who comes later than that |
# | `OvertakingGuard` | when more than `most` have come after it | passed by at most `most` who came later |
# | `IdleGuard` | off the batch for `idle` s, for `quantum` tokens | on the batch then, but for those promoted before |
# | `WorkGuard` | `factor` x the most work found waiting, and `slack`, was done since | passed by nobody later from then on |
#
# A bound is on who may pass, not on the time alone: where nobody is served nobody waits for less.

# %%
ALPHA, WAIT, MOST, IDLE, QUANTUM, FACTOR, SLACK = 0.5, 60.0, 15, 60.0, 20, 1.0, 100.0
guards = {
    "aging": Aging(SRPT(), ALPHA),
    "deadline": DeadlineGuard(SRPT(), wait=WAIT),
    "bounded": OvertakingGuard(SRPT(), MOST),
    "idle": IdleGuard(SRPT(), IDLE, QUANTUM),
    "work": WorkGuard(SRPT(), FACTOR, SLACK),
}
runs = {name: served(policy) for name, policy in guards.items()}


def passers(rows, request):
    """Who came after `request` and had its first step before it."""
    return rows[(rows["arrival"] > request["arrival"]) & (rows["first_scheduled"] < request["first_scheduled"])]


def unfinished(rows):
    """The most work (tokens) that was there, waiting or running, when anybody came."""
    there = [((rows["arrival"] <= now) & (rows["finish"] > now)) for now in rows["arrival"]]
    return max(rows.loc[mask, "output_len"].sum() for mask in there)


def measured(name, rows):
    """(what is bounded, its bound, the greatest that was measured) of the long requests."""
    long = rows[rows["output_len"] == LONG]
    leads = [(passers(rows, one)["arrival"] - one["arrival"]).max() for _, one in long.iterrows()]
    if name == "aging":
        return "lead of a passer (s)", (LONG - 1) / ALPHA, max(leads)
    if name == "deadline":
        return "lead of a passer (s)", WAIT, max(leads)
    if name == "bounded":
        return "passers", MOST, max(len(passers(rows, one)) for _, one in long.iterrows())
    if name == "idle":
        return "wait for the first step (s)", IDLE + 1, long["wait"].max()  # a step that has begun is ended
    # both slots are busy all the time, so that work is done at SLOTS tokens a second; a step that has begun is ended
    return "wait for the first step (s)", (FACTOR * unfinished(rows) + SLACK) / SLOTS + 1, long["wait"].max()


# %%
table = []
for name, rows in {"fcfs": fcfs, "srpt": srpt, **runs}.items():
    what, bound, most = measured(name, rows) if name in guards else ("", np.nan, np.nan)
    long, others = rows[rows["output_len"] == LONG], rows[rows["output_len"] == SHORT]
    table.append(
        {
            "policy": name, "bounded": what, "bound": bound, "measured": most, "a long one waits (s)": long["wait"].max(),
            "mean E2E (s)": rows["e2e"].mean(), "price": rows["e2e"].mean() / srpt["e2e"].mean() - 1.0,
            "mean E2E of the short (s)": others["e2e"].mean(),
        }
    )  # fmt: skip
table = pd.DataFrame(table).set_index("policy")
assert (table.loc[list(guards), "measured"] <= table.loc[list(guards), "bound"]).all()
assert (table.loc[list(guards), "a long one waits (s)"] < table.loc["srpt", "a long one waits (s)"]).all()
table.round(2)

# %% [markdown]
# Each bound holds. The price is the rise of mean latency over SRPT, as high as it gets: here nothing is to spare, so that
# every second for a long request is one more for all the short ones behind it.

# %%
assert (table["price"].drop("srpt") > 0).all()
figure, ax = plt.subplots(figsize=(7, 3), layout="constrained")
for k, rows in enumerate([srpt, *runs.values(), fcfs]):
    for _, one in rows[rows["output_len"] == LONG].iterrows():
        ax.plot([one["arrival"], one["first_scheduled"]], [k, k], color="tab:red", alpha=0.5, lw=5, solid_capstyle="butt")
        ax.plot([one["first_scheduled"], one["finish"]], [k, k], color="tab:blue", alpha=0.5, lw=5, solid_capstyle="butt")
ax.axvline(last, color="grey", lw=0.8)
ax.set_yticks(range(len(runs) + 2), ["srpt", *runs, "fcfs"])
ax.set(xlabel="s", title="Two long requests: red until the first step, blue until the last; grey: the stream ends")
plt.show()

# %% [markdown]
# ## The price where there is something to spare
#
# Requests of all lengths, arrivals in clumps, 16 slots at 95 % of what they can do, step times of an H100. The guards are the
# nodes of `conf/policy`, with the settings that they come with; on the command line `policy=fcfs,srpt,deadline_srpt`. What a
# guard costs hangs on how often it acts: one that acts on the few who wait longest is nearly free, one that acts on most
# requests of a burst is first come first served by another name. And a bound on who may pass is none on the longest wait.

# %%
names = ("fcfs", "srpt", "aging_srpt", "deadline_srpt", "bounded_srpt", "idle_srpt", "work_srpt")
spare = {
    name: lengthwise.simulate(
        name, predictor="oracle", workload="synthetic", arrivals="gamma", max_num_seqs=16, load=0.95, num_requests=600, seed=2
    )
    for name in names
}
prices = pd.DataFrame(
    {name: {key: run.metrics[key] for key in ("e2e_mean", "e2e_p99", "wait_p99", "max_wait")} for name, run in spare.items()}
).T
prices["price"] = prices["e2e_mean"] / prices.loc["srpt", "e2e_mean"] - 1.0
prices.round(2)

# %%
assert (prices.loc[list(names[2:]), "price"] < prices.loc["fcfs", "price"]).all() and prices.loc["idle_srpt", "price"] < 0.05
assert prices.loc["idle_srpt", "max_wait"] < prices.loc["srpt", "max_wait"]
assert len(spare["fcfs"].requests) == 600
