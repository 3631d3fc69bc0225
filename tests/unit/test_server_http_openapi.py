"""Calls drawn from the server's own OpenAPI document: whatever they say, the answer is no 5xx and has the form it promises."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fake_service import OPEN, Fake
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.engine.server.app import make_app

DOCUMENT = make_app(Fake(), OPEN).openapi()
POSTS = sorted(path for path, item in DOCUMENT["paths"].items() if "post" in item)
TEXT = st.text(max_size=20)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a schema of the document allows."""
    if "$ref" in schema:
        return values(DOCUMENT["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]])
    if "anyOf" in schema:
        return st.one_of([values(each) for each in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    kind = schema.get("type")
    if kind == "object":
        needed, props = set(schema.get("required", ())), schema.get("properties", {})
        drawn = {name: values(each) for name, each in props.items()}
        return st.fixed_dictionaries(
            {name: each for name, each in drawn.items() if name in needed},
            optional={name: each for name, each in drawn.items() if name not in needed},
        )
    if kind == "array":
        return st.lists(values(schema["items"]), min_size=schema.get("minItems", 0), max_size=4)
    if kind == "integer":
        least, most = schema.get("minimum"), schema.get("maximum", schema.get("exclusiveMaximum"))
        return st.integers(least, most if most is None else most - 1) | st.integers(max(least or 0, 0), 30)
    if kind == "number":
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        out = st.floats(low, allow_nan=False, allow_infinity=False, exclude_min="exclusiveMinimum" in schema)
        return out | st.floats(0.1, 1.0)
    kinds = {"boolean": st.booleans(), "null": st.none(), "string": st.text(max_size=schema.get("maxLength", 30))}
    return kinds[kind] if kind else ANYTHING


def bodies(path: str) -> st.SearchStrategy[Any]:
    """Mostly what the document allows; sometimes with a field of anything, sometimes anything."""
    schema = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    good = values(schema)
    names = sorted(DOCUMENT["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]["properties"])
    spoilt = st.builds(lambda body, name, value: {**body, name: value}, good, st.sampled_from(names), ANYTHING)
    return good | spoilt | ANYTHING


def check(path: str, examples: list[Any]) -> list[int]:
    async def work() -> list[int]:
        out = []
        app = make_app(Fake(), OPEN)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
            for body in examples:
                content = json.dumps(body).encode()  # NaN and infinity too, which Python reads back
                response = await client.post(path, content=content, headers={"content-type": "application/json"})
                out.append(response.status_code)
                assert response.status_code < 500, (path, body)
                if response.status_code >= 400:
                    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        return out

    return asyncio.run(work())


@pytest.mark.parametrize("path", POSTS)
def test_no_call_is_answered_by_a_fault(path):
    seen: list[int] = []

    @settings(max_examples=30)
    @given(st.lists(bodies(path), min_size=4, max_size=8))
    def run(examples):
        seen.extend(check(path, examples))

    run()
    assert 400 in seen and len(seen) >= 100


def test_the_document_names_the_errors_as_they_are():
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"} == set(POSTS)
    for path in POSTS:
        responses = DOCUMENT["paths"][path]["post"]["responses"]
        schema = responses["4XX"]["content"]["application/json"]["schema"]
        assert "422" not in responses and schema["$ref"].endswith("/ErrorBody")
