"""Tuning: what a range is, and a search over made-up cells: repeatable, resumable, fair to the nodes' own values."""

import json
import logging
import sys

import pandas as pd
import pytest

from lengthwise.experiments import app, job, study
from lengthwise.experiments.manifest import read_manifest
from lengthwise.experiments.ranges import Range, split_ranges
from lengthwise.experiments.run import Run

pytest.importorskip("optuna", reason="optuna is not installed (extra `tune`)")

TUNE = ("-m", "hydra/sweeper=tune", "policy=aging_srpt", "predictor=oracle", "rate=5", "wandb=off", "tune.objective=cost")
ALPHA = "policy.alpha=interval(1.0, 99.0)"


@pytest.fixture(autouse=True)
def made_up(monkeypatch):
    """Cells that cost (alpha - 60)^2 / 100 and a part by seed. `calls` has each one computed; `broken` alphas raise above."""
    state = type("State", (), {"calls": [], "broken": float("inf"), "stop_after": None})()

    def run_cell(cfg, prepared):
        alpha, seed = cfg["policy"]["alpha"], cfg["seed"]
        if state.stop_after is not None and len(state.calls) >= state.stop_after:
            raise KeyboardInterrupt
        state.calls.append((alpha, seed))
        if alpha > state.broken:
            raise RuntimeError("planted")
        frame = pd.DataFrame({"rid": [0]})
        cost = (alpha - 60) ** 2 / 100 + seed
        cell = {"policy": "aging_srpt", "load": cfg["load"], "seed": seed}
        metrics = {"num_finished": 5, "cost": cost, "e2e_p99": None}
        return Run(frame, frame, {"cell": cell, "metrics": metrics, "provenance": {}})

    monkeypatch.setattr(job, "run_cell", run_cell)
    return state


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run `lengthwise run ARGS` with out=tmp_path/runs; gives (exit code or message, everything printed)."""

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["lengthwise", *TUNE, *args, f"out={tmp_path / 'runs'}"])
        handlers = list(logging.root.handlers)
        try:
            app.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        finally:
            logging.root.handlers[:] = handlers
        out, err = capsys.readouterr()
        return code, f"{code}\n{out}\n{err}"

    return call


def found(tmp_path):
    return json.loads((tmp_path / "runs/adhoc/tune.json").read_text())


def test_a_search_finds_a_better_value_and_says_how_it_does_on_other_seeds(run, tmp_path, made_up):
    code, text = run(ALPHA, "tune.trials=15", "tune.seeds=2", "tune.held_out=2")
    assert code == 0, text
    record = found(tmp_path)
    own, best = record["trials"][0], record["best"]
    assert own["params"] == {"policy.alpha": 20.0} and own["value"] == 16.5  # the node's own, mean over seeds 0 and 1
    assert len(record["trials"]) == 15 and best["value"] == min(trial["value"] for trial in record["trials"]) < 4
    assert all(list(trial["seeds"]) == ["0", "1"] for trial in record["trials"])  # the same seeds for every trial
    assert best["held_out"]["values"].keys() == {"2", "3"} and best["held_out"]["relative"] < -0.5
    assert best["held_out"]["own"] == 18.5 and best["held_out"]["value"] == pytest.approx(best["value"] + 2)
    assert f"best: policy.alpha={best['params']['policy.alpha']}" in text and "held out (seeds 2, 3)" in text
    table = pd.read_csv(tmp_path / "runs/adhoc/tune.csv")
    assert table["value"].tolist() == pytest.approx([trial["value"] for trial in record["trials"]])
    rows = read_manifest(tmp_path / "runs/adhoc")
    assert len(rows) == len(made_up.calls) == 34 and {row["status"] for row in rows} == {"ok"}


def test_x_resume_a_search_goes_on_where_it_stopped_and_finds_the_same(run, tmp_path, made_up):
    assert run(ALPHA, "tune.trials=9", "name=whole")[0] == 0
    whole, calls = json.loads((tmp_path / "runs/whole/tune.json").read_text()), list(made_up.calls)
    made_up.calls.clear()
    made_up.stop_after = 17
    with pytest.raises(KeyboardInterrupt):
        run(ALPHA, "tune.trials=9")
    made_up.stop_after = None
    code, text = run(ALPHA, "tune.trials=9")
    assert code == 0, text
    assert found(tmp_path) == whole and made_up.calls == calls  # no cell twice
    assert run(ALPHA, "tune.trials=9")[0] == 0 and made_up.calls == calls
    assert run(ALPHA, "tune.trials=12")[0] == 0 and found(tmp_path)["trials"][:9] == whole["trials"]


def test_another_sampler_seed_is_another_search(run, tmp_path):
    assert run(ALPHA, "tune.trials=4", "tune.held_out=0", "tune.sampler.seed=1")[0] == 0
    first = found(tmp_path)["trials"]
    random = "tune.sampler._target_=optuna.samplers.RandomSampler"
    assert run(ALPHA, "tune.trials=4", "tune.held_out=0", random)[0] == 0
    assert found(tmp_path)["trials"][0] == first[0] and found(tmp_path)["trials"][1] != first[1]


def test_x_resume_a_failing_trial_is_one_trial(run, tmp_path, made_up):
    made_up.broken = 40.0
    code, text = run(ALPHA, "tune.trials=10", "tune.seeds=2")
    assert code == 0, text
    trials = found(tmp_path)["trials"]
    bad = [trial for trial in trials if trial["params"]["policy.alpha"] > 40]
    assert 0 < len(bad) < 10 and all(trial["value"] is None and "planted" in trial["error"] for trial in bad)
    assert all(trial["value"] is not None for trial in trials if trial not in bad)
    assert f"trial {bad[0]['number']} failed" in text and "planted" in text
    made_up.broken = 0.0
    code, text = run(ALPHA, "tune.trials=3", "name=other", "num_requests=7")
    assert code != 0 and "none of 3 trials has a value of cost" in text


def test_a_proposal_that_a_node_refuses_is_a_failed_trial(run, tmp_path):
    code, text = run("policy.alpha=-5.0,30.0", "tune.trials=6", "tune.held_out=0")
    assert code == 0, text
    trials = found(tmp_path)["trials"]
    assert {trial["params"]["policy.alpha"] for trial in trials[1:]} == {"-5.0", "30.0"}
    assert all(("must be > 0" in (trial["error"] or "")) == (trial["params"]["policy.alpha"] == "-5.0") for trial in trials)


def test_the_greatest_is_found_too_and_the_own_values_may_be_the_best(run, tmp_path):
    code, text = run("policy.alpha=interval(19.0, 60.0)", "tune.trials=5", "tune.direction=maximize")
    assert code == 0, text
    values = [trial["value"] for trial in found(tmp_path)["trials"]]
    assert found(tmp_path)["best"]["value"] == max(values)
    code, text = run("policy.alpha=interval(21.0, 60.0)", "tune.trials=5", "tune.direction=maximize")  # 20 is out of the range
    assert code == 0 and found(tmp_path)["best"]["number"] == 0 and "no trial is better" in text


REFUSED = [
    ([], ["nothing to tune", "interval"]),
    (["seed=0,1", ALPHA], ["seed=0,1", "tune.seeds"]),
    (["load=0.5,0.9", ALPHA], ["load=0.5,0.9", "fields of nodes"]),
    (["policy.alhpa=interval(1.0, 2.0)"], ["policy.alhpa", "Did you mean 'policy.alpha'"]),
    (["policy.alpha=interval(5.0, 2.0)"], ["the low end must be below"]),
    (["policy.alpha=tag(log, interval(0.0, 2.0))"], ["above 0"]),
    ([ALPHA, "tune.direction=down"], ["tune.direction='down'", "minimize"]),
    ([ALPHA, "tune.trials=0"], ["tune.trials=0", ">= 1"]),
    ([ALPHA, "tune.seed=3"], ["Did you mean 'tune.seeds'"]),
    ([ALPHA, "policy=aging_sj"], ["Did you mean 'aging_sjf'"]),
]


@pytest.mark.parametrize(("args", "words"), REFUSED, ids=[" ".join(args) or "nothing" for args, _ in REFUSED])
def test_refused_before_the_first_cell(args, words, run, made_up):
    code, text = run(*args)
    assert code != 0 and all(word in text for word in words) and "Traceback" not in text, text
    assert not made_up.calls


def test_an_objective_that_is_not_there_ends_the_search(run, made_up):
    code, text = run(ALPHA, "tune.objective=csot")
    assert code != 0 and "csot" in text and "Did you mean 'cost'" in text and len(made_up.calls) == 3
    code, text = run(ALPHA, "tune.objective=e2e_p99", "tune.trials=2")
    assert code != 0 and "e2e_p99 is n/a" in text and "none of 2 trials" in text


def test_without_optuna_the_extra_is_named(run, made_up, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, text = run(ALPHA)
    assert code != 0 and "pip install 'lengthwise[tune]'" in text and "Traceback" not in text and not made_up.calls


def test_ranges_are_read_as_hydra_writes_them():
    texts = [
        "a.x=interval(1,9)",
        "a.n=int(interval(1,9))",
        "a.l=tag(log,interval(1,100))",
        "a.r=range(0,10,3)",
        "a.c=hold,clip",
    ]
    ranges, fixed = split_ranges([*texts, "b=1"])
    assert fixed == ["b=1"]
    assert ranges == [
        Range("a.x", 1.0, 9.0), Range("a.n", 1, 9, whole=True), Range("a.l", 1.0, 100.0, log=True),
        Range("a.r", 0.0, 9.0, 3.0, whole=True), Range("a.c", choices=("hold", "clip")),
    ]  # fmt: skip
    assert [space.placed(6) for space in ranges] == [6.0, 6, 6, 6, None]
    assert [space.placed(5.5) for space in ranges] == [5.5, None, 5.5, None, None]
    assert ranges[3].placed(7) is None and ranges[4].placed("clip") == "clip" and ranges[0].placed(None) is None
    assert split_ranges(["a.x=1,2", "a.x=4", "a.y=1,2"])[0] == [Range("a.y", choices=("1", "2"))]  # the last one counts


def test_a_search_is_held_like_a_study(run, tmp_path):
    (tmp_path / "runs/adhoc").mkdir(parents=True)
    with study._locked(tmp_path / "runs/adhoc"):
        code, text = run(ALPHA)
    assert code != 0 and "another run is writing" in text
