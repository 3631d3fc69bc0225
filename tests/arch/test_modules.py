"""No class is ever loaded under two module names, however the process was started, and `sched` is the standard library's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOOK = """
import importlib, pkgutil, sys
import lengthwise
from lengthwise.sched import Request, Policy
from lengthwise.engine.simulated import SimulatedClock
import lengthwise.experiments.load_runs, lengthwise.experiments.figures.quickstart
ours = [m for name, m in list(sys.modules.items()) if name.split(".")[0] == "lengthwise"]
places = {}
for module in list(sys.modules.values()):
    file = getattr(module, "__file__", None)
    if file:
        import os
        places.setdefault(os.path.realpath(file), set()).add(module.__name__)
double = {k: sorted(v - {"__main__"}) for k, v in places.items() if len(v - {"__main__"}) > 1 and k.startswith(sys.argv[1])}
assert not double, double
named = {name for name in sys.modules if name.split(".")[0] in ("predictors", "engine", "experiments", "conf")}
assert not named, named
for module in ours:
    for name, value in vars(module).items():
        if isinstance(value, type) and value.__module__.split(".")[0] in ("sched", "engine", "predictors", "experiments"):
            raise AssertionError(f"{module.__name__}.{name} is {value.__module__}.{value.__qualname__}")
assert Request.__module__ == "lengthwise.sched.request", Request.__module__
import sched
assert hasattr(sched, "scheduler"), sched.__file__
print("one name each:", len(ours))
"""


@pytest.mark.parametrize("start", ["elsewhere", "notebooks", "tests"])
def test_one_class_one_module_name(start, tmp_path):
    """Run from a foreign folder and, as a notebook or a test would, from folders of the tree."""
    folder = tmp_path if start == "elsewhere" else ROOT / start
    run = subprocess.run([sys.executable, "-c", LOOK, str(ROOT)], cwd=folder, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    assert int(run.stdout.split(":")[1]) > 20


def test_from_a_notebook_in_the_root(tmp_path):
    """A kernel started in the root has it on sys.path: everything is still loaded once, under lengthwise."""
    look = LOOK.replace("import sched\nassert", "import lengthwise.sched as sched\nsched.scheduler\nassert")
    run = subprocess.run([sys.executable, "-c", look, str(ROOT)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]


def test_a_class_pickles_by_its_public_name():
    import pickle

    from lengthwise.sched import Request

    assert b"lengthwise.sched.request" in pickle.dumps(Request)


def test_the_links_lead_to_the_folders():
    for name in ("sched", "predictors", "engine", "conf", "experiments"):
        link = ROOT / "src" / "lengthwise" / name
        assert link.is_symlink() and link.resolve() == ROOT / name and not link.readlink().is_absolute()
