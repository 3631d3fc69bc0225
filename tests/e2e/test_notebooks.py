"""Every notebook runs from top to bottom, in a folder of its own."""

from __future__ import annotations

import os
from pathlib import Path

import jupytext
import nbclient
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.py"))
FIGURES = {"02_sweeps_and_wandb": 3}  # at least; one in the others


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.filterwarnings("default")  # a kernel's client is not ours to keep quiet
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, tmp_path, monkeypatch):
    home = tmp_path / "home"
    for name, value in {
        "HOME": str(home),
        "IPYTHONDIR": str(home),
        "JUPYTER_CONFIG_DIR": str(home),
        "TMPDIR": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "r"))
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    home.mkdir()
    notebook = jupytext.read(path)
    client = nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    images = sum("image/png" in output.get("data", {}) for output in outputs)
    assert images >= FIGURES.get(path.stem, 1), f"the notebook shows {images} figures"
    assert not list(home.rglob("*wandb*")), "W&B wrote into the home directory"
    assert not [output for output in outputs if output.output_type == "error"]
    assert os.listdir(tmp_path)
