"""Cost models: monotone, linear where they say so, the same bits by every path; the shipped hardware nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lengthwise.engine.simulated import SimulatedClock, SimulatedExecutor
from lengthwise.engine.simulated.affine import Affine
from lengthwise.engine.simulated.cost import CostModel, HostOverhead
from lengthwise.engine.simulated.hardware import Hardware
from lengthwise.engine.simulated.piecewise import Piecewise
from lengthwise.engine.simulated.roofline import Roofline
from lengthwise.engine.simulated.table import Table, interpolate
from lengthwise.sched import Chunk, Plan, Request

CONF = Path(__file__).parents[2] / "conf" / "hardware"
NODES = (  # one of each form and source; test_hardware_nodes.py has them all
    "unit", "llama31_8b_h100", "llama31_8b_a100", "llama31_8b_h100_table", "llama2_70b_h100_tp4",
    "llama2_70b_a100_tp4_measured", "opt_13b_a100_distserve", "opt_66b_a100_tp4_vllm",
)  # fmt: skip
HOST = HostOverhead(step=1e-3, row=1e-5)
ROOFLINE = {
    "flops_per_token": 1.4e10,
    "weight_bytes": 1.5e10,
    "kv_bytes_per_token": 131072,
    "attention_flops": 524288,
    "peak_flops": 9.89e14,
    "bandwidth": 3.35e12,
    "compute_efficiency": 0.77,
    "memory_efficiency": 0.7,
    "kv_efficiency": 0.97,
    "attention_efficiency": 0.53,
    "sharpness": 2.1,
    "token": 2e-6,
    "row": 6e-6,
    "decode": 2e-4,
    "chunk": 1e-4,
}
TABLE = {
    "tokens": [1, 64, 512, 4096],
    "linear": [6e-3, 6.3e-3, 9e-3, 6.3e-2],
    "rows": [1, 8, 64],
    "contexts": [1, 100, 1000, 4000],
    "attention": [[2e-4, 2e-4, 3e-4, 5e-4], [4e-4, 5e-4, 8e-4, 1.9e-3], [7e-4, 1e-3, 4e-3, 1.2e-2]],
    "per_attention": 8e-10,
    "chunk": 1e-4,
    "chunk_token": 5e-6,
}
PIECEWISE = {
    "prefill": {"base": 2e-2, "token": 1e-4, "square": 7e-9},
    "few": {"base": 2e-2, "context": 6e-7, "row": 4e-5},
    "many": {"base": 7e-3, "context": 7e-7, "row": 1.6e-4},
    "threshold": 95,
}
STEEP = PIECEWISE | {"many": {"base": 4e-2, "context": 2e-7, "row": 1e-4}}  # the line of few overtakes as context grows


def load(path: Path) -> Hardware:
    node = instantiate(OmegaConf.load(path))
    assert isinstance(node, Hardware)
    return node


def chunk(start: int, length: int) -> Chunk:
    return Chunk(Request(0, 0.0, start + length), start, length, True)


MODELS: dict[str, CostModel] = {
    "affine": Affine(6e-3, 1e-5, 4e-8, 1.5e-5, 8e-10, HOST, decode_base=2e-4),
    "roofline": Roofline(**ROOFLINE, host=HOST),
    "table": Table(**TABLE, host=HOST),
    "piecewise": Piecewise(**PIECEWISE, host=HOST),
    "piecewise_steep": Piecewise(**STEEP, host=HOST),
} | {name: load(CONF / f"{name}.yaml").cost for name in NODES}


@pytest.fixture(params=sorted(MODELS))
def cost(request: pytest.FixtureRequest) -> CostModel:
    return MODELS[request.param]


def decode(cost: CostModel, rows: int, context: int) -> float:
    a, c, limit = cost.decode_line(rows, context)
    assert context < limit and c >= 0
    return a + c * context


SIZES = (1, 2, 7, 8, 9, 63, 64, 65, 94, 95, 96, 200, 256, 300)


def test_a_decode_step_takes_longer_with_more_rows_and_with_more_context(cost):
    for mean in (1, 50, 100, 999, 1000, 4000, 9000):
        times = [decode(cost, rows, rows * mean) for rows in SIZES]
        assert times == sorted(times) and times[0] > 0
    for rows in SIZES:
        times = [decode(cost, rows, context) for context in range(rows, rows * 9000, rows * 251)]
        assert times == sorted(times)


def test_a_prefill_step_takes_longer_with_longer_later_and_more_chunks(cost):
    def t(*chunks: Chunk, rows: int = 0, context: int = 0) -> float:
        return cost.step(rows, context, chunks)

    lengths = [t(chunk(0, n)) for n in (1, 16, 63, 64, 65, 500, 512, 2048, 5000, 8192)]
    assert lengths == sorted(lengths)
    starts = [t(chunk(s, 512)) for s in (0, 1, 512, 4096)]
    assert starts == sorted(starts)
    assert t(chunk(0, 512), chunk(0, 64)) >= t(chunk(0, 512))
    assert t(chunk(0, 512), rows=8, context=800) >= t(chunk(0, 512))
    assert t(chunk(0, 512), rows=8, context=4000) >= t(chunk(0, 512), rows=8, context=800)


def test_a_step_without_chunks_is_the_decode_line(cost):
    for rows in SIZES:
        for context in (rows, rows * 100, rows * 1234):
            assert cost.step(rows, context, []) == pytest.approx(decode(cost, rows, context), rel=1e-12)


def test_an_answer_does_not_depend_on_what_was_asked_before():
    fresh, used = Roofline(**ROOFLINE), Roofline(**ROOFLINE)
    for n in range(300, 0, -1):
        used.step(n, n * 10, [chunk(0, n)])
        used.decode_line(n, n)
    assert fresh.decode_line(77, 500) == used.decode_line(77, 500)
    assert fresh.step(5, 50, [chunk(8, 200)]) == used.step(5, 50, [chunk(8, 200)])


def test_the_roofline_is_its_formula():
    cost = Roofline(**ROOFLINE, base=3e-4, host=HOST)
    r, rows, context = ROOFLINE, 10, 5000
    n = rows + 300 + 200
    compute = r["flops_per_token"] * n / (r["peak_flops"] * r["compute_efficiency"])
    memory = r["weight_bytes"] / (r["bandwidth"] * r["memory_efficiency"])
    expected = 3e-4 + 1e-3 + (compute ** r["sharpness"] + memory ** r["sharpness"]) ** (1 / r["sharpness"])
    expected += r["token"] * n + (r["row"] + 1e-5) * rows + r["decode"] + 2 * (r["chunk"] + 1e-5)
    expected += r["kv_bytes_per_token"] * context / (r["bandwidth"] * r["kv_efficiency"])
    pairs = 300 * (100 + 150) + 200 * 100
    expected += r["attention_flops"] * pairs / (r["peak_flops"] * r["attention_efficiency"])
    assert cost.step(rows, context, [chunk(100, 300), chunk(0, 200)]) == pytest.approx(expected, rel=1e-12)


def test_the_table_returns_its_knots_and_straight_lines_between():
    cost = Table(**TABLE)
    for i, rows in enumerate(TABLE["rows"]):
        for j, context in enumerate(TABLE["contexts"]):
            expected = interpolate(rows, TABLE["tokens"], TABLE["linear"]) + TABLE["attention"][i][j]
            assert decode(cost, rows, rows * context) == pytest.approx(expected, rel=1e-12)
    a, c, limit = cost.decode_line(8, 8 * 100)
    assert limit == 8 * 1000 and cost.decode_line(8, limit - 1) == (a, c, limit)
    assert cost.decode_line(8, limit)[2] == float("inf")
    assert cost.decode_line(8, limit)[0] != a
    half_way = decode(cost, 36, 36 * 1000)  # rows half-way between two knots
    linear = interpolate(36, TABLE["tokens"], TABLE["linear"])
    assert half_way == pytest.approx(linear + (8e-4 + 4e-3) / 2, rel=1e-12)


class Growing:
    """Drives an executor: prefill all at once, then decode to the end; returns every step's end time and the finishes."""

    def __init__(self, cost: CostModel, lens: list[int], prompt_len: int, fast_forward: bool, pieces: bool = False) -> None:
        clock = SimulatedClock()
        executor = SimulatedExecutor(clock, cost, lens, fast_forward=fast_forward)
        live = [Request(rid, 0.0, prompt_len, 100_000) for rid in range(len(lens))]
        plan = Plan(chunks=[Chunk(r, 0, prompt_len, True) for r in live])
        self.ends: list[float] = []
        self.finished: list[tuple[int, float]] = []
        joins, context, self.num_plans = list(live), prompt_len * len(live), 0
        while live:
            until = clock.now + 37.3 * decode(cost, 1, 1) if pieces else float("inf")
            outcome = executor.collect(plan, until)
            self.num_plans += 1
            self.ends += list(outcome.ends)
            clock.advance(outcome.ends[-1])
            if plan.num_decode:
                context += plan.num_decode * outcome.num_steps
                joins = []
            else:
                context += len(live)
            for done in outcome.finished:
                live.remove(done.request)
                joins = [r for r in joins if r is not done.request]
                context -= prompt_len + done.num_tokens
                self.finished.append((done.request.rid, outcome.ends[-1]))
            plan = Plan(joins=joins, num_decode=len(live), context_tokens=context, repeat=10**6)


