"""Imports point down only: experiments -> engine | predictors -> sched -> numpy, stdlib. Read from syntax trees."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("sched", "predictors", "engine", "conf", "experiments")
ALLOWED = {
    "sched": set(),
    "predictors": {"sched"},
    "engine": {"sched"},
    "conf": set(),
    "experiments": {"sched", "predictors", "engine", "conf"},
}
NATIVE = {"torch", "transformers", "tokenizers", "safetensors", "triton", "flashinfer"}
HEAVY = NATIVE | {"sklearn", "lightgbm", "wandb", "pandas", "pyarrow", "matplotlib", "scipy", "hydra", "rich"}
LATE = {"lightgbm", "wandb"}  # imported inside functions only


def files(folder):
    return sorted((ROOT / folder).rglob("*.py"))


def imports(tree):
    """(node, module, level) of every import statement; module None for `from . import x`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name, 0
        elif isinstance(node, ast.ImportFrom):
            yield node, node.module, node.level


def violations(folder, path, source):
    """What is wrong with the imports of one file of a top folder."""
    tree = ast.parse(source)
    depth = len(path.relative_to(ROOT / folder).parts)  # 1: directly in the folder
    found = []
    for node, module, level in imports(tree):
        top = (module or "").split(".")
        where = f"{path.relative_to(ROOT)}:{node.lineno}"
        if level > depth:
            found.append(f"{where}: a relative import climbs out of {folder}/")
        if level == 0 and top[0] in FOLDERS:
            found.append(f"{where}: bare import of {top[0]}; write lengthwise.{top[0]}")
        if level == 0 and top[0] == "lengthwise" and len(top) > 1:
            if top[1] == folder:
                found.append(f"{where}: import {module} relatively inside {folder}/")
            elif top[1] not in ALLOWED[folder] and top[1] in FOLDERS:
                found.append(f"{where}: {folder} must not import {top[1]}")
        if level == 0 and folder == "sched" and top[0] not in {*sys.stdlib_module_names, "numpy"}:
            found.append(f"{where}: sched imports {top[0]}; numpy and the standard library only")
        if level == 0 and top[0] == "vllm" and not path.is_relative_to(ROOT / "engine" / "vllm"):
            found.append(f"{where}: only engine/vllm/ imports vllm")
    for node in tree.body:
        for inner, module, _ in imports(node) if isinstance(node, (ast.Import, ast.ImportFrom)) else ():
            if (module or "").split(".")[0] in LATE:
                found.append(f"{path.relative_to(ROOT)}:{inner.lineno}: import {module} inside the function that needs it")
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_of(folder):
    assert files(folder), f"{folder}/ has no Python file"
    found = [text for path in files(folder) for text in violations(folder, path, path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("folder", "name", "line", "says"),
    [
        ("sched", "x.py", "import torch", "sched imports torch"),
        ("sched", "x.py", "from lengthwise.engine import y", "must not import engine"),
        ("engine", "simulated/x.py", "from lengthwise.predictors import y", "must not import predictors"),
        ("predictors", "x.py", "from lengthwise.engine import y", "must not import engine"),
        ("engine", "simulated/x.py", "from ...sched import y", "climbs out"),
        ("engine", "simulated/x.py", "import sched", "bare import"),
        ("engine", "native/x.py", "def f():\n    import vllm", "only engine/vllm/"),
        ("experiments", "x.py", "from lengthwise.experiments.run import Run", "relatively"),
        ("predictors", "x.py", "import lightgbm as lgb", "inside the function"),
    ],
)
def test_a_planted_violation_is_caught(folder, name, line, says):
    assert any(says in text for text in violations(folder, ROOT / folder / name, line))


def test_allowed_imports_pass():
    assert violations("engine", ROOT / "engine/simulated/x.py", "from ..y import z\nfrom lengthwise.sched import Request") == []
    assert violations("predictors", ROOT / "predictors/x.py", "def f():\n    import lightgbm") == []


def loaded_by(statement, cwd="/"):
    code = f"import sys; {statement}; print(); print(' '.join(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=cwd)
    return set(run.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("module", ["lengthwise", "lengthwise.sched", "lengthwise.engine.simulated", "lengthwise.cli"])
def test_light_modules_load_nothing_heavy(module):
    loaded = {name.split(".")[0] for name in loaded_by(f"import {module}")}
    assert not loaded & HEAVY, f"import {module} loads {sorted(loaded & HEAVY)}"
    assert "lengthwise" in loaded


def test_a_simulated_cell_loads_nothing_of_the_native_engine(tmp_path):
    """Whatever the configuration names for a native executor: neither the engine nor the libraries it stands on."""
    line = ["run", "workload=synthetic", "num_requests=5", "wandb=off", "out=runs"]
    loaded = loaded_by(f"from lengthwise.cli import main; assert main({line}) == 0", cwd=tmp_path)
    assert "lengthwise.engine.simulated.executor" in loaded and list((tmp_path / "runs").rglob("summary*"))
    assert not [name for name in loaded if name.startswith("lengthwise.engine.native")]
    assert not {name.split(".")[0] for name in loaded} & NATIVE
