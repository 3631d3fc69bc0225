"""`lengthwise bench`: completions of made-up ids of many lengths, one a second on average. Its times are ours elsewhere.

It has no environment of its own: it runs with the Python that runs the server.
"""

from __future__ import annotations

import json
from pathlib import Path

from .load import Load, Times
from .server import LENGTHWISE, Server


def command(venv: Path, server: Server, tokenizer: Path, load: Load, out: Path) -> list[str]:
    lengths = (f"workload.prompt_len.mean={load.prompt_len}", f"workload.output_len.mean={load.output_len}")
    return [
        *LENGTHWISE, "bench", f"target={server.url}", "workload=synthetic_short", *lengths, "rate=1",
        f"num_requests={load.num_requests}", "window.warm_up=0", "window.go_on=0", f"out={out}", "wandb=off",
    ]  # fmt: skip


def read(out: Path) -> Times:
    (path,) = out.glob("bench/*/summary.json")
    metrics = json.loads(path.read_text())["metrics"]
    return Times(metrics["num_counted"], metrics["ttft_mean"], metrics["tpot_mean"])


def expected(ours: Times, load: Load) -> Times:
    return ours
