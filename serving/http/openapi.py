"""`/openapi.json`: the routes and the fields of their requests, from the models that read them.

It says nothing about this server but what every server of this version says, so it needs no token.
"""

from collections.abc import Sequence

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


def documentation_route(routes: Sequence[Route]) -> Path:
    """`/openapi.json`."""
    content = dump(document(routes))

    async def answer(request: Request) -> Response:
        return Response(content, headers=HEADERS | {"content-type": "application/json"})

    return Path("/openapi.json", answer)
