"""The built wheel holds every module and every config node, once, and the package's own files."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("sched", "predictors", "engine", "conf", "experiments")
NEEDED = ("pyproject.toml", "README.md", "LICENSE", "src", *FOLDERS)


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """Names in a wheel built, without network, from a copy of the tree: building leaves files behind."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in NEEDED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, symlinks=True, ignore=skip)
        else:
            assert source.exists(), f"{name} is not there"
            shutil.copy(source, tree / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-q",
        "-w",
        str(out),
        str(tree),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_wheel_holds_every_module_and_node_of(folder, names):
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml") and "__pycache__" not in path.parts]
    expected = {f"lengthwise/{path.relative_to(ROOT).as_posix()}" for path in files}
    assert expected, folder
    assert not expected - set(names), sorted(expected - set(names))


def test_the_wheel_holds_the_package_and_nothing_else(names):
    assert len(names) == len(set(names))
    assert {"lengthwise/__init__.py", "lengthwise/cli.py", "lengthwise/py.typed"} <= set(names)
    packages = {path.name for path in (ROOT / "src").iterdir() if path.is_dir() and not path.name.endswith(".egg-info")}
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == packages
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_every_folder_with_modules_is_a_package():
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), f"{path.parent.relative_to(ROOT)} has no __init__.py"


def test_building_left_nothing_in_the_tree(names):
    assert not (ROOT / "build").exists()
