"""Studies with a made-up simulator: what runs, what is skipped, what is refused, what a failure leaves, how it exits."""

import ast
import errno
import itertools
import json
import os
import sys
from pathlib import Path

import pandas as pd
import pytest
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.types import RunMode

import lengthwise
from lengthwise.experiments import app, cellhash, composer, job, launch, prepare, size, study, sweep
from lengthwise.experiments.manifest import append, find_row, read_manifest
from lengthwise.experiments.nodes import reads
from lengthwise.experiments.paths import remove_stale, temporary
from lengthwise.experiments.progress import Progress
from lengthwise.experiments.run import Run

REFERENCE = Path(lengthwise.__file__).parent / "experiments"


@pytest.fixture(autouse=True)
def made_up(monkeypatch):
    """Cells that cost nothing. `calls` holds the config of each one computed; `fail` maps a seed to what its cell raises."""
    state = type("State", (), {"calls": [], "fail": {}, "finished": 5, "reported": []})()

    def run_cell(cfg, prepared):
        state.calls.append(cfg)
        if cfg["seed"] in state.fail:
            raise state.fail[cfg["seed"]]
        prepared.saturation_rate(cfg)
        frame = pd.DataFrame({"rid": [0]})
        cell = {"policy": cfg["choices"]["policy"], "load": cfg["load"], "seed": cfg["seed"]}
        return Run(frame, frame, {"cell": cell, "metrics": {"num_finished": state.finished}, "provenance": {}})

    monkeypatch.setattr(job, "run_cell", run_cell)
    monkeypatch.setattr(prepare, "measure_saturation", lambda cfg: {"rate": 10.0})
    monkeypatch.setattr("lengthwise.experiments.report.finish", lambda folder, rows, cfg: state.reported.append(rows))
    return state


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run `lengthwise run ARGS` here with out=tmp_path/runs; gives (exit code or message, standard error)."""

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["lengthwise", *args, f"out={tmp_path / 'runs'}"])
        try:
            app.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        err = capsys.readouterr().err
        return code, f"{code}\n{err}"

    return call


def folders(tmp_path, name="adhoc"):
    root = tmp_path / "runs" / name
    return sorted(path.name for path in root.iterdir() if path.is_dir()) if root.exists() else []


def manifest(tmp_path, name="adhoc"):
    return read_manifest(tmp_path / "runs" / name)


# --- resume -----------------------------------------------------------------------------------------------------------


def test_x_resume_complete_cells_are_not_run_again(run, tmp_path, made_up):
    assert run("-m", "seed=0,1")[0] == 0
    first = {name: (tmp_path / "runs/adhoc" / name / "summary.json").stat().st_mtime_ns for name in folders(tmp_path)}
    assert len(first) == 2 == len(made_up.calls)
    assert run("-m", "seed=0,1,2")[0] == 0
    assert [cfg["seed"] for cfg in made_up.calls] == [0, 1, 2]
    assert {row["status"] for row in manifest(tmp_path)} == {"ok"}
    assert [row["cached"] for row in manifest(tmp_path)] == [True, True, False]
    for name, stamp in first.items():
        assert (tmp_path / "runs/adhoc" / name / "summary.json").stat().st_mtime_ns == stamp
    assert run("-m", "seed=0,1,2")[0] == 0  # all complete: drawn again, nothing computed
    assert len(made_up.calls) == 3
    assert [len(rows) for rows in made_up.reported] == [2, 3, 3]


def test_x_resume_the_manifest_holds_exactly_this_sweep(run, tmp_path, made_up):
    run("-m", "seed=0,1,2")
    run("-m", "seed=1,3")
    assert [row["fields"]["seed"] for row in manifest(tmp_path)] == [1, 3]
    assert len(folders(tmp_path)) == 4  # results of other sweeps stay
    assert [row["fields"]["seed"] for row in made_up.reported[-1]] == [1, 3]


def test_x_resume_a_result_that_is_not_whole_is_made_again(run, tmp_path, made_up):
    run("seed=0")
    (only,) = folders(tmp_path)
    (tmp_path / "runs/adhoc" / only / "requests.parquet").unlink()
    assert run("seed=0")[0] == 0
    assert len(made_up.calls) == 2 and folders(tmp_path) == [only]
    assert (tmp_path / "runs/adhoc" / only / "requests.parquet").exists()


def test_x_resume_what_a_killed_run_left_is_removed_and_a_living_ones_kept(run, tmp_path):
    root = tmp_path / "runs/adhoc"
    living = temporary(root / "x")
    dead = living.with_name(living.name.rpartition("-")[0] + f"-{2**22 + 1}")
    for folder in (living, dead):
        folder.mkdir(parents=True)
        (folder / "requests.parquet").write_text("half")
    assert run("-m", "seed=0,1")[0] == 0
    assert living.exists() and not dead.exists()
    assert remove_stale(root) == 0


def test_another_run_of_the_same_study_is_refused(run, tmp_path):
    (tmp_path / "runs/adhoc").mkdir(parents=True)
    with study._locked(tmp_path / "runs/adhoc"):
        code, text = run("-m", "seed=0,1")
    assert code != 0 and "another run is writing" in text and "name=" in text
    assert run("-m", "seed=0,1")[0] == 0


# --- identity ---------------------------------------------------------------------------------------------------------


def compose(*overrides, mode=RunMode.MULTIRUN):
    with initialize_config_module("lengthwise.conf", version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        config = hydra.compose_config("run", list(overrides), run_mode=mode)
        return config, hydra.config_loader


def cells_of(*overrides):
    config, loader = compose(*overrides)
    params = [f"{key}={value}" for key, value in config.hydra.sweeper.params.items()]
    return config, [cfg for _, cfg in sweep.sweep_cells(config, [*params, *overrides], loader)]


def plain(*overrides):
    config, _ = compose(*overrides, mode=RunMode.RUN)
    return composer.plain(config, config.hydra.runtime.choices)


CHANGES = (
    "seed=1", "load=0.9", "rate=3", "num_requests=7", "policy=sjf", "predictor=oracle", "limits=seqs64", "slo=batch",
    "limits.token_budget=512", "slo.ttft=3", "arrivals=gamma", "hardware=unit", "executor.fast_forward=false",
    "system=vllm", "kv.watermark=0.02",
)  # fmt: skip


def test_x6_cells_that_differ_in_any_key_have_different_folders():
    configs = [plain(), *(plain(change) for change in CHANGES)]
    names = [cellhash.cell_name(cfg, cellhash.cell_hash(cfg, {"saturation": "s"})) for cfg in configs]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 120 and "/" not in name and not name.startswith(".") for name in names)
    other_input = cellhash.cell_hash(configs[0], {"saturation": "t"})
    assert other_input != cellhash.cell_hash(configs[0], {"saturation": "s"})


def test_where_results_go_is_no_part_of_a_cell():
    a, b = plain(), plain("out=elsewhere", "name=x", "check=true", "exclude=[{seed:9}]", "wandb=online", "figure=quickstart")
    assert cellhash.cell_hash(a, {}) == cellhash.cell_hash(b, {})
    assert cellhash.cell_hash(plain("load=1"), {}) == cellhash.cell_hash(plain("load=1.0"), {})


def test_an_edited_file_is_another_cell(tmp_path, monkeypatch):
    table = tmp_path / "trace.csv"
    table.write_text("a\n1\n")
    cfg = {**plain(), "workload": {"_target_": "x.y", "path": str(table)}}
    before = cellhash.cell_hash(cfg, {})
    assert cellhash.cell_hash(cfg, {}) == before
    table.write_text("a\n2\n3\n")
    assert cellhash.cell_hash(cfg, {}) != before

    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_policy_a.py").write_text("class Own: ...\n")
    cfg = {**plain(), "policy": {"_target_": "own_policy_a.Own"}}
    before = cellhash.cell_hash(cfg, {})
    (tmp_path / "own_policy_a.py").write_text("class Own:\n    x = 1\n")
    cellhash._module_hash.cache_clear()
    assert cellhash.cell_hash(cfg, {}) != before


def test_code_that_makes_results_is_part_of_a_cell():
    """Every module of experiments/ that a cell, a saturation rate or a prediction imports counts in the hash."""
    modules = {path.stem: path for path in REFERENCE.glob("*.py")}
    todo, seen = {"cell", "saturation", "learned"}, set()
    while todo:
        name = todo.pop()
        seen.add(name)
        for node in ast.walk(ast.parse(modules[name].read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
                todo |= {node.module.split(".")[0]} & set(modules) - seen
    assert seen.isdisjoint(Path(name).stem for name in cellhash.READERS)


def test_x6_no_config_can_run_code():
    from omegaconf import OmegaConf

    assert not any(OmegaConf.has_resolver(name) for name in ("eval", "python", "exec", "sh"))


# --- what a sweep holds -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quickstart():
    return cells_of("study=quickstart")


def test_x5_quickstart_is_162_cells_of_9_pairs(quickstart):
    config, cells = quickstart
    assert len(cells) == 162
    pairs = {(c["choices"]["policy"], c["choices"]["predictor"]) for c in cells}
    learned = ("constant", "prompt_length", "gbdt", "oracle")
    assert pairs == {("fcfs", "none"), *itertools.product(("sjf", "srpt"), learned)}
    wide, narrow = ([c for c in cells if c["choices"]["setting"] == s] for s in ("slots256_poisson", "slots64_gamma3"))
    assert len(wide) == len(narrow) == 81
    assert {(c["limits"]["max_num_seqs"], c["choices"]["arrivals"]) for c in wide} == {(256, "poisson")}
    assert {(c["limits"]["max_num_seqs"], c["choices"]["arrivals"]) for c in narrow} == {(64, "gamma")}
    assert {c["arrivals"]["cv"] for c in narrow} == {3.0}
    assert {(c["load"], c["seed"]) for c in cells} == set(itertools.product((0.8, 0.95, 1.2), (0, 1, 2)))
    assert {(c["num_requests"], c["choices"]["workload"]) for c in cells} == {(4000, "sharegpt")}
    assert {c["limits"]["kv_pool_tokens"] for c in cells} == {None}  # derived from the hardware
    assert "joblib" in config.hydra.launcher._target_  # set in the study file: honoured


def test_cells_known_beforehand_are_those_the_jobs_compose(quickstart):
    """One composition per set of groups gives what a whole composition per job gives."""
    config, loader = compose("study=quickstart")
    cells = {cellhash.digest(cellhash.identity(cfg)) for cfg in quickstart[1]}
    assert len(cells) == 162
    chosen = (("slots256_poisson", 0.8, ("fcfs", "none"), 0), ("slots64_gamma3", 1.2, ("srpt", "gbdt"), 2))
    for setting, load, pair, seed in chosen:
        job = [f"setting={setting}", f"load={load}", f"policy={pair[0]}", f"predictor={pair[1]}", f"seed={seed}"]
        composed = loader.load_sweep_config(config, [*job, "study=quickstart"])
        cfg = composer.plain(composed, composed.hydra.runtime.choices)
        assert cellhash.digest(cellhash.identity(cfg)) in cells


def test_a_plain_copy_is_what_hydra_composes(tmp_path):
    """Values set on the plain copy, on one with interpolations, and by Hydra: the same config, nested keys and all."""
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/linked.yaml").write_text("_target_: lengthwise.sched.policies.fcfs.FCFS\ncopy: ${load}\n")
    with initialize_config_module("lengthwise.conf", version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        for policy in ("aging_srpt", "linked"):
            overrides = [f"hydra.searchpath=['file://{tmp_path}']", f"policy={policy}", "predictor=oracle"]
            config = hydra.compose_config("run", overrides, run_mode=RunMode.MULTIRUN)
            compose_job = composer.Composer(config, hydra.config_loader)
            more = ["policy.alpha=3.5"] if policy == "aging_srpt" else []
            for job in (["load=0.5", "seed=3"], ["load=0.7", "kv.watermark=1e-2", "slo.ttft=3", "name=x"], ["seed=4", *more]):
                job = [*overrides[1:], *job]
                composed = hydra.config_loader.load_sweep_config(config, job)
                assert compose_job(job) == composer.plain(composed, composed.hydra.runtime.choices)
            ((*_, read),) = compose_job._composed.values()
            assert read == (["${load}"] if policy == "linked" else [])
    assert compose_job(["policy=linked", "predictor=oracle", "load=0.9"])["policy"]["copy"] == 0.9


def test_a_thousand_cells_are_composed_once(monkeypatch):
    config, loader = compose("rate=20")
    composed, whole = [], type(loader).load_sweep_config

    def counted(self, *args):
        composed.append(args)
        return whole(self, *args)

    monkeypatch.setattr(type(loader), "load_sweep_config", counted)
    cells = sweep.sweep_cells(config, ["rate=20", "policy=fcfs,priority", "seed=range(0,500)"], loader)
    assert len(cells) == 1000 and len(composed) == 2
    assert len({cellhash.digest(cfg) for _, cfg in cells}) == 1000


def test_x4_numbers_stay_numbers(run, tmp_path):
    assert run("-m", "load=1e-5,1e-3")[0] == 0
    assert [row["fields"]["load"] for row in manifest(tmp_path)] == [1e-5, 1e-3]


def test_x4_stored_config_is_resolved_and_the_same_anywhere(run, tmp_path):
    from omegaconf import OmegaConf

    run("seed=3", "policy=srpt", "predictor=oracle")
    (only,) = folders(tmp_path)
    stored = OmegaConf.load(tmp_path / "runs/adhoc" / only / ".hydra/config.yaml")
    assert stored.seed == 3 and stored.choices.policy == "srpt" and "out" not in stored
    assert "${" not in (tmp_path / "runs/adhoc" / only / ".hydra/config.yaml").read_text()


# --- refused before the first cell ------------------------------------------------------------------------------------

REFUSED = [
    (["polcy=sjf"], ["polcy", "Did you mean 'policy'"]),
    (["policy=fcsf"], ["policy/fcsf", "Did you mean 'fcfs'"]),
    (["limits.max_num_seq=3"], ["Did you mean 'limits.max_num_seqs'"]),
    (["load=abc"], ["load='abc'", "> 0"]),
    (["load=-1"], ["load=-1.0", "> 0"]),
    (["load=nan"], ["load=nan"]),
    (["load=null"], ["load=null", "needs a load"]),
    (["rate=0"], ["rate=0", "> 0"]),
    (["num_requests=0"], ["num_requests=0", ">= 1"]),
    (["num_requests=1.5"], ["num_requests=1.5", ">= 1"]),
    (["seed=-1"], ["seed=-1", ">= 0"]),
    (["limits.max_num_seqs=many"], ["limits.max_num_seqs='many'", ">= 1"]),
    (["slo.ttft=-2"], ["slo.ttft=-2", "> 0"]),
    (["check=maybe"], ["check='maybe'"]),
    (["wandb=yes"], ["wandb=", "offline"]),
    (["name=a/b"], ["name='a/b'"]),
    (["name=prepared"], ["prepared"]),
    (["policy=sjf"], ["policy=sjf needs a prediction", "exclude="]),
    (["-m", "load=0.5,abc"], ["load='abc'"]),
    (["-m", "load=0.5,0.5"], ["comes twice", "load=0.5"]),
    (["-m", "load=1,1.0"], ["comes twice"]),
    (["-m", "polcy=sjf,fcfs"], ["Did you mean 'policy'"]),
    (["-m", "policy=fcfs,srtp"], ["policy/srtp", "Did you mean 'srpt'"]),
    (["-m", "policy=fcfs,sjf"], ["policy=sjf needs a prediction"]),
    (["-m", "seed=0,1", "exclude=[{polcy: fcfs}]"], ["'polcy'", "Did you mean 'policy'"]),
    (["-m", "seed=0,1", "exclude=[{policy: fcfs}]"], ["no cell"]),
    (["-m", "seed=0,1", "exclude=fcfs"], ["exclude='fcfs'"]),
    (["study=quickstar"], ["Did you mean 'quickstart'"]),
    (["-m", "seed=0,1", "study.size=smal"], ["study.size='smal'", "standard, small"]),
    (["study.size=small"], ["study.size=small", "num_requests"]),
    (["-m", "study.siz=small", "seed=0,1"], ["Did you mean 'study.size'"]),
    (["-m", "repeat=3"], ["repeats are seeds", "seed=0,1,2"]),
    (["-m", "seed=0,1", "table=wide"], ["table='wide'", "short, long"]),
    (["-m", "seed=0,1", "figures={wait_cdf: {}}"], ["'wait_cdf'", "wait_ccdf"]),
    (["-m", "seed=0,1", "figures={tails: 3}"], ["figures=", "wait_ccdf"]),
]  # fmt: skip


@pytest.mark.parametrize(("args", "words"), REFUSED, ids=[" ".join(args) for args, _ in REFUSED])
def test_x4_refused_at_the_door(args, words, run, tmp_path, made_up):
    code, text = run(*args)
    assert code != 0
    assert all(word in text for word in words), text
    assert "Traceback" not in text
    assert not made_up.calls and not folders(tmp_path)


def test_exclude_takes_single_values_lists_and_keys(run, tmp_path):
    pairs = "{policy: fcfs, predictor: [oracle, gbdt]}, {policy: [sjf], predictor: none}"
    rules = f"exclude=[{pairs}, {{seed: 1, policy: sjf}}]"
    code, text = run("-m", "policy=fcfs,sjf", "predictor=none,oracle", "seed=0,1", rules)
    assert code == 0, text
    found = [(r["fields"]["policy"], r["fields"]["predictor"], r["fields"]["seed"]) for r in manifest(tmp_path)]
    assert found == [("fcfs", "none", 0), ("fcfs", "none", 1), ("sjf", "oracle", 0)]


def test_exclude_unread_leaves_a_predictor_to_those_who_read_one(run, tmp_path):
    """vtc_predicted goes by what its clients got last and reads none, unless told to; a quantile reservation reads one."""
    policies = "policy=fcfs,las,srpt,vtc_predicted,deadline_srpt"
    code, text = run("-m", policies, "predictor=none,constant,oracle", "seed=0", "exclude=[unread]")
    assert code == 0, text
    found = [(r["fields"]["policy"], r["fields"]["predictor"]) for r in manifest(tmp_path)]
    readers = [(policy, predictor) for policy in ("srpt", "deadline_srpt") for predictor in ("constant", "oracle")]
    assert sorted(found) == sorted([(policy, "none") for policy in ("fcfs", "las", "vtc_predicted")] + readers)
    code, text = run("-m", "policy=fcfs", "admission=none,quantile", "predictor=none,oracle", "exclude=[unread]", "name=b")
    assert code == 0, text
    found = [(r["fields"].get("admission"), r["fields"]["predictor"]) for r in manifest(tmp_path, "b")]
    assert found == [("none", "none"), ("quantile", "oracle")]


def test_exclude_takes_unread_beside_combinations(run, tmp_path):
    rules = "exclude=[unread, {policy: srpt, seed: 1}]"
    code, text = run("-m", "policy=fcfs,srpt", "predictor=none,oracle", "seed=0,1", rules)
    assert code == 0, text
    found = [(r["fields"]["policy"], r["fields"]["predictor"], r["fields"]["seed"]) for r in manifest(tmp_path)]
    assert found == [("fcfs", "none", 0), ("fcfs", "none", 1), ("srpt", "oracle", 0)]
    code, text = run("-m", "seed=0,1", "exclude=[unred]")
    assert code != 0 and "unred" in text and "unread" in text


def test_code_edited_while_a_study_runs_does_not_lose_its_cells(run, tmp_path, monkeypatch):
    codes = iter(range(100))
    monkeypatch.setattr(cellhash, "code", lambda parts: f"edit {next(codes)}")
    assert run("-m", "seed=0,1")[0] == 0
    assert [row["status"] for row in manifest(tmp_path)] == ["ok", "ok"]


def test_a_small_study_has_fewer_requests_two_seeds_and_another_name():
    config, _ = compose("study.size=small")
    params = {"num_requests": "300,4000", "seed": "range(3,9)", "policy": "fcfs,srpt"}
    assert size.sized(config, params, ["policy=fcfs"]) == {
        "num_requests": "100,400", "seed": "3,4", "policy": "fcfs,srpt", "name": "adhoc-small"
    }  # fmt: skip
    assert config.name == "adhoc-small"
    config, _ = compose("study.size=small", "num_requests=70", "name=mine", "seed=0,1,2")
    assert size.sized(config, params, ["num_requests=70", "name=mine", "seed=0,1,2"]) == params  # what is said is left alone
    config, _ = compose("study.size=small", "num_requests=60")
    assert size.sized(config, {}, []) == {"num_requests": "60", "name": "adhoc-small"}  # never more than the study's
    config, _ = compose()
    assert size.sized(config, params, []) == params and config.name == "adhoc"


def test_a_small_study_may_have_fewer_of_its_own_values():
    config, _ = compose(
        "study.size=small", "study.small={load: '0.9', policy: 'fcfs,srpt', num_requests: 500}", "num_requests=900"
    )
    params = {"load": "0.7,0.9", "policy": "fcfs,sjf,srpt", "seed": "0,1,2"}
    assert size.sized(config, params, []) == {
        "load": "0.9", "policy": "fcfs,srpt", "num_requests": "500", "seed": "0,1", "name": "adhoc-small"
    }  # fmt: skip
    said = size.sized(config, params, ["policy=sjf", "load=0.7"])
    assert "load" in said and said["load"] == "0.7,0.9" and said["policy"] == "fcfs,sjf,srpt"  # what is said goes before
    config, _ = compose("study.small={load: '0.9'}")
    assert size.sized(config, params, []) == params


@pytest.mark.parametrize(
    ("small", "words"),
    [
        ("load: '0.9,1.2'", "study.small.load: 1.2 is none of the study's own: 0.7, 0.9"),
        ("policy: fcsf", "study.small.policy: fcsf"),
        ("limits: seqs64", "study.small.limits: seqs64"),
        ("num_requests: 5000", "study.small.num_requests: 5000"),
        ("num_requests: 0", "study.small.num_requests: 0"),
    ],
)
def test_a_small_study_shows_nothing_that_the_study_does_not(small, words):
    config, _ = compose("study.size=small", f"study.small={{{small}}}")
    with pytest.raises(ValueError, match=words):
        size.sized(config, {"load": "0.7,0.9", "policy": "fcfs,srpt"}, [])


def test_the_small_study_of_all_policies_has_at_most_300_cells():
    """Counted from what each policy reads, as composing them all takes a while: a predictor each for those who read one."""
    config, loader = compose("study=policies", "study.size=small")
    params = size.sized(config, config.hydra.sweeper.params, [])
    parsed = OverridesParser.create(config_loader=loader).parse_overrides([f"{key}={value}" for key, value in params.items()])
    values = {o.key_or_group: list(o.sweep_string_iterator()) if o.is_sweep_override() else [o.value()] for o in parsed}
    nodes = REFERENCE.parent / "conf/policy"
    assert set(values["policy"]) == {path.stem for path in nodes.glob("*.yaml")} - {"dfs_weight", "lpm"}
    reading = [bool(reads({"policy": as_node(nodes / f"{name}.yaml")})) for name in values["policy"]]
    assert set(values["predictor"]) == {"none", "default", "oracle"} and 0 < sum(reading) < len(reading)
    pairs = 2 * sum(reading) + reading.count(False)
    assert pairs * len(values["setting"]) * len(values["seed"]) <= 300 and values["load"] == [0.95]


def as_node(path):
    """The node in a file, what it would read of the rest of a config left at its defaults."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.load(path), resolve=True)


