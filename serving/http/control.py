"""`/v1/weights`, `/pause` and `/resume`: orders to the engine, of callers with the admin scope."""

from dataclasses import replace
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from serving.errors import ServiceError
from serving.frontend import Frontend
from serving.http.errors import OPENAI, answer, error_answer
from serving.http.fields import Fields, Reading
from serving.http.route import Caller, Encode, Route


class WeightsFields(Fields):
    """Fields of a request."""

    folder: str | None = None
    head: str | None = None
    version: str | None = None
    running: str = "keep"


class Weights(Route[WeightsFields]):
    """Other weights for the engine, from folders on the server's machine."""

    path = "/v1/weights"
    dialect = OPENAI
    fields = WeightsFields
    is_for_admins = True

    def read(self, content: dict[str, object], caller: Caller) -> Encode:
        strict = replace(self._frontend.limits, unknown_fields="refuse")
        return self._prepare(WeightsFields.read(content, Reading(strict)), caller)

    def _prepare(self, fields: WeightsFields, caller: Caller) -> Encode:
        given = fields.folder, fields.head, fields.version, fields.running

        async def encode() -> dict:
            version = await self._frontend.update_weights(*given)
            return {"object": "weights", "version": version}

        return encode


class Pauses:
    """Handlers of the routes without a body."""

    def __init__(self, frontend: Frontend):
        self._frontend = frontend

    async def pause(self, request: Request) -> Response:
        """Stops after the rounds in flight."""
        return await self._answer("pause", request)

    async def resume(self, request: Request) -> Response:
        """Ends a pause."""
        return await self._answer("resume", request)

    async def _answer(self, order: Literal["pause", "resume"], request: Request) -> Response:
        try:
            version = await self._frontend.control(order)
        except ServiceError as error:
            self._frontend.refused("http", request.url.path, error)
            return error_answer(error)
        return answer({"paused": order == "pause", "version": version})
