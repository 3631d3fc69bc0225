"""genai-bench: TTFT and TPOT as ours; its last token's time is taken after the usage that follows it.

It goes on sending until it has counted its requests and then hangs up: what it sent too much is aborted, and in no mean of it
or of ours. It wants a GPU of its list; that is in its title and in nothing that is read here.
"""

from __future__ import annotations

import json
from pathlib import Path

from .load import Load, Times
from .server import Server


def command(venv: Path, server: Server, tokenizer: Path, load: Load, out: Path) -> list[str]:
    return [
        str(venv / "bin" / "genai-bench"), "benchmark", "--api-backend", "vllm", "--api-base", server.url, "--api-key", "none",
        "--api-model-name", server.model, "--model-tokenizer", str(tokenizer), "--task", "text-to-text",
        "--max-time-per-run", "5", "--max-requests-per-run", str(load.num_requests),
        "--num-concurrency", str(load.concurrency), "--traffic-scenario", f"D({load.prompt_len},{load.output_len})",
        "--experiment-base-dir", str(out), "--server-engine", "vLLM", "--server-version", "none", "--server-gpu-type", "A10",
        "--server-gpu-count", "1",
    ]  # fmt: skip


def read(out: Path) -> Times:
    (path,) = out.glob("*/*concurrency*.json")
    found = json.loads(path.read_text())["aggregated_metrics"]
    return Times(found["num_completed_requests"], found["stats"]["ttft"]["mean"], found["stats"]["tpot"]["mean"])


def expected(ours: Times, load: Load) -> Times:
    return ours
