"""Figures: each node of conf/figure draws invented results, is pure, marks gaps, and gives the same bytes each time."""

from __future__ import annotations

import importlib.resources
import inspect
import json
import shutil
import subprocess
import sys

import matplotlib
import numpy as np
import pandas as pd
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lengthwise.engine.simulated.affine import Affine
from lengthwise.experiments.figures import (
    attainment,
    capacity,
    curves,
    ecdf,
    gap,
    goodput,
    latency_vs_load,
    quickstart,
    ranking,
    slowdown_decile,
    style,
    tails,
    timeline,
    wait_ccdf,
)
from lengthwise.experiments.figures.contract import SETTINGS, canned_capacity, canned_study, check_figure
from lengthwise.experiments.figures.main import config_hash, draw_figure, frame_of, main, size_of
from lengthwise.experiments.figures.sources.attainments import SCALES, load_attainments
from lengthwise.experiments.figures.sources.points import interval, load_points, pooled, ratio_interval, with_variants
from lengthwise.experiments.figures.sources.slowdowns import load_slowdowns
from lengthwise.experiments.figures.sources.steps import NUM_BINS, binned, load_steps
from lengthwise.experiments.figures.sources.waits import load_waits
from lengthwise.experiments.latencies import idle_latency
from lengthwise.experiments.load_runs import load_requests, load_runs, read_cells, read_requests, run_end
from lengthwise.experiments.metrics import judge
from lengthwise.experiments.statistics import over_seeds, percentile

OTHER = {"capacity", "reliability", "robustness"}  # drawn from something else than cells, or than any cells
EVERY = sorted(node.name[:-5] for node in (importlib.resources.files("lengthwise.conf") / "figure").iterdir())
NODES = [name for name in EVERY if name not in OTHER]
SCHEDULES = (("fcfs", "none"), ("srpt", "gbdt"), ("srpt", "oracle"))
NAN = float("nan")


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


def texts(ax):
    return [text.get_text() for panel in ax.child_axes for text in panel.texts]


@pytest.mark.parametrize("name", NODES)
def test_every_node_draws_and_is_pure(name, study):
    draw = node(name)
    assert inspect.getmodule(draw.func).__name__.endswith(f".{name}")
    table = check_figure(draw, frame_of(draw, read_cells(study)))
    assert {"setting_name", "load", "policy", "predictor"} <= set(table)


@pytest.mark.parametrize("name", NODES)
def test_n3_every_figure_is_one_command_and_the_same_data_bytes_again(name, study, capsys):
    """Case N3: from stored results alone, with the data beside it, the config hash, the seeds and n on the page."""
    stored = {path: path.read_bytes() for path in study.rglob("*") if path.is_file()}
    assert main([f"figure={name}", f"runs={study}", f"out={study}/drawn/first"]) == 0
    assert [line.rsplit(".", 1)[1] for line in capsys.readouterr().out.split()] == ["pdf", "png", "csv"]
    settings, seen = dict(matplotlib.rcParams), set(sys.modules)
    draw_figure(node(name), read_cells(study), study / "drawn" / "again")
    assert dict(matplotlib.rcParams) == settings and "matplotlib.pyplot" not in set(sys.modules) - seen
    header = (study / "drawn/first.pdf").read_bytes()
    assert header.startswith(b"%PDF") and b"CreationDate" not in header
    for suffix in ("csv", "png", "pdf"):
        assert (study / f"drawn/first.{suffix}").read_bytes() == (study / f"drawn/again.{suffix}").read_bytes(), suffix
    assert len(pd.read_csv(study / "drawn/first.csv"))
    assert stored == {path: path.read_bytes() for path in study.rglob("*") if path.is_file() and path.parent.name != "drawn"}
    footer = style.footer(load_runs(study), config_hash(read_cells(study)))
    assert config_hash(read_cells(study)) in footer and "seeds 0" in footer and "30 requests a cell" in footer


@pytest.mark.parametrize("name", [name for name in NODES if name != "quickstart"])
def test_n2_every_figure_marks_what_is_missing(name, study):
    """Case N2: with one of six cells gone nothing is made up; the table says so, or holds no row of it."""
    shutil.rmtree(next(study.glob("gamma-seqs64-srpt-gbdt-*")))
    draw, cells = node(name), read_cells(study)
    table = check_figure(draw, frame_of(draw, cells))
    gone = table[table["setting_name"].str.contains("gamma") & (table["predictor"] == "gbdt")]
    numbers = [key for key in ("value", "gap_closed", "wait", "waiting") if key in gone]
    assert not len(gone) or gone[numbers].isna().all(axis=None)
    if "absent" in gone:
        assert (gone["absent"] == "0: missing").all() and len(gone)
    assert "5 of 6 cells" in style.footer(load_runs(cells), "x")


