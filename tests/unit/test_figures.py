"""Figures: each node of conf/figure draws invented results, is pure, marks gaps, and gives the same bytes each time."""

from __future__ import annotations

import importlib.resources
import inspect
import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lengthwise.experiments.figures import ecdf, latency_vs_load, quickstart, style
from lengthwise.experiments.figures.contract import canned_study, check_figure
from lengthwise.experiments.figures.main import config_hash, draw_figure, main
from lengthwise.experiments.load_runs import load_requests, load_runs, read_cells

NODES = sorted(node.name[:-5] for node in (importlib.resources.files("lengthwise.conf") / "figure").iterdir())
SCHEDULES = (("fcfs", "none"), ("srpt", "gbdt"), ("srpt", "oracle"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Six cells, as in case N2: two settings, three schedules, one seed, one load."""
    folder = tmp_path_factory.mktemp("figures") / "study"
    canned_study(folder, num_requests=30, loads=(0.95,), seeds=(0,), schedules=SCHEDULES)
    return folder


@pytest.fixture
def study(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "study")


def node(name):
    return instantiate(OmegaConf.load(str(importlib.resources.files("lengthwise.conf") / "figure" / f"{name}.yaml")))


def frame_for(draw, folder):
    module = inspect.getmodule(draw.func)
    return load_requests(folder) if module.SOURCE == "requests" else load_runs(folder)


@pytest.mark.parametrize("name", NODES)
def test_every_node_draws_and_is_pure(name, study):
    draw = node(name)
    assert inspect.getmodule(draw.func).__name__.endswith(f".{name}")
    if name == "latency_vs_load":
        draw = node(name)
        draw.keywords["statistic"] = "p50"
    table = check_figure(draw, frame_for(draw, study))
    assert {"setting_name", "load", "policy", "predictor"} <= set(table)


@pytest.mark.parametrize("name", NODES)
def test_a_drawing_touches_no_global_state(name, study):
    import matplotlib

    before, seen = dict(matplotlib.rcParams), set(sys.modules)
    draw_figure(node(name), read_cells(study), study / name)
    assert dict(matplotlib.rcParams) == before
    assert "matplotlib.pyplot" not in set(sys.modules) - seen
    header = (study / f"{name}.pdf").read_bytes()
    assert header.startswith(b"%PDF") and b"CreationDate" not in header


def test_figures_are_the_same_bytes_in_another_process(study):
    files = draw_figure(node("quickstart"), read_cells(study), study / "here")
    code = (
        "import sys; from pathlib import Path; from lengthwise.experiments.figures import quickstart as q;"
        "from lengthwise.experiments.figures.main import draw_figure; from lengthwise.experiments.load_runs import read_cells;"
        "p = Path(sys.argv[1]); draw_figure(q.draw, read_cells(p), p / 'there')"
    )
    subprocess.run([sys.executable, "-c", code, str(study)], check=True, env={"PYTHONHASHSEED": "7", "HOME": str(study)})
    for file in files:
        assert file.read_bytes() == (study / f"there{file.suffix}").read_bytes(), file.suffix


def test_the_quickstart_table_is_what_was_measured(study):
    runs = load_runs(study)
    table = check_figure(quickstart.draw, runs)
    assert len(table) == 4 and "fcfs" not in set(table["policy"])
    gamma = runs[runs["arrivals"] == "gamma"].set_index(["policy", "predictor"])["e2e_mean"]
    row = table[(table["setting_name"].str.contains("gamma")) & (table["predictor"] == "gbdt")].iloc[0]
    assert row["ratio"] == pytest.approx(gamma["srpt", "gbdt"] / gamma["fcfs", "none"])
    assert np.isnan(row["ratio_low"]) and row["gap_note"] == "n/a"  # one seed gives no interval, so no gap is shown


def test_n2_a_missing_cell_is_a_marked_gap_not_a_point(study):
    gone = next(study.glob("gamma-seqs64-srpt-gbdt-*"))
    shutil.rmtree(gone)
    runs = load_runs(study)
    table = check_figure(quickstart.draw, runs)
    assert len(table) == 4 and table["ratio"].isna().sum() == 1
    _, ax = style.page(quickstart.size(runs))
    quickstart.draw(runs, ax)
    texts = [text.get_text() for panel in ax.child_axes for text in panel.texts]
    assert texts.count(" missing") == 1
    assert "5 of 6 cells" in style.footer(runs, "x")
    lines = check_figure(lambda r, a: latency_vs_load.draw(r, a, statistic="p50"), runs)
    assert lines["value"].isna().sum() == 1


def test_the_figure_command(study, capsys):
    assert main(["figure=quickstart", f"runs={study}"]) == 0
    assert [line.rsplit(".", 1)[1] for line in capsys.readouterr().out.split()] == ["pdf", "png", "csv"]
    first = (study / "quickstart.csv").read_bytes()
    assert main(["figure=quickstart", f"runs={study}", f"out={study}/again"]) == 0
    assert (study / "again.csv").read_bytes() == first


def test_n2_the_figure_command_fails_on_a_deleted_cell_unless_allowed(study, capsys):
    """Case N2."""
    shutil.rmtree(next(study.glob("gamma-seqs64-srpt-gbdt-*")))
    with pytest.raises(SystemExit, match=r"5 of 6 cells.*gamma-seqs64-srpt-gbdt-0\.95-0 is missing") as stop:
        main(["figure=quickstart", f"runs={study}"])
    assert stop.value.code != 0 and (study / "quickstart.pdf").exists()
    assert main(["figure=quickstart", f"runs={study}", "allow_missing=true"]) == 0
    assert "5 of 6 cells" in capsys.readouterr().out


def test_the_figure_command_names_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(SystemExit, match="no such folder of results"):
        main(["figure=quickstart", f"runs={tmp_path}/nothing"])


def test_exceedance_counts_what_never_ended():
    requests = pd.DataFrame({"e2e": [1.0, 2.0, 3.0, np.nan], "status": ["finished"] * 3 + ["unfinished"]})
    times, shares = ecdf.exceedance(requests, "e2e")
    assert shares.min() >= 0.25 and times.max() <= 3.0
    for time, share in zip(times, shares, strict=True):
        above = (requests["e2e"].fillna(np.inf) > time).mean()
        assert above <= share + 1e-12


def test_a_policy_keeps_its_colour():
    assert style.colours(["srpt", "mine", "fcfs"])["srpt"] == style.colours(["srpt"])["srpt"]
    assert len(set(style.colours(["srpt", "sjf", "mine", "fcfs"]).values())) == 4


def test_config_hash_depends_on_the_cells_only(study):
    cells = read_cells(study)
    assert config_hash(cells) == config_hash(cells[::-1]) != config_hash(cells[1:])