def test_study_size_is_said_beside_the_study(run, tmp_path, made_up):
    """`study` is a group and `study.size` a key: both on one line."""
    code, text = run("-m", "study=smoke", "study.size=small")
    assert code == 0, text
    assert [cfg["num_requests"] for cfg in made_up.calls] == [100] * 4
    assert len(folders(tmp_path, "smoke-small")) == 4 and not (tmp_path / "runs/smoke").exists()
    assert run("-m", "study=smoke", "num_requests=100", "name=other")[0] == 0
    a, b = ({row["hash"] for row in manifest(tmp_path, name)} for name in ("smoke-small", "other"))
    assert a == b  # a size makes no cell another


def test_a_launcher_whose_plug_in_is_absent_names_the_extra(run, tmp_path, monkeypatch):
    from hydra.core.config_store import ConfigStore

    from hydra_plugins import lengthwise_ray

    Plugins.instance()  # else a later scan would store them again
    for name in ("submitit_local.yaml", "submitit_slurm.yaml"):
        monkeypatch.delitem(ConfigStore.instance().repo["hydra"]["launcher"], name, raising=False)
    monkeypatch.setattr(lengthwise_ray, "find_spec", lambda name: None)
    study = tmp_path / "conf/study/own.yaml"
    study.parent.mkdir(parents=True)
    study.write_text("# @package _global_\ndefaults:\n  - override /hydra/launcher: submitit_slurm\nhydra: {mode: MULTIRUN}\n")
    for args, extra in (
        (["-m", "hydra/launcher=submitit_local", "seed=0,1"], "hpc"),
        (["--config-dir", str(tmp_path / "conf"), "study=own"], "hpc"),
        (["-m", "hydra/launcher=ray_local", "seed=0,1"], "cluster"),
    ):
        code, text = run(*args)
        assert code != 0 and f"pip install 'lengthwise[{extra}]'" in text and "Traceback" not in text, text
    assert not folders(tmp_path)