LENS = [1, 2, 40, 41, 41, 300, 3000, 5200, 12000]


def test_fast_forward_and_arrays_give_the_bits_of_single_steps(cost):
    single = Growing(cost, LENS, 90, fast_forward=False)
    fast = Growing(cost, LENS, 90, fast_forward=True)
    cut = Growing(cost, LENS, 90, fast_forward=True, pieces=True)
    assert fast.num_plans < 20 < cut.num_plans < single.num_plans == len(single.ends)
    assert single.ends == fast.ends == cut.ends
    assert single.finished == fast.finished == cut.finished
    assert [rid for rid, _ in fast.finished] == sorted(range(len(LENS)), key=LENS.__getitem__)
    segments = {cost.decode_line(1, context)[1] for context in (91, 500, 2000, 6000)}
    assert not isinstance(cost, Table) or len(cost.contexts) == 2 or len(segments) > 1  # the table's runs do cross knots


def test_many_rows_fast_forward_across_the_meeting_of_two_lines():
    """From the line of many rows to that of few, in the middle of a run."""
    cost = Piecewise(**STEEP)
    lens = [1 + 7 * k for k in range(1, 101)]
    single, fast = (Growing(cost, lens, 10, fast_forward=f) for f in (False, True))
    assert single.ends == fast.ends and single.finished == fast.finished
    (_, first, meet), (_, then, _) = cost.decode_line(100, 0), cost.decode_line(100, 10**9)
    assert 0 < meet < 10**6 and cost.decode_line(100, meet - 1)[1] == first != then == cost.decode_line(100, meet)[1]
    assert decode(cost, 100, int(meet)) == pytest.approx(decode(cost, 100, int(meet) - 1), rel=1e-4)


