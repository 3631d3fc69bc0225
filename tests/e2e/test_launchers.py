"""Every launcher runs the same sweep: the same results, a failing cell named, and only that one run again."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from omegaconf import OmegaConf

COMMAND = [sys.executable, "-c", "import sys; from lengthwise.cli import main; sys.exit(main())"]
SWEEP = ("-m", "--config-dir", "conf", "policy=own", "policy.mark=a,b", "seed=0,1", "rate=20", "num_requests=60")
OWN = """
import os
from lengthwise.sched.policies.fcfs import FCFS

class Own(FCFS):
    def __init__(self, mark="a"):
        open(f"pids/{os.getpid()}", "w").close()
        self.broken = mark == "b" and os.path.exists("broken")

    def key(self, req, view):
        if self.broken and req.rid == 7:
            raise RuntimeError("planted")
        return super().key(req, view)
"""
LAUNCHERS = {  # name: (what it needs, its extra, further overrides)
    "joblib": ("joblib", None, ["hydra.launcher.n_jobs=2"]),
    "submitit_local": ("hydra_plugins.hydra_submitit_launcher", "hpc", ["hydra.launcher.timeout_min=5"]),
    "ray_local": ("hydra_plugins.hydra_ray_launcher", "cluster", ["hydra.launcher.ray.init.num_cpus=2"]),
}


def run(*args, cwd, **env):
    path = os.pathsep.join([str(cwd), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **env}
    command = [*COMMAND, "run", *SWEEP, "workload.num_rows=200", "wandb=off", *args]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def place(folder):
    (folder / "own.py").write_text(OWN)
    (folder / "pids").mkdir()
    (folder / "conf/policy").mkdir(parents=True)
    (folder / "conf/policy/own.yaml").write_text("_target_: own.Own\nmark: a\n")
    return folder


def results(folder):
    """Whether each cell ended well, and by (mark, seed) the bytes of its results, measured times left out."""
    rows = {}
    for line in (folder / "runs/adhoc/cells.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows[row["hash"]] = row
    found = {}
    for row in rows.values():
        cell = folder / "runs/adhoc" / row["folder"]
        assert cell.is_dir() == (row["status"] == "ok")
        if cell.is_dir():
            summary = json.loads((cell / "summary.json").read_text())
            assert summary["provenance"].pop("config_hash") == row["hash"]
            del summary["volatile"]
            key = OmegaConf.load(cell / ".hydra/config.yaml").policy.mark, row["fields"]["seed"]
            found[key] = (summary, (cell / "requests.parquet").read_bytes(), (cell / "steps.parquet").read_bytes())
    return [row["status"] for row in rows.values()], found


@pytest.fixture(scope="module")
def basic(tmp_path_factory):
    """What the cells come to, one after the other in one process."""
    folder = place(tmp_path_factory.mktemp("basic"))
    done = run("hydra/launcher=basic", cwd=folder)
    assert done.returncode == 0, done.stderr
    return results(folder)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_sweep_by_each_launcher(launcher, basic, tmp_path):
    needs, extra, more = LAUNCHERS[launcher]
    try:
        there = importlib.util.find_spec(needs)
    except ModuleNotFoundError:
        there = None
    if there is None:
        pytest.skip(f"{needs} is not installed (extra `{extra}`)")
    place(tmp_path)
    (tmp_path / "broken").touch()
    args = (f"hydra/launcher={launcher}", *more)
    done = run(*args, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "2 of 4 cells failed" in done.stderr and "RuntimeError: planted" in done.stderr, done.stderr
    assert "4/4 cells" in done.stderr and "2 failed" in done.stderr  # progress is read from the manifest
    assert results(tmp_path)[0] == ["ok", "ok", "failed", "failed"]
    (tmp_path / "broken").unlink()
    for pid in (tmp_path / "pids").iterdir():
        pid.unlink()

    done = run(*args, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4 cells, 2 of them complete" in done.stderr
    assert len(list((tmp_path / "pids").iterdir())) > 1  # not in the one process that starts them
    assert results(tmp_path) == basic
    assert not list((tmp_path / "runs/adhoc").glob(".tmp-*"))


def test_a_ray_cluster_of_the_sweep_ends_with_it(tmp_path):
    """Nothing of it is left: no process that knows the sweep's folder, no token in the home folder."""
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("hydra_plugins.hydra_ray_launcher") is None:
        pytest.skip("hydra-ray-launcher is not installed (extra `cluster`)")
    place(tmp_path)
    home, folder = tmp_path / "home", Path(tempfile.mkdtemp(prefix="ray"))  # a socket's path is short
    home.mkdir()
    done = run("hydra/launcher=ray_local", f"+hydra.launcher.ray.init._temp_dir={folder}", cwd=tmp_path, HOME=str(home))
    assert done.returncode == 0, done.stderr
    assert any(folder.iterdir())
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(folder) not in left
    assert "ray.io" not in done.stderr and "Started a local Ray" not in done.stderr
    assert not list(home.rglob("*auth_token*"))
    shutil.rmtree(folder, ignore_errors=True)