def text_right_of(figure, axes):
    """Texts that reach beyond the page."""
    figure.canvas.draw()
    width = figure.bbox.width
    texts = [text for ax in axes for text in (*ax.texts, ax.title, ax.xaxis.label) if text.get_text()]
    return [text.get_text() for text in texts if text.get_window_extent().x1 > width + 1]


@pytest.mark.parametrize("name", NODES)
def test_no_note_runs_off_a_page_of_one_panel(name, tmp_path):
    canned_study(tmp_path, num_requests=120, loads=(0.95,), seeds=(0, 1), settings=(("gamma", "seqs64"),), schedules=SCHEDULES)
    draw = node(name)
    frame = frame_of(draw, read_cells(tmp_path))
    figure, ax = style.page(size_of(draw, frame))
    draw(frame, ax)
    assert text_right_of(figure, [ax, *ax.child_axes]) == []


@pytest.mark.parametrize("name", NODES)
def test_rates_instead_of_loads_give_the_same_numbers(name, tmp_path):
    """Cells that were given a rate and no load: as many points, each with its own requests."""
    canned_study(tmp_path, num_requests=120, loads=(0.8, 0.95), seeds=(0, 1), settings=SETTINGS[1:], schedules=SCHEDULES)
    draw = node(name)
    want = check_figure(draw, frame_of(draw, read_cells(tmp_path)))
    for path in tmp_path.glob("*/summary.json"):
        summary = json.loads(path.read_text())
        summary["cell"]["load"] = None
        path.write_text(json.dumps(summary))
    rows = [json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines()]
    lines = (json.dumps(row | {"fields": row["fields"] | {"load": None}}) + "\n" for row in rows)
    (tmp_path / "cells.jsonl").write_text("".join(lines))
    found = check_figure(draw, frame_of(draw, read_cells(tmp_path)))
    pd.testing.assert_frame_equal(found.drop(columns="load"), want.drop(columns="load"))
    assert found["load"].isna().all() and want["load"].notna().all()


def test_cells_with_neither_a_load_nor_a_rate_are_no_blank_page(seeds):
    points = load_points(seeds[1]).assign(load=NAN, rate=NAN)
    _, ax = style.page((6, 4))
    latency_vs_load.draw(points, ax)
    assert any("neither a load nor a rate" in text for text in texts(ax))


def test_ecdf_never_mixes_variants_and_marks_what_is_missing(study, tmp_path):
    """Two cells that differ in their preemption are two lines; a cell that is gone is told in its panel."""
    other = tmp_path / "other"
    canned_study(other, num_requests=40, loads=(0.95,), seeds=(0,), schedules=SCHEDULES)
    for folder, name in ((study, "pause"), (other, "recompute")):
        for path in folder.glob("*/summary.json"):
            summary = json.loads(path.read_text())
            summary["cell"]["preemption"] = name
            path.write_text(json.dumps(summary))
    places = [path.parent for folder in (study, other) for path in sorted(folder.glob("*/summary.json"))]
    requests = load_requests(places)
    table = check_figure(ecdf.draw, requests)
    assert set(table["variant"]) == {"pause", "recompute"} and set(table["num_requests"]) == {30, 40}
    lines = table.drop_duplicates(["setting_name", "policy", "predictor", "variant"])
    assert len(lines) == 12 and (lines["num_requests"] == lines["variant"].map({"pause": 30, "recompute": 40})).all()
    _, ax = style.page(ecdf.size(requests))
    ecdf.draw(load_requests([place for place in places if not place.name.startswith("gamma-seqs64-srpt-gbdt")]), ax)
    heads = [panel.get_title(loc="right") for panel in ax.child_axes]
    assert sorted(heads) == ["", "4 of 6 cells"]  # one of each folder is gone


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
    assert texts(ax).count(" missing") == 1
    assert "5 of 6 cells" in style.footer(runs, "x")
    lines = check_figure(lambda p, a: latency_vs_load.draw(p, a, statistic="p50"), load_points(read_cells(study)))
    assert lines["value"].isna().sum() == 1