@pytest.mark.parametrize("name", ["submitit_slurm", "ray_local", "ray_cluster", "joblib"])
def test_launchers_are_composed_and_built(name):
    pytest.importorskip({"submitit_slurm": "submitit", "joblib": "joblib"}.get(name, "ray"))
    config, _ = compose(f"hydra/launcher={name}", "seed=0,1")
    built = Plugins.instance()._instantiate(config.hydra.launcher)
    assert callable(built.launch)
    if name == "ray_cluster":  # the plug-in sets a number where there is none, and Ray refuses it
        assert built.ray_cfg.init.setdefault("object_store_memory", 1) is None


def test_a_launcher_gets_some_jobs_at_a_time(run, tmp_path, made_up, monkeypatch):
    Plugins.instance()
    launcher = sys.modules["hydra._internal.core_plugins.basic_launcher"].BasicLauncher
    whole, parts = launcher.launch, []

    def counted(self, jobs, initial_job_idx):
        parts.append((initial_job_idx, len(jobs)))
        return whole(self, jobs, initial_job_idx)

    monkeypatch.setattr(launcher, "launch", counted)
    assert run("-m", "seed=0,1,2,3,4", "hydra.sweeper.at_once=2")[0] == 0
    assert parts == [(0, 2), (2, 2), (4, 1)] and [cfg["seed"] for cfg in made_up.calls] == [0, 1, 2, 3, 4]
    local = type("LocalLauncher", (), {})()
    assert launch._at_once(local) == os.cpu_count() and launch._at_once(object()) == launch.AT_ONCE


