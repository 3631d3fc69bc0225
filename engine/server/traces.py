"""Traces: one OpenTelemetry span for each request, made when it ends, from what is known of it then.

Name and attributes are vLLM's (which follow the GenAI semantic conventions as far as those go), so that dashboards find them;
ours begin with `lengthwise.`. Nothing of a prompt or an answer is in one. Spans leave in a thread of the exporter.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lengthwise.sched import Request

from .outbox import Ending
from .streams import Stream

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

NAME = "llm_request"
HEADERS = ("traceparent", "tracestate")


def trace_context(headers: Mapping[str, str]) -> dict[str, str] | None:
    """The span that a call belongs to, as its headers say; None where they say nothing."""
    return {name: headers[name] for name in HEADERS if name in headers} or None


class Traces:
    """endpoint: where spans are sent by OTLP over HTTP, e.g. http://localhost:4318/v1/traces. exporter: instead of that. Raises
    ValueError without the packages."""

    def __init__(self, endpoint: str, exporter: SpanExporter | None = None) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, Status, StatusCode
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ValueError(
                f"server.otlp_endpoint={endpoint} needs the extra `otel`: pip install 'lengthwise[otel]' ({error})"
            ) from error
        resource = Resource.create({"service.name": "lengthwise"}).merge(
            OTELResourceDetector().detect()
        )  # the user's word last
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("lengthwise")
        self._context = TraceContextTextMapPropagator().extract
        self._kind, self._failed = SpanKind.SERVER, Status(StatusCode.ERROR)

    def ended(self, stream: Stream, ending: Ending, now: float) -> None:
        """The span of a request that has just ended. now: s of the service's clock."""
        epoch = time.time_ns() - round(now * 1e9)
        span = self._tracer.start_span(
            NAME, self._context(stream.trace or {}), self._kind, self._attributes(stream, ending),
            start_time=epoch + round(stream.request.arrival * 1e9),
        )  # fmt: skip
        if ending.reason.startswith(("failed", "rejected")):
            span.set_status(self._failed)
        span.end(epoch + round(ending.time * 1e9))

    def close(self) -> None:
        """Send what is left; waits for it as long as sending may take (10 s, or OTEL_EXPORTER_OTLP_TIMEOUT)."""
        self._provider.shutdown()

    def _attributes(self, stream: Stream, ending: Ending) -> dict[str, Any]:
        request = stream.request
        out: dict[str, Any] = {
            "gen_ai.request.id": stream.key,
            "gen_ai.request.max_tokens": request.max_new_tokens,
            "gen_ai.response.finish_reasons": [ending.reason.partition(":")[0]],
            "gen_ai.usage.prompt_tokens": request.prompt_len,
            "gen_ai.usage.completion_tokens": ending.num_tokens,
            **latencies(request, ending.time),
        }
        if request.prediction is not None and not request.prediction.is_rank_only:
            out["lengthwise.predicted_len"] = request.prediction.mean()
        return out


def latencies(request: Request, end: float) -> dict[str, float]:
    """Of a request that ended at `end` (s): those of the parts that it has reached."""
    arrival, scheduled, first = request.arrival, request._first_scheduled, request._first_token
    out = {"e2e": end - arrival, "time_in_queue": (end if scheduled < 0.0 else scheduled) - arrival}
    if scheduled >= 0.0:
        out["time_in_model_inference"] = end - scheduled
    if first >= 0.0:
        out["time_to_first_token"] = first - arrival
        out["time_in_model_prefill"] = first - scheduled
        out["time_in_model_decode"] = end - first
    return {f"gen_ai.latency.{name}": value for name, value in out.items()}
