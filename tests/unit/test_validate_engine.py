"""X12: the simulation's error against an engine, per metric and load, with its sign; what is not its profile is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf

import lengthwise
from lengthwise.engine.native.tiny import tiny
from lengthwise.engine.simulated.affine import Affine
from lengthwise.engine.simulated.cost import HostOverhead
from lengthwise.engine.simulated.hardware import Hardware
from lengthwise.engine.simulated.table import Table
from lengthwise.experiments import native_stage
from lengthwise.experiments.native_stage import NativeStage, facts
from lengthwise.experiments.simulate import compose
from lengthwise.experiments.simulated_stage import SimulatedStage
from lengthwise.experiments.validate_app import checked, write
from lengthwise.experiments.validate_engine import Pair, at_one_load, compare, lines, rows, step_error

CELL = {"workload": "synthetic_short", "limits": "cpu32", "num_requests": 40, "rate": 2.0}
COST = Affine(0.01, 1e-4, 1e-7, 3e-5, 1e-9, HostOverhead(1e-3, 1e-5))
TABLE = Table(
    tokens=[1, 64, 512], linear=[0.01, 0.012, 0.05], rows=[1, 32], contexts=[1, 1024],
    attention=[[1e-5, 1e-4], [2e-4, 6e-3]], per_attention=1e-8, chunk=1e-4, chunk_token=1e-6, host=HostOverhead(1e-3, 1e-5),
)  # fmt: skip


def hardware(cost, **provenance) -> Hardware:
    return Hardware("made", "made", 1e9, 0.0, 0.0, 1000.0, cost, provenance)


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return tiny(max_positions=8192)


def profile_of(stage: NativeStage, cost=COST) -> Hardware:
    return hardware(cost, profile=facts(stage.loaded()))


# --- errors -----------------------------------------------------------------------------------------------------------


def test_errors_have_the_sign_of_the_simulation_and_none_where_nothing_differs():
    engine = lengthwise.simulate(hardware=hardware(COST), **CELL)
    same = at_one_load([Pair(0, engine, engine)], COST)
    assert all(entry["error"] in (0.0, None) for entry in same["metrics"].values())
    slower = replace(hardware(Affine(0.011, 1.1e-4, 1.1e-7, 3.3e-5, 1.1e-9, HostOverhead(1.1e-3, 1.1e-5))))
    found = at_one_load([Pair(0, engine, lengthwise.simulate(hardware=slower, **CELL))], slower.cost)
    assert found["metrics"]["tpot_mean"]["error"] == pytest.approx(0.1, abs=0.03)
    assert found["metrics"]["ttft_mean"]["error"] > 0 and found["metrics"]["e2e_p50"]["error"] > 0
    assert found["metrics"]["output_tokens_per_s"]["error"] < 0
    assert found["step_error"] == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize("cost", [COST, TABLE], ids=["affine", "table"])
@pytest.mark.parametrize("fast_forward", [True, False])
def test_steps_priced_as_they_were_simulated_are_off_by_nothing(cost, fast_forward):
    run = lengthwise.simulate(hardware=hardware(cost), executor=SimulatedStage(fast_forward), **CELL)
    assert abs(step_error([run.steps], cost)) < 1e-6
    assert step_error([run.steps.iloc[:0]], cost) is None


def test_requests_of_all_seeds_are_judged_together():
    runs = [lengthwise.simulate(hardware=hardware(COST), **{**CELL, "seed": seed}) for seed in range(3)]
    found = at_one_load([Pair(seed, run, run) for seed, run in enumerate(runs)], COST)
    pooled = pd.concat([run.requests for run in runs])
    assert found["metrics"]["e2e_mean"]["engine"] == pytest.approx((pooled["finish"] - pooled["arrival"]).mean())
    assert found["metrics"]["e2e_p99"]["engine"] is not None  # 120 requests; of one seed alone there are too few
    assert found["metrics"]["e2e_p99"]["by_seed"] == [None] * 3 and found["metrics"]["e2e_mean"]["by_seed"] == [0.0] * 3
    assert found["num_finished"] == len(pooled)


# --- the door ---------------------------------------------------------------------------------------------------------


def test_a_missing_profile_is_refused_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(native_stage, "_loaded", None)  # no model is loaded for it
    cfg = {
        **compose(executor="native", model="tiny", rate=1.0), "rate": None, "load": None, "loads": [0.5], "seeds": [0],
        "hardware": {"_target_": "lengthwise.experiments.nodes.read_hardware", "path": str(tmp_path / "none.yaml")},
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"no profile .*none\.yaml: `lengthwise profile"):
        checked(cfg)
    for bad, says in (({"loads": []}, "loads="), ({"seeds": [-1]}, "seeds="), ({"rate": 1.0}, "give loads=")):
        with pytest.raises(ValueError, match=says):
            checked({**cfg, **bad})


def test_the_profile_of_another_engine_is_refused(model):
    stage = NativeStage(model)
    said: list[str] = []
    cfg = compose(executor=stage, **{**CELL, "hardware": "unit"})
    with pytest.raises(ValueError, match="unit is no profile of an engine"):
        compare(cfg, [0.5], [0], said.append)
    other = hardware(COST, profile={**facts(stage.loaded()), "dtype": "bfloat16"})
    with pytest.raises(ValueError, match="dtype 'bfloat16', here 'float32'"):
        compare({**cfg, "hardware": other}, [0.5], [0], said.append)
    assert not said
    with pytest.raises(ValueError, match="no real engine"):
        compare(compose(**CELL), [0.5], [0], said.append)


# --- a comparison -------------------------------------------------------------------------------------------------------


def test_an_engine_told_its_profile_is_simulated_without_error(model, tmp_path):
    """Whatever is off in a comparison comes from the times: with the same, nothing is."""
    stage = NativeStage(model, times="told")
    cfg = compose(executor=stage, **{**CELL, "hardware": profile_of(stage)})
    said: list[str] = []
    answer = compare(cfg, [0.5, 0.9], [0, 1], said.append)
    assert [at["load"] for at in answer["loads"]] == [0.5, 0.9] and len(said) == 5
    for at in answer["loads"]:
        assert at["rate"] == pytest.approx(at["load"] * answer["saturation_rate"]) and at["num_finished"] == 80
        assert all(entry["error"] in (0.0, None) for entry in at["metrics"].values())
        assert abs(at["step_error"]) < 1e-6 and at["marks"] == []
    table = rows(answer)
    assert set(table["metric"]) == {f"{a}_{b}" for a in ("ttft", "tpot", "e2e") for b in ("mean", "p50", "p99")} | {
        "requests_per_s", "output_tokens_per_s",
    }  # fmt: skip
    folder = write(tmp_path / "answer", answer)
    assert json.loads((folder / "validation.json").read_text())["num_requests"] == 40
    assert len(pd.read_csv(folder / "validation.csv")) == 22
    printed = lines(answer)
    assert "load 0.9" in printed[0] and any(line.startswith("single steps") and "0.0%" in line for line in printed)


def test_steps_outside_the_fitted_range_are_marked(model):
    stage = NativeStage(model, times="told")
    narrow = Affine(0.01, 1e-4, 1e-7, 3e-5, fitted_range={"rows": 1, "context": 100, "prefill_tokens": 50})
    cfg = compose(executor=stage, **{**CELL, "num_requests": 10, "hardware": profile_of(stage, narrow)})
    answer = compare(cfg, [0.9], [0], lambda text: None)
    (mark,) = answer["loads"][0]["marks"]
    assert "outside the fitted range" in mark and any(mark in line for line in lines(answer))


def test_a_measured_comparison_gives_every_error_its_sign(model):
    """A profile that prices everything at ten times what it takes: the simulation is slower, in every latency."""
    stage = NativeStage(model)
    slow = profile_of(stage, Affine(0.05, 0.0, 0.0, 1e-3))
    cfg = compose(executor=stage, **{**CELL, "num_requests": 12, "hardware": slow})
    at = compare({**cfg, "limits": {**cfg["limits"], "max_num_seqs": 2}}, [0.5], [0], lambda text: None)["loads"][0]
    assert at["num_finished"] == 12 and at["step_error"] > 0
    assert at["metrics"]["tpot_mean"]["error"] > 0 and at["metrics"]["e2e_mean"]["error"] > 0


def test_the_node_of_the_command_composes():
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    with initialize_config_module("lengthwise.conf", version_base="1.3"):
        composed = GlobalHydra.instance().hydra.compose_config("validate", ["model=tiny"], run_mode=RunMode.RUN)
    assert OmegaConf.is_missing(composed.hardware, "path")  # then it is where `lengthwise profile` puts it
    assert composed.executor.model.family == "llama" and composed.loads == [0.5, 0.8, 0.95]