def test_the_figure_command(study, capsys):
    assert main(["figure=quickstart", f"runs={study}"]) == 0
    assert [line.rsplit(".", 1)[1] for line in capsys.readouterr().out.split()] == ["pdf", "png", "csv"]
    first = (study / "quickstart.csv").read_bytes()
    assert main(["figure=quickstart", f"runs={study}", f"out={study}/again"]) == 0
    assert (study / "again.csv").read_bytes() == first


def test_the_figure_command_draws_some_of_the_cells(study, capsys):
    assert main(["figure=wait_ccdf", f"runs={study}", "only={policy: srpt, predictor: [gbdt, none]}"]) == 0
    table = pd.read_csv(study / "wait_ccdf.csv")
    assert set(zip(table["policy"], table["predictor"], strict=True)) == {("srpt", "gbdt")}
    with pytest.raises(SystemExit, match=r"only=.*fcsf.*none of the 6 cells"):
        main(["figure=wait_ccdf", f"runs={study}", "only={policy: fcsf}"])


def test_a_ranking_has_the_best_policy_first_and_no_oracle_in_it(seeds):
    points = load_points(seeds[1], latency="e2e")
    points["value"] *= np.where(points["predictor"] == "gbdt", 0.5, 1.0)
    table = check_figure(ranking.draw, points)
    assert list(dict.fromkeys(table["policy"])) == ["srpt", "fcfs"] and set(table["statistic"]) == {"mean", "p999"}
    assert set(table["load"]) == {0.8} and table[table["statistic"] == "p999"]["value"].isna().all()  # 360 requests
    slow = points.assign(value=points["value"].where(points["predictor"] != "gbdt", 1e6))
    assert ranking.ranked(slow[slow["load"] == 0.8]) == ["fcfs", "srpt"]  # the oracle's mean is not its own
    nothing = points.assign(value=points["value"].where(points["policy"] != "srpt"))
    assert ranking.ranked(nothing) == ["fcfs", "srpt"]
    mean = point(table, policy="srpt", predictor="gbdt", statistic="mean")
    assert mean["value"] == point(points, policy="srpt", predictor="gbdt", load=0.8, statistic="mean")["value"]
    _, ax = style.page(ranking.size(points))
    ranking.draw(points, ax)
    assert any("P99.9 wants 20,000" in text for text in texts(ax)) and "n=2" in texts(ax)
    with pytest.raises(ValueError, match=r"statistics.*p42"):
        ranking.draw(points, ax, statistics=["p42"])


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
    assert len(set(style.colours(["aging_srpt", "vtc", "gittins", "ltr", "fcfs", "mlfq"]).values())) == 6


def test_config_hash_depends_on_the_cells_only(study):
    cells = read_cells(study)
    assert config_hash(cells) == config_hash(cells[::-1]) != config_hash(cells[1:])


# --- points: pooled percentiles ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """One setting, three seeds of 120 requests, one of FCFS's failed."""
    folder = tmp_path_factory.mktemp("seeds") / "study"
    rows = canned_study(
        folder, num_requests=120, loads=(0.8, 1.2), seeds=(0, 1, 2), settings=(("gamma", "seqs64"),), schedules=SCHEDULES
    )
    rows[2]["status"] = "failed"
    shutil.rmtree(folder / rows[2]["folder"])
    return folder, read_cells(folder, rows)


def point(table, **where):
    for key, value in where.items():
        table = table[table[key] == value]
    assert len(table) == 1
    return table.iloc[0]


def test_n6_a_percentile_is_of_the_pooled_requests_never_a_mean_of_percentiles(seeds):
    """Case N6: 99 x 1 and one 100, and 100 x 1: the pooled P99 is 1, the mean of the two parts' is more."""
    parts = [(np.array([1.0] * 99 + [100.0]), np.zeros(100, bool)), (np.ones(100), np.zeros(100, bool))]
    found = pooled(parts, "p99")
    assert found["value"] == percentile(np.concatenate([part[0] for part in parts]), 0.99) == 1.0 and found["n"] == 200
    assert np.mean([percentile(part[0], 0.99) for part in parts]) == pytest.approx(1.495)
    table = load_points(seeds[1])
    row = point(table, policy="srpt", predictor="gbdt", load=0.8, latency="ttft", statistic="p99")
    cells = [c for c in seeds[1] if c.fields["predictor"] == "gbdt" and c.fields["load"] == 0.8]
    pool = np.concatenate([(r := read_requests(c.folder))["first_token"] - r["arrival"] for c in cells])
    assert row["value"] == percentile(pool, 0.99) and row["n"] == 360 and row["num_seeds"] == 3
    assert row["low"] < row["value"] < row["high"]
    for statistic, text in style.STATISTICS.items():  # the label is the quantile that was used
        if statistic != "mean":
            value = point(table, policy="srpt", predictor="gbdt", load=0.8, latency="ttft", statistic=statistic)["value"]
            level = round(float(text.removeprefix("P")) / 100, 6)
            assert np.isnan(value) if level == 0.999 else value == percentile(pool, level)


