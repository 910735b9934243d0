"""`/openapi.json` and `/docs`: the routes and the fields of their requests, made from the models
that read them.

Both say nothing about this server but what every server of this version says, so they need no
token.
"""

from collections.abc import Mapping, Sequence
from html import escape

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as Path

from serving.http.errors import dump
from serving.http.page import HEADERS
from serving.http.route import Route
from serving.version import NAME, VERSION

_SCHEMAS = "#/components/schemas/"
_READ = {
    "/health": "whether the server accepts requests",
    "/ready": "the same",
    "/ping": "the same",
    "/version": "the version of the server",
    "/metrics": "metrics in Prometheus' text format",
    "/v1/models": "the model",
    "/tokenizer_info": "the model's tokenizer_config.json",
}
"""Routes without a body."""


def document(routes: Sequence[Route]) -> dict:
    """The OpenAPI 3.1 document of the routes that take a JSON object, and of those
    without a body.
    """
    models = sorted({(route.fields, "validation") for route in routes}, key=lambda one: str(one[0]))
    references, definitions = models_json_schema(models, ref_template=_SCHEMAS + "{model}")
    answer = {"responses": {"200": {"description": "the answer"}}}
    paths: dict[str, dict] = {
        path: {"get": {"summary": text} | answer} for path, text in _READ.items()
    }
    for route in routes:
        schema = references[route.fields, "validation"]
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        summary = (type(route).__doc__ or "").partition("\n")[0]
        paths[route.path] = {"post": {"summary": summary, "requestBody": body} | answer}
    return {
        "openapi": "3.1.0",
        "info": {"title": NAME, "version": VERSION},
        "paths": paths,
        "components": {"schemas": definitions["$defs"]},
    }


def documentation_routes(routes: Sequence[Route]) -> list[Path]:
    """`/openapi.json`, and `/docs`, a page with the same that loads nothing."""
    content = document(routes)
    return [
        Path("/openapi.json", _fixed(dump(content), "application/json")),
        Path("/docs", _fixed(_page(content).encode(), "text/html; charset=utf-8")),
    ]


def _fixed(content: bytes, kind: str):
    async def answer(request: Request) -> Response:
        return Response(content, headers=HEADERS | {"content-type": kind})

    return answer


def _page(content: Mapping) -> str:
    schemas, parts = content["components"]["schemas"], []
    for path, methods in content["paths"].items():
        for method, one in methods.items():
            parts.append(f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(one['summary'])}</p>")
            if "requestBody" in one:
                schema = one["requestBody"]["content"]["application/json"]["schema"]
                fields = schemas[schema["$ref"].removeprefix(_SCHEMAS)]
                rows = (
                    f"<tr><td><code>{escape(name)}</code></td><td>{escape(_kind(field))}</td></tr>"
                    for name, field in fields["properties"].items()
                )
                parts.append(f"<table>{''.join(rows)}</table>")
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{NAME}</title>"
    return f'{head}<h1>{NAME}</h1><p><a href="openapi.json">openapi.json</a></p>{"".join(parts)}'


def _kind(field: Mapping) -> str:
    """The type of a field in words."""
    if "$ref" in field:
        return field["$ref"].removeprefix(_SCHEMAS)
    if "anyOf" in field:
        return " or ".join(_kind(one) for one in field["anyOf"] if one.get("type") != "null")
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}"
    return str(field.get("type", "any"))