# --- failures ---------------------------------------------------------------------------------------------------------


def test_x_resume_a_failing_cell_stops_nothing_else(run, tmp_path, made_up):
    made_up.fail = {1: RuntimeError("planted")}
    code, text = run("-m", "seed=0,1,2")
    assert code != 0 and "1 of 3 cells failed" in text and "planted" in text and "seed1" in text
    assert len(folders(tmp_path)) == 2
    (kept,) = (tmp_path / "runs/adhoc").glob("*.failed.txt")
    assert "planted" in kept.read_text() and "Traceback" in kept.read_text()
    assert [row["status"] for row in made_up.reported[0]] == ["ok", "failed", "ok"]  # the failed one is shown, not dropped
    assert made_up.reported[0][1]["fields"]["seed"] == 1

    made_up.fail = {}
    assert run("-m", "seed=0,1,2")[0] == 0  # only the failed one runs
    assert [cfg["seed"] for cfg in made_up.calls] == [0, 1, 2, 1]
    assert not list((tmp_path / "runs/adhoc").glob("*.failed.txt"))


def test_a_single_cell_fails_in_one_line(run, tmp_path, made_up):
    made_up.fail = {0: RuntimeError("planted\nmore")}
    code, _ = run("seed=0")
    assert "RuntimeError: planted" in str(code) and len(str(code).splitlines()) == 1
    assert not folders(tmp_path)


