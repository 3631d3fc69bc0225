"""The shipped hardware nodes, every one: binds, says what it rests on, has a KV pool, and never gets faster with more work."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lengthwise.engine.simulated import SimulatedClock, SimulatedExecutor
from lengthwise.engine.simulated.hardware import Hardware
from lengthwise.sched import Chunk, Plan, Request

CONF = Path(__file__).parents[2] / "conf" / "hardware"
NAMES = sorted(path.stem for path in CONF.glob("*.yaml") if path.stem != "profiled")  # a profile comes with its path
DEVICES = [name for name in NAMES if name != "unit"]


@cache
def load(name: str) -> Hardware:
    node = instantiate(OmegaConf.load(CONF / f"{name}.yaml"))
    assert isinstance(node, Hardware)
    return node


def chunk(start: int, length: int) -> Chunk:
    return Chunk(Request(0, 0.0, start + length), start, length, True)


def decode(name: str, rows: int, context: int) -> float:
    a, c, limit = load(name).cost.decode_line(rows, context)
    assert context < limit and c >= 0
    return a + c * context


def prefill(name: str, *chunks: Chunk, rows: int = 0, context: int = 0) -> float:
    return load(name).cost.step(rows, context, chunks)


@pytest.mark.parametrize("name", NAMES)
def test_a_node_states_what_it_rests_on_and_has_a_pool(name):
    hardware = load(name)
    assert hardware.name == name
    assert hardware.kv_pool_tokens() > 10_000
    provenance = hardware.provenance
    assert {"data", "form", "held_out_error", "range", "validated"} <= set(provenance)
    assert all(provenance[key] for key in ("data", "form", "held_out_error", "range", "validated"))
    assert type(provenance) is dict and type(hardware.cost.fitted_range) is dict
    assert type(hardware.cost).__name__.lower() == provenance["form"].split(",")[0]
    assert set(hardware.cost.fitted_range) == ({"rows", "context", "prefill_tokens"} if name != "unit" else set())


@pytest.mark.parametrize("name", DEVICES)
def test_a_step_beyond_the_fitted_range_is_marked(name):
    """X12: results outside the validated range are marked."""
    cost = load(name).cost
    rows, context, tokens = (cost.fitted_range[key] for key in ("rows", "context", "prefill_tokens"))
    assert cost.in_range(rows, context, tokens)
    over = cost.in_range(np.array([rows + 1, 1, 0]), np.array([1, context + 1, 0]), np.array([0, 0, tokens + 1]))
    assert over.tolist() == [False, False, False]


@pytest.mark.parametrize("name", DEVICES)
def test_more_work_never_takes_less_time(name):
    sizes = (1, 2, 16, 63, 64, 65, 94, 95, 96, 128, 192, 256, 300)
    for mean in (1, 100, 1000, 8000):
        times = [decode(name, rows, rows * mean) for rows in sizes]
        assert times == sorted(times) and times[0] > 0
    for rows in sizes:
        times = [decode(name, rows, context) for context in range(rows, rows * 9000, rows * 499)]
        assert times == sorted(times)
    lengths = [prefill(name, chunk(0, n)) for n in (1, 16, 64, 65, 128, 500, 2048, 5000, 8192)]
    assert lengths == sorted(lengths)
    starts = [prefill(name, chunk(s, 512)) for s in (0, 1, 512, 4096)]
    assert starts == sorted(starts)
    found = [prefill(name, chunk(s, 4096 - s)) for s in (0, 16, 1024, 4000, 4095)]  # the more of a prompt is cached
    assert found == sorted(found, reverse=True) and found[-1] < found[0]
    assert prefill(name, chunk(0, 512), chunk(0, 64)) >= prefill(name, chunk(0, 512))
    mixed = [prefill(name, chunk(0, 512), rows=rows, context=800 * rows) for rows in (0, *sizes)]
    assert mixed == sorted(mixed)
    assert mixed[4] >= decode(name, 63, 800 * 63)


@pytest.mark.parametrize("name", NAMES)
def test_fast_forward_gives_the_bits_of_single_steps(name):
    ends: list[list[float]] = []
    for fast in (False, True):
        clock = SimulatedClock()
        executor = SimulatedExecutor(clock, load(name).cost, [701] * 3, fast_forward=fast)
        live = [Request(rid, 0.0, 1500, 10_000) for rid in range(3)]
        plan, context, seen = Plan(chunks=[Chunk(r, 0, 1500, True) for r in live]), 4503, []
        joins = live
        while True:
            outcome = executor.collect(plan, float("inf"))
            seen += list(outcome.ends)
            clock.advance(outcome.ends[-1])
            context += plan.num_decode * outcome.num_steps
            joins = joins if not plan.num_decode else []
            if outcome.finished:
                break
            plan = Plan(joins=joins, num_decode=3, context_tokens=context, repeat=10**6)
        ends.append(seen)
    assert ends[0] == ends[1] and len(ends[0]) == 701


def leaves(node, path=()):
    for key, value in node.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        yield (*path, key)


OPTIONAL = {  # have defaults that cost nothing
    "num_gpus", "host", "row", "step", "fitted_range", "work", "memory_share", "base", "token", "decode", "chunk",
    "chunk_token", "per_attention", "decode_base",
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["llama31_8b_h100", "llama31_8b_h100_table", "llama2_70b_h100_tp8_measured", "opt_13b_a100_distserve", "unit"],
)
def test_a_field_that_is_missing_is_named_before_anything_runs(name):
    """X12: a missing profile field is refused at start, not met in the middle of a run."""
    whole = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    tried = 0
    for path in leaves(whole):
        nested = path[:2] in (("cost", part) for part in ("prefill", "few", "many"))
        skip = (path[0] == "provenance" and len(path) > 1) or path[-1].startswith("_") or "fitted_range" in path
        if skip or (path[-1] in OPTIONAL and not nested):
            continue
        node = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
        *above, last = path
        inner = node
        for key in above:
            inner = inner[key]
        del inner[last]
        with pytest.raises(Exception, match=last):
            instantiate(node)
        tried += 1
    assert tried >= 10


def test_a_group_counts_all_of_its_memory_and_one_copy_of_the_weights():
    for device in ("a100", "h100"):
        four, eight = (load(f"llama2_70b_{device}_tp{tp}_measured") for tp in (4, 8))
        assert eight.memory == 2 * four.memory and eight.activations == 2 * four.activations
        assert eight.weights == four.weights and eight.kv_bytes_per_token == four.kv_bytes_per_token == 327680
        assert eight.cost.work.weight_bytes == four.cost.work.weight_bytes
        assert eight.cost.work.peak_flops == 2 * four.cost.work.peak_flops
        assert eight.kv_pool_tokens() > 2 * four.kv_pool_tokens()
    assert load("llama2_70b_h100_tp4").kv_pool_tokens() == load("llama2_70b_h100_tp4_measured").kv_pool_tokens()


@pytest.mark.parametrize("model", ["llama2_70b", "llama31_70b"])
@pytest.mark.parametrize(("device", "form"), [("h100", ""), ("h200", ""), ("a100", "_table")])
def test_twice_the_ranks_are_faster_but_not_twice_as_fast(model, device, form):
    four, eight = f"{model}_{device}_tp4", f"{model}_{device}_tp8{form}"
    host = load(four).cost.host.step
    for length in (1024, 2048, 8192):
        one, other = (prefill(name, chunk(0, length)) - host for name in (four, eight))
        assert one / 2 < other < one
    for rows in (1, 64):
        one, other = (decode(name, rows, rows * 1000) - host for name in (four, eight))
        assert one / 2 < other < one


def test_newer_devices_are_faster_and_smaller_models_too():
    for model in ("llama31_8b", "llama2_7b", "qwen25_7b"):
        a100, h100, h200 = (f"{model}_{device}" for device in ("a100", "h100", "h200"))
        for rows in (1, 64, 256):
            assert decode(h200, rows, rows * 1000) < decode(h100, rows, rows * 1000) < decode(a100, rows, rows * 1000)
        assert prefill(h100, chunk(0, 4096)) < prefill(a100, chunk(0, 4096))
        assert prefill(h200, chunk(0, 4096)) == pytest.approx(prefill(h100, chunk(0, 4096)), rel=0.06)  # the same cores
    assert decode("llama2_7b_h100", 64, 64_000) > decode("llama31_8b_h100", 64, 64_000)  # four times the KV to read
    assert load("llama2_7b_h100").kv_bytes_per_token == 4 * load("llama31_8b_h100").kv_bytes_per_token


@pytest.mark.parametrize("name", [name for name in DEVICES if "measured" not in name and "opt" not in name])
def test_no_composed_step_beats_the_device(name):
    hardware = load(name)
    cost, work = hardware.cost, hardware.cost.work
    if work is None:
        return
    host = cost.host.step
    assert decode(name, 1, 1) - host > work.weight_bytes / work.bandwidth
    flops = work.flops_per_token * 4096 + work.attention_flops * 4096**2 / 2
    assert 1 < (prefill(name, chunk(0, 4096)) - host) / (flops / work.peak_flops) < 2.6
