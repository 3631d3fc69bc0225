"""Traces: one span a request, with what is known of it when it ends, whatever the end, and nothing that was said."""

from __future__ import annotations

import asyncio
import http.server
import subprocess
import sys
import threading
from unittest.mock import MagicMock

import httpx
import pytest
import torch
from fake_service import Fake
from native import Spoiling
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from serving import Gate, read, run, until, writer

from lengthwise.engine.server import service, traces
from lengthwise.engine.server.app import make_app
from lengthwise.engine.server.settings import Settings
from lengthwise.engine.server.traces import Traces
from lengthwise.experiments import serve_app
from lengthwise.sched import LengthDistribution
from lengthwise.sched.policies import SJF

torch.set_num_threads(1)

PROMPT = [9, 8, 7]
ALWAYS = {
    "gen_ai.request.id", "gen_ai.request.max_tokens", "gen_ai.response.finish_reasons", "gen_ai.usage.prompt_tokens",
    "gen_ai.usage.completion_tokens", "gen_ai.latency.e2e", "gen_ai.latency.time_in_queue",
}  # fmt: skip
SCHEDULED = {"gen_ai.latency.time_in_model_inference"}
EMITTED = {f"gen_ai.latency.{name}" for name in ("time_to_first_token", "time_in_model_prefill", "time_in_model_decode")}
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def traced(main, engine=None, **options):
    """What `main` returns, and the spans by request id."""
    exporter = InMemorySpanExporter()
    out = run(main, engine, traces=Traces("http://127.0.0.1:9/v1/traces", exporter), **options)
    spans = exporter.get_finished_spans()
    by_id = {span.attributes["gen_ai.request.id"]: span for span in spans}
    assert len(by_id) == len(spans) and all(span.name == "llm_request" and span.kind == SpanKind.SERVER for span in spans)
    return out, by_id


def test_a_span_says_what_the_request_was():
    async def main(service):
        parent = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=b"}
        stream = await service.submit("x", PROMPT, 12, predicted_len=7.5, trace=parent)
        await read(stream)
        await read(await service.submit("y", PROMPT, 3))
        return stream.request

    request, spans = traced(main)
    span, other = spans["x"], spans["y"]
    said = dict(span.attributes)
    assert set(said) == ALWAYS | SCHEDULED | EMITTED | {"lengthwise.predicted_len"}
    assert said["gen_ai.request.max_tokens"] == 12 and said["gen_ai.response.finish_reasons"] == ("length",)
    assert (said["gen_ai.usage.prompt_tokens"], said["gen_ai.usage.completion_tokens"]) == (3, 12)
    assert said["lengthwise.predicted_len"] == 7.5
    latency = {name.removeprefix("gen_ai.latency."): value for name, value in said.items() if "latency" in name}
    assert latency["time_to_first_token"] == request._first_token - request.arrival > 0
    assert latency["time_in_queue"] == request._first_scheduled - request.arrival
    parts = [latency[name] for name in ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")]
    assert sum(parts) == pytest.approx(latency["e2e"]) and min(parts) >= 0
    assert latency["time_in_model_inference"] == pytest.approx(sum(parts[1:]))
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(latency["e2e"], abs=1e-6)
    assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == SPAN and span.parent.is_remote
    assert span.context.trace_state.get("a") == "b" and span.resource.attributes["service.name"] == "lengthwise"
    assert other.parent is None and "lengthwise.predicted_len" not in other.attributes
    assert span.status.status_code == StatusCode.UNSET


def test_whatever_the_end_there_is_a_span():
    async def main(service):
        service._executor._sampler = Spoiling(128, lambda row: row.request.prompt_len == 2 and row.num_output == 4)
        gate = Gate(service)
        await read(await service.submit("failed", [3, 3], 9, predicted_len=1))
        one = await service.submit("aborted", PROMPT, 2000, predicted_len=2)
        await until(lambda: one._come)
        await gate.shut()
        two = await service.submit("timeout", PROMPT, 2000, timeout=50.0)  # waits for its prediction
        service._clock._start -= 100
        service.abort(one)
        gate.open()
        await read(one), await read(two)

        def fail(plan):
            raise RuntimeError("the device is gone")

        service._executor.submit = fail
        await read(await service.submit("down", PROMPT, 5, predicted_len=3))

    class Never:
        def predict(self, requests):
            threading.Event().wait(0.2)
            return [LengthDistribution.rank_only(1.0) for _ in requests]

    _, spans = traced(main, policy=SJF(), predictor=Never(), fallback_len=4.0, prediction_deadline=1000.0, check=False)
    assert {key: span.attributes["gen_ai.response.finish_reasons"][0] for key, span in spans.items()} == {
        "failed": "failed", "aborted": "aborted", "timeout": "timeout", "down": "failed",
    }  # fmt: skip
    assert {key for key, span in spans.items() if span.status.status_code == StatusCode.ERROR} == {"failed", "down"}
    predicted = {"lengthwise.predicted_len"}
    assert set(spans["aborted"].attributes) == ALWAYS | SCHEDULED | EMITTED | predicted
    assert set(spans["timeout"].attributes) == ALWAYS and spans["timeout"].attributes["gen_ai.latency.e2e"] >= 50
    assert spans["failed"].attributes["gen_ai.usage.completion_tokens"] == 5  # with the one that it failed at
    assert EMITTED.isdisjoint(spans["down"].attributes)


def test_nothing_that_was_said_is_in_a_span():
    engine = writer()

    async def main(service):
        return await read(await service.submit("x", [101, 102, 103, 104], 20, prompt="the secret of the house"))

    answer, spans = traced(main, engine)
    told = spans["x"].to_json()
    for secret in ("secret", answer.text[:12], "101, 102", str(answer.token_ids[:3])[1:-1]):
        assert secret not in told


@pytest.mark.parametrize("headers", [{}, {"traceparent": "nonsense"}, {"traceparent": f"00-{TRACE}-{SPAN}-01"}])
def test_the_headers_of_a_call_name_its_parent(headers):
    service = Fake()

    async def work():
        transport = httpx.ASGITransport(make_app(service, Settings(port=0)))
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            return await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}, headers=headers)

    assert asyncio.run(work()).status_code == 200
    ((*_, fields),) = service.asked
    assert fields["trace"] == (headers or None)

    async def main(service):
        await read(await service.submit("x", PROMPT, 2, trace=fields["trace"]))

    _, spans = traced(main)
    assert (spans["x"].parent is not None) == (TRACE in str(headers))