def test_n4_the_seeds_there_are_the_method_and_the_failed_one_are_said(seeds):
    """Case N4: three seeds of which one failed."""
    table = load_points(seeds[1], latency="ttft")
    row = point(table, policy="fcfs", load=0.8, statistic="p50")
    assert (row["num_seeds"], row["num_cells"], row["absent"]) == (2, 3, "2: failed") and row["low"] < row["high"]
    _, ax = style.page(latency_vs_load.size(table))
    latency_vs_load.draw(table, ax)
    assert "n=2" in texts(ax) and any("95 % jackknife over seeds" in text.get_text() for text in ax.texts)
    runs = load_runs(seeds[1])
    row = point(goodput.draw(runs, style.page(goodput.size(runs))[1]), policy="fcfs", load=0.8)
    assert (row["num_seeds"], row["num_cells"], row["absent"]) == (2, 3, "2: failed")
    assert row["value"] == runs[(runs["policy"] == "fcfs") & (runs["load"] == 0.8)]["goodput_rps"].mean()


def test_n5_a_mean_is_never_alone(seeds):
    """Case N5: means fall from 3.4 to 0.67 while medians rise from 0.1 to 0.2: the figure shows both."""
    closed = np.zeros(21, bool)
    light, heavy = np.array([10, 0.1, 0.1]), np.array([10.0] + [0.2] * 20)
    assert [round(pooled([(x, closed[: len(x)])], "mean")["value"], 2) for x in (light, heavy)] == [3.4, 0.67]
    assert [pooled([(x, closed[: len(x)])], "p50")["value"] for x in (light, heavy)] == [0.1, 0.2]
    table = load_points(seeds[1])
    drawn = latency_vs_load.draw(table, style.page(latency_vs_load.size(table))[1], statistic="mean")
    assert set(drawn["statistic"]) == {"mean", "p50"}
    assert inspect.signature(latency_vs_load.draw).parameters["statistic"].default == "p99"
    assert node("latency_vs_load").keywords["statistic"] == "p99" and drawn["n"].gt(0).all()


def test_a_mean_with_a_request_that_has_not_ended_is_not_shown():
    parts = [(np.arange(200.0), np.arange(200) == 150)]
    assert np.isnan(pooled(parts, "mean")["value"]) and "1 of 200" in pooled(parts, "mean")["note"]
    assert pooled(parts, "p50")["note"] == "" and pooled(parts, "p99")["note"].startswith(">=")
    nothing = pooled([], "p50")
    assert nothing["n"] == 0 and nothing["note"] == "n=0, p50 wants 1" and np.isnan([nothing["value"], nothing["low"]]).all()


def test_the_jackknife_of_a_mean_over_equal_parts_is_the_t_interval():
    g = np.random.default_rng(0)
    parts = [g.exponential(1.0, 50) for _ in range(5)]
    got, want = interval(parts, lambda x: float(x.mean())), over_seeds(dict(enumerate(part.mean() for part in parts)))
    assert [got[key] for key in ("value", "low", "high")] == pytest.approx([want.mean, want.low, want.high])
    assert np.isnan(interval(parts[:1], lambda x: float(x.mean()))["low"])


def test_a_share_is_pooled_and_stays_within_0_and_1():
    got = ratio_interval([9, 1], [10, 90])
    assert got["value"] == 0.1 and got["low"] == 0.0 and got["high"] <= 1.0
    assert np.isnan(ratio_interval([0, 0], [0, 0])["value"])


