"""aiperf: its inter-token latency is (last response - first) / (tokens - 1), our TPOT where a response is one token, as here.

Responses without text count for nothing, so that a last token that shows none (an end, which is ignored) ends its time one
token early. Tokens are those of the server's usage; told nothing, it would count those of the text, which can be fewer.
"""

from __future__ import annotations

import json
from pathlib import Path

from .load import Load, Times
from .server import Server


def command(venv: Path, server: Server, tokenizer: Path, load: Load, out: Path) -> list[str]:
    return [
        str(venv / "bin" / "aiperf"), "profile", "-m", server.model, "-u", server.url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", str(tokenizer), "--request-count", str(load.num_requests), "--concurrency", str(load.concurrency),
        "--synthetic-input-tokens-mean", str(load.prompt_len), "--output-tokens-mean", str(load.output_len),
        "--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--artifact-dir", str(out), "--ui", "none",
    ]  # fmt: skip


def read(out: Path) -> Times:
    found = json.loads((out / "profile_export_aiperf.json").read_text())
    ttft, tpot = (found[name]["avg"] / 1e3 for name in ("time_to_first_token", "inter_token_latency"))
    return Times(int(found["request_count"]["avg"]), ttft, tpot)


def expected(ours: Times, load: Load) -> Times:
    return ours
