"""Golden results: small cells whose numbers must not move unnoticed. A change that moves one is a line in CHANGELOG.md.

`python tests/golden/test_golden.py` writes them anew.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import lengthwise

FILE = Path(__file__).with_name("golden.json")
CELLS = {
    "fcfs chunked": {"policy": "fcfs", "load": 0.9},
    "fcfs static contiguous": {"policy": "fcfs", "batching": "static", "kv": "contiguous", "rate": 2.0, "max_num_seqs": 16},
    "sjf noisy prefill_first": {"policy": "sjf", "predictor": "noisy_oracle", "batching": "prefill_first", "load": 1.1},
    "srpt oracle pause": {"policy": "srpt", "predictor": "oracle", "load": 1.1},
    "srpt oracle recompute, tight": {
        "policy": "srpt", "predictor": "oracle", "preemption": "recompute", "rate": 20.0, "kv_pool_tokens": 12_000,
    },
    "aging_srpt noisy mixed": {"policy": "aging_srpt", "predictor": "noisy_oracle", "batching": "mixed", "load": 1.1},
}  # fmt: skip
NUMBERS = (
    "ttft_mean", "tpot_mean", "e2e_mean", "e2e_p99", "itl_p99", "slowdown_mean", "max_wait", "overtaking_max", "goodput_rps",
    "attainment", "preemptions", "recompute_tax", "kv_use_mean", "busy_share", "num_finished", "num_rejected",
)  # fmt: skip


def measured(cell: dict) -> dict:
    limits = {"max_num_seqs": 32, **{k: v for k, v in cell.items() if k in ("max_num_seqs", "kv_pool_tokens")}}
    parts = {k: v for k, v in cell.items() if k not in limits}
    run = lengthwise.simulate(workload="synthetic", arrivals="gamma", num_requests=300, seed=7, check=True, **parts, **limits)
    return {name: run.metrics[name] for name in NUMBERS}


@pytest.mark.parametrize("name", CELLS)
def test_the_numbers_have_not_moved(name):
    golden = json.loads(FILE.read_text())[name]
    now = measured(CELLS[name])
    assert set(now) == set(golden)
    assert now == pytest.approx(golden, rel=1e-9)


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: measured(cell) for name, cell in CELLS.items()}, indent=1) + "\n")
