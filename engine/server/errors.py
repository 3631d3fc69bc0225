"""Errors as OpenAI's clients read them: {"error": {message, type, param, code}}, whatever went wrong.

No text of a prompt is repeated in one, so that none finds its way into a log of errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from .health import Down, Full
from .request_id import REQUEST_ID, own_id

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 499: "client_gone"}
CODES = {
    401: "invalid_api_key",
    404: "not_found",
    408: "upload_timeout",
    413: "body_too_large",
    429: "queue_full",
    503: "unavailable",
}


class Fault(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: Fault


ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}}


class Refused(Exception):
    """A call that gets an error instead of an answer. param: the field at fault. code: for programs to tell it by."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code


@contextmanager
def refusing(param: str | None = None) -> Iterator[None]:
    """A ValueError within is the engine's word on what a client asked: 400."""
    try:
        yield
    except ValueError as error:
        raise Refused(str(error), param=param) from error


class Gone(Exception):
    """The client has left: nobody reads an answer."""


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or CODES.get(status)}}


def error_response(
    message: str, status: int, param: str | None = None, code: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    return JSONResponse(error_body(message, status, param, code), status, headers=None if headers is None else dict(headers))


def install(app: FastAPI) -> None:
    """Let every error of `app` leave it in this form. Mutates `app`."""

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return error_response(error.message, error.status, error.param, error.code)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        param, message = described(error)
        return error_response(message, 400, param)

    @app.exception_handler(Full)
    async def full(_: Request, error: Full) -> Response:
        wait = str(max(1, math.ceil(error.retry_after)))
        return error_response(f"too many requests wait; come back in {wait} s", 429, headers={"retry-after": wait})

    @app.exception_handler(Down)
    async def down(_: Request, error: Down) -> Response:
        return error_response(str(error), 503)

    @app.exception_handler(Gone)
    async def gone(_: Request, __: Gone) -> Response:
        return Response(status_code=499)  # sent to nobody

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        status = 400 if error.status_code == 422 else error.status_code
        return error_response(str(error.detail or HTTPStatus(status).phrase), status, headers=error.headers)

    @app.exception_handler(Exception)
    async def broken(request: Request, __: Exception) -> Response:  # a fault of ours: whoever runs the application logs it
        key = own_id(request.headers)  # this handler stands around all middleware
        return error_response("the server failed at this call", 500, headers=None if key is None else {REQUEST_ID: key})


def described(error: RequestValidationError) -> tuple[str | None, str]:
    """(the field at fault, what is wrong with it), of the first field with faults; every way in which it is wrong, once."""
    faults = error.errors()
    if faults[0]["type"] == "json_invalid":
        return None, f"the body is no JSON: {faults[0].get('ctx', {}).get('error', 'cannot be read')}"
    places = [[part for part in fault["loc"] if part != "body"] for fault in faults]
    if not places[0]:
        if faults[0]["type"] == "value_error":
            return None, _plainly(faults[0]["msg"])
        return None, "the body must be a JSON object, sent as application/json"
    field = places[0][0]
    said = dict.fromkeys(_plainly(fault["msg"]) for fault, place in zip(faults, places, strict=True) if place[:1] == [field])
    return str(field), f"{field}: {'; or '.join(list(said)[:4])}"


def _plainly(message: str) -> str:
    return message.removeprefix("Value error, ").removeprefix("Input ")
