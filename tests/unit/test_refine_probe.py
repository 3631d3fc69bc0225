"""The probe of hidden states: its filter by hand, what it learns, its file, and the way from an engine to a simulation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.testing import assert_allclose

import lengthwise
from lengthwise.engine.native.engine import NativeEngine
from lengthwise.engine.native.probing import decoder_layers
from lengthwise.engine.native.tiny import tiny
from lengthwise.experiments.native_stage import NativeStage
from lengthwise.experiments.probe_train import Readings, Recording, record, scored, table, train, write_traces
from lengthwise.experiments.simulate import compose
from lengthwise.predictors.artefact import data_hash
from lengthwise.predictors.near_duplicates import prompt_keys
from lengthwise.predictors.predictions import Predictions
from lengthwise.predictors.prompt_length import PromptLength
from lengthwise.predictors.prompts import Prompts
from lengthwise.predictors.refine_probe import Bins, Filter, Network, RefineProbe, load
from lengthwise.predictors.refine_replay import RefineReplay
from lengthwise.sched import Request

torch.set_num_threads(1)


# --- bins and filter ----------------------------------------------------------------------------------------------------


def test_tokens_to_come_fall_into_equal_bins_and_the_last_takes_the_rest():
    bins = Bins(4, 40.0)
    assert bins.of([0, 9, 10, 39, 40, 999]).tolist() == [0, 0, 1, 3, 3, 3] and bins.middles.tolist() == [5, 15, 25, 35]
    for bad in ((1, 10.0), (4, 0.0), (4, float("inf"))):
        with pytest.raises(ValueError, match="bins up to"):
            Bins(*bad)


def test_a_token_leaves_its_bin_by_one_in_its_width():
    once = Bins(3, 30.0).drift(1)
    assert_allclose(once, [[1.0, 0.0, 0.0], [0.1, 0.9, 0.0], [0.0, 0.1, 0.9]])
    assert_allclose(Bins(3, 30.0).drift(2)[2], [0.01, 0.18, 0.81])
    assert_allclose(Bins(3, 30.0).drift(0), np.eye(3))
    assert_allclose(Bins(10, 512.0).drift(8).sum(axis=1), 1.0)
    assert Bins(10, 512.0).drift(1)[5, 4] == pytest.approx(1 / 51.2)  # the released transition


def test_the_filter_against_a_calculation_by_hand():
    """Three bins of 10 tokens. Said at 4 tokens: (.2, .3, .5); at 6: (.5, .25, .25)."""
    belief = Filter(Bins(3, 30.0))
    assert_allclose(belief.update(7, 4, np.array([0.2, 0.3, 0.5])), [0.2, 0.3, 0.5])
    # moved on by two tokens: .2 + .3 x .19 + .5 x .01, .3 x .81 + .5 x .18, .5 x .81
    prior = np.array([0.262, 0.333, 0.405])
    both = prior * [0.5, 0.25, 0.25]
    assert_allclose(belief.update(7, 6, np.array([0.5, 0.25, 0.25])), both / both.sum())
    assert_allclose(belief.update(8, 6, np.array([0.0, 0.0, 1.0])), [0, 0, 1])  # another request begins anew
    assert_allclose(Filter(Bins(3, 30.0)).update(7, 6, np.array([1.0, 0.0, 0.0])), [1, 0, 0])


def test_what_contradicts_a_sure_belief_is_believed():
    belief = Filter(Bins(3, 30.0))
    belief.update(0, 1, np.array([1.0, 0.0, 0.0]))  # the lowest bin is kept for ever
    assert_allclose(belief.update(0, 2, np.array([0.0, 0.0, 1.0])), [0, 0, 1])


def test_a_filter_keeps_so_many_beliefs():
    belief = Filter(Bins(3, 30.0), most=2)
    for rid in (0, 1, 0, 2):  # when 2 comes, 1 is the one that was read longest ago
        belief.update(rid, 4 + rid, np.array([0.2, 0.3, 0.5]))
    assert_allclose(belief.update(1, 9, np.array([0.1, 0.1, 0.8])), [0.1, 0.1, 0.8])  # begins anew
    assert belief.update(2, 9, np.array([0.1, 0.1, 0.8]))[2] > 0.8  # goes on


# --- what it learns -----------------------------------------------------------------------------------------------------


def readings(num_answers=60, every=8, noise=0.25, seed=0) -> Readings:
    """Answers whose hidden states tell, with noise, how many hundred tokens are still to come."""
    rng = np.random.default_rng(seed)
    total = rng.integers(40, 400, num_answers)
    rows = [(i, g, t) for i, t in enumerate(total.tolist()) for g in range(every, t, every)]
    row, generated, whole = np.array(rows).T
    signal = (whole - generated)[:, None] / 400.0 + noise * rng.standard_normal((len(rows), 6))
    return Readings(row, row // 2, generated, whole, signal.astype(np.float16))


def test_a_probe_learns_what_states_tell_and_the_filter_takes_noise_away():
    found = train(readings(), layer=3, num_bins=8, width=16)
    score = {name: values["mae"] for name, values in found.scores.items()}
    assert score["probe_filtered"] < score["probe"] < score["constant"]
    assert found.scores["probe_filtered"]["kendall_tau"] > 0.5 and found.probe.layer == 3
    assert found.scores["probe_filtered"]["n"] == len(readings())
    assert sum(band["n"] for band in found.scores["probe"]["bands"]) == len(readings())
    again = train(readings(), layer=3, num_bins=8, width=16)
    assert np.array_equal(again.expected, found.expected) and np.array_equal(
        again.probe.network.first, found.probe.network.first
    )
    text = "\n".join(table(found.scores))
    assert "probe, filtered" in text and f"{score['constant']:.1f}" in text


def test_states_that_tell_nothing_are_no_better_than_a_constant():
    noise = readings()
    blind = Readings(noise.row, noise.group, noise.generated, noise.total, np.random.default_rng(1).permutation(noise.hidden))
    score = train(blind, layer=0, num_bins=4, width=8).scores
    assert score["probe"]["mae"] > 0.9 * score["constant"]["mae"]


@pytest.mark.parametrize("seen", [[0, 1, 2, 3], [1, 3], [2]])
def test_bins_without_a_row_are_all_but_impossible(seen):
    rng = np.random.default_rng(0)
    bins = np.array(seen)[rng.integers(len(seen), size=3000)]
    hidden = np.hstack([np.eye(4)[bins] + 0.05 * rng.standard_normal((3000, 4)), np.ones((3000, 1))])
    chances = Network.fit(hidden, bins, 4, 16, 0).chances(hidden)
    assert_allclose(chances.sum(axis=1), 1.0)
    assert np.mean(chances.argmax(axis=1) == bins) > 0.95
    assert chances[:, [i for i in range(4) if i not in seen]].max(initial=0.0) < 1e-3


def test_scores_by_generated_tokens():
    at, whole = np.array([1, 64, 65, 600]), np.array([10, 100, 90, 700])
    made = Readings(np.arange(4), np.arange(4), at, whole, np.zeros((4, 1)))
    score = scored(made, np.array([20.0, 100.0, 80.0, 700.0]))
    assert score["mae"] == 5.0 and [(b["from"], b["n"], b["mae"]) for b in score["bands"]] == [
        (1, 2, 5),
        (65, 1, 10),
        (513, 1, 0),
    ]


# --- its files ----------------------------------------------------------------------------------------------------------


def made(bins=4) -> RefineProbe:
    rng = np.random.default_rng(0)
    network = Network(np.zeros(5), np.ones(5), *(rng.standard_normal(s) for s in ((5, 3), (3,), (3, bins), (bins,))))
    about = {"workload": "asked", "unit": "m tokens"}
    return RefineProbe(network, Bins(bins, 80.0), -2, 4, about, np.unique(prompt_keys(["Seen before, all of it"])))


def test_a_probe_comes_back_as_it_was_saved(tmp_path: Path):
    made().save(tmp_path / "probe")
    back = load(str(tmp_path / "probe"))
    x = np.random.default_rng(1).standard_normal((7, 5))
    assert np.array_equal(back.network.chances(x), made().network.chances(x))
    assert (back.bins, back.layer, back.every, back.about) == (Bins(4, 80.0), -2, 4, made().about)
    assert np.array_equal(back.seen, made().seen) and back.seen.size == 1
    assert load(str(tmp_path / "probe"), every=16).every == 16 and not back.reads_truth
    assert b"pickle" not in (tmp_path / "probe/probe.npz").read_bytes()


def test_what_is_no_probe_is_refused(tmp_path: Path):
    for path, words in ((None, "names no probe"), (str(tmp_path), "holds no probe.json")):
        with pytest.raises(ValueError, match=words):
            load(path)
    made().save(tmp_path)
    with pytest.raises(ValueError, match="every=0"):
        load(str(tmp_path), every=0)
    page = json.loads((tmp_path / "probe.json").read_text())
    (tmp_path / "probe.json").write_text(json.dumps({**page, "format": 9}))
    with pytest.raises(ValueError, match="format 9, this version reads 1"):
        load(str(tmp_path))


def test_a_reading_is_what_the_filter_expects_and_nothing_where_nothing_was_read():
    probe, requests = made(), [Request(i, 0.0, 4) for i in range(3)]
    refiner = probe.refiner([0, 1, 2], [9, 9, 9], 0)
    state = np.random.default_rng(2).standard_normal((2, 5)).astype(np.float32)
    first = refiner.refine(requests, [4, 8, 4], {requests[0]: state[0], requests[2]: state[1]})
    assert first[1] is None
    chances = probe.network.chances(state)
    assert [row.mean() for row in (first[0], first[2])] == pytest.approx((4 + chances @ probe.bins.middles).tolist())
    assert refiner.refine(requests[:1], [8], {}) == [None]
    with pytest.raises(ValueError, match="reads hidden states, and this executor gives none"):
        refiner.refine(requests, [4, 8, 4], None)


def test_a_probe_is_not_read_on_prompts_that_it_has_learned_from_nor_in_another_count():
    fresh, lens = ["A question of another kind"], np.array([5])
    assert made().check("asked", "m tokens", Prompts(lens, fresh), lens) is None
    with pytest.raises(ValueError, match="has learned from 1 of the 1 prompts of asked"):
        made().check("asked", "m tokens", Prompts(lens, ["Seen before, all of it"]), lens)
    with pytest.raises(ValueError, match="counts lengths as 'm tokens', the workload as 'words'"):
        made().check("asked", "words", Prompts(lens, fresh), lens)
    assert "may have learned" in str(made().check("asked", "words", Prompts(lens), lens))
    assert made().check("another", "words", Prompts(lens), lens) is None


def test_a_replay_is_of_the_rows_that_were_recorded(tmp_path: Path):
    data = Readings(np.array([0]), np.zeros(1, int), np.array([8]), np.array([9]), np.zeros((1, 1)))
    prompts, lens = Prompts(np.array([5.0])), np.array([9])
    write_traces(data, np.array([9.0]), tmp_path / "t.parquet", data_hash(prompts, lens))
    replay = RefineReplay(str(tmp_path / "t.parquet"))
    replay.check("w", "tokens", prompts, lens)
    with pytest.raises(ValueError, match="of other rows than those of w"):
        replay.check("w", "tokens", prompts, lens + 1)


def test_lengths_do_not_refine_an_order():
    with pytest.raises(ValueError, match="says lengths, and predictor order only an order"):
        lengthwise.simulate("ltr", Order(), "synthetic", refine="oracle", num_requests=100)


class Order(PromptLength):
    """Ranks alone."""

    name = "order"

    def predict_columns(self, prompts):
        return Predictions(super().predict_columns(prompts).score)


def test_a_replay_tells_the_last_reading_before(tmp_path: Path):
    data = Readings(np.array([5, 2, 5]), np.zeros(3, int), np.array([16, 8, 8]), np.array([40, 9, 40]), np.zeros((3, 1)))
    write_traces(data, np.array([35.0, 9.0, 50.0]), tmp_path / "traces.parquet")
    refiner = RefineReplay(str(tmp_path / "traces.parquet"), every=4).refiner([2, 5], [9, 40], 0)
    requests = [Request(i, 0.0, 4) for i in range(2)]
    assert refiner.refine(requests, [7, 7], None) == [None, None]
    assert [row.mean() for row in refiner.refine(requests, [8, 8])] == [9.0, 50.0]
    assert [row.mean() for row in refiner.refine(requests, [8, 39])] == [9.0, 40.0]  # one more at least
    with pytest.raises(ValueError, match="no trace of row 3 and 0 others"):
        RefineReplay(str(tmp_path / "traces.parquet")).refiner([2, 3], [9, 9], 0)


def test_what_is_no_trace_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="names no traces"):
        RefineReplay(None)
    with pytest.raises(ValueError, match="every=0"):
        RefineReplay("x", every=0)
    with pytest.raises(ValueError, match="there are no traces"):
        RefineReplay(str(tmp_path / "none.parquet")).refiner([0], [1], 0)
    pq.write_table(pa.table({"row": [1]}), tmp_path / "odd.parquet")
    with pytest.raises(ValueError, match="no columns row, generated, expected"):
        RefineReplay(str(tmp_path / "odd.parquet")).refiner([0], [1], 0)


# --- from an engine to a simulation -------------------------------------------------------------------------------------


def test_recorded_on_an_engine_read_on_it_and_replayed_in_simulation(tmp_path: Path):
    stage = NativeStage(tiny(max_positions=8192), times="told")
    common = {
        "workload": "synthetic_short",
        "limits": "cpu32",
        "num_requests": 40,
        "rate": 200.0,
        "hardware": "llama31_8b_h100",
    }
    asked = compose(executor=stage, window={"warm_up": 0.0}, **common)
    data, run = record(asked, every=4, layer=1)
    answers = run.requests.set_index("row")["output_len"]
    assert set(data.row.tolist()) <= set(answers.index) and (data.total == answers.loc[data.row].to_numpy()).all()
    assert (data.generated >= 2).all() and (data.remaining >= 1).all() and data.hidden.shape[1] == 64
    assert (run.requests["output_len"] == run.workload.output_len).all()  # looking changes nothing
    plain = lengthwise.simulate(executor=stage, window={"warm_up": 0.0}, **common)
    assert plain.requests["finish"].max() == pytest.approx(run.requests["finish"].max(), rel=0.2)

    found = train(data, layer=1, every=4, num_bins=4, width=8)
    found.probe.save(tmp_path / "probe")
    write_traces(data, found.expected, tmp_path / "traces.parquet")
    on_engine = lengthwise.simulate("srpt", "constant", executor=stage, refine=load(str(tmp_path / "probe")), **common)
    replay = RefineReplay(str(tmp_path / "traces.parquet"), every=4)
    with pytest.raises(ValueError, match="no trace of row"):
        lengthwise.simulate("srpt", "constant", refine=replay, seed=1, **common)
    simulated = lengthwise.simulate("srpt", "constant", refine=replay, **{**common, "workload": run.workload.dataset})
    for one in (on_engine, simulated):
        assert (one.requests["status"] == "finished").all()
        assert not any("true lengths" in mark for mark in one.summary["provenance"]["marks"])
    with pytest.raises(ValueError, match="this executor gives none"):
        lengthwise.simulate("srpt", "constant", refine=load(str(tmp_path / "probe")), **common)


def test_a_model_that_is_to_be_compiled_cannot_be_looked_at_and_one_layer_is_at_a_time():
    engine = NativeEngine(tiny(), attention="torch", compiled=True)
    with pytest.raises(ValueError, match="is to be compiled"):
        engine.look_at(0)
    engine = NativeEngine(tiny(), attention="torch")
    first = engine.look_at(0)
    assert first is not None and engine.look_at(1) is not first and engine.look_at(None) is None
    assert not any(layer._forward_hooks for layer in decoder_layers(engine.model))


def test_answers_too_short_to_be_read_are_said_to_be():
    stage = NativeStage(tiny(max_positions=8192), times="told")
    asked = compose(
        executor=stage, workload="synthetic_short", limits="cpu32", num_requests=10, rate=200.0, hardware="llama31_8b_h100"
    )
    with pytest.raises(ValueError, match="20 answers are needed"):
        record(asked, every=4, layer=0)
    assert Recording(4, 0).refine([Request(0, 0.0, 1)], [4], None) == [None]