def test_cells_that_differ_in_a_variant_are_two_lines(study):
    runs = load_runs(study).assign(preemption=["pause", "recompute"] * 3)
    two = pd.concat(
        [runs, runs.assign(preemption=["recompute", "pause"] * 3, e2e_mean=runs["e2e_mean"] * 2)], ignore_index=True
    )
    assert set(with_variants(two)["variant"]) == {"pause", "recompute"}
    table = check_figure(goodput.draw, two)
    assert len(table) == 2 * 6 and not table.duplicated(["setting_name", "policy", "predictor", "variant"]).any()
    table = check_figure(quickstart.draw, two)
    assert len(table) == 8 and set(table["variant"]) == {"pause", "recompute"}


# --- what the other figures show ---------------------------------------------------------------------------------------


def test_tails_say_how_many_requests_a_percentile_wants(seeds):
    points = load_points(seeds[1])
    _, ax = style.page(tails.size(points))
    table = tails.draw(points, ax)
    assert set(table["statistic"]) == {"p50", "p99", "p999"}
    assert table[table["statistic"] == "p999"]["value"].isna().all()
    assert "P99.9 wants 20,000 requests\na point, n = 240 to 360" in texts(ax)


def test_goodput_shows_what_is_offered_and_attainment_where_it_falls_below_90_percent(seeds):
    runs = load_runs(seeds[1])
    table = goodput.draw(runs, style.page(goodput.size(runs))[1])
    assert np.allclose(table["rate"], table["load"] * 20.0)
    line = pd.DataFrame({"load": [0.5, 0.7, 0.9, 1.1], "value": [1.0, 0.95, 0.85, 0.2]})
    assert goodput.crossing(line, "load") == pytest.approx(0.8)
    assert np.isnan(goodput.crossing(line.assign(value=0.5), "load"))
    table = goodput.draw(runs, style.page(goodput.size(runs))[1], metric="attainment", at="load")
    assert {"crossing", "attainment_n"} <= set(table) and table["value"].between(0, 1).all()
    with pytest.raises(ValueError, match="no metric nope"):
        goodput.draw(runs, style.page((5, 3))[1], metric="nope")


def test_attainment_is_judged_again_and_at_scale_1_is_the_summarys(seeds):
    cells = seeds[1]
    table = load_attainments(cells)
    for (policy, predictor, load), block in table[table["judged"] == "all"].groupby(["policy", "predictor", "load"]):
        done = [c for c in cells if (c.fields["policy"], c.fields["predictor"], c.fields["load"]) == (policy, predictor, load)]
        done = [c for c in done if c.status == "ok"]
        row = block[block["scale"] == 1.0].iloc[0]
        assert row["num_met"] == sum(c.metrics["num_met"] for c in done) and row["n"] == sum(
            c.metrics["attainment_n"] for c in done
        )
        assert (np.diff(block.sort_values("scale")["value"]) >= 0).all()  # a looser SLO is met by no fewer
        one = block[block["scale"] == 0.5].iloc[0]
        again = [judge(read_requests(c.folder), {"ttft": 5.0}, run_end(c))["all"] for c in done]
        assert one["num_met"] == sum((verdict == 1).sum() for verdict in again)
    assert set(table["scale"]) == set(SCALES) and table["slo"].eq("ttft 10 s").all()
    with pytest.raises(ValueError, match="no cell has a limit of tpot"):
        attainment.draw(table, style.page((6, 4))[1], judged="tpot")


