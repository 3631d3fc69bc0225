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
# # Sweeps, figures and W&B
#
# A sweep of two policies over three loads and three seeds; what it says, policy against policy on the same arrivals; three
# figures from the stored results; a copy for Weights & Biases without a network, read back and compared with the originals.
# It takes seconds and needs no data, no key and no account.

# %%
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

from lengthwise.experiments.comparison import paired
from lengthwise.experiments.figures import goodput, latency_vs_load, slowdown_decile
from lengthwise.experiments.figures.sources.points import load_points
from lengthwise.experiments.figures.sources.slowdowns import load_slowdowns
from lengthwise.experiments.load_runs import load_requests, load_runs, read_cells
from lengthwise.experiments.tracking import mirror
from lengthwise.experiments.wandb_check import check_mirror
from lengthwise.experiments.wandb_log import read_offline

# %% [markdown]
# ## The sweep
#
# Commas sweep, `exclude` names pairs that mean nothing: FCFS reads no prediction, SRPT needs one. Arrivals, prompts and lengths
# depend on the seed alone, so both policies of a seed serve the same requests.

# %%
out = Path(tempfile.mkdtemp())
schedules = ["policy=fcfs,srpt", "predictor=none,oracle"]
schedules += ["exclude=[{policy: fcfs, predictor: oracle}, {policy: srpt, predictor: none}]"]
sweep = ["limits=seqs64", "arrivals=gamma", "load=0.7,0.9,1.1", "seed=0,1,2", "num_requests=300"]
sweep += ["wandb=off", f"out={out}", "name=second"]
done = subprocess.run([sys.executable, "-m", "lengthwise.cli", "run", "-m", *schedules, *sweep], capture_output=True, text=True)
assert done.returncode == 0, done.stdout + done.stderr

# %% [markdown]
# ## Reading it back
#
# One row per cell, or one row per request. The study's own files are what every number below comes from.

# %%
study = out / "second"
cells = read_cells(study)
runs, requests = load_runs(cells), load_requests(cells)
runs[["policy", "predictor", "load", "seed", "status", "ttft_p50", "ttft_p99", "e2e_mean", "goodput_rps", "max_wait"]]

# %% [markdown]
# ## Paired differences
#
# Runs of one seed share their luck, so policies are compared seed by seed: the difference of each pair, then its mean and its
# 95 % interval over seeds. Three seeds give wide intervals; a study that has to convince takes five or more.

# %%
compared = paired(runs)
compared = compared[compared["policy"] == "srpt"]
compared[["load", "difference", "difference_low", "difference_high", "ratio", "ratio_low", "ratio_high", "difference_seeds"]]

# %%
by_hand = runs.pivot(index=["load", "seed"], columns="policy", values="e2e_mean")
by_hand = (by_hand["srpt"] - by_hand["fcfs"]).groupby("load").mean()
assert (abs(by_hand.to_numpy() - compared["difference"].to_numpy()) < 1e-9).all()
by_hand.to_frame("SRPT - FCFS, mean E2E (s)")

# %% [markdown]
# ## Three figures
#
# A figure draws on the axes it is given and returns the table it plotted. On the command line:
# `lengthwise figure figure=latency_vs_load runs=PATH`, which writes a PDF, a PNG and the table.

# %%
points = load_points(cells)
figure = plt.figure(figsize=latency_vs_load.size(points))
table = latency_vs_load.draw(points, figure.add_axes((0, 0, 1, 1)), latency="ttft", statistic="p99")
assert table["n"].min() >= 100  # a percentile says of how many requests it is, or is not shown

# %%
figure = plt.figure(figsize=goodput.size(runs))
table = goodput.draw(runs, figure.add_axes((0, 0, 1, 1)))

# %%
slow = load_slowdowns(cells, measure="slowdown")
figure = plt.figure(figsize=slowdown_decile.size(slow))
table = slowdown_decile.draw(slow, figure.add_axes((0, 0, 1, 1)), load=0.9)

# %% [markdown]
# ## A copy for W&B
#
# `mirror` writes one W&B run per cell, after the fact, under the cell's hash; a sweep does so by itself unless told
# `wandb=off`. Doing it again adds nothing. `wandb sync` in that folder uploads it, some day, from somewhere with a network.

# %%
first, second = mirror(study, cells), mirror(study, cells)
assert (first["mirrored"], second["mirrored"], second["skipped"]) == (len(cells), 0, len(cells)), (first, second)
print(first, second, sep="\n")

# %% [markdown]
# ## Reading W&B's files back
#
# No network and no account: the offline files are read as they lie there, every row of them.

# %%
copies, history = read_offline(study)
copies[["id", "name", "group", "job_type", "num_rows", "num_segments", "ended", "problem"]]

# %%
assert check_mirror(study) == []  # rows, metrics and requests agree with the study's own files
logged = history.set_index("id")["e2e_mean"]
assert (logged[runs["hash"]].to_numpy() == runs["e2e_mean"].to_numpy()).all()
assert len(copies) == len(history) == len(cells) == 18