def test_the_piecewise_model_is_its_formula():
    cost = Piecewise(**PIECEWISE, host=HOST)
    assert decode(cost, 94, 20_000) == pytest.approx(1e-3 + 94e-5 + 2e-2 + 6e-7 * 20_000 + 4e-5 * 94, rel=1e-12)
    assert decode(cost, 200, 20_000) == pytest.approx(1e-3 + 200e-5 + 7e-3 + 7e-7 * 20_000 + 1.6e-4 * 200, rel=1e-12)
    published = 7e-3 + 1.6e-4 * 95
    few = 2e-2 + 4e-5 * 94
    assert published < few  # the fits do not meet
    assert decode(cost, 95, 0) == pytest.approx(1e-3 + 95e-5 + few, rel=1e-12)
    whole = cost.step(0, 0, [chunk(0, 300)])
    assert whole == pytest.approx(1e-3 + 1e-5 + 2e-2 + 300e-4 + 7e-9 * 300**2, rel=1e-12)
    halves = [cost.step(0, 0, [c]) for c in (chunk(0, 100), chunk(100, 200))]
    assert sum(halves) - whole == pytest.approx(2e-2 + 1e-3 + 1e-5, rel=1e-9)  # one more step; the squares add up
    both = cost.step(10, 500, [chunk(0, 300)])
    assert both == pytest.approx(whole + decode(cost, 10, 500) - 7e-3 - 1e-3, rel=1e-12)