def test_attainment_is_refused_where_requests_had_limits_of_their_own(study):
    folder = next(study.glob("gamma-seqs64-srpt-gbdt-*"))
    summary = json.loads((folder / "summary.json").read_text())
    summary["metrics"]["num_met"] -= 1
    (folder / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(ValueError, match="its requests have limits of their own"):
        load_attainments(read_cells(study))
    summary["slo"] = {"ttft": {"least": 1.0, "greatest": 2.0}}
    (folder / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(ValueError, match="its ttft limits differ by request"):
        load_attainments(read_cells(study))


def test_slowdown_by_decile_is_e2e_over_e2e_alone(seeds):
    table = load_slowdowns(seeds[1], measure="slowdown")
    cells = [c for c in seeds[1] if c.fields["predictor"] == "oracle" and c.fields["load"] == 0.8]
    requests = pd.concat([read_requests(c.folder) for c in cells])
    alone = idle_latency(Affine(0.01, 0, 0, 0), requests["prompt_len"], requests["output_len"], 2048)
    slow = (requests["finish"] - requests["arrival"]) / alone
    rows = table[(table["predictor"] == "oracle") & (table["load"] == 0.8)]
    assert rows[rows["statistic"] == "p50"]["n"].sum() == len(requests) == 360
    assert rows[rows["statistic"] == "max"]["value"].max() == pytest.approx(slow.max())
    first = rows[(rows["decile"] == 1)].set_index("statistic")
    short = slow[requests["output_len"] <= first["greatest_size"].iloc[0]]
    assert first["value"]["mean"] == pytest.approx(short.mean()) and first["value"]["p50"] == pytest.approx(short.median())
    assert np.isnan(first["value"]["p99"]) and first["note"]["p99"] == "n=36, p99 wants 100"
    with pytest.raises(ValueError, match=r"load 0\.5 is not among 0\.8, 1\.2"):
        slowdown_decile.draw(table, style.page((6, 4))[1], load=0.5)
    assert set(slowdown_decile.draw(table, style.page((6, 4))[1])["load"]) == {0.8}  # the greatest below overload


def test_a_slowdown_that_its_cost_model_no_longer_gives_is_refused(study):
    folder = next(study.glob("gamma-seqs64-srpt-gbdt-*"))
    summary = json.loads((folder / "summary.json").read_text())
    summary["metrics"]["slowdown_mean"] = 3.0
    (folder / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(ValueError, match="3 when it ran: the model has changed since"):
        load_slowdowns(read_cells(study))


def test_a_timeline_keeps_the_time_average(study):
    cell = read_cells(study)[0]
    end = run_end(cell)
    steps = pd.read_parquet(cell.folder / "steps.parquet")
    table = binned(cell, np.linspace(0.0, end, 18))
    held = np.concatenate(([0], steps["num_waiting"].to_numpy()[:-1])) * np.diff(np.concatenate(([0.0], steps["end"])))
    assert table["waiting"].mean() == pytest.approx(held.sum() / end) and table["busy"].mean() == pytest.approx(1.0)
    assert table["kv"].between(0, 1).all() and table["kv"].max() == pytest.approx(table["running"].max() / 100, rel=0.3)
    frame = load_steps(read_cells(study))
    assert len(frame) == 6 * NUM_BINS
    table = timeline.draw(frame, style.page((6, 5))[1], rows=["busy"])
    assert len(table) == 6 * NUM_BINS and table["seed"].eq(0).all()
    with pytest.raises(ValueError, match="seed 4 is not among 0"):
        timeline.draw(frame, style.page((6, 5))[1], seed=4)
    with pytest.raises(ValueError, match="choose of waiting, running, kv, busy"):
        timeline.draw(frame, style.page((6, 5))[1], rows=["tokens"])


def test_busy_is_the_share_of_time_with_a_step_running(study):
    cell = read_cells(study)[0]
    steps = pd.read_parquet(cell.folder / "steps.parquet")
    steps["end"] = steps["start"] + (steps["end"] - steps["start"]) / 4
    steps.to_parquet(cell.folder / "steps.parquet")
    table = binned(cell, np.linspace(0.0, run_end(cell), 8))
    assert table["busy"].to_numpy() == pytest.approx(0.25, abs=0.1) and table["busy"].mean() == pytest.approx(0.25)


def test_a_wait_curve_ends_at_the_longest_wait_and_is_the_share_above(seeds):
    table = load_waits(seeds[1])
    requests = load_requests(seeds[1])
    for (policy, predictor, load), block in table.groupby(["policy", "predictor", "load"]):
        mine = requests[(requests["policy"] == policy) & (requests["predictor"] == predictor) & (requests["load"] == load)]
        assert (
            block["wait"].max() == mine["wait"].max() and block["share_above"].min() == 0.0 and block["n"].eq(len(mine)).all()
        )
        for row in block.itertuples():
            assert row.share_above == pytest.approx((mine["wait"] > row.wait).mean())
    _, ax = style.page(wait_ccdf.size(table))
    wait_ccdf.draw(table, ax)
    longest = [text for text in texts(ax) if text.startswith("max ")]
    assert len(longest) == 6 and f"max {requests['wait'].max():.3g} s" in longest


def test_the_gap_figure_shows_no_number_where_no_gap_is_shown(seeds):
    runs = load_runs(seeds[1])
    _, ax = style.page(gap.size(runs))
    table = gap.draw(runs, ax)
    assert set(table["predictor"]) == {"gbdt"} and len(table) == 2 and (table["difference_seeds"] == [2, 3]).all()
    flat = runs.assign(e2e_mean=10.0 + runs["seed"])
    _, ax = style.page(gap.size(flat))
    assert gap.draw(flat, ax)["gap_closed"].isna().all() and texts(ax).count("n/a") == 2
    with pytest.raises(ValueError, match="a gap wants FCFS"):
        gap.draw(runs[runs["predictor"] != "gbdt"], style.page((6, 4))[1])


def test_names_at_line_ends_stand_apart_and_in_order():
    spots = curves._within(curves._apart(np.array([0.9, 0.52, 0.5, 0.49, 0.0]), 0.1), 0.1)
    assert (np.diff(spots) <= -0.1 + 1e-12).all() and spots[-1] >= 0 and spots[0] == 0.9


def test_a_schedule_looks_the_same_with_and_without_others():
    all_ = [("fcfs", "none", ""), ("srpt", "constant", ""), ("srpt", "gbdt", ""), ("srpt", "oracle", "")]
    found = style.looks(all_)
    assert len({(look.colour, look.dashes, look.marker) for look in found.values()}) == 4
    assert found["srpt", "oracle", ""].dashes == () and found["srpt", "oracle", ""].hollow
    twelve = [("srpt", f"p{k}", "") for k in range(12)]
    assert len({(look.dashes, look.marker) for look in style.looks(twelve).values()}) == 12
    assert (
        style.looks([("aging_srpt", "oracle", "pause")])["aging_srpt", "oracle", "pause"].label == "SRPT + aging oracle pause"
    )


def test_n1_own_files_give_every_row_and_every_value(tmp_path):
    """Case N1: 2,000 rows, a key in 26 of them: both counts come back, and the same again."""
    canned_study(
        tmp_path, num_requests=2000, loads=(0.95,), seeds=(0,), settings=(("gamma", "seqs64"),), schedules=SCHEDULES[:1]
    )
    cell = read_cells(tmp_path)[0]
    requests = read_requests(cell.folder)
    requests.loc[~requests.index.isin(range(0, 2000, 77)), "predicted"] = np.nan
    requests.to_parquet(cell.folder / "requests.parquet")
    frame = load_requests(cell.folder)
    assert len(frame) == 2000 and frame["predicted"].notna().sum() == 26
    pd.testing.assert_frame_equal(frame, load_requests(cell.folder))


def test_n3_capacities_are_drawn_from_their_files_alone(tmp_path, capsys):
    """Case N3, for the figure that is not made of cells: each search a bar, an open end and a failure told."""
    canned_capacity(tmp_path / "capacity")
    for out in ("a", "b"):
        assert main(["figure=capacity", f"runs={tmp_path}/capacity", f"out={tmp_path}/{out}"]) == 0
    for suffix in ("csv", "png", "pdf"):
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()
    frame = capacity.read(tmp_path / "capacity")
    assert "seeds 0, 1   n = 60 requests a cell   5 searches" in capacity.footer(frame)
    table = check_figure(capacity.draw, frame)
    assert table["rate"].tolist() == pd.read_csv(tmp_path / "a.csv")["rate"].tolist() == [10.0, 11.0, 12.0, 0.0, 14.0]
    _, ax = style.page(capacity.size(frame))
    capacity.draw(frame, ax)
    assert {">= 12", " no rate held", " no search", "14"} <= set(texts(ax))
    with pytest.raises(SystemExit, match=r"no capacity\.json in"):
        main(["figure=capacity", f"runs={tmp_path}/nothing"])


def test_two_searches_for_one_bar_are_refused(tmp_path):
    """Of one schedule, but of another tolerance or version: one bar would hide the other."""
    canned_capacity(tmp_path)
    answer = json.loads((tmp_path / "capacity-1" / "capacity.json").read_text())
    answer |= {"rate": 3.0, "lo": 3.0, "tolerance": 0.5, "provenance": {"search_hash": "other", "marks": []}}
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "capacity.json").write_text(json.dumps(answer))
    with pytest.raises(ValueError, match=r"2 searches are of .* chat srpt gbdt: other, 000000000001"):
        check_figure(capacity.draw, capacity.read(tmp_path))


def test_no_figure_is_left_out():
    assert set(EVERY) == set(NODES) | OTHER and {f"{name}.py" for name in EVERY} <= {
        path.name for path in (importlib.resources.files("lengthwise.experiments") / "figures").iterdir()
    }