def test_a_cell_that_finishes_nothing_is_an_error(run, tmp_path, made_up):
    made_up.finished = 0
    code, text = run("num_requests=7")
    assert code != 0 and "0 of 7 requests finished" in text
    assert not folders(tmp_path)


def test_x9_a_full_disk_names_path_and_free_space(run, tmp_path, made_up, monkeypatch):
    def full(self, folder):
        (Path(folder) / "requests.parquet").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(Path(folder) / "steps.parquet"))

    monkeypatch.setattr(Run, "save", full)
    code, text = run("seed=0")
    assert code != 0 and "steps.parquet" in text and "No space left" in text and "bytes free" in text
    code, text = run("-m", "seed=0,1")
    assert code != 0 and "2 of 2 cells failed" in text and "bytes free" in text
    assert not folders(tmp_path) and not list((tmp_path / "runs/adhoc").glob(".tmp-*"))


@pytest.mark.parametrize("kind", [ValueError, FileNotFoundError])
def test_a_sweep_that_cannot_be_prepared_runs_no_cell(kind, run, tmp_path, made_up, monkeypatch):
    def broken(cfg):
        raise kind("lengths are missing")

    monkeypatch.setattr(prepare, "measure_saturation", broken)
    code, text = run("-m", "seed=0,1")
    assert code != 0 and "prepare 1/1: saturation" in text and "lengths are missing" in text and "cannot write" not in text
    assert not made_up.calls


