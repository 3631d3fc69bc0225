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
# # The engine and its simulation
#
# One scheduler drives both. Here the same cell runs on a real model and in simulation; told the same step times the two decide
# alike, request by request; and a profile of the engine says what step times to tell.
#
# The model is a tiny one with random weights, made in place, so that this runs anywhere within a minute. `model="smollm2"` is a
# real one; its steps take tens of milliseconds, and a cell as long as its requests take to arrive.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch

import lengthwise
from lengthwise.engine.native.tiny import tiny
from lengthwise.experiments.native_stage import NativeStage
from lengthwise.experiments.profile_app import profile
from lengthwise.experiments.simulate import compose
from lengthwise.experiments.validate_engine import compare, lines, rows

torch.set_num_threads(1)  # as fast as any for a model this small
model = tiny(max_positions=8192)
out = Path(tempfile.mkdtemp())
cell = dict(workload="synthetic_short", limits="cpu32", num_requests=40, policy="srpt", predictor="noisy_oracle")

# %% [markdown]
# ## A cell on the engine
#
# `executor="native"` is all that changes. Arrivals are replayed in real time, prompts without text get made-up ids, and answers
# are as long as the workload says (`lengths: forced`) unless the model is to decide (`free`).

# %%
engine = lengthwise.simulate(executor="native", model=model, rate=20.0, **cell)
engine.requests[["arrival", "first_token", "finish", "prompt_len", "output_len", "status"]].head()

# %%
engine.summary["provenance"]["engine"], engine.summary["provenance"]["marks"]

# %% [markdown]
# ## The same decisions
#
# Told the step times of a cost model, here an H100's, the engine still computes every token, on a clock that jumps. Its
# requests are then the simulation's, to the last bit. The KV pool is so small that requests lose their memory on the way.

# %%
crowded = dict(cell, rate=400.0, hardware="llama31_8b_h100", preemption="recompute", kv_pool_tokens=2500)
simulated = lengthwise.simulate(**crowded)
told = lengthwise.simulate(executor=NativeStage(model, times="told"), **crowded)
pd.testing.assert_frame_equal(simulated.requests, told.requests, check_exact=True)
simulated.metrics["preemptions"], len(told.steps)

# %% [markdown]
# ## A profile
#
# What is left to go wrong is time. `lengthwise profile` times steps of the engine over states of the batch drawn at random,
# tells what of it is spent around the forward, and fits a cost model to four fifths of them; here with few states, to be quick.

# %%
hardware = profile(model, out / "tiny.yaml", rows=32, context_per_row=512, prefill_tokens=512, states=60, passes=2, repeats=2)
{key: hardware.provenance[key] for key in ("form", "steps", "spread", "host_share", "bias", "held_out_error")}

# %% [markdown]
# Steps that the engine took above, and what the profile says of them:

# %%
steps = engine.steps
decodes = steps[steps["num_chunks"] == 0]
states = list(zip(decodes["num_decode"].tolist(), decodes["context_tokens"].tolist(), strict=True))
lines_of = [hardware.cost.decode_line(num_rows, context) for num_rows, context in states]  # seconds: a + c * context
priced = [a + c * context for (a, c, _), (_, context) in zip(lines_of, states, strict=True)]
figure, ax = plt.subplots(figsize=(4, 4))
ax.plot(1e3 * (decodes["end"] - decodes["start"]), [1e3 * x for x in priced], ".", alpha=0.4)
ax.axline((0, 0), slope=1, color="black", lw=0.8)
ax.set(xlabel="measured (ms)", ylabel="profile (ms)", title="decode steps", xscale="log", yscale="log")
plt.show()

# %% [markdown]
# ## Errors
#
# `lengthwise validate` replays one trace on the engine and in the simulation of its profile, at shares of the saturation rate,
# and shows the simulation's error with its sign, by metric: errors of TTFT and TPOT can cancel in E2E. The last line prices the
# very steps that the engine took; what is more than that is queueing. On a busy machine these numbers say little.

# %%
cfg = compose(executor="native", model=model, hardware=hardware, **dict(cell, policy="fcfs", predictor="none"))
answer = compare(cfg, loads=[0.5, 0.8], seeds=[0, 1], say=print)
print("\n".join(lines(answer)))

# %%
rows(answer).pivot(index="metric", columns="load", values="error").round(3)

# %% [markdown]
# On the command line:
#
# ```
# lengthwise run executor=native model=smollm2 rate=1 num_requests=100 limits=cpu32 workload=synthetic_short
# lengthwise profile model=smollm2 out=profiles/smollm2.yaml
# lengthwise run executor=native model=smollm2 hardware=profiled hardware.path=profiles/smollm2.yaml load=0.8 limits=cpu32
# lengthwise validate model=smollm2
# ```