def test_the_pools_and_step_times_of_the_shipped_nodes():
    h100, a100, table = (load(CONF / f"llama31_8b_{x}.yaml") for x in ("h100", "a100", "h100_table"))
    assert 440_000 < h100.kv_pool_tokens() == table.kv_pool_tokens() < a100.kv_pool_tokens() < 460_000
    for rows in (1, 64, 256):
        one, other = decode(h100.cost, rows, rows * 1000), decode(table.cost, rows, rows * 1000)
        assert other == pytest.approx(one, rel=0.08)
        assert decode(a100.cost, rows, rows * 1000) > one
    weights_alone = h100.weights / 3.35e12  # no decode step can beat one reading of the weights
    assert weights_alone < decode(h100.cost, 1, 1) - h100.cost.host.step < 2 * weights_alone
    for hardware, peak in ((h100, 9.89e14), (a100, 3.12e14)):
        ideal = 2 * 7e9 * 2048 / peak
        assert ideal < hardware.cost.step(0, 0, [chunk(0, 2048)]) < 2.2 * ideal


def test_the_unit_node_is_a_unit():
    unit = load(CONF / "unit.yaml")
    assert unit.kv_pool_tokens() == 10**9
    assert decode(unit.cost, 1, 17) == decode(unit.cost, 64, 10**6) == 1.0
    assert unit.cost.step(0, 0, [chunk(0, 8000)]) == 0.0
    assert unit.cost.step(3, 100, [chunk(0, 8000)]) == 1.0


def test_what_lies_outside_the_fitted_range_is_marked_not_refused():
    import numpy as np

    cost = Roofline(**ROOFLINE, fitted_range={"rows": 256, "context": 450_000, "prefill_tokens": 8192})
    assert cost.in_range(256, 450_000, 8192)
    assert not cost.in_range(257, 1000, 0) and not cost.in_range(1, 450_001, 0) and not cost.in_range(0, 0, 8193)
    rows, context, prefill = np.array([1, 300, 8]), np.array([100, 100, 10**6]), np.array([0, 0, 0])
    assert cost.in_range(rows, context, prefill).tolist() == [True, False, False]
    assert decode(cost, 300, 10**6) > decode(cost, 256, 450_000)
    assert Affine(1.0, 0.0, 0.0, 0.0).in_range(10**9, 10**9, 10**9)
    with pytest.raises(ValueError, match="row"):
        Affine(1.0, 0.0, 0.0, 0.0, fitted_range={"row": 3})


@pytest.mark.parametrize(
    ("model", "wrong", "match"),
    [
        (Roofline, ROOFLINE | {"sharpness": 0.5}, "sharpness=0.5"),
        (Roofline, ROOFLINE | {"bandwidth": 0}, "bandwidth=0"),
        (Roofline, ROOFLINE | {"kv_efficiency": float("nan")}, "kv_efficiency=nan"),
        (Roofline, ROOFLINE | {"bandwidth": None}, "bandwidth=None"),
        (Roofline, ROOFLINE | {"token": None}, "token=None"),
        (Roofline, ROOFLINE | {"sharpness": None}, "sharpness=None"),
        (Affine, {"base": 1, "per_row": None, "per_context": 0, "per_prefill": 0}, "per_row=None"),
        (Piecewise, PIECEWISE | {"few": {"base": 1, "context": 1}}, r"few lacks \['row'\]"),
        (Piecewise, PIECEWISE | {"prefill": {"base": 1, "token": 1, "square": -1}}, "prefill.square=-1"),
        (Piecewise, PIECEWISE | {"many": PIECEWISE["many"] | {"rows": 1}}, r"many has \['rows'\]"),
        (Piecewise, PIECEWISE | {"threshold": 1}, "threshold=1"),
        (Table, TABLE | {"per_attention": None}, "per_attention=None"),
        (Table, TABLE | {"tokens": [1, 64, 64, 4096]}, "tokens"),
        (Table, TABLE | {"rows": [1]}, "rows"),
        (Table, TABLE | {"linear": [1.0]}, "1 values for 4"),
        (Table, TABLE | {"attention": [[1.0, 2.0]]}, "3 rows of 4"),
    ],
)
def test_impossible_arguments_are_refused_by_name(model, wrong, match):
    with pytest.raises(ValueError, match=match):
        model(**wrong)
