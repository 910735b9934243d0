"""`peagle-generate --batch`: answers a file in OpenAI's batch form by the routes of the server.

The engine is in this process.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {...}}
    {"id": "batch_req_1", "custom_id": "a", "response": {"status_code": 200, ...}, "error": null}

The answers stand in the order in which they are done. A line that is no request has an "error" and
no "response"; what a route refuses has the response of the server.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from tqdm import tqdm

from peagle_jax.config import ConfigError
from serving import request_ids
from serving.errors import ServiceError, failure
from serving.frontend import Frontend, State
from serving.http.chat import Chat
from serving.http.completions import Completions
from serving.http.errors import dump_in_turns, status_of
from serving.http.generation import whole_answer
from serving.http.route import Caller, Route
from serving.json_input import parse_object
from serving.settings import Settings, reply_format_of, served_name

if TYPE_CHECKING:
    from peagle_jax import Engine

_log = logging.getLogger(__name__)
_OPEN_PER_SLOT = 2
"""Lines that are open for each slot of the engine, so that one that ends is followed at once."""
_ID = "batch_req_"


@dataclass(frozen=True)
class Result:
    """Numbers of the lines that are answered, failed (also in runs before), and left."""

    answered: int
    failed: int
    left: int


@dataclass(frozen=True)
class _Request:
    custom_id: str
    route: Route
    body: dict


class _BadLine(Exception):
    """A line that is no request; `custom_id` is its own, if it has one that no other line has."""

    def __init__(self, code: str, rule: str, custom_id: str | None = None):
        super().__init__(rule)
        self.code, self.custom_id = code, custom_id


class Batch:
    """A file of requests and that of their answers, which holds those of a run that was ended.

    Raises:
      ConfigError: a file cannot be used, or another run writes the answers.
    """

    def __init__(self, source: Path, out: Path):
        self._source, self._path = source, out
        self._done: set[tuple[str | None, str]] = set()
        self._seen: dict[str, int] = {}
        self._failed = 0
        try:
            with source.open("rb") as file:
                self._left = sum(1 for line in file if line.strip())
            if out.exists() and out.samefile(source):
                raise ConfigError(f"{out}: holds the requests; give another file for the answers")
            with contextlib.ExitStack() as stack:
                self._out = stack.enter_context(out.open("ab"))
                fcntl.flock(self._out, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._read_answers()
                stack.pop_all()
        except BlockingIOError as error:
            raise ConfigError(f"{out}: another run writes it") from error
        except OSError as error:
            name = error.filename or out
            raise ConfigError(f"{name}: cannot be used ({error.strerror})") from error

    def close(self) -> None:
        """Closes the file of the answers, which writes what is left; raises as `run` does."""
        with self._writing():
            self._out.close()

    def run(self, engine: "Engine", settings: Settings) -> Result:
        """Answers the lines that have no answer yet, many at a time.

        Args:
          engine: not yet warm.
          settings: name the model.

        Raises:
          ConfigError: the answers cannot be written.
        """
        from peagle_jax.cli import runs
        from serving.worker import EngineWorker  # imports jax, which mistakes do not need

        worker = EngineWorker(engine, waits_for_all=runs.compiles_in_children())
        reply_format = reply_format_of(settings, engine.tokenizer)
        self._frontend = Frontend(worker, name=served_name(settings), reply_format=reply_format)
        routes = [Chat(self._frontend), Completions(self._frontend)]
        self._routes = {route.path: route for route in routes}
        try:
            asyncio.run(self._answer_all(_OPEN_PER_SLOT * engine.config.max_num_seqs))
        finally:
            worker.join()
        return Result(len(self._done) - self._failed, self._failed, self._left)

    async def _answer_all(self, num_open: int) -> None:
        frontend = self._frontend
        frontend.start()
        try:
            with (
                self._source.open("rb") as file,
                tqdm(total=self._left, unit="request", disable=None) as bar,
            ):
                if await frontend.change(State.STARTING) is State.SERVING:
                    lines = self._unanswered(file, bar)
                    await asyncio.gather(*(self._work(lines, bar) for _ in range(num_open)))
        finally:
            await frontend.drain(0.0)

    def _unanswered(self, file: BinaryIO, bar: tqdm) -> Iterator[tuple[dict, _Request | None]]:
        """The entries of the lines without an answer: with a request, or with an error."""
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            entry, request = self._entry(number, line)
            if _key(entry) in self._done:
                self._advance(bar)
            else:
                yield entry, request

    def _entry(self, number: int, line: bytes) -> tuple[dict, _Request | None]:
        entry = {"id": f"{_ID}{number}", "custom_id": None, "response": None, "error": None}
        try:
            request = self._request(number, line)
        except _BadLine as error:
            entry["custom_id"] = error.custom_id
            entry["error"] = {"code": error.code, "message": f"line {number}: {error}"}
            return entry, None
        entry["custom_id"] = request.custom_id
        return entry, request

    async def _work(self, entries: Iterator[tuple[dict, _Request | None]], bar: tqdm) -> None:
        """Answers lines until none is left, or the engine is dead: then its open lines stay without
        an answer.
        """
        for entry, request in entries:
            if request is not None:
                entry["response"] = await self._response(request)
            if self._frontend.state is not State.SERVING:
                return
            await self._write(entry)
            self._advance(bar)

    async def _write(self, entry: dict) -> None:
        line = await dump_in_turns(entry) + b"\n"
        with self._writing():
            self._out.write(line)
            self._out.flush()
        self._add(entry)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be written ({error.strerror})") from error

    def _advance(self, bar: tqdm) -> None:
        self._left -= 1
        bar.update()

    def _request(self, number: int, line: bytes) -> _Request:
        """The request of a line. Lines come in their order: the first has the custom_id."""
        limits = self._frontend.limits
        max_ids = limits.max_n * self._frontend.config.max_model_len
        try:
            content = parse_object(line, field="line", limits=limits, max_ids=max_ids)
        except ServiceError as error:
            raise _BadLine("invalid_json", error.message.removeprefix("line: ")) from error
        custom_id = content.get("custom_id")
        if not isinstance(custom_id, str) or not custom_id:
            raise _BadLine("invalid_custom_id", "custom_id: must be a text that is not empty")
        if custom_id in self._seen:
            rule = f"custom_id: {custom_id!r} is that of line {self._seen[custom_id]}"
            raise _BadLine("duplicate_custom_id", rule)
        self._seen[custom_id] = number
        url, body = content.get("url"), content.get("body")
        rule = None
        if content.get("method") != "POST":
            rule = "method", "must be POST"
        elif not isinstance(url, str) or url not in self._routes:
            rule = "url", f"{url!r} is none of {', '.join(self._routes)}"
        elif not isinstance(body, dict):
            rule = "body", "must be a JSON object"
        elif body.get("stream"):
            rule = "body", "stream: answers of a batch are whole; leave it out"
        if rule is not None:
            raise _BadLine(f"invalid_{rule[0]}", ": ".join(rule), custom_id)
        return _Request(custom_id, self._routes[url], body)

    async def _response(self, request: _Request) -> dict:
        caller = Caller(request_id=request_ids.request_id(""))
        try:
            body = await whole_answer(request.route, self._frontend, request.body, caller)
            status = 200
        except ServiceError as error:
            body, status = request.route.dialect.error(error), status_of(error)
        except Exception as error:
            _log.exception("%s: failed", request.custom_id)
            known = failure(error)
            body, status = request.route.dialect.error(known), status_of(known)
        return {"status_code": status, "request_id": caller.request_id, "body": body}

    def _add(self, entry: dict) -> None:
        self._done.add(_key(entry))
        response = entry["response"]
        self._failed += response is None or response["status_code"] != 200

    def _read_answers(self) -> None:
        """Counts the answers of a run before, and repairs a last line that is not whole."""
        begin = 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    self._add(json.loads(line))
                except (ValueError, KeyError, TypeError) as error:
                    is_ours = f'{{"id":"{_ID}'.encode().startswith(line[: len(_ID) + 7])
                    if line.endswith(b"\n") or not is_ours:
                        rule = f"line {number} is no answer of a batch; give another file"
                        raise ConfigError(f"{self._path}: {rule}") from error
                    self._out.truncate(begin)
                    return
                begin += len(line)
        if begin and not line.endswith(b"\n"):
            self._out.write(b"\n")


def _key(entry: dict) -> tuple[str | None, str]:
    """What finds a line of the input again: its custom_id, else its number."""
    custom_id = entry["custom_id"]
    return custom_id, entry["id"] if custom_id is None else ""
