"""Utilisation: by hand on a few plans, additive over single steps, and never above 1 for a fitted roofline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lengthwise.engine.simulated.affine import Affine
from lengthwise.engine.simulated.cost import HostOverhead
from lengthwise.engine.simulated.roofline import Roofline
from lengthwise.engine.simulated.work import Work
from lengthwise.experiments.utilisation import NEEDED, utilisation, why_not, window_utilisation
from lengthwise.sched import Chunk, Request

HARDWARE = Path(__file__).parents[2] / "conf" / "hardware"
WORK = Work(10.0, 1000.0, 2.0, 3.0, 1e4, 1e5)  # flops/token, weights, kv/token, flops/pair, peak, bandwidth
COST = Affine(1.0, 0.0, 0.0, 0.0, work=WORK)


def plans(*rows: tuple[float, float, int, int, int, int, float]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=list(NEEDED))
    integers = [name for name in NEEDED if name not in ("start", "end", "prefill_pairs")]
    return frame.astype(dict.fromkeys(integers, "int32"))


def test_a_decode_run_counts_every_one_of_its_steps():
    frame = utilisation(plans((0.0, 2.0, 3, 4, 100, 0, 0.0)), COST)
    attended = 100 + 104 + 108
    assert frame["flops"].tolist() == [10 * 12 + 3 * attended]
    assert frame["bytes"].tolist() == [3 * 1000 + 2 * attended + 2 * 12]
    assert frame["flops_utilisation"].tolist() == [frame["flops"][0] / (1e4 * 2)]
    assert frame["bandwidth_utilisation"].tolist() == [frame["bytes"][0] / (1e5 * 2)]


def test_a_prefill_counts_its_pairs_and_the_kv_it_writes():
    pairs = 50 * (20 + 25.0)  # 50 tokens after 20
    frame = utilisation(plans((1.0, 2.0, 1, 0, 0, 50, pairs)), COST)
    assert frame["flops"].tolist() == [500 + 3 * pairs]
    assert frame["bytes"].tolist() == [1000 + 2 * 50]


def test_a_run_of_steps_counts_as_its_single_steps_do():
    whole = utilisation(plans((0.0, 5.0, 5, 7, 300, 0, 0.0)), COST)
    single = utilisation(plans(*((float(i), i + 1.0, 1, 7, 300 + 7 * i, 0, 0.0) for i in range(5))), COST)
    assert whole[["flops", "bytes"]].sum().tolist() == single[["flops", "bytes"]].sum().tolist()


def test_large_counts_do_not_overflow():
    frame = utilisation(plans((0.0, 1.0, 10_000, 256, 2_000_000, 0, 0.0)), COST)
    assert frame["bytes"][0] > 2 * 2e10


def test_a_window_takes_its_share_of_a_plan_and_counts_idle_time():
    steps = plans((0.0, 2.0, 1, 1, 10, 0, 0.0), (3.0, 4.0, 1, 1, 10, 0, 0.0))
    each = 1000 + 2 * 10 + 2
    found, reason = window_utilisation(steps, COST)
    assert reason is None and found["bandwidth_utilisation"] == pytest.approx(2 * each / (1e5 * 4))
    found, _ = window_utilisation(steps, COST, 1.0, 3.5)
    assert found["bandwidth_utilisation"] == pytest.approx((each / 2 + each / 2) / (1e5 * 2.5))
    found, _ = window_utilisation(steps, COST, 1.0, 3.5, seconds=10.0)
    assert found["bandwidth_utilisation"] == pytest.approx(each / (1e5 * 10))


def test_without_work_there_is_a_reason_and_no_number():
    steps = plans((0.0, 1.0, 1, 1, 10, 0, 0.0))
    bare = Affine(1.0, 0.0, 0.0, 0.0)
    found, reason = window_utilisation(steps, bare)
    assert set(found.values()) == {None} and reason is not None and "work" in reason
    with pytest.raises(ValueError, match="work"):
        utilisation(steps, bare)
    assert window_utilisation(steps, None)[1] == "no cost model"
    assert window_utilisation(steps.iloc[:0], COST)[1] == "no steps"
    assert window_utilisation(plans((1.0, 1.0, 1, 1, 10, 0, 0.0)), COST)[1] == "no time passed"
    assert np.isnan(utilisation(plans((1.0, 1.0, 1, 1, 10, 0, 0.0)), COST)["flops_utilisation"][0])
    with pytest.raises(ValueError, match="prefill_pairs"):
        utilisation(steps.drop(columns="prefill_pairs"), COST)


@pytest.mark.parametrize("field", ["peak_flops", "bandwidth", "weight_bytes"])
def test_impossible_work_is_refused_by_name(field):
    values = {"flops_per_token": 1, "weight_bytes": 1, "kv_bytes_per_token": 1, "attention_flops": 1, "peak_flops": 1,
              "bandwidth": 1}  # fmt: skip
    with pytest.raises(ValueError, match=f"{field}=-1"):
        Work(**(values | {field: -1}))


SHARE = st.floats(0.05, 1.0)


def check_at_most_one(cost: Roofline, rows: int, mean: int, chunks: list[tuple[int, int]]) -> None:
    context = rows * mean
    parts = [Chunk(Request(0, 0.0, s + n), s, n, True) for s, n in chunks]
    if parts:
        seconds = cost.step(rows, context, parts)
    else:
        a, c, _ = cost.decode_line(rows, context)
        seconds = a + c * context
    pairs = sum(n * (s + n / 2) for s, n in chunks)
    frame = utilisation(plans((0.0, seconds, 1, rows, context, sum(n for _, n in chunks), pairs)), cost)
    assert 0 < frame["bandwidth_utilisation"][0] <= 1 + 1e-9
    assert 0 < frame["flops_utilisation"][0] <= 1 + 1e-9


BATCH = {
    "rows": st.integers(0, 512),
    "mean": st.integers(1, 40_000),
    "chunks": st.lists(st.tuples(st.integers(0, 30_000), st.integers(1, 16_384)), max_size=4),
}


@given(ec=SHARE, em=SHARE, ek=SHARE, ea=SHARE, p=st.floats(1.0, 32.0), **BATCH)
@settings(max_examples=200, deadline=None)
def test_a_roofline_of_efficiencies_up_to_1_never_uses_more_than_the_device_has(ec, em, ek, ea, p, rows, mean, chunks):
    if not rows and not chunks:
        return
    kv, flops, peak, bandwidth = 131072, 524288, 9.89e14, 3.35e12
    cost = Roofline(
        flops_per_token=1.4e10, weight_bytes=1.5e10, kv_bytes_per_token=kv, attention_flops=flops, peak_flops=peak,
        bandwidth=bandwidth, compute_efficiency=ec, memory_efficiency=em, kv_efficiency=ek, attention_efficiency=ea,
        sharpness=p, token=kv / bandwidth,
    )  # fmt: skip
    check_at_most_one(cost, rows, mean, chunks)


FITTED = [path for path in sorted(HARDWARE.glob("*.yaml")) if "roofline.Roofline" in path.read_text()]


@pytest.mark.parametrize("path", FITTED, ids=lambda path: path.stem)
@given(**BATCH)
@settings(max_examples=25, deadline=None)
def test_a_shipped_roofline_never_uses_more_than_the_device_has(path, rows, mean, chunks):
    if rows or chunks:
        check_at_most_one(instantiate(OmegaConf.load(path)).cost, rows, mean, chunks)


def test_decoding_is_bound_by_bandwidth_and_prefill_by_operations():
    cost = instantiate(OmegaConf.load(HARDWARE / "llama31_8b_h100.yaml")).cost
    a, c, _ = cost.decode_line(1, 1000)
    decode = utilisation(plans((0.0, a + c * 1000, 1, 1, 1000, 0, 0.0)), cost).iloc[0]
    assert decode["bandwidth_utilisation"] > 0.5 > 0.01 > decode["flops_utilisation"]
    seconds = cost.step(0, 0, [Chunk(Request(0, 0.0, 4096), 0, 4096, True)])
    prefill = utilisation(plans((0.0, seconds, 1, 0, 0, 4096, 4096 * 2048.0)), cost).iloc[0]
    assert prefill["flops_utilisation"] > 0.5 > 0.1 > prefill["bandwidth_utilisation"]


def test_host_time_lowers_utilisation():
    options = {"flops_per_token": 1.4e10, "weight_bytes": 1.5e10, "kv_bytes_per_token": 131072, "attention_flops": 524288,
               "peak_flops": 9.89e14, "bandwidth": 3.35e12, "compute_efficiency": 1.0, "memory_efficiency": 1.0,
               "kv_efficiency": 1.0, "attention_efficiency": 1.0, "sharpness": 32.0}  # fmt: skip
    shares = []
    for host in (HostOverhead(), HostOverhead(step=5e-3)):
        cost = Roofline(**options, host=host)
        a, c, _ = cost.decode_line(8, 8000)
        shares.append(utilisation(plans((0.0, a + c * 8000, 1, 8, 8000, 0, 0.0)), cost)["bandwidth_utilisation"][0])
    assert shares[0] == pytest.approx(1.0, abs=1e-3) and shares[1] < 0.6


def test_every_node_of_a_device_states_its_work_or_says_why_not():
    nodes = [path for path in HARDWARE.glob("*.yaml") if path.stem != "profiled"]  # a profile comes with its path
    without = {p.stem for p in nodes if why_not(instantiate(OmegaConf.load(p)).cost) is not None}
    assert without <= {"unit", "llama31_8b_h100_table"} | {p.stem for p in HARDWARE.glob("cpu*.yaml")}
