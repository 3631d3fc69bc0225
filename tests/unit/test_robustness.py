"""Errors of a stated strength: each node errs as it says, ratios and where they stop by hand, the page and the figure."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf

from lengthwise.experiments.cellhash import fields
from lengthwise.experiments.composer import Composer, plain
from lengthwise.experiments.error import error_names
from lengthwise.experiments.figures import robustness as figure
from lengthwise.experiments.figures import style
from lengthwise.experiments.figures.contract import canned_study, check_figure
from lengthwise.experiments.load_runs import load_runs, read_cells
from lengthwise.experiments.nodes import make
from lengthwise.experiments.robustness import ratios, stop, stops
from lengthwise.experiments.robustness_table import FILES, robustness_page, write_robustness
from lengthwise.experiments.statistics import paired_ratio
from lengthwise.experiments.validate import validate
from lengthwise.predictors.scores import kendall_tau

NAN = math.nan


# --- where prediction stops helping -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strengths", "ratio", "at", "note"),
    [
        ([0, 1, 3], [0.5, 0.8, 1.2], 2.0, ""),  # halfway between 1 and 3
        ([0, 100], [0.75, 1.75], 25.0, ""),
        ([0, 1, 2], [0.9, 1.0, 1.5], 1.0, ""),  # at a strength that was measured
        ([0, 1, 2, 4], [0.5, 1.5, 0.7, 0.8], 0.5, "below 1 again at 2"),
        ([0, 1, 2], [1.0, 1.1, 1.2], 0.0, "never helps"),
        ([0, 1, 2], [1.1, 0.9, 1.2], 0.0, "below 1 again at 1"),
        ([0, 1, 8], [0.5, 0.6, 0.99], NAN, "never up to 8"),
        ([0, 1, 2], [0.5, NAN, 1.5], NAN, "no value at 1"),
        ([0, 1, 2], [0.5, 1.5, NAN], 0.5, ""),
        ([25, 100], [1.2, 1.3], NAN, "at or below 25"),  # the truth is missing
        ([25, 100], [1.2, 0.9], NAN, "at or below 25; below 1 again at 100"),
        ([], [], NAN, "not measured"),
    ],
)
def test_a_line_stops_where_it_first_reaches_1(strengths, ratio, at, note):
    found = stop(strengths, ratio, ratio)
    assert found.at == pytest.approx(at, nan_ok=True) and found.note == note


def test_it_surely_helps_as_far_as_every_interval_lies_below_1():
    strengths, ratio = [0, 1, 2, 3], [0.5, 0.6, 0.7, 0.8]
    assert stop(strengths, ratio, [0.6, 0.9, 1.1, 0.9]).sure_to == 1
    assert stop(strengths, ratio, [0.6, 0.9, 0.9, 0.9]).sure_to == 3
    assert math.isnan(stop(strengths, ratio, [1.2, 0.9, 0.9, 0.9]).sure_to)
    assert math.isnan(stop(strengths, ratio, [NAN] * 4).sure_to)  # one seed has no interval


# --- ratios -------------------------------------------------------------------------------------------------------------


def cell(policy, error, strength, seed, mean, p99, **more):
    row = {"policy": policy, "predictor": f"{error}_{strength}", "workload": "w", "arrivals": "a", "limits": "l", "load": 0.9}
    row |= {"rate": 9.0, "seed": seed, "status": "ok", "num_requests": 10, "e2e_mean": mean, "e2e_p99": p99}
    return row | {"error": error, "strength": strength, "error_axis": f"how {error}"} | more


def frame():
    """Two policies, two kinds of error, the truth, two seeds; FCFS is 10 s and 20 s in the mean."""
    rows = [cell("fcfs", "none", NAN, seed, 10.0 * (seed + 1), 100.0, predictor="none") for seed in (0, 1)]
    for policy, factor in (("srpt", 1.0), ("ltr", 2.0)):
        rows += [cell(policy, "none", 0.0, seed, 5.0 * factor, 50.0) for seed in (0, 1)]
        rows += [cell(policy, "mae", 8.0, seed, 10.0 * factor * (seed + 1), 200.0) for seed in (0, 1)]
        rows += [cell(policy, "mae", 4.0, seed, 8.0 * factor * (seed + 1), 100.0) for seed in (0, 1)]
        rows += [cell(policy, "tau", 0.5, seed, 5.0 * factor * (seed + 1), 60.0) for seed in (0, 1)]
    return pd.DataFrame(rows)


def at(table, **keys):
    for key, value in keys.items():
        table = table[table[key] == value]
    assert len(table) == 1
    return table.iloc[0]


def test_a_ratio_is_to_fcfs_of_the_same_seed_and_the_truth_begins_every_kind():
    table = ratios(frame())
    assert len(table) == 2 * 2 * (3 + 2)  # policies x statistics x strengths, the truth in both kinds
    for kind in ("mae", "tau"):
        row = at(table, policy="srpt", error=kind, strength=0.0, statistic="mean")
        assert row["ratio"] == pytest.approx(math.sqrt(0.5 * 0.25)) and row["ratio_low"] < row["ratio"] < row["ratio_high"]
        assert row["num_seeds"] == row["num_cells"] == 2 and row["error_axis"] == f"how {kind}"
    assert at(table, policy="srpt", error="mae", strength=8.0, statistic="p99")["ratio"] == pytest.approx(2.0)
    mae = table[(table["policy"] == "ltr") & (table["error"] == "mae") & (table["statistic"] == "mean")]
    assert mae["strength"].tolist() == [0.0, 4.0, 8.0] and mae["ratio"].tolist() == pytest.approx([math.sqrt(0.5), 1.6, 2.0])


def test_where_the_lines_of_a_study_stop():
    ends = stops(ratios(frame()))
    assert len(ends) == 8
    srpt = at(ends, policy="srpt", error="mae", statistic="mean")
    assert srpt["stops_at"] == pytest.approx(8.0) and srpt["strongest"] == 8.0 and srpt["ratio"] == pytest.approx(1.0)
    assert at(ends, policy="srpt", error="mae", statistic="p99")["stops_at"] == pytest.approx(4.0)
    first = math.sqrt(0.5)
    ltr = at(ends, policy="ltr", error="mae", statistic="mean")
    assert ltr["stops_at"] == pytest.approx(4.0 * (1 - first) / (1.6 - first))
    assert at(ends, policy="srpt", error="tau", statistic="p99")["note"] == "never up to 0.5"
    page = "\n".join("".join(text for text, _ in line) for line in robustness_page(ratios(frame()), ends))
    assert "> 0.5" in page and "8 / 4" in page and "1.00 [1.00, 1.00]" in page and "mae: how mae" in page


def test_without_the_truth_a_line_above_1_stops_somewhere_below_its_first_strength():
    runs = frame()
    table = ratios(runs[runs["strength"] != 0.0])
    ends = stops(table)
    assert at(ends, policy="ltr", error="mae", statistic="mean")["note"] == "at or below 4"
    page = "\n".join("".join(text for text, _ in line) for line in robustness_page(table, ends))
    assert "<= 4 / <= 4" in page


def test_variants_are_lines_of_their_own_against_fcfs_of_the_same():
    slow = frame().assign(preemption="recompute")
    slow["e2e_mean"] *= np.where(slow["policy"] == "fcfs", 2.0, 6.0)
    runs = pd.concat([frame().assign(preemption="pause"), slow], ignore_index=True)
    table = ratios(runs)
    for variant, want in (("pause", 1.0), ("recompute", 3.0)):
        row = at(table, policy="srpt", variant=variant, error="mae", strength=8.0, statistic="mean")
        assert row["ratio"] == pytest.approx(want) and row["num_cells"] == 2
    ends = stops(table)
    assert len(ends) == 16 and set(ends["variant"]) == {"pause", "recompute"}
    page = "\n".join("".join(text for text, _ in line) for line in robustness_page(table, ends))
    assert "srpt pause" in page and "ltr recompute" in page
    _, ax = style.page(figure.size(runs))
    figure.draw(runs, ax)
    assert set(ratios(frame())["variant"]) == {""}


def test_a_seed_that_comes_twice_is_refused_by_name():
    runs = frame()
    twice = runs[(runs["policy"] == "ltr") & (runs["error"] == "tau") & (runs["seed"] == 1)]
    with pytest.raises(ValueError, match=r"ltr with tau_0.5: seed 1 comes twice"):
        ratios(pd.concat([runs, twice]))


def test_a_cell_that_is_gone_is_counted_and_not_made_up_for():
    runs = frame()
    runs.loc[(runs["policy"] == "srpt") & (runs["error"] == "mae") & (runs["seed"] == 1), ["status", "e2e_mean"]] = [
        "missing",
        NAN,
    ]
    row = at(ratios(runs), policy="srpt", error="mae", strength=4.0, statistic="mean")
    assert (
        row["num_seeds"] == 1 and row["num_cells"] == 2 and row["ratio"] == pytest.approx(0.8) and math.isnan(row["ratio_low"])
    )
    runs.loc[runs["policy"] == "fcfs", "status"] = "missing"
    ends = stops(ratios(runs))
    assert ends["stops_at"].isna().all() and set(ends["note"]) == {"no value at 0"}


def test_loads_stand_apart_and_runs_without_errors_have_no_rows():
    two = pd.concat([frame(), frame().assign(load=1.2)], ignore_index=True)
    assert len(stops(ratios(two))) == 16
    assert ratios(frame().drop(columns=["error", "strength", "error_axis"])).empty
    assert stops(ratios(frame().iloc[:0])).empty


def test_a_ratio_turns_over_with_its_interval():
    a, b = {0: 1.0, 1: 2.0, 2: 4.0, 3: None}, {0: 2.0, 1: 2.0, 2: 3.0, 3: 1.0}
    one, other = paired_ratio(a, b), paired_ratio(b, a)
    assert one.mean == pytest.approx((0.5 * 1.0 * 4 / 3) ** (1 / 3)) and one.n == 3 and one.missing == (3,)
    assert one.mean * other.mean == pytest.approx(1.0) and one.low * other.high == pytest.approx(1.0)
    assert paired_ratio({0: 0.0}, {0: 1.0}).mean is None


# --- nodes --------------------------------------------------------------------------------------------------------------


def composed(*overrides):
    with initialize_config_module("lengthwise.conf", version_base="1.3"):
        config = compose("run", list(overrides), return_hydra_config=True)
        choices = OmegaConf.to_container(config.hydra.runtime.choices)
        own = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
        return {**OmegaConf.to_container(own, resolve=True), "choices": choices}


def measured(kind, said, truth):
    """The strength that N points show."""
    quarter = len(truth) // 4
    return {
        "mae": lambda: np.mean(np.abs(said - truth)),
        "tau": lambda: 1.0 - kendall_tau(said, truth),
        "short": lambda: np.log2(truth / said).mean(),
        "long": lambda: np.log2(said / truth).mean(),
        "heavy_tail": lambda: np.mean(np.abs(np.log(said / truth))),
        "shift": lambda: 1.0 - kendall_tau(said[quarter:], truth[quarter:]) + np.abs(said[:quarter] - truth[:quarter]).max(),
        "adversarial": lambda: np.mean(said != truth),
    }[kind]()


@pytest.mark.parametrize("kind", ["mae", "tau", "short", "long", "heavy_tail", "shift", "adversarial"])
def test_every_error_is_as_strong_as_it_says(kind):
    truth = np.random.default_rng(0).integers(9_000, 60_000, 8000)
    steps = composed(f"error={kind}")["error"]["strengths"]
    assert list(steps.values()) == sorted(set(steps.values())) and steps["weak"] > 0
    for step in ("weak", "severe"):
        cfg = composed(f"error={kind}", f"error.step={step}")
        oracle = make(cfg["predictor"])
        assert measured(kind, oracle.from_truth(truth, np.random.default_rng(1)).point, truth) == pytest.approx(
            steps[step], rel=0.05
        )
        said = {
            "predictor": f"oracle_{kind}_{steps[step]:g}",
            "error": kind,
            "strength": steps[step],
            "error_axis": cfg["error"]["axis"],
        }
        assert error_names(cfg) == said and said.items() <= fields(cfg).items()


@pytest.mark.parametrize("kind", ["tau", "short", "long", "heavy_tail", "shift"])
def test_a_strength_that_its_step_does_not_have_is_refused_where_it_would_set_nothing(kind):
    validate(composed(f"error={kind}", "error.step=mild"))
    with pytest.raises(ValueError, match=r"error.strength=0.4: .*error.step"):
        validate(composed(f"error={kind}", "error.strength=0.4"))


def test_a_strength_that_the_predictor_reads_may_be_any():
    for kind in ("mae", "adversarial"):
        cfg = composed(f"error={kind}", "error.strength=0.4")
        validate(cfg)
        oracle = cfg["predictor"]["oracle"]
        assert 0.4 in (oracle.get("mae"), oracle.get("share")) and error_names(cfg)["strength"] == 0.4
    assert "before" in composed("error=mae")["error"]["axis"]  # the noise, not what is left of it


def test_what_is_told_without_an_error_is_the_truth_and_fcfs_is_told_nothing():
    cfg = composed("arm=srpt", "error=none")
    assert error_names(cfg) == {"predictor": "oracle", "error": "none", "strength": 0.0, "error_axis": "none"}
    assert make(cfg["predictor"]).from_truth([3, 7], np.random.default_rng(0)).point.tolist() == [3.0, 7.0]
    for config in (composed("arm=fcfs", "error=none"), composed("policy=srpt", "predictor=oracle")):
        assert error_names(config) == {} and "strength" not in fields(config)


def test_every_arm_is_told_what_it_reads():
    told = {
        name: composed(f"arm={name}", "error=tau") for name in ("srpt", "ltr", "trail", "gittins", "mc_sf", "vtc_predicted")
    }
    assert {name: cfg["policy"]["_target_"].split(".")[-2] for name, cfg in told.items()} == {name: name for name in told}
    for name, cfg in told.items():
        found = make(cfg["predictor"]).from_truth(np.arange(1, 200), np.random.default_rng(0))
        assert (found.survival is not None) == (name == "gittins") and (found.point is None) == (name == "gittins")
        assert (cfg["refine"]["_target_"] is not None) == (name == "trail")
        assert "prediction" in make(cfg["policy"]).needs or "distribution" in make(cfg["policy"]).needs
    assert make(told["ltr"]["policy"]).guard is not None and make(told["trail"]["refine"]).carried


def test_a_job_composed_from_what_others_share_is_the_one_that_hydra_composes():
    """Values that interpolations read and values that none does: the same config as composed anew."""
    with initialize_config_module("lengthwise.conf", version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        config = hydra.compose_config("run", ["study=robustness"], run_mode=RunMode.MULTIRUN)
        shared = Composer(config, hydra.config_loader)
        for step, seed, load in (("mild", 3, 1), ("weak", 0, 0.5), ("mild", 4, 2), ("severe", 0, 0.5)):
            job = ["arm=srpt", "error=tau", f"seed={seed}", f"error.step={step}", f"load={load}", "limits.max_num_seqs=7"]
            found, anew = shared(job), hydra.config_loader.load_sweep_config(config, job)
            assert found == plain(anew, OmegaConf.to_container(anew.hydra.runtime.choices))
            tau = {"mild": 0.5, "weak": 0.75, "severe": 0.05}[step]
            assert (found["predictor"]["oracle"]["tau"], found["seed"], found["load"]) == (tau, seed, load)
            found["predictor"]["oracle"]["tau"] = found["limits"]["max_num_seqs"] = None  # a copy: the next is not touched


# --- a study's end ------------------------------------------------------------------------------------------------------


@pytest.fixture
def study(tmp_path):
    """Invented cells whose predictors stand for errors: constant is a great one, prompt_length a small one, oracle none."""
    canned_study(tmp_path, num_requests=200, loads=(0.95,), seeds=(0, 1), settings=(("gamma", "seqs64"),))
    kinds = {"constant": 40.0, "prompt_length": 10.0, "oracle": 0.0}
    for path in tmp_path.glob("*/summary.json"):
        summary = json.loads(path.read_text())
        if (strength := kinds.get(summary["cell"]["predictor"])) is not None:
            error = "mae" if strength else "none"
            summary["cell"] |= {"error": error, "strength": strength, "error_axis": "tokens"}
            path.write_text(json.dumps(summary))
    return tmp_path


def test_the_end_of_a_study_writes_both_tables(study, tmp_path):
    lines = write_robustness(study, read_cells(study))
    found = [pd.read_csv(study / name) for name in FILES]
    assert (
        len(found[0]) == 2 * 2 * 3
        and len(found[1]) == 2 * 2
        and any("stops helping" in "".join(t for t, _ in line) for line in lines)
    )
    runs = load_runs(read_cells(study))
    want = runs[(runs["policy"] == "sjf") & (runs["predictor"] == "constant")].set_index("seed")["e2e_mean"]
    fcfs = runs[runs["policy"] == "fcfs"].set_index("seed")["e2e_mean"]
    row = at(found[0], policy="sjf", strength=40.0, statistic="mean")
    assert row["ratio"] == pytest.approx(float(np.exp(np.log(want / fcfs).mean())), rel=1e-6)


def test_a_study_without_errors_has_no_such_end(tmp_path):
    canned_study(tmp_path, num_requests=20, loads=(0.95,), seeds=(0,), settings=(("gamma", "seqs64"),))
    assert write_robustness(tmp_path, read_cells(tmp_path)) == [] and not (tmp_path / FILES[0]).exists()
    with pytest.raises(style.NothingToDraw, match="no cell has an error"):
        figure.size(load_runs(tmp_path))


@pytest.mark.parametrize("statistic", ["mean", "p99"])
def test_the_figure_draws_a_panel_for_each_kind(study, statistic):
    table = check_figure(lambda runs, ax: figure.draw(runs, ax, statistic=statistic), load_runs(study))
    assert set(table["statistic"]) == {statistic} and table["place"].tolist() == [0, 1, 2] * 2
    page, ax = style.page(figure.size(frame()))
    figure.draw(frame(), ax, statistic=statistic)
    shown = [panel for panel in ax.child_axes if panel.get_visible()]
    assert [panel.get_title(loc="left") for panel in shown] == ["mae", "tau"]
    assert [text.get_text() for text in shown[0].get_xticklabels()] == ["0", "4", "8"]
    page.canvas.draw()
    assert max(text.get_window_extent().x1 for text in ax.texts) <= page.bbox.width
    assert max(text.get_window_extent().x1 for text in shown[1].get_legend().get_texts()) <= page.bbox.width
    with pytest.raises(ValueError, match="statistic 'p50'"):
        figure.draw(frame(), ax, statistic="p50")
