"""The metrics of a service: what they count equals what happened, under the names that others read."""

from __future__ import annotations

import asyncio
import math
import re

import numpy as np
import pytest
import torch
from native import Spoiling
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from serving import Gate, read, run, until

from lengthwise.engine.native.sampling import SamplingParams
from lengthwise.engine.server.health import Full
from lengthwise.engine.server.tally import Histogram
from lengthwise.sched import LengthDistribution, pause, recompute, swap
from lengthwise.sched.batching import Chunked, Mixed, PrefillFirst
from lengthwise.sched.kv import Paged, Prefix
from lengthwise.sched.policies import SRPT

torch.set_num_threads(1)

GAUGES = {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:cache_config_info"}
COUNTERS = {
    "vllm:num_preemptions", "vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:prompt_tokens",
    "vllm:generation_tokens", "vllm:request_success", "lengthwise_starved", "lengthwise_aborted", "lengthwise_rejected",
    "lengthwise_prediction_fallbacks", "lengthwise_thrashed", "lengthwise_futile_preemptions",
}  # fmt: skip
HISTOGRAMS = {
    "vllm:iteration_tokens_total", "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds", "vllm:e2e_request_latency_seconds", "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds", "vllm:request_inference_time_seconds",
    "vllm:request_prompt_tokens", "vllm:request_generation_tokens", "vllm:request_params_max_tokens",
    "vllm:request_params_n", "lengthwise_wait_seconds", "lengthwise_scheduling_seconds", "lengthwise_predicted_ratio",
    "lengthwise_predicted_error_tokens", "lengthwise_prediction_seconds",
}  # fmt: skip


def scrape(service):
    """Values by sample name, {sorted labels beside model_name and engine} appended where there are any."""
    out = {}
    for family in text_string_to_metric_families(generate_latest(service.metrics.registry).decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("model_name"), labels.pop("engine")) == ("tiny-llama", "0")
            out[sample.name + "".join(f",{v}" for v in labels.values())] = sample.value
    return out


class Constant:
    def predict(self, requests):
        return [LengthDistribution.point(8.0) for _ in requests]


def test_all_names_are_there():
    async def main(service):
        text = generate_latest(service.metrics.registry).decode()
        return {f.name: f for f in text_string_to_metric_families(text)}, text

    families, text = run(main, predictor=Constant(), fallback_len=8.0)
    kinds = {name: family.type for name, family in families.items()}
    assert {n for n, k in kinds.items() if k == "gauge"} == GAUGES | {"lengthwise_last_step_age_seconds"}
    assert {n for n, k in kinds.items() if k == "counter"} == COUNTERS
    assert {n for n, k in kinds.items() if k == "histogram"} == HISTOGRAMS
    assert all(f.documentation.endswith(".") for f in families.values())
    assert re.search(
        r'^vllm:cache_config_info\{block_size="16",engine="0",model_name="tiny-llama",num_gpu_blocks="256"\} 1', text, re.M
    )
    assert re.search(r"^vllm:request_success_total\{.*finished_reason=\"stop\"", text, re.M)


def test_a_scripted_run_is_counted_as_it_was():
    """Three that finish, one refused, one too many, one aborted, one timed out, one that fails."""

    async def main(service):
        service._executor._sampler = Spoiling(128, lambda row: row.request.prompt_len == 7 and row.num_output == 3)
        gate, prompt = Gate(service), list(range(40))
        a = await read(await service.submit("a", prompt, 10, predicted_len=5, answer_len=10))
        b = await read(await service.submit("b", prompt, 6, predicted_len=12))
        c = await read(await service.submit("c", [1], 9, predicted_len=9, answer_len=1))
        with pytest.raises(ValueError, match="empty"):
            await service.submit("bad", [], 5)
        failed = await read(await service.submit("f", [2] * 7, 9))
        one = await service.submit("one", [1, 2], 2000)
        await until(lambda: one._come)
        await gate.shut()
        assert scrape(service)["vllm:num_requests_running"] == 1
        two = await service.submit("two", [1, 2], 2000, timeout=50.0)
        with pytest.raises(Full):
            await service.submit("three", [1, 2], 2000)
        seen = scrape(service)
        assert seen["vllm:num_requests_waiting"] == 1 and seen["vllm:kv_cache_usage_perc"] > 0
        service._clock._start -= 100
        assert scrape(service)["lengthwise_last_step_age_seconds"] >= 100
        await gate.step()
        service.abort(one)
        gate.open()
        one, two = await read(one), await read(two)
        await until(lambda: not service._live.streams)
        return scrape(service), [a, b, c], [failed, one, two]

    options = {"max_num_seqs": 1, "max_waiting": 1, "kv": Prefix(4096, 16, 0.0), "replay": True, "starved_after": 40.0}
    seen, done, rest = run(main, **options)
    assert [x.reason for x in done] == ["stop", "length", "stop"]
    assert [x.reason.split(":")[0] for x in rest] == ["failed", "aborted", "timeout"]
    generated = sum(len(x.token_ids) for x in (*done, *rest))
    assert seen["vllm:generation_tokens_total"] == generated and seen["vllm:prompt_tokens_total"] == 40 + 40 + 1 + 7 + 2
    assert {k: v for k, v in seen.items() if k.startswith("vllm:request_success_total")} == {
        f"vllm:request_success_total,{k}": v for k, v in {"stop": 2, "length": 1, "abort": 1, "timeout": 1, "error": 1}.items()
    }
    assert (seen["lengthwise_rejected_total,full"], seen["lengthwise_rejected_total,invalid"]) == (1, 1)
    assert seen["lengthwise_aborted_total"] == 1 and seen["lengthwise_starved_total"] == 1
    assert (seen["vllm:prefix_cache_queries_total"], seen["vllm:prefix_cache_hits_total"]) == (90, 32)
    assert seen["vllm:num_preemptions_total"] == 0
    for name, values in {
        "vllm:request_prompt_tokens": [40, 40, 1], "vllm:request_generation_tokens": [10, 6, 1],
        "vllm:request_params_max_tokens": [10, 6, 9], "vllm:request_params_n": [1, 1, 1],
        "lengthwise_predicted_ratio": [2.0, 1 / 9], "lengthwise_predicted_error_tokens": [5, 8],  # b was cut: nobody knows
    }.items():  # fmt: skip
        assert (seen[name + "_count"], seen[name + "_sum"]) == (len(values), pytest.approx(sum(values)))
    steps = seen["vllm:iteration_tokens_total_count"]
    assert steps == generated + 1 + 0  # one row a step; the step that failed gave nothing
    assert seen["lengthwise_scheduling_seconds_count"] == steps
    computed = 40 + 40 + 1 + 7 + 2 - 32 + generated + 1 - 5
    assert seen["vllm:iteration_tokens_total_sum"] == computed
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert seen[f"vllm:{name}_seconds_count"] == 3
    parts = [seen[f"vllm:request_{p}_time_seconds_sum"] for p in ("queue", "prefill", "decode")]
    assert seen["vllm:e2e_request_latency_seconds_sum"] == pytest.approx(sum(parts))
    assert seen["vllm:request_inference_time_seconds_sum"] == pytest.approx(sum(parts[1:]))
    assert seen["vllm:request_time_per_output_token_seconds_count"] == 2
    assert seen["lengthwise_wait_seconds_count"] == 6 and 100 < seen["lengthwise_wait_seconds_sum"] < 160
    assert seen["vllm:time_to_first_token_seconds_count"] == 5


@pytest.mark.parametrize("batching", [Chunked, PrefillFirst, Mixed])
@pytest.mark.parametrize("preemption", [recompute, pause, lambda: swap(cpu=160)], ids=["recompute", "pause", "swap"])
def test_gaps_and_first_tokens_add_up_whatever_happens_between(batching, preemption):
    """Gaps between the tokens of a request add up to its last - first token, through preemptions, failures and aborts."""
    rng = np.random.default_rng(3)

    async def main(service):
        def fails(row):
            return row.request.rid % 11 == 5 and row.num_output == row.request.rid % 4

        service._executor._sampler = Spoiling(128, fails)
        times: dict[int, list[float]] = {}
        outbox = service._outbox
        send, end = outbox._send, outbox._end

        def sent(pieces, time):
            for piece in pieces:
                times.setdefault(piece.request.rid, []).append(time)
            send(pieces, time)

        def ended(ending):
            if ending.piece.token_id is not None:
                times.setdefault(ending.piece.request.rid, []).append(ending.time)
            end(ending)

        outbox._send, outbox._end = sent, ended
        streams = []
        for i in range(50):
            n = int(rng.integers(1, 40))
            streams.append(
                await service.submit(str(i), [1 + i] * n, int(rng.integers(1, 40)), predicted_len=float(rng.integers(1, 40)))
            )
            if i % 9 == 8:
                service.abort(streams[i - 3])
            await asyncio.sleep(0.002)
        answers = await asyncio.gather(*map(read, streams))
        seen = scrape(service)
        assert sum(map(len, times.values())) == sum(len(a.token_ids) for a in answers) == seen["vllm:generation_tokens_total"]
        gaps = sum(t[-1] - t[0] for t in times.values())
        assert seen["vllm:inter_token_latency_seconds_sum"] == pytest.approx(gaps)
        assert seen["vllm:inter_token_latency_seconds_count"] == sum(len(t) - 1 for t in times.values())
        first = sum(times[s.request.rid][0] - s.request.arrival for s in streams if s.request.rid in times)
        assert seen["vllm:time_to_first_token_seconds_sum"] == pytest.approx(first)
        assert seen["vllm:time_to_first_token_seconds_count"] == len(times)
        done = [s.request for s, a in zip(streams, answers, strict=True) if a.reason == "length"]
        e2e = sum(times[r.rid][-1] - r.arrival for r in done)
        assert seen["vllm:e2e_request_latency_seconds_sum"] == pytest.approx(e2e)
        tpot = [(t[-1] - t[0]) / (len(t) - 1) for t in (times[r.rid] for r in done) if len(t) > 1]
        assert seen["vllm:request_time_per_output_token_seconds_sum"] == pytest.approx(math.fsum(tpot))
        assert seen["vllm:request_success_total,error"] > 0 and seen["vllm:request_success_total,abort"] > 0
        assert not service._tally._last_token and not service._outbox._endings
        return seen["vllm:num_preemptions_total"]

    options = {"policy": SRPT(), "kv": Paged(320, 16, 0.0), "max_num_seqs": 6, "batching": batching()}
    assert run(main, preemption=preemption(), **options) > 3


def test_a_histogram_counts_up_to_its_bounds():
    histogram = Histogram((1, 2, 4))
    for value, times in ((0.5, 1), (1, 2), (1.5, 3), (4, 1), (9, 2)):
        histogram.add(value, times)
    assert histogram.counts == [3, 3, 1, 2] and histogram.num == 9
    assert histogram.sum == 0.5 + 2 + 4.5 + 4 + 18


def test_predictions_are_counted_too():
    async def main(service):
        streams = [await service.submit(str(i), [1], 9, SamplingParams(), answer_len=4) for i in range(3)]
        await asyncio.gather(*map(read, streams))
        await until(lambda: service._predicting.seconds.num >= 1)
        return scrape(service)

    seen = run(main, policy=SRPT(), predictor=Constant(), fallback_len=8.0, replay=True, prediction_deadline=100.0)
    assert 1 <= seen["lengthwise_prediction_seconds_count"] <= 3
    assert (seen["lengthwise_predicted_ratio_count"], seen["lengthwise_predicted_ratio_sum"]) == (3, 1.5)
    assert seen["lengthwise_prediction_fallbacks_total,late"] == 0
