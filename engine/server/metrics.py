"""Metrics: the tally, the scheduler and the inbox as Prometheus reads them, made when it asks and not before.

Names are vLLM's where it has them, so that dashboards, gateways and clients find them; ours begin with `lengthwise_`. The
client library's own histograms take one value a call, which would cost a step its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from .tally import Histogram, Tally

Numbers = Callable[[], Mapping[str, float]]


class Metrics(Collector):
    """A collector in a `registry` of its own. gauges, counters: give current values by metric name. fallbacks: by kind.
    cache: block_size and num_gpu_blocks. prediction: seconds of each batch of predictions, where there is a predictor."""

    def __init__(
        self,
        model_name: str,
        tally: Tally,
        *,
        gauges: Numbers,
        counters: Numbers,
        fallbacks: Numbers,
        cache: Mapping[str, int],
        prediction: Histogram | None = None,
    ) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        self._tally = tally
        self._gauges, self._counters, self._fallbacks = gauges, counters, fallbacks
        self._cache = cache
        self._prediction = prediction
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        names, values, tally = list(self._labels), list(self._labels.values()), self._tally
        for name, value in self._gauges().items():
            gauge = GaugeMetricFamily(name, DOCS[name], labels=names)
            gauge.add_metric(values, value)
            yield gauge
        info = GaugeMetricFamily("vllm:cache_config_info", "The KV pool.", labels=[*names, *self._cache])
        info.add_metric([*values, *map(str, self._cache.values())], 1)
        yield info
        counts = {
            **self._counters(),
            "vllm:prompt_tokens": tally.prompt_tokens,
            "vllm:generation_tokens": tally.generation_tokens,
            "vllm:prefix_cache_queries": tally.queried_tokens,
            "lengthwise_starved": tally.num_starved,
            "lengthwise_aborted": tally.reasons["abort"],
        }
        for name, value in counts.items():
            counter = CounterMetricFamily(name, DOCS[name], labels=names)
            counter.add_metric(values, value)
            yield counter
        kinds: dict[tuple[str, str], Mapping[str, float]] = {
            ("vllm:request_success", "finished_reason"): tally.reasons,
            ("lengthwise_rejected", "kind"): {"full": tally.num_full, "invalid": tally.num_invalid},
            ("lengthwise_prediction_fallbacks", "kind"): self._fallbacks(),
        }
        for (name, label), numbers in kinds.items():
            counter = CounterMetricFamily(name, DOCS[name], labels=[*names, label])
            for kind, value in numbers.items():
                counter.add_metric([*values, kind], value)
            yield counter
        histograms = {name: getattr(tally, field) for name, field in HISTOGRAMS.items()}
        if self._prediction is not None:
            histograms["lengthwise_prediction_seconds"] = self._prediction
        for name, histogram in histograms.items():
            family = HistogramMetricFamily(name, DOCS[name], labels=names)
            counts_now, total, buckets = list(histogram.counts), 0, []
            for bound, count in zip((*histogram.bounds, "+Inf"), counts_now, strict=True):
                total += count
                buckets.append((str(float(bound)) if bound != "+Inf" else "+Inf", total))
            family.add_metric(values, buckets, histogram.sum)
            yield family


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
    "lengthwise_starved": "Requests that waited longer than starved_after.",
    "lengthwise_aborted": "Requests that their client gave up.",
    "lengthwise_rejected": "Requests refused: the queue was full, or they could not be served.",
    "lengthwise_scheduling_seconds": "Planning and booking of a step.",
    "lengthwise_predicted_ratio": "Length / predicted length.",
    "lengthwise_predicted_error_tokens": "|Length - predicted length|.",
    "lengthwise_prediction_seconds": "Predicting a batch of requests.",
    "lengthwise_prediction_fallbacks": "Predictions replaced by a constant, by kind.",
}
