"""Stages: what a cell on the real engine shares with a simulated one, and what it refuses, serves and says."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

import lengthwise
from lengthwise.engine.native.tiny import tiny
from lengthwise.experiments import native_stage
from lengthwise.experiments.cellhash import identity
from lengthwise.experiments.composer import plain
from lengthwise.experiments.dataset import Dataset
from lengthwise.experiments.native_stage import NativeStage
from lengthwise.experiments.nodes import load_dataset
from lengthwise.experiments.served import Encoded, named_pieces, servable
from lengthwise.experiments.simulate import compose
from lengthwise.experiments.validate import validate_numbers
from lengthwise.sched.kv import Prefix

SMALL = {"workload": "synthetic_short", "limits": "cpu32", "num_requests": 25}


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return tiny(max_positions=8192)


def rows(prompts=None, **fields) -> Dataset:
    n = 6
    return Dataset(
        "six", np.arange(20, 20 + n), np.arange(3, 3 + n), "other tokens", "made here", "none",
        prompts=prompts, max_new_tokens=50, **fields,
    )  # fmt: skip


class Words:
    """A model whose tokens are words: enough of a ServedModel to be asked texts."""

    name, vocab_size = "words", 1000
    tokenizer = SimpleNamespace(chat_template=None)

    def encode_chat(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]


# --- rows -------------------------------------------------------------------------------------------------------------


def test_texts_are_encoded_and_counted_anew_and_the_answers_keep_their_unit():
    texts = ["a bb ccc", "a", "a bb", "x y z w", "dddd", "e e"]
    data = servable(rows(texts), Words())
    assert data.prompt_len.tolist() == [3, 1, 2, 4, 1, 2]
    assert [list(ids) for ids in data.prompt_ids] == [[1, 2, 3], [1], [1, 2], [1, 1, 1, 1], [4], [1, 1]]
    assert data.output_len.tolist() == rows().output_len.tolist()
    assert data.unit == "words tokens" and data.notes["served"]["output_unit"] == "other tokens"
    assert "other tokens" in data.notes["served"]["mark"]
    with pytest.raises(ValueError, match="row 2 is no token of words"):
        servable(rows(["a", "b", "  ", "c", "d", "e"]), Words())


def test_without_text_ids_are_made_up_and_alike_where_pieces_are(model):
    names = [[7, 8, 9], [7, 8, 1], [], [2], [7], [5, 8, 9]]
    data = servable(rows(block_hashes=names, hash_tokens=8), model)
    assert data.unit == "other tokens" and data.prompt_len.tolist() == rows().prompt_len.tolist()
    ids = [list(data.prompt_ids[row]) for row in range(6)]
    assert [len(x) for x in ids] == data.prompt_len.tolist()
    assert all(0 <= i < model.vocab_size for x in ids for i in x)
    assert ids[0][:16] == ids[1][:16] and ids[0][:8] == ids[4][:8]
    assert ids[0][16:20] != ids[1][16:20] and ids[2][:8] != ids[3][:8]
    again = servable(rows(block_hashes=names, hash_tokens=8), model)
    assert [list(x) for x in again.prompt_ids] == ids
    assert list(servable(rows(), model, seed=1).prompt_ids[0]) != list(servable(rows(), model).prompt_ids[0])


def test_a_model_without_tokenizer_serves_texts_by_their_length_and_says_so(model):
    data = servable(rows(["hello"] * 6), model)
    assert data.prompt_len.tolist() == rows().prompt_len.tolist() and "no tokenizer" in data.notes["served"]["prompt_ids"]


def test_pieces_of_encoded_texts_are_named_for_a_prefix_cache_only():
    texts = ["a bb ccc d e", "a bb ccc x y", "z bb ccc d e ff", "a", "b b", "c c c"]
    data = servable(rows(texts), Words())
    assert isinstance(data.prompt_ids, Encoded)
    named = named_pieces(data, 2)
    first, second, third = (list(named.block_hashes[row]) for row in range(3))
    assert first[:1] == second[:1] and len(first) == 2 and len(third) == 3 and len(named.block_hashes[3]) == 0
    assert servable(rows(texts), Words()).block_hashes is None
    assert named_pieces(rows(block_hashes=[[1]] * 6, hash_tokens=16), 2).block_hashes[0] == [1]


# --- the door ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"load": 0.8}, "load=0.8 on a real engine is a share of a rate that nobody has measured"),
        ({"load": 0.8, "hardware": "unit"}, "give rate="),
        ({"rate": 1.0, "stage": {"lengths": "long"}}, "lengths='long': choose forced or free"),
        ({"rate": 1.0, "stage": {"times": "guessed"}}, "times='guessed'"),
        ({"rate": 1.0, "stage": {"times": "told"}}, "give the hardware"),
        ({"rate": 1.0, "stage": {"lengths": "free"}, "predictor": "oracle"}, "no oracle can know"),
    ],
)
def test_what_cannot_be_run_is_refused_before_a_model_is_loaded(options, says, monkeypatch):
    monkeypatch.setattr(native_stage, "_loaded", None)
    options = dict(options)
    stage = NativeStage("never loaded", **options.pop("stage", {}))
    with pytest.raises(ValueError, match=says):
        lengthwise.simulate(executor=stage, **{**SMALL, **options})


def test_a_simulation_needs_hardware():
    cfg = compose(rate=1.0)
    cfg["hardware"] = None
    validate_numbers(cfg)
    from lengthwise.experiments.cell import run_cell

    with pytest.raises(ValueError, match="hardware=null"):
        run_cell(cfg, None)


# --- one cell on both ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cell",
    [
        {"policy": "fcfs", "rate": 40.0},
        {"policy": "srpt", "predictor": "noisy_oracle", "rate": 400.0, "kv_pool_tokens": 2500, "preemption": "recompute"},
        {"policy": "srpt", "predictor": "oracle", "rate": 400.0, "kv_pool_tokens": 2500, "preemption": "swap"},
        {"policy": "fcfs", "batching": "static", "kv": "contiguous", "rate": 40.0, "max_num_seqs": 8},
        {"policy": "fcfs", "arrivals": "closed_loop"},
    ],
    ids=["chunked", "recompute", "swap", "static", "closed loop"],
)
def test_told_the_same_step_times_a_cell_is_the_simulated_one_bit_for_bit(cell, model):
    common = {**SMALL, "hardware": "llama31_8b_h100", "check": True, "kv_pool_tokens": 40_000, **cell}
    simulated = lengthwise.simulate(**common)
    native = lengthwise.simulate(executor=NativeStage(model, times="told"), **common)
    pd.testing.assert_frame_equal(simulated.requests, native.requests, check_exact=True)
    assert native.steps["num_steps"].sum() == simulated.steps["num_steps"].sum() == len(native.steps)
    for name, value in simulated.metrics.items():
        if value is not None and name != "swapped_bytes":  # KV of another model
            # steps are counted in runs there and one by one here, which tells in their means only
            close = 0.1 if name.startswith("itl") or name == "kv_use_mean" else 1e-9
            assert native.metrics[name] == pytest.approx(value, rel=close), name
    if "kv_pool_tokens" in cell:
        assert simulated.metrics["preemptions"] > 0


def test_prefix_hits_are_the_same_on_both(model):
    common = {
        **SMALL, "workload": "agents", "kv": "prefix", "arrivals": "sessions", "rate": 3.0, "hardware": "llama31_8b_h100",
        "max_model_len": 8192, "num_requests": 12, "kv_pool_tokens": 60_000,
    }  # fmt: skip
    simulated = lengthwise.simulate(**common)
    native = lengthwise.simulate(executor=NativeStage(model, times="told"), **common)
    assert simulated.metrics["prefix_hit_tokens"] > 0
    pd.testing.assert_frame_equal(simulated.requests, native.requests, check_exact=True)


def test_a_measured_cell_replays_arrivals_in_real_time_and_says_what_it_is(model, monkeypatch):
    begun = []
    real = NativeStage.begin

    def begin(self, *args):
        begun.append(real(self, *args))
        return begun[-1]

    monkeypatch.setattr(NativeStage, "begin", begin)
    run = lengthwise.simulate(executor=NativeStage(model), rate=40.0, **SMALL)
    requests, truth = run.requests, run.workload.output_len
    assert (requests["status"] == "finished").all() and (requests["output_len"] == truth).all()
    assert (requests["first_scheduled"] >= requests["arrival"]).all() and (requests["arrival"] == run.workload.arrival).all()
    assert requests["finish"].max() >= run.workload.arrival[-1]  # nobody was let in before its time
    assert (run.steps["end"] > run.steps["start"]).all() and (run.steps["start"].to_numpy()[1:] >= run.steps["end"][:-1]).all()
    assert run.metrics["slowdown_mean"] is None and run.metrics["ttft_mean"] > 0
    cell, provenance = run.summary["cell"], run.summary["provenance"]
    assert (cell["executor"], cell["model"], cell["hardware"]) == ("native", "tiny-llama", "none")
    assert provenance["engine"]["dtype"] == "float32" and provenance["engine"]["threads"] == torch.get_num_threads()
    assert any("timed on a machine" in mark for mark in provenance["marks"])
    assert any("slowdown is absent" in mark for mark in provenance["marks"])
    assert run.summary["volatile"]["host_seconds"] > 0 < run.summary["volatile"]["overhead_us_per_step"]
    assert not begun[0].executor.generations  # what has ended is not kept


def test_free_answers_end_where_the_model_ends_them():
    ending = tiny(eos_token_id=5, max_positions=8192)
    free = NativeStage(ending, times="told", lengths="free", sampling={"temperature": 5.0})
    common = {**SMALL, "hardware": "llama31_8b_h100", "rate": 40.0}
    run = lengthwise.simulate(executor=free, **common)
    assert (run.requests["status"] == "finished").all()
    assert set(run.requests["reason"]) <= {"stop", "length"} and "stop" in set(run.requests["reason"])
    assert (run.requests["output_len"] != run.workload.output_len).any()
    assert free.names({"choices": {"executor": "native_free"}})["executor"] == "native_free"
    again = lengthwise.simulate(executor=free, **common)
    assert (again.requests["output_len"] == run.requests["output_len"]).all()


def test_the_pool_is_no_larger_than_requests_can_fill(model):
    stage = NativeStage(model)
    cfg = compose(executor=stage, rate=1.0, limits="cpu32")
    assert stage.pool_tokens(cfg) == 32 * 4096
    assert stage.pool_tokens({**cfg, "limits": {**cfg["limits"], "kv_pool_tokens": 512}}) == 512
    assert stage.max_model_len({**cfg, "limits": {**cfg["limits"], "max_model_len": 10**6}}) == 8192


def test_predictions_see_the_prompts_as_they_are_served(model):
    data = rows(["hello"] * 6)
    cfg = compose(executor=NativeStage(Words()), rate=1.0)
    cfg["workload"] = data

    class Engine:
        model = Words()

    native_stage._LAST[:] = [((id(cfg["executor"].model), _options(cfg["executor"])), Engine())]
    try:
        served = load_dataset(cfg)
        assert served.prompt_len.tolist() == [1] * 6 and load_dataset(cfg) is served
    finally:
        native_stage._LAST.clear()
    assert load_dataset({**cfg, "executor": compose(rate=1.0)["executor"]}) is data


def _options(stage):
    return {
        "attention": stage.attention, "kv_dtype": stage.kv_dtype, "threads": stage.threads, "memory_share": stage.memory_share,
        "linears": stage.linears, "compiled": stage.compiled,
    }  # fmt: skip


def test_names_of_pieces_reach_the_cache():
    data = servable(rows(["a b c d", "a b c e", "a b", "c", "d", "e"]), Words())
    stage = NativeStage(Words())
    assert stage.named(data, Prefix(64, 2)).hash_tokens == 2
    from lengthwise.sched.kv import Paged

    assert stage.named(data, Paged(64, 2)) is data


# --- what a cell is -----------------------------------------------------------------------------------------------------


def config(*overrides):
    with initialize_config_module("lengthwise.conf", version_base="1.3"):
        composed = GlobalHydra.instance().hydra.compose_config("run", list(overrides), run_mode=RunMode.RUN)
        choices = dict(composed.hydra.runtime.choices)
        return plain(composed, choices)


def test_the_model_is_part_of_a_native_cell_and_of_no_simulated_one():
    simulated = [identity(config(f"model={name}")) for name in ("tiny", "smollm2")]
    assert simulated[0] == simulated[1] and "model" not in simulated[0]["config"]["choices"]
    models = (["model=tiny"], ["model=smollm2"], ["model=tiny", "model.seed=1"])
    native = [config("executor=native", "rate=1", *model) for model in models]
    assert len({str(identity(cfg)) for cfg in native}) == 3
    assert native[0]["choices"]["model"] == "tiny" and native[0]["executor"]["model"]["family"] == "llama"
    assert native[0].get("hardware") is None and "model" not in native[0]
