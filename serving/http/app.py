"""All routes as one ASGI application, with checks of tokens and hosts before them."""

import ipaddress
from collections.abc import Collection, Sequence
from datetime import UTC, datetime

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from serving import caller
from serving.bearer_tokens import token_of
from serving.errors import Code, ServiceError
from serving.frontend import Frontend, State
from serving.http.chat import Chat
from serving.http.completions import Completions
from serving.http.connection import RESERVED
from serving.http.control import Pauses, Weights
from serving.http.errors import answer, dialect_of, error_answer, no_such_model
from serving.http.generation import Generation, Reader
from serving.http.messages import CountTokens, Messages
from serving.http.openapi import documentation_route
from serving.http.page import page_routes
from serving.http.responses import CountInputTokens, Responses
from serving.http.tokens import Detokenize, Tokenize
from serving.version import NAME, VERSION

_PROBES = ("/health", "/ready", "/ping")


def make_app(
    frontend: Frontend,
    *,
    tokens: Sequence[bytes],
    max_bytes: int,
    allowed_hosts: Collection[str] | None = None,
    allowed_origins: Collection[str] = (),
    with_page: bool = True,
) -> ASGIApp:
    """The application.

    Args:
      tokens: bearer tokens, read again for every request; if empty, no token is needed.
      max_bytes: most bytes of a request's body.
      allowed_hosts: allowed names in the Host header, in addition to those of this machine; None
        allows all.
      allowed_origins: origins whose pages may use the server from a browser; "*" allows all.
      with_page: whether `/` leads to the page.
    """
    pages = _Pages(frontend)
    reader = Reader(max_bytes=max_bytes, on_free=frontend.memory.schedule)
    generating = [
        Completions(frontend),
        Chat(frontend),
        Messages(frontend),
        CountTokens(frontend),
        Responses(frontend),
        CountInputTokens(frontend),
        Tokenize(frontend),
        Detokenize(frontend),
        Weights(frontend),
    ]
    pauses = Pauses(frontend)
    routes = [
        Route("/health", pages.health),
        Route("/ping", pages.health, methods=["GET", "POST"]),
        Route("/ready", pages.health),
        Route("/metrics", pages.metrics),
        Route("/version", pages.version),
        Route("/reset_prefix_cache", pages.reset_prefix_cache, methods=["POST"]),
        Route("/pause", pauses.pause, methods=["POST"]),
        Route("/resume", pauses.resume, methods=["POST"]),
        Route("/v1/models", pages.models),
        Route("/v1/models/{name:path}", pages.model),
        Route("/tokenizer_info", pages.tokenizer_info),
        *(
            Route(one.path, Generation(one, frontend, reader), methods=["POST"])
            for one in generating
        ),
    ]
    static = [documentation_route(generating), *(page_routes() if with_page else [])]
    app = Starlette(routes=routes + static, exception_handlers={HTTPException: _no_such_page})
    app.router.redirect_slashes = False
    files = frozenset(route.path for route in static)
    guard = _Guard(app, tokens, allowed_hosts, frontend, without_token=files)
    outermost = _WithoutSlash(guard, files)
    if not allowed_origins:
        return outermost
    # Outermost: a preflight request has no token, and a page may read a refusal only with the
    # headers of its origin.
    return CORSMiddleware(
        outermost,
        allow_origins=allowed_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["retry-after", "x-request-id"],
    )


class _WithoutSlash:
    """Reads a path that ends in a slash as the same path without it.

    Starlette would redirect, to an absolute address: behind a proxy it lacks https and the proxy's
    own path.

    Args:
      exact: paths of files, in which a slash at the end changes what relative links mean.
    """

    def __init__(self, app: ASGIApp, exact: frozenset[str]):
        self._app, self._exact = app, exact

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].rstrip("/")
        if path and not {path, scope["path"]} & self._exact:
            scope = {**scope, "path": path}
        await self._app(scope, receive, send)


