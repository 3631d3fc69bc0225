"""guidellm: its TPOT is the time from start to last token over all tokens, so that the first one's wait is in it.

Its "inter-token latency" is what is called TPOT here.
"""

from __future__ import annotations

import json
from pathlib import Path

from .load import Load, Times
from .server import Server


def command(venv: Path, server: Server, tokenizer: Path, load: Load, out: Path) -> list[str]:
    return [
        str(venv / "bin" / "guidellm"), "run", "--backend", f"kind=openai_http,target={server.url},model={server.model}",
        "--profile", f"kind=concurrent,streams={load.concurrency}",
        "--constraint", f"kind=max_requests,count={load.num_requests}",
        "--tokenizer", f"kind=hf_auto,model={tokenizer}",
        "--data", f"kind=synthetic_text,prompt_tokens={load.prompt_len},output_tokens={load.output_len}",
        "--output", f"kind=json,path={out / 'report.json'}", "--disable-console-interactive",
    ]  # fmt: skip


def read(out: Path) -> Times:
    (benchmark,) = json.loads((out / "report.json").read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    ttft, tpot = (metrics[f"time_{name}_ms"]["successful"]["mean"] / 1e3 for name in ("to_first_token", "per_output_token"))
    return Times(metrics["request_totals"]["successful"], ttft, tpot)


def expected(ours: Times, load: Load) -> Times:
    assert ours.e2e is not None
    return ours._replace(tpot=ours.e2e / load.output_len)
