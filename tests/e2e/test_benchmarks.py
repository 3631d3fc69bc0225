"""Every benchmark still runs: with its smallest sizes, no time looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SMALLEST = {
    "attention": ["--tiny", "--repeats", "1", "--calls", "2", "--threads", "1"],
    "engine_host": [
        *("--quick", "--model", "tiny", "--modes", "eager", "--concurrency", "1", "3", "--threads", "1"),
        *("--models-folder", "models"),
    ],
    "gpu_engine": ["--tiny", "--device", "cpu"],
    "engine_throughput": [
        *("--quick", "--models", "tiny", "--systems", "transformers_static", "transformers_batch", "ours_eager"),
        *("--points", "1", "mixed8", "--repeat", "1", "--threads", "1", "--log", "log.jsonl", "--models-folder", "models"),
    ],
    "kv_dtypes": ["--tiny", "--quick", "--threads", "1"],
    "linear": ["--tiny", "--repeats", "1", "--calls", "2", "--threads", "1"],
    "predictor_latency": None,  # wants ShareGPT, and trains for a minute
    "read_back": ["--repeats", "1", "--cells", "3"],
    "scheduler_step": ["--repeats", "1"],
    "server": ["--models", "tiny", "--streams", "3", "--tokens", "4", "--repeats", "1"],
    "server_http": ["--model", "tiny", "--streams", "3", "--tokens", "4", "--idle", "20", "--repeats", "1"],
    "servegen_day": None,  # wants ServeGen's files
    "simulator_speed": ["--repeats", "1", "--requests", "100", "--large", "10000", "--large-repeats", "1"],
    "sweep_speed": ["--cells", "4", "--long", "0"],
}


def test_all_are_listed() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} - {"report"} == set(SMALLEST)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, sizes in SMALLEST.items() if sizes is not None])
def test_benchmark(name: str, tmp_path: Path) -> None:
    sizes = SMALLEST[name]
    assert sizes is not None
    command = [sys.executable, str(FOLDER / f"{name}.py"), *sizes, "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    made = json.loads((tmp_path / "out.json").read_text())
    assert made["figures"] and all(value is not None for value in made["figures"].values())