class _Guard:
    """Refuses requests without a token, for a foreign host, and on a reserved connection."""

    def __init__(
        self,
        app: ASGIApp,
        tokens: Sequence[bytes],
        allowed_hosts: Collection[str] | None,
        frontend: Frontend,
        *,
        without_token: Collection[str],
    ):
        self._app, self._frontend, self._without_token = app, frontend, without_token
        self._tokens, self._allowed_hosts = tokens, allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = None if scope["path"] in _PROBES else self._refusal(scope)
        if error is None:
            await self._app(scope, receive, send)
            return
        self._frontend.refused("http", scope["path"], error)
        dialect = dialect_of(scope["path"])
        await error_answer(error, content=dialect.error)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ServiceError | None:
        values = lambda name: [value for key, value in scope["headers"] if key == name]
        if scope.get("state", {}).get(RESERVED):
            return ServiceError(
                Code.UNAVAILABLE,
                "too many connections are open; try again, or use another server",
                retry_after=1.0,
            )
        host = next(iter(values(b"host")), None)
        if None not in (host, self._allowed_hosts) and not is_allowed(host, self._allowed_hosts):
            return ServiceError(
                Code.PERMISSION_DENIED,
                f"Host: {name_of(host)!r} is no name of this server; its operator may allow it "
                "with "
                "--allowed-hosts",
            )
        if scope["path"] in self._without_token:
            return None
        keys = values(b"x-api-key")  # of Anthropic's clients
        given = values(b"authorization") or [b"Bearer " + key for key in keys]
        token = token_of(given, self._tokens)
        if self._tokens and token is None:
            return ServiceError(
                Code.UNAUTHENTICATED, "send one known token: Authorization: Bearer TOKEN"
            )
        caller.enter(token)
        return None


class _Pages:
    """Handlers of the routes that do not generate."""

    def __init__(self, frontend: Frontend):
        self._frontend = frontend

    async def health(self, request: Request) -> Response:
        state, is_paused = self._frontend.state, self._frontend.load.is_paused
        # A paused server takes requests, which wait: no probe should restart or avoid it.
        content = {"status": state.value, "paused": is_paused}
        return answer(content, 200 if state is State.SERVING else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(
            self._frontend.metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST}
        )

    async def version(self, request: Request) -> Response:
        return answer({"version": VERSION})

    async def tokenizer_info(self, request: Request) -> Response:
        tokenizer = self._frontend.tokenizer
        if tokenizer is None:
            return error_answer(ServiceError(Code.NOT_FOUND, "this model has no tokenizer"))
        return answer(tokenizer.description)

    async def reset_prefix_cache(self, request: Request) -> Response:
        try:
            if "origin" in request.headers:
                # A page of any site can make a browser send a POST without a body; its origin is in
                # this header.
                raise ServiceError(Code.PERMISSION_DENIED, "not for pages in a browser")
            return answer({"pages": await self._frontend.flush_prefix_cache()})
        except ServiceError as error:
            self._frontend.refused("http", request.url.path, error)
            return error_answer(error)

    async def models(self, request: Request) -> Response:
        name = self._frontend.name
        ends = {"has_more": False, "first_id": name, "last_id": name}  # Anthropic's
        return answer({"object": "list", "data": [self._model()], **ends})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._frontend.name:
            return error_answer(no_such_model(name, self._frontend.name))
        return answer(self._model())

    def _model(self) -> dict:
        frontend = self._frontend
        return {
            "id": frontend.name,
            "object": "model",
            "type": "model",  # this, the name and the time are Anthropic's
            "display_name": frontend.name,
            "created_at": datetime.fromtimestamp(int(frontend.started), UTC).isoformat(),
            "created": int(frontend.started),
            "owned_by": NAME,
            "root": frontend.name,
            "parent": None,
            "max_model_len": frontend.config.max_model_len,
            "method": frontend.method,
            "weights_version": frontend.load.version,
            "num_speculative_tokens": frontend.config.num_draft,
        }


async def _no_such_page(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    content = dialect_of(request.url.path).no_route(error.status_code, message)
    return answer(content, error.status_code, error.headers)


def name_of(host: bytes) -> str:
    """The name in a Host header, without port, brackets and trailing dot."""
    text = host.decode("latin-1").strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].removesuffix(".")


def is_allowed(host: bytes, allowed: Collection[str]) -> bool:
    """Whether the Host header names this machine itself, or one of `allowed` ("*" allows all).

    The owner of a web page can let its name resolve to 127.0.0.1, so that the page reads answers of
    a server there (DNS rebinding). The browser still sends the page's name as Host, so a server
    without tokens refuses it.
    """
    name = name_of(host)
    if "*" in allowed or name == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name in {one.lower() for one in allowed}
    spelled = {one.lower().strip("[]") for one in allowed}
    return address.is_loopback or str(address) in spelled or name in spelled