def test_x9_results_are_kept_when_drawing_fails(run, tmp_path, made_up, monkeypatch):
    def broken(*_):
        raise KeyError("colour")

    monkeypatch.setattr("lengthwise.experiments.report.finish", broken)
    code, text = run("-m", "seed=0,1")
    assert code != 0 and "cells are kept" in text and "colour" in text
    assert len(folders(tmp_path)) == 2
    monkeypatch.setattr("lengthwise.experiments.report.finish", lambda *_: None)
    assert run("-m", "seed=0,1")[0] == 0
    assert len(made_up.calls) == 2


def test_a_worker_that_vanishes_leaves_a_named_gap(run, tmp_path, made_up, monkeypatch):
    Plugins.instance()  # loads the launchers' modules anew
    launcher = sys.modules["hydra._internal.core_plugins.basic_launcher"].BasicLauncher
    whole = launcher.launch

    def killed(self, jobs, initial_job_idx):
        whole(self, jobs[:1], initial_job_idx)
        raise RuntimeError("a worker was killed\nmore")

    monkeypatch.setattr(launcher, "launch", killed)
    code, text = run("-m", "seed=0,1,2")
    assert code != 0 and "the launcher stopped: RuntimeError: a worker was killed\n" in text
    assert "2 of 3 cells failed" in text and "no result" in text
    assert [row["status"] for row in manifest(tmp_path)] == ["ok", "planned", "planned"]
    assert [row["status"] for row in made_up.reported[0]] == ["ok", "planned", "planned"]


