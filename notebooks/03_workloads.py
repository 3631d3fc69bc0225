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
# # Workloads
#
# What the traces are like that a schedule is tried on: how requests arrive, how long prompts and answers are, how much of a
# prompt was there before, how sessions go on. Real traces are shown where their files lie below `LENGTHWISE_DATA`
# (`lengthwise data` says where each is had); without any the synthetic workloads remain.

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from lengthwise.experiments.arrivals.gamma import Gamma
from lengthwise.experiments.arrivals.poisson import Poisson
from lengthwise.experiments.catalogue import entries, nodes, status
from lengthwise.experiments.draw import draw
from lengthwise.experiments.nodes import make
from lengthwise.experiments.trace_summary import summarise, summary_frame

# %%
pd.DataFrame(
    [{"node": e.name, "found": status(e.origin, check=False).path is not None, "licence": e.origin.licence} for e in entries()]
)


# %% [markdown]
# A workload node makes a `Dataset`: columns of prompt and output lengths, and what else its trace has (arrival times, prefix
# hashes, sessions, texts, several samples). `dropped` counts what was left out and `notes` say what was changed.


# %%
def load(node, **changes):
    """The Dataset of a workload node, or None where its file is not at hand."""
    try:
        return make({**nodes()[node], **changes})
    except FileNotFoundError:
        return None


wanted = (
    "synthetic",
    "azure_conv_like",
    "azure_code",
    "azure_conv",
    "mooncake_conversation",
    "mooncake_synthetic",
    "lmcache_miniswe",
    "lmcache_magagent",
    "vidur_lengths",
)
data = {node: dataset for node in wanted if (dataset := load(node)) is not None}
{node: (len(dataset), dict(dataset.dropped)) for node, dataset in data.items()}

# %%
table = summary_frame(data.values())
table.drop(columns="unit").T.round(2)

# %% [markdown]
# ## Arrivals
#
# The same rate can be served easily or hardly at all: what counts is how uneven the gaps are (`gap_cv`; 1 is Poisson). The
# Azure code trace has silences of minutes, then hundreds of calls in one. Where no trace is at hand, two generated processes
# at 5 requests/s show the difference.

# %%
times = {node: dataset.arrival for node, dataset in data.items() if dataset.arrival is not None}
if not times:
    processes = {"poisson": Poisson(), "gamma, CV 3": Gamma(cv=3.0)}
    times = {name: draw(data["synthetic"], process, 5000, 5.0, seed=0).arrival for name, process in processes.items()}

figure, axes = plt.subplots(len(times), 1, figsize=(7, 1.5 * len(times)), squeeze=False, layout="constrained")
for ax, (name, arrival) in zip(axes[:, 0], times.items(), strict=True):
    per_bin, edges = np.histogram(arrival, bins=np.arange(0, arrival[-1] + 30, 30))
    ax.step(edges[:-1] / 60, per_bin / 30, where="post")
    ax.set_title(name, loc="left", fontsize=9)
    ax.set_ylabel("requests/s")
axes[-1, 0].set_xlabel("minutes")

# %% [markdown]
# Mooncake's recorded times are rounded to 3 s, which makes most gaps 0 and the CV of the rest meaningless. `jitter=3.0` spreads
# them within their 3 s by a stated seed; the default leaves them as they are.

# %%
spread = load("mooncake_conversation", jitter=3.0)
both = {} if spread is None else {"recorded": summarise(data["mooncake_conversation"]), "jitter=3.0": summarise(spread)}
pd.DataFrame(both, index=["rate", "gap_cv", "longest_gap", "num_ties"])

# %% [markdown]
# ## Lengths
#
# Prompts and outputs over five orders of magnitude. Outputs that stand exactly at a service's limit were cut there: they are
# `censored`, at least that long, and never a label to learn from.

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
for ax, column in zip(axes, ("prompt_len", "output_len"), strict=True):
    for name, dataset in data.items():
        lens = np.sort(getattr(dataset, column))
        ax.step(lens, np.arange(1, len(lens) + 1) / len(lens), where="post", label=name, linewidth=1)
    ax.set_xscale("log")
    ax.set_xlabel(f"{column} (tokens)")
axes[0].set_ylabel("share of requests")
axes[1].legend(fontsize=7)

# %%
table.loc[table["censored"].notna(), ["n", "output_p99", "output_max", "censored"]]

# %% [markdown]
# ## Prefixes
#
# What a prefix cache without limit would find: a prompt's pieces are named by chained hashes, so that a name seen before means
# the same text up to there. A real cache is smaller and finds less (`kv=prefix`).

# %%
table.loc[table["piece_hit_share"].notna(), ["n", "prompt_mean", "piece_hit_share", "token_hit_share", "request_hit_share"]]

# %% [markdown]
# ## Sessions
#
# Conversations and agents come back with all they said before. Gaps are the time between an answer and the next call: a person
# thinking, a tool at work. Some traces know only when calls began; `notes["gap"]` then says how the gap was made.

# %%
sessions = {name: dataset for name, dataset in data.items() if "session" in dataset.columns}
conversations = load("conversations", num_sessions=300)
if conversations is not None:
    sessions["conversations"] = conversations
{name: dataset.notes.get("gap", "no gap recorded") for name, dataset in sessions.items()}

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
for name, dataset in sessions.items():
    turns = pd.Series(dataset.columns["session"]).value_counts().to_numpy()
    axes[0].step(np.sort(turns), np.arange(1, len(turns) + 1) / len(turns), where="post", label=name)
    growth = pd.Series(dataset.prompt_len).groupby(np.asarray(dataset.columns["turn"])).median()
    axes[1].plot(growth.index, growth.to_numpy(), label=name)
axes[0].set(xlabel="turns of a session", ylabel="share of sessions")
axes[1].set(xlabel="turn", ylabel="median prompt (tokens)", yscale="log")
axes[0].legend(fontsize=7)

# %% [markdown]
# ## A file of one's own
#
# `workload=table` reads any CSV, Parquet or JSONL by named columns and declared units; the same summary then applies.

# %%
mine = pd.DataFrame({"ms": [0, 40, 40, 900], "in": [120, 80, 95, 400], "out": [30, 250, 7, 90]})
mine.to_csv("mine.csv", index=False)
own = make(
    {**nodes()["table"], "path": "./mine.csv", "prompt_len": "in", "output_len": "out", "unit": "my tokens", "arrival": "ms",
     "time_unit": "ms"}
)  # fmt: skip
assert summarise(own)["num_ties"] == 1 and own.arrival.tolist() == [0.0, 0.04, 0.04, 0.9]
dict(own.notes)
