"""Profiles: the states that are timed, what the fit makes of known times, and the node that is written."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lengthwise.engine.native.tiny import tiny
from lengthwise.engine.simulated.affine import Affine
from lengthwise.engine.simulated.cost import CostModel, HostOverhead
from lengthwise.engine.simulated.hardware import Hardware
from lengthwise.engine.simulated.kernels import Batch
from lengthwise.engine.simulated.steps import Draw, price
from lengthwise.engine.simulated.table import Table
from lengthwise.experiments import profile, profile_fit
from lengthwise.experiments.native_stage import NativeStage, facts, step_seconds, why_another
from lengthwise.experiments.nodes import read_hardware
from lengthwise.experiments.profile import Bench, Timed, corners, pool_need, row_contexts, time_steps
from lengthwise.experiments.profile_app import profile as profile_model
from lengthwise.experiments.profile_app import write_profile
from lengthwise.sched import Finished, Outcome, Scheduler

DRAW = Draw(60, 0, rows=16, context=16 * 256, context_per_row=512, prefill_tokens=256, chunks=3)
AFFINE = {"base": 2e-3, "per_row": 3e-5, "per_context": 4e-7, "per_prefill": 5e-5, "per_attention": 6e-8}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


class Ticking:
    """A clock that only the executor moves: the module `time` of what is under test."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Told:
    """An engine whose steps take what `cost` says, and 0.3 of the host's time before, 0.7 after the forward."""

    def __init__(self, cost: CostModel, host: HostOverhead, time: Ticking) -> None:
        self.cost, self.host, self.time = cost, host, time
        self.model = SimpleNamespace(max_positions=4096, vocab_size=64, name="told")
        self.host_seconds, self.left, self.plans = 0.0, {}, []

    def pool_tokens(self) -> int:
        return 10**6

    def executor(self, kv, clock, *, answer_lens, max_num_seqs, depth):
        self.answer_lens = answer_lens
        return self

    def submit(self, plan):
        self.plans.append(plan)
        rows = plan.num_decode + len(plan.chunks)
        host = self.host.step + self.host.row * rows
        self.time.now += host + step_seconds(self.cost, plan)
        self.host_seconds += host
        return plan

    def collect(self, plan, until):
        ended = [c.request for c in plan.chunks if self.answer_lens[c.request.rid] == 1]
        done = [Finished(request, 1, "stop") for request in ended]
        return Outcome(1, [self.time.now], 1 if plan.num_decode else 0, done)

    def forget(self, request) -> None: ...


def timed_by(cost: CostModel, host: HostOverhead, monkeypatch, draw: Draw = DRAW) -> tuple[Timed, Told]:
    time = Ticking()
    monkeypatch.setattr(profile, "time", time)
    engine = Told(cost, host, time)
    return time_steps(engine, draw, passes=2, repeats=3), engine


# --- states -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "context"), [(1, 16), (1, 4000), (7, 700), (16, 16 * 16), (5, 1234)])
def test_rows_of_a_state_attend_what_it_says_in_all_and_differ(rows, context):
    each = row_contexts(Batch(rows, context, ()))
    assert len(each) == rows and sum(each) == context and min(each) >= 2
    assert rows == 1 or max(each) > 2 * min(each)


def test_the_corners_of_the_range_are_timed():
    found = corners(DRAW)
    assert {b.num_rows for b in found} == {0, 1, 16} and max(b.context for b in found) == 16 * 256
    assert all(pool_need(b, 16, 3) % 16 == 0 and pool_need(b, 16, 3) >= b.context for b in found)


def test_what_is_timed_is_the_state_and_nothing_else(monkeypatch):
    """Every state is priced as it was drawn: decodes, chunks at their starts, and contexts that grow by a token a step."""
    timed, engine = timed_by(Affine(**AFFINE), HostOverhead(1e-4, 1e-6), monkeypatch)
    cost = Affine(**AFFINE)
    assert len(timed.batches) == 66 and timed.num_samples == 6 and timed.spread < 0.05
    for batch, forward, host in zip(timed.batches, timed.forward, timed.host, strict=True):
        grown = Batch(batch.num_rows, batch.context + 2 * batch.num_rows, batch.chunks)  # the median of three steps
        assert forward == pytest.approx(price(cost, grown), rel=1e-9)
        assert host == pytest.approx(1e-4 + 1e-6 * (batch.num_rows + len(batch.chunks)), rel=1e-6)
    kinds = {(bool(plan.num_decode), bool(plan.chunks)) for plan in engine.plans}
    assert kinds == {(True, False), (False, True), (True, True)}


def test_a_turn_is_told_apart_into_its_parts(monkeypatch):
    time = Ticking()
    monkeypatch.setattr(profile, "time", time)
    bench = Bench(Told(Affine(**AFFINE), HostOverhead(1e-3, 0.0), time), 4096, 4, 16)
    for name, seconds in (("plan", 2e-3), ("book", 4e-3)):
        monkeypatch.setattr(Scheduler, name, slowed(getattr(Scheduler, name), time, seconds))
    batch = Batch(3, 300, ())
    for n, turn in enumerate(bench.turns(batch, 5), 1):
        assert [turn.planning, turn.executor, turn.booking, turn.host] == pytest.approx([2e-3, 1e-3, 4e-3, 7e-3])
        assert turn.total - turn.host == pytest.approx(price(Affine(**AFFINE), Batch(3, 300 + 3 * n, ())))
        assert turn.plan.num_decode == 3


