"""Metrics: the tally, the scheduler and the inbox as Prometheus reads them, made when it asks and not before.

Names are vLLM's where it has them, so that dashboards, gateways and clients find them; ours begin with `lengthwise_`. The
client library's own histograms take one value a call, which would cost a step its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from lengthwise.sched import Scheduler

from ..native.inbox import Inbox
from .predicting import Predicting
from .refining import Refining
from .tally import Histogram, Tally


class Metrics(Collector):
    """A collector in a `registry` of its own. step_age: s since the last step, while there is something to do. predicting,
    refining: None where nobody predicts, or predicts anew."""

    def __init__(
        self,
        model_name: str,
        tally: Tally,
        scheduler: Scheduler,
        inbox: Inbox,
        predicting: Predicting | None,
        refining: Refining | None,
        *,
        num_waiting: Callable[[], int],
        step_age: Callable[[], float],
    ) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        self._tally, self._scheduler, self._inbox, self._predicting = tally, scheduler, inbox, predicting
        self._refining = refining
        self._num_waiting, self._step_age = num_waiting, step_age
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        names, values = list(self._labels), list(self._labels.values())
        tally, scheduler, kv = self._tally, self._scheduler, self._scheduler.kv
        gauges = {
            "vllm:num_requests_running": scheduler.num_running,
            "vllm:num_requests_waiting": self._num_waiting(),
            "vllm:kv_cache_usage_perc": kv.in_use / kv.num_blocks,
            "lengthwise_last_step_age_seconds": self._step_age(),
        }
        for name, value in gauges.items():
            gauge = GaugeMetricFamily(name, DOCS[name], labels=names)
            gauge.add_metric(values, value)
            yield gauge
        info = GaugeMetricFamily("vllm:cache_config_info", "The KV pool.", labels=[*names, "block_size", "num_gpu_blocks"])
        info.add_metric([*values, str(kv.block_size), str(kv.num_blocks)], 1)
        yield info
        counts = {
            "vllm:num_preemptions": scheduler.num_preemptions,
            "vllm:prompt_tokens": tally.prompt_tokens,
            "vllm:generation_tokens": tally.generation_tokens,
            "vllm:prefix_cache_queries": tally.queried_tokens,
            "vllm:prefix_cache_hits": scheduler.cached_tokens,
            "lengthwise_thrashed": scheduler.num_thrashed,
            "lengthwise_futile_preemptions": scheduler.num_futile,
            "lengthwise_starved": tally.num_starved,
            "lengthwise_aborted": tally.reasons["abort"],
        }
        for name, value in counts.items():
            counter = CounterMetricFamily(name, DOCS[name], labels=names)
            counter.add_metric(values, value)
            yield counter
        fallbacks = {} if self._predicting is None else self._predicting.counts
        kinds = {
            ("vllm:request_success", "finished_reason"): tally.reasons,
            ("lengthwise_rejected", "kind"): {"full": tally.num_full, "invalid": tally.num_invalid},
            ("lengthwise_prediction_fallbacks", "kind"): {**fallbacks, "late": self._inbox.num_late},
        }
        if self._refining is not None:
            kinds["lengthwise_refinement_failures", "kind"] = self._refining.counts
        for (name, label), numbers in kinds.items():
            counter = CounterMetricFamily(name, DOCS[name], labels=[*names, label])
            for kind, value in numbers.items():
                counter.add_metric([*values, kind], value)
            yield counter
        histograms = {name: getattr(tally, field) for name, field in HISTOGRAMS.items()}
        if self._predicting is not None:
            histograms["lengthwise_prediction_seconds"] = self._predicting.seconds
        if self._refining is not None:
            histograms["lengthwise_refinement_seconds"] = self._refining.seconds
        for name, histogram in histograms.items():
            family = HistogramMetricFamily(name, DOCS[name], labels=names)
            family.add_metric(values, cumulative(histogram), histogram.sum)
            yield family


def cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    """(upper bound, how many are at most that), the last of all."""
    bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))


HISTOGRAMS = {  # name: field of Tally
    "vllm:iteration_tokens_total": "iteration_tokens",
    "vllm:time_to_first_token_seconds": "ttft",
    "vllm:inter_token_latency_seconds": "itl",
    "vllm:request_time_per_output_token_seconds": "tpot",
    "vllm:e2e_request_latency_seconds": "e2e",
    "vllm:request_queue_time_seconds": "queue",
    "vllm:request_prefill_time_seconds": "prefill",
    "vllm:request_decode_time_seconds": "decode",
    "vllm:request_inference_time_seconds": "inference",
    "vllm:request_prompt_tokens": "prompt_len",
    "vllm:request_generation_tokens": "output_len",
    "vllm:request_params_max_tokens": "max_new_tokens",
    "vllm:request_params_n": "num_answers",
    "lengthwise_wait_seconds": "wait",
    "lengthwise_scheduling_seconds": "scheduling",
    "lengthwise_predicted_ratio": "predicted_ratio",
    "lengthwise_predicted_error_tokens": "predicted_error",
}

DOCS = {
    "vllm:num_requests_running": "Requests in the batch.",
    "vllm:num_requests_waiting": "Requests that have come and are not in the batch.",
    "vllm:kv_cache_usage_perc": "Share of the KV blocks in use, 1 is all.",
    "lengthwise_last_step_age_seconds": "Time since the last step ended; 0 while there is nothing to do.",
    "vllm:num_preemptions": "Times that a request was taken off the batch.",
    "vllm:prompt_tokens": "Prompt tokens of requests that had their first token.",
    "vllm:generation_tokens": "Tokens generated.",
    "vllm:prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "vllm:request_success": "Requests that ended, by reason.",
    "vllm:iteration_tokens_total": "Tokens computed in a step.",
    "vllm:time_to_first_token_seconds": "First token - arrival.",
    "vllm:inter_token_latency_seconds": "Gaps between the tokens of a request.",
    "vllm:request_time_per_output_token_seconds": "(Last - first token) / (tokens - 1).",
    "vllm:e2e_request_latency_seconds": "Last token - arrival.",
    "vllm:request_queue_time_seconds": "First scheduled - arrival, of those that finish.",
    "vllm:request_prefill_time_seconds": "First token - first scheduled.",
    "vllm:request_decode_time_seconds": "Last token - first token.",
    "vllm:request_inference_time_seconds": "Last token - first scheduled.",
    "vllm:request_prompt_tokens": "Tokens of a prompt.",
    "vllm:request_generation_tokens": "Tokens of an answer.",
    "vllm:request_params_max_tokens": "max_new_tokens asked for.",
    "vllm:request_params_n": "Answers to a request: each of several is a request of its own here.",
    "lengthwise_wait_seconds": "First scheduled - arrival of all that ended; of those never scheduled, all their time.",
    "lengthwise_thrashed": "Requests that were taken off the batch more than three times.",
    "lengthwise_futile_preemptions": "Times that a request was taken off the batch again without a token since it came back.",
    "lengthwise_starved": "Requests that waited longer than starved_after.",
    "lengthwise_aborted": "Requests that their client gave up.",
    "lengthwise_rejected": "Requests refused: the queue was full, or they could not be served.",
    "lengthwise_scheduling_seconds": "Planning and booking of a step.",
    "lengthwise_predicted_ratio": "Length / predicted length, as it was last predicted.",
    "lengthwise_predicted_error_tokens": "|Length - predicted length|, as it was last predicted.",
    "lengthwise_prediction_seconds": "Predicting a batch of requests.",
    "lengthwise_prediction_fallbacks": "Predictions replaced by a constant, by kind.",
    "lengthwise_refinement_seconds": "Predicting anew those who decode, in the step loop.",
    "lengthwise_refinement_failures": "Predictions that stayed as they were because the new one was none, by kind.",
}
