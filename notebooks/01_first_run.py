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
# # A first run
#
# Simulate one schedule in three lines, sweep two from the command line, read the sweep back, and draw a figure.
# Everything here takes seconds and needs no data: lengths are synthetic, the hardware is a fitted cost model of Llama-3.1-8B on
# one H100.

# %%
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

import lengthwise
from lengthwise.experiments.figures import ecdf
from lengthwise.experiments.load_runs import load_requests, load_runs

# %%
run = lengthwise.simulate(policy="srpt", predictor="oracle", workload="synthetic", load=0.9, num_requests=500, seed=0)
run.requests.head()

# %% [markdown]
# A `Run` holds one row per request, one per engine step, and a summary. Times are in seconds, lengths in tokens; every latency
# starts when the request was due to arrive.

# %%
metrics = run.summary["metrics"]
{name: metrics[name] for name in ("ttft_mean", "ttft_p99", "e2e_mean", "e2e_p99", "goodput_rps", "attainment", "max_wait")}

# %%
fcfs = lengthwise.simulate(policy="fcfs", workload="synthetic", load=0.9, num_requests=500, seed=0)
(run.requests["arrival"] == fcfs.requests["arrival"]).all()  # the same seed gives both the same arrivals and lengths

# %% [markdown]
# ## A sweep
#
# On the command line a comma makes a sweep, `-m` runs it, and `out` says where results go. Run it again and it computes
# nothing: a cell is known by the hash of its config.

# %%
out = Path(tempfile.mkdtemp())
sweep = ["limits=seqs64", "arrivals=gamma", "load=1.1", "num_requests=400", "wandb=off", f"out={out}", "name=first"]
schedules = ["policy=fcfs,srpt", "predictor=oracle"]
done = subprocess.run([sys.executable, "-m", "lengthwise.cli", "run", "-m", *schedules, *sweep], capture_output=True, text=True)
assert done.returncode == 0, done.stderr
print(done.stdout)

# %% [markdown]
# ## Reading it back
#
# One row per cell. A cell that failed or went missing would stay in this frame as a row without numbers.

# %%
runs = load_runs(out / "first")
runs[["policy", "predictor", "load", "seed", "status", "e2e_mean", "e2e_p99", "ttft_p99", "max_wait"]]

# %%
requests = load_requests(out / "first")
requests.groupby("policy")["e2e"].describe(percentiles=[0.5, 0.9, 0.99])

# %% [markdown]
# ## A figure
#
# A figure is a pure function of such a frame: it draws on the axes you give it and returns the table it plotted.

# %%
figure = plt.figure(figsize=ecdf.size(requests))
ax = figure.add_axes((0, 0, 1, 1))
table = ecdf.draw(requests, ax, latency="e2e")

# %%
assert set(table["policy"]) == {"fcfs", "srpt"}
table.groupby("policy").tail(1)
