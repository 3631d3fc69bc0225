"""KeyCheck: who may ask. All routes want the key but the open ones, which are named here and nowhere else."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import error_response
from .settings import Settings

OPEN = ("/health", "/version")
METRICS = "/metrics"


def open_routes(settings: Settings) -> tuple[str, ...]:
    """Paths that want no key; ("*",) where there is none."""
    if settings.api_key is None:
        return ("*",)
    return (*OPEN, METRICS) if settings.open_metrics else OPEN


class KeyCheck:
    """Around `app`: 401 without `Authorization: Bearer KEY`, before the body is read."""

    def __init__(self, app: ASGIApp, api_key: str, open_paths: tuple[str, ...]) -> None:
        self._app = app
        self._wanted = f"Bearer {api_key}".encode()
        self._open = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open:
            given = Headers(scope=scope).get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, self._wanted):
                answer = error_response("a valid API key is wanted", 401, headers={"www-authenticate": "Bearer"})
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)