def slowed(call, time, seconds):
    def wrapped(*given):
        time.now += seconds
        return call(*given)

    return wrapped


def test_a_range_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(profile, "time", Ticking())
    engine = Told(Affine(**AFFINE), HostOverhead(), Ticking())
    engine.model.max_positions = 300
    with pytest.raises(ValueError, match="told takes 300 tokens, a state to be timed has"):
        time_steps(engine, DRAW)
    engine.model.max_positions = 4096
    engine.pool_tokens = lambda: 100
    with pytest.raises(ValueError, match="memory holds 100 tokens of KV, a state to be timed needs"):
        time_steps(engine, DRAW)


# --- fits -------------------------------------------------------------------------------------------------------------


def test_known_times_are_found_again(monkeypatch):
    timed, _ = timed_by(Affine(**AFFINE), HostOverhead(2e-4, 3e-6), monkeypatch)
    fitted = profile_fit.fit(timed, DRAW, "affine")
    assert fitted.host.step == pytest.approx(2e-4, rel=0.01) and fitted.host.row == pytest.approx(3e-6, rel=0.01)
    for name, value in AFFINE.items():
        assert fitted.arguments[name] == pytest.approx(value, rel=0.05), name
    assert fitted.errors["all"]["mean"] < 0.002 and abs(fitted.bias) < 0.002
    assert fitted.num_test == 12 and fitted.num_train == 54


def test_the_form_that_errs_least_on_held_out_states_is_kept(monkeypatch):
    kinked = Table(
        tokens=[1, 8, 64, 300], linear=[2e-3, 2.1e-3, 9e-3, 2e-2], rows=[1, 16], contexts=[1, 512],
        attention=[[1e-5, 1e-4], [2e-4, 6e-3]], per_attention=1e-8,
    )  # fmt: skip
    draw = Draw(150, 0, rows=16, context=16 * 256, context_per_row=512, prefill_tokens=256, chunks=3)
    timed, _ = timed_by(kinked, HostOverhead(1e-5, 0.0), monkeypatch, draw)
    fitted = profile_fit.fit(timed, draw)
    assert fitted.form == "table" and fitted.errors["all"]["mean"] < 0.03 < fitted.others["affine"]["all"]["mean"]


def test_a_fit_refuses_few_states_and_unknown_forms(monkeypatch):
    timed, _ = timed_by(Affine(**AFFINE), HostOverhead(), monkeypatch)
    with pytest.raises(ValueError, match="form='cubic'"):
        profile_fit.fit(timed, DRAW, "cubic")
    with pytest.raises(ValueError, match="states=12: a fit needs 30"):
        profile_fit.fit(timed, Draw(12))


def test_the_node_says_what_it_rests_on_and_prices_as_the_fit_does(monkeypatch):
    timed, _ = timed_by(Affine(**AFFINE), HostOverhead(2e-4, 3e-6), monkeypatch)
    fitted = profile_fit.fit(timed, DRAW)
    known = {
        "model": "told: with a colon", "dtype": "float32", "machine": "none, 2 cores", "threads": 2, "kv_dtype": "fp32",
        "pool_tokens": 12_345, "kv_bytes_per_token": 768, "weight_bytes": 10**6,
    }  # fmt: skip
    text = profile_fit.hardware_text("told", known, timed, fitted, DRAW, "lengthwise profile model=told")
    made = instantiate(OmegaConf.create(text))
    assert isinstance(made, Hardware) and made.kv_pool_tokens() == 12_345 and made.kv_bytes_per_token == 768
    assert {"data", "form", "held_out_error", "range", "validated", "profile", "steps", "bias"} <= set(made.provenance)
    assert made.provenance["profile"]["model"] == "told: with a colon" and made.provenance["profile"]["threads"] == 2
    assert dict(made.cost.fitted_range) == {"rows": 16, "context": 4096, "prefill_tokens": 256}
    for batch in timed.batches[:20]:
        assert price(made.cost, batch) == pytest.approx(price(fitted.cost, batch), rel=1e-9)


# --- a real engine ------------------------------------------------------------------------------------------------------


def test_an_engine_is_profiled_and_known_again(tmp_path):
    stage = NativeStage(tiny(max_positions=1024), threads=1)
    out = tmp_path / "deep" / "small.yaml"
    timed, fitted = write_profile(
        stage, out, rows=4, context_per_row=256, prefill_tokens=64, chunks=2, states=36, passes=1, repeats=2, command="x"
    )
    assert (timed.total > 0).all() and (timed.host > 0).all() and (timed.host < timed.total).all()
    assert np.isfinite(fitted.errors["all"]["mean"])
    hardware = read_hardware(str(out))
    engine = stage.loaded()
    assert hardware.name == "small" and hardware.kv_bytes_per_token == engine.kv_bytes_per_token
    assert hardware.provenance["profile"] == facts(engine)
    assert why_another(hardware, facts(engine)) is None
    engine = SimpleNamespace(
        model=engine.model, kv_dtype="bf16", attention=engine.attention, linears=engine.linears, compiled=engine.compiled
    )
    assert "kv_dtype 'fp32', here 'bf16'" in why_another(hardware, facts(engine))


def test_what_cannot_be_profiled_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no real engine"):
        profile_model(executor="simulated", out=tmp_path / "x.yaml")
    with pytest.raises(ValueError, match=r"range\.rows=1, the least is 2"):
        write_profile(NativeStage(tiny()), tmp_path / "x.yaml", rows=1)
    with pytest.raises(ValueError, match="there is no profile"):
        read_hardware(str(tmp_path / "none.yaml"))