def test_x_resume_an_interrupt_says_how_to_go_on(run, tmp_path, made_up):
    made_up.fail = {1: KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        run("-m", "seed=0,1,2")
    assert len(folders(tmp_path)) == 1 and not made_up.reported
    made_up.fail = {}
    assert run("-m", "seed=0,1,2")[0] == 0
    assert [cfg["seed"] for cfg in made_up.calls] == [0, 1, 1, 2]


# --- prepared inputs --------------------------------------------------------------------------------------------------


def test_saturation_is_measured_once_per_limits_hardware_and_lengths(run, tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(prepare, "measure_saturation", lambda cfg: measured.append(cfg) or {"rate": 10.0 + len(measured)})
    assert run("-m", "limits=default,seqs64", "load=0.5,0.8", "seed=0,1", "policy=fcfs,priority")[0] == 0
    assert [cfg["limits"]["max_num_seqs"] for cfg in measured] == [256, 64]
    assert run("limits=seqs64", "seed=5")[0] == 0
    assert len(measured) == 2
    assert not list((tmp_path / "runs/prepared").rglob("summary.json"))


def test_prepared_inputs_enter_the_hash(run, tmp_path, monkeypatch):
    run("seed=0")
    import shutil

    shutil.rmtree(tmp_path / "runs/prepared")
    monkeypatch.setattr(prepare, "measure_saturation", lambda cfg: {"rate": 11.0})
    run("seed=0")
    assert len(folders(tmp_path)) == 2


def test_predictions_survive_the_file(tmp_path, monkeypatch):
    import numpy as np

    from lengthwise.predictors.predictions import Predictions

    made = Predictions(np.array([1.0, 2.0]), np.array([3.0, 4.0])), np.array([0, 1]), {"latency": {"per_batch": 0.1}}
    calls = []
    monkeypatch.setattr(prepare, "is_prepared", lambda cfg: True)
    monkeypatch.setattr(prepare, "predictions_key", lambda cfg: {"predictor": "x"})
    monkeypatch.setattr(prepare, "make_predictions", lambda cfg: calls.append(1) or made)
    store = prepare.Prepared(tmp_path)
    for _ in range(2):
        got, fold, info = store.predictions({"rate": 1.0})
    assert got.score.tolist() == [1.0, 2.0] and got.point.tolist() == [3.0, 4.0] and got.survival is None
    assert fold.tolist() == [0, 1] and info == {"latency": {"per_batch": 0.1}} and len(calls) == 1
    monkeypatch.setattr(prepare, "is_prepared", lambda cfg: False)
    assert store.predictions({"rate": 1.0}) is None and store.hashes({"rate": 1.0}) == {}


# --- small parts ------------------------------------------------------------------------------------------------------


def test_manifest_skips_a_line_cut_off_and_keeps_the_last_row(tmp_path):
    for status in ("planned", "ok"):
        append(tmp_path, {"cell": "a", "hash": "1", "status": status})
    append(tmp_path, {"cell": "b", "hash": "2", "status": "planned"})
    with open(tmp_path / "cells.jsonl", "a") as file:
        file.write('{"cell": "c", "ha')
    assert [(row["cell"], row["status"]) for row in read_manifest(tmp_path)] == [("a", "ok"), ("b", "planned")]
    assert json.loads((tmp_path / "cells.jsonl").read_text().splitlines()[0])["status"] == "planned"


def test_a_job_finds_its_row_and_progress_counts_on(tmp_path, capsys):
    for i in range(3):
        append(tmp_path, {"cell": f"c{i}", "hash": str(i), "config": f"k{i}", "status": "planned"})
    watched = Progress(tmp_path)
    assert watched._count() == (3, 0, 0, 0)
    append(tmp_path, {"cell": "c1", "hash": "1", "config": "k1", "status": "failed"})
    append(tmp_path, {"cell": "c2", "hash": "2", "config": "k2", "status": "ok", "cached": True})
    with open(tmp_path / "cells.jsonl", "a") as file:
        file.write('{"cell": "c0", "hash"')
    assert watched._count() == (3, 2, 1, 1) and Progress(tmp_path, total=9)._count() == (9, 2, 1, 1)
    assert find_row(tmp_path, "k1")["status"] == "failed" and find_row(tmp_path, "k9") is None
    with open(tmp_path / "cells.jsonl", "a") as file:
        file.write(': "0", "config": "k0", "status": "ok"}\n')
    assert watched._count() == (3, 3, 1, 2)
    with Progress(tmp_path):
        pass
    assert "3/3 cells" in capsys.readouterr().err and not sys.stderr.isatty()
