"""The application: OpenAI's routes over one Service. A route reads like the protocol; what it needs stands beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import choose_encoder

import lengthwise

from .answering import Answering, unless_gone
from .answers import ChatShape, CompletionShape, Shape, speller
from .body_limit import BodyLimit
from .calls import calls, check_num, request_key
from .errors import ERRORS, Refused, install
from .models import Models
from .prompts import Prompt, Prompts
from .protocol import Asked, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from .request_id import REQUEST_ID, EchoId
from .security import METRICS, KeyCheck, open_routes
from .service import Service
from .settings import Settings
from .sse import EventStream, events
from .writer import Writer


def make_app(service: Service, settings: Settings, about: Mapping[str, Any] | None = None) -> FastAPI:
    """The server's ASGI application over a service that has started. about: what /v1/models says beside the model's name."""
    app = FastAPI(
        title="Lengthwise",
        version=lengthwise.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=ERRORS,
    )
    install(app)
    app.add_middleware(BodyLimit, limit=settings.max_body, seconds=settings.upload_timeout)
    if settings.api_key is not None:
        app.add_middleware(KeyCheck, api_key=settings.api_key, open_paths=open_routes(settings))  # before any body
    app.add_middleware(EchoId)  # outermost: around their answers too
    model, most = service.model, service.max_model_len
    models, prompts, spell = Models(model.name, most, about or {}), Prompts(model), speller(model)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        models.check(body.model)
        check_num(body.num_prompts * body.n, settings)
        service.check_room()  # before anything is tokenized for nobody
        given = await prompts.completion(body.prompt)
        echo = [prompt.text or "" for prompt in given for _ in range(body.n)] if body.echo else None
        shape = CompletionShape(spell, body.logprobs is not None, echo, body.return_token_ids)
        return await answer(request, body, given, shape)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        models.check(body.model)
        check_num(body.n, settings)
        service.check_room()
        given = await prompts.chat(body.messages)
        return await answer(request, body, [given], ChatShape(spell, body.logprobs, body.return_token_ids))

    async def answer(request: Request, body: Asked, given: list[Prompt], shape: Shape) -> Response:
        key = request_key(request.headers)
        asked = calls(key, body, request.headers, given, settings, most)
        live = await Answering.submit(service, asked)
        writer = Writer(key, body, shape, asked, live, model.name)
        headers = {REQUEST_ID: key}
        deltas = live.deltas()
        try:
            if not body.stream:
                whole = await unless_gone(request.receive, live.whole())
                return JSONResponse(writer.whole(whole), headers=headers)
            first = await unless_gone(request.receive, anext(deltas))  # so that a call refused late still has a status
        except BaseException:
            live.abort()
            raise
        return EventStream(events(first, deltas, writer), live, headers)

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [models.card]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        models.check(name)
        return models.card

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        models.check(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise Refused("give either a prompt or messages", param="prompt")
        if body.prompt is not None:
            ids = await prompts.tokens(body.prompt, body.add_special_tokens)
        else:
            ids = (await prompts.chat(body.messages or [])).ids
        return {"count": len(ids), "max_model_len": most, "tokens": ids}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, str]:
        models.check(body.model)
        return {"prompt": await prompts.text(body.tokens)}

    @app.get("/health")
    async def health() -> Response:
        now = service.health()
        ok = now.ok and not now.draining  # nobody new should be sent here
        return JSONResponse({**now._asdict(), "ok": ok}, 200 if ok else 503)

    @app.head(METRICS, include_in_schema=False)
    @app.get(METRICS)
    async def metrics(request: Request) -> Response:
        write, kind = choose_encoder(request.headers.get("accept", ""))
        return Response(write(service.metrics.registry), headers={"content-type": kind})

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": lengthwise.__version__}

    return app
