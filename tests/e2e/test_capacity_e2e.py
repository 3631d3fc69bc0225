"""`lengthwise capacity` as a person runs it: the console command in a new process, small cells, a table, failures, resuming."""

import json
import os
import subprocess
import sys

import pytest

from lengthwise.experiments.capacity_table import read_capacity

COMMAND = [sys.executable, "-c", "import sys; from lengthwise.cli import main; sys.exit(main())"]
TINY = [
    "hardware=unit", "hardware.cost.decode_base=0.01", "hardware.cost.per_row=0.002", "workload.num_rows=400",
    "workload.prompt_len.mean=20", "workload.output_len.mean=20", "limits.max_num_seqs=8", "num_requests=300",
    "slo.ttft=0.3", "slo.tpot=null", "search.tolerance=0.1", "seeds=[0,1]",
]  # fmt: skip


def run(*args, cwd, command="capacity", **env):
    return subprocess.run(
        [*COMMAND, command, *args],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_one_search_and_the_same_again(tmp_path):
    first = run(*TINY, "for_rate=100", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    (file,) = (tmp_path / "runs").rglob("capacity.json")
    answer = json.loads(file.read_text())
    assert answer["lo"] == answer["rate"] > 0 and answer["seeds"] == [0, 1] and answer["gpus"] == 1
    assert f"{answer['rate']:g} requests/s hold" in first.stdout and "for 100 requests/s" in first.stdout
    assert str(file) in first.stdout and "USD" not in first.stdout
    assert first.stderr.count("probe ") == len(answer["probes"])
    again = run(*TINY, "for_rate=100", cwd=tmp_path)
    assert first.stdout.endswith(again.stdout) and again.stderr.count("[found]") == len(answer["probes"])


def test_several_searches_give_a_table_and_one_that_fails_stops_no_other(tmp_path):
    exclude = "exclude=[{policy: fcfs, predictor: oracle}, {policy: srpt, predictor: none}]"
    done = run("-m", *TINY, "policy=fcfs,srpt", "predictor=none,oracle", exclude, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = read_capacity(tmp_path / "runs").set_index("policy")
    assert sorted(found.index) == ["fcfs", "srpt"] and (found["rate"] > 0).all()
    assert all(f"{rate:.4g}" in done.stdout for rate in found["rate"])
    broken = run("-m", *TINY, "policy=fcfs,srpt", "predictor=none", cwd=tmp_path)
    assert broken.returncode == 1 and "1 of 2 searches failed" in broken.stderr and "policy=srpt needs" in broken.stderr
    assert "fcfs" in broken.stdout and "Traceback" not in broken.stderr


@pytest.fixture
def plugin(tmp_path):
    """A policy that raises at rates between 4 and 8 requests/s: its ninth request, evenly spaced, comes after 1 to 2 s."""
    (tmp_path / "own.py").write_text(
        "from lengthwise.sched.policies.fcfs import FCFS\n"
        "class Own(FCFS):\n"
        "    def key(self, req, view):\n"
        "        if req.rid == 8 and 1 < req.arrival < 2:\n"
        "            raise RuntimeError('planted')\n"
        "        return super().key(req, view)\n"
    )
    return tmp_path


def test_x10_a_search_whose_third_probe_fails_ends_without_a_number(plugin):
    bounds = ["search.lo=2", "search.hi=16", "search.raises=0"]
    args = [*TINY, *bounds, "slo.ttft=0.05", "arrivals=deterministic", "policy._target_=own.Own"]
    done = run(*args, cwd=plugin, PYTHONPATH=str(plugin))
    assert done.returncode == 1, done.stderr
    assert "lengthwise capacity: search failed at probe 3: 5.65685 requests/s, seed 0: RuntimeError: planted" in done.stderr
    assert done.stderr.count(" fail  [") == 1 == done.stderr.count(" pass  [") and "requests/s hold" not in done.stdout
    assert not list(plugin.rglob("capacity.json")) and len(list(plugin.rglob("failed.txt"))) == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["study=smoke"], "study=smoke"),
        (["price.per_gpu_hour=2"], "needs price.date"),
        (["rate=3"], "search.lo and search.hi"),
        (["criterion.targett=0.9"], "Did you mean 'criterion.target'?"),
        (["policy=srtp"], "Did you mean 'srpt'?"),
    ],
)
def test_refusals_are_one_line_and_no_traceback(tmp_path, args, says):
    done = run(*args, cwd=tmp_path)
    assert done.returncode == 1 and says in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("summary.json"))