def test_spans_are_sent_to_the_endpoint():
    got = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((self.path, self.headers["content-type"], self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_): ...

    async def main(service):
        await read(await service.submit("x", PROMPT, 2))

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        run(main, traces=Traces(f"http://127.0.0.1:{server.server_port}/v1/traces"))
        server.shutdown()
        thread.join()
    assert [(path, kind) for path, kind, _ in got] == [("/v1/traces", "application/x-protobuf")] and b"llm_request" in got[0][2]


def test_an_endpoint_that_is_not_there_harms_nobody(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")  # s

    async def main(service):
        return await read(await service.submit("x", PROMPT, 5))

    assert run(main, traces=Traces("http://127.0.0.1:9/v1/traces")).reason == "length"


@pytest.mark.parametrize("failing", ["loaded", "told_by", "check_lengths", "Service"])
def test_no_exporter_outlives_a_server_that_cannot_be_made(failing, monkeypatch):
    made, closed = [], []

    class Noted(Traces):
        def __init__(self, endpoint):
            super().__init__(endpoint, InMemorySpanExporter())
            made.append(self)

        def close(self):
            super().close()
            closed.append(self)

    def fail(*args, **fields):
        raise ValueError("cannot be")

    stage = MagicMock()
    for name in ("load_policy", "new_kv", "make", "told_by", "check_lengths"):
        monkeypatch.setattr(serve_app, name, MagicMock())
    monkeypatch.setattr(serve_app, "served_stage", lambda cfg: stage)
    monkeypatch.setattr(traces, "Traces", Noted)
    monkeypatch.setattr(
        *{"loaded": (stage, "loaded"), "Service": (service, "Service")}.get(failing, (serve_app, failing)), fail
    )
    with pytest.raises(ValueError, match="cannot be"):
        serve_app.compose_service(MagicMock(), Settings(otlp_endpoint="http://127.0.0.1:9/v1/traces"))
    assert len(made) == 1 and closed == made


def test_without_the_packages_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(
        ValueError, match=r"server\.otlp_endpoint=http://t needs the extra `otel`: pip install 'lengthwise\[otel\]'"
    ):
        Traces("http://t")


@pytest.mark.parametrize("endpoint", ["localhost:4318", "", 5])
def test_an_endpoint_that_is_none_is_named(endpoint):
    with pytest.raises(ValueError, match=r"server\.otlp_endpoint"):
        Settings(otlp_endpoint=endpoint)


def test_nothing_is_imported_where_nobody_traces():
    code = (
        "import sys, lengthwise.engine.server.run\n"  # FastAPI looks for the interface by itself
        "assert not [name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))]"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
